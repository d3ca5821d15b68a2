"""The pack in a running server: what the front end and the queue see."""

import json
import re

import numpy as np
import pytest
from comfyui.graphs import editing, made_small, painting
from comfyui.install import REPOSITORY
from comfyui.server import Finished
from PIL import Image

NODES = ("Qwen21Loader", "Qwen21Lora", "Qwen21Encode", "Qwen21ReferenceLatents", "Qwen21Sampler", "Qwen21Decode", "Qwen21Schedule", "Qwen21PrefixCache")
WORKFLOWS = sorted((REPOSITORY / "workflows/api").glob("*.json"))
PREVIEW_MESSAGES, TEXT_MESSAGE = (1, 4), 3  # ComfyUI's kinds of binary messages


@pytest.fixture(scope="session")
def information(comfy_server) -> dict:
    return comfy_server.get("/object_info")


@pytest.fixture(scope="session")
def picture(comfy_server, smooth_picture) -> str:
    """An RGBA picture of an odd size in the input folder."""
    smooth_picture(70, 45).save(comfy_server.base / "input/odd.png")
    return "odd.png"


def saved(server, finished) -> list:
    """The PNG files that a run saved, in order, opened."""
    found = [image for outputs in finished.history["outputs"].values() for image in outputs.get("images", []) if image["type"] == "output"]
    return [Image.open(server.base / "output" / image["subfolder"] / image["filename"]) for image in found]


def pixels(server, graph: dict, **extra) -> np.ndarray:
    finished = server.run(graph, **extra)
    assert finished.error is None, finished.error
    return np.asarray(saved(server, finished)[0])


def tooltips(inputs: dict):
    """(input, tooltip) of every widget and socket, those inside growing inputs too."""
    for group in ("required", "optional"):
        for name, (kind, options) in ((name, (*spec, {})[:2]) for name, spec in inputs.get(group, {}).items()):
            template = options.get("template", {}).get("input")
            yield from tooltips(template) if template else [(name, options.get("tooltip"))]


def test_starts_without_an_import_failure(comfy_server, information):
    log = comfy_server.log.read_text().partition("got prompt")[0]  # runs that were to fail come after
    assert "Import times" in log
    assert "IMPORT FAILED" not in log and "Cannot import" not in log and "Traceback" not in log


@pytest.mark.parametrize("node", NODES)
def test_node_is_offered_with_tooltips(information, node):
    described = information[node]
    assert described["category"] == "Qwen-Image 2.1" and described["display_name"].startswith("Qwen-Image 2.1 ")
    assert described["description"] and described["search_aliases"]
    bare = [name for name, tooltip in tooltips(described["input"]) if not tooltip]
    assert not bare, f"inputs without a tooltip: {bare}"


def test_node_ids_and_inputs_stay(information):
    """Shared workflows name them."""
    inputs = {node: {name for group in ("required", "optional") for name in information[node]["input"].get(group, {})} for node in NODES}
    assert inputs == {
        "Qwen21Loader": {"checkpoint", "text_encoder", "vae", "weight_dtype"},
        "Qwen21Lora": {"model", "lora", "strength"},
        "Qwen21Encode": {"clip", "prompt", "negative_prompt", "size_policy", "resolution", "images"},
        "Qwen21ReferenceLatents": {"positive", "negative", "vae", "canvas", "width", "height", "batch_size"},
        "Qwen21Sampler": {"model", "positive", "negative", "latent", "seed", "steps", "cfg", "schedule", "sampler_name", "denoise", "cfg_until"},
        "Qwen21Decode": {"vae", "latent", "alpha", "colour"},
        "Qwen21Schedule": {"model", "latent", "steps", "schedule"},
        "Qwen21PrefixCache": {"model", "budget_mb", "device", "precision"},
    }
    outputs = {node: information[node]["output"] for node in NODES}
    assert outputs["Qwen21Loader"] == ["MODEL", "CLIP", "VAE"] and outputs["Qwen21Sampler"] == ["LATENT", "STRING"]
    assert outputs["Qwen21Lora"] == ["MODEL", "STRING"]
    assert outputs["Qwen21Encode"] == ["CONDITIONING"] * 2 and outputs["Qwen21ReferenceLatents"] == ["CONDITIONING", "CONDITIONING", "LATENT"]
    assert outputs["Qwen21Decode"] == ["IMAGE", "MASK", "IMAGE"] and outputs["Qwen21Schedule"] == ["SIGMAS", "MODEL"]


def test_loader_offers_our_checkpoints_only(comfy_server, information):
    other = comfy_server.base / "models/diffusers/other"
    other.mkdir(exist_ok=True)
    (other / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    options = comfy_server.get("/object_info/Qwen21Loader")["Qwen21Loader"]["input"]["required"]["checkpoint"][1]["options"]
    assert options == ["tiny", "random", "turbo", "small.safetensors"]


def test_a_single_file_finds_its_text_encoder_and_vae(comfy_server):
    """And says on the node which it took."""
    graph = painting()
    graph["load"]["inputs"]["checkpoint"] = "small.safetensors"
    finished = comfy_server.run(graph)
    assert finished.error is None and saved(comfy_server, finished)[0].size == (64, 96)
    assert "took small.safetensors as text encoder and small.safetensors as vae" in comfy_server.log.read_text()


def test_run_reports_progress_previews_and_saves_rgba(comfy_server):
    graph, workflow = painting(steps=4, seed=11), {"nodes": [], "marker": "kept"}
    finished = comfy_server.run(graph, extra_pnginfo={"workflow": workflow})
    assert finished.error is None
    steps = [data["value"] for data in finished.of("progress") if data.get("node") == "sample"]
    assert steps[-1] == 4, steps
    assert set(PREVIEW_MESSAGES) & set(finished.binary), finished.binary
    image = saved(comfy_server, finished)[0]
    assert (image.mode, image.size) == ("RGBA", (64, 96))
    prompt = json.loads(image.info["prompt"])
    assert "/" not in json.dumps(prompt["load"].pop("is_changed")), "the picture names the files it was made with"  # ComfyUI adds it
    assert prompt == graph and json.loads(image.info["workflow"]) == workflow


def test_unchanged_prompt_is_not_run_again(comfy_server):
    graph = painting(seed=12)
    comfy_server.run(graph)
    again = comfy_server.run(graph)
    assert {node for data in again.of("execution_cached") for node in data["nodes"]} == set(graph)
    changed = comfy_server.run(painting(seed=13))
    assert {node for data in changed.of("execution_cached") for node in data["nodes"]} >= {"load", "encode"}


def test_picture_is_edited_on_its_own_canvas(comfy_server, picture):
    """LoadImage, `keep`, crop: the saved picture has the size of the one that came in."""
    graph = editing(picture)
    finished = comfy_server.run(graph)
    assert finished.error is None
    assert saved(comfy_server, finished)[0].size == (70, 45)
    other = editing(picture, seed=2)
    assert not np.array_equal(pixels(comfy_server, other), np.asarray(saved(comfy_server, finished)[0]))


def test_what_a_node_says_reaches_the_front_end(comfy_server, picture):
    """The size policy `auto` moves a reference off 1024 x 1024 and says so on the node."""
    Image.open(comfy_server.base / "input" / picture).resize((64, 64)).save(comfy_server.base / "input/square.png")
    graph = editing("square.png", policy="auto")
    kept = {name: graph[name] for name in ("load", "open", "encode")}
    kept["encode"]["inputs"]["resolution"] = 1024
    kept["show"] = {"class_type": "PreviewAny", "inputs": {"source": ["encode", 0]}}
    finished = comfy_server.run(kept)
    assert finished.error is None
    assert TEXT_MESSAGE in finished.binary, finished.binary


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflow_runs(comfy_server, picture, file):
    finished = comfy_server.run(made_small(file, picture), extra_pnginfo={"workflow": {"nodes": []}})
    assert finished.error is None, finished.error
    images = saved(comfy_server, finished)
    assert images and all("prompt" in image.info and "workflow" in image.info for image in images)


def test_interrupt_then_run_again(comfy_server):
    before = pixels(comfy_server, painting(seed=21))
    with comfy_server.listening() as listener:
        prompt, heard = listener.queue(painting(seed=22, steps=1000)), Finished()
        while not any(data.get("value", 0) >= 2 and data.get("node") == "sample" for data in heard.of("progress")):
            listener.receive(heard)
        assert comfy_server.post("/interrupt", {})[0] == 200
        finished = listener.finish(prompt)
    assert finished.of("execution_interrupted") and not finished.of("execution_error")
    assert finished.history["status"]["status_str"] == "error" and not finished.history["outputs"]
    again = pixels(comfy_server, painting(seed=21) | {"save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 2], "filename_prefix": "again"}}})
    assert np.array_equal(before, again)


def test_two_prompts_in_the_queue(comfy_server):
    with comfy_server.listening() as listener:
        first, second = listener.queue(painting(seed=31)), listener.queue(painting(seed=32, prompt="a wet road"))
        results = [listener.finish(prompt) for prompt in (first, second)]
    assert [result.error for result in results] == [None, None]
    one, other = (np.asarray(saved(comfy_server, result)[0]) for result in results)
    assert not np.array_equal(one, other)
    assert np.array_equal(
        other,
        pixels(
            comfy_server,
            painting(seed=32, prompt="a wet road") | {"save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 2], "filename_prefix": "alone"}}},
        ),
    )


def test_freed_models_load_again(comfy_server):
    graph = painting(seed=41)
    before = pixels(comfy_server, graph)
    assert comfy_server.post("/free", {"unload_models": True, "free_memory": True})[0] == 200
    assert np.array_equal(pixels(comfy_server, graph), before)


BAD = [
    ("sample", "cfg", 99.0),
    ("sample", "steps", -1),
    ("sample", "steps", 1001),
    ("sample", "steps", "many"),
    ("sample", "seed", -1),
    ("sample", "denoise", 1.5),
    ("sample", "cfg_until", -0.1),
    ("sample", "sampler_name", "guess"),
    ("sample", "schedule", "karras"),
    ("sample", "model", ["load", 1]),
    ("sample", "latent", ["encode", 0]),
    ("sample", "positive", ...),
    ("encode", "size_policy", "stretch"),
    ("encode", "resolution", 5000),
    ("encode", "resolution", "large"),
    ("encode", "clip", ["load", 2]),
    ("encode", "images.image_1", ["load", 0]),
    ("load", "checkpoint", "../../etc"),
    ("load", "weight_dtype", "float8"),
    ("decode", "alpha", "maybe"),
    ("decode", "vae", ["load", 0]),
]


@pytest.mark.parametrize(("node", "name", "value"), BAD, ids=lambda part: str(part))
def test_bad_input_is_refused_before_the_run(comfy_server, node, name, value):
    graph = painting()
    graph[node]["inputs"][name] = value
    if value is ...:
        del graph[node]["inputs"][name]
    status, answer = comfy_server.post("/prompt", {"prompt": graph})
    assert status == 400, answer
    errors = answer["node_errors"][node]["errors"]
    assert any(name in json.dumps(error) for error in errors), errors


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("images.image_11", ["open", 0], r"images\.image_11 is not known.*image_10"),
        ("images.picture", ["open", 0], r"images\.picture is not known"),
        ("image_1", ["open", 0], r"image_1 is not known"),
        ("images.image_1", "a file name", r"images\.image_1 is 'a file name'"),
    ],
)
def test_reference_under_a_wrong_key_is_refused(comfy_server, picture, name, value, expected):
    graph = editing(picture)
    del graph["encode"]["inputs"]["images.image_1"]
    graph["encode"]["inputs"][name] = value
    finished = comfy_server.run(graph)
    assert finished.error and re.search(expected, finished.error) and "\n" not in finished.error, finished.error
    data = finished.of("execution_error")[0]
    assert data["node_id"] == "encode" and data["exception_type"].endswith(("UsageError", "Qwen21Error"))


def test_error_in_a_run_is_one_sentence_and_leaves_the_queue_working(comfy_server):
    graph = painting(seed=51)
    graph["decode"]["inputs"] |= {"alpha": "over colour", "colour": "red"}
    finished = comfy_server.run(graph)
    assert "'red'" in finished.error and "\n" not in finished.error
    assert comfy_server.run(painting(seed=52)).error is None
