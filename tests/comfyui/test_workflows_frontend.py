"""The example workflows in the real front end (headless Chromium) and under comfy-cli's validation; help pages and Chinese texts."""

import copy
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from comfyui.install import REPOSITORY
from PIL import Image

FRONTEND = Path(__file__).parent / "frontend"
WORKFLOWS = sorted((REPOSITORY / "workflows").glob("*.json"))
NAMES = [file.stem for file in WORKFLOWS]
NODES = ["Qwen21Loader", "Qwen21Lora", "Qwen21Encode", "Qwen21ReferenceLatents", "Qwen21Sampler", "Qwen21Decode", "Qwen21Schedule", "Qwen21PrefixCache"]
RUN = "text_to_image"


def missing_tool() -> str | None:
    """Why the front end cannot be driven here, or None."""
    node = shutil.which("node")
    if node is None:
        return "no node was found on the PATH"
    if not os.environ.get("CHROMIUM") and shutil.which("chromium") is None:
        return "no chromium was found on the PATH: set CHROMIUM to one"
    script = "require(process.env.PLAYWRIGHT_CORE || 'playwright-core')"
    if subprocess.run([node, "-e", script], cwd=FRONTEND, check=False, capture_output=True).returncode:
        return "no playwright-core was found: set PLAYWRIGHT_CORE to the package's folder, or NODE_PATH to the folder it is in"
    return None


@pytest.fixture(scope="module")
def driver() -> str:
    """Node, with all it needs to drive the front end."""
    reason = missing_tool()
    if reason:
        pytest.skip(reason)
    return shutil.which("node")


@pytest.fixture(scope="module")
def information(comfy_server) -> dict:
    return comfy_server.get("/object_info")


@pytest.fixture(scope="module")
def checkpoint(information) -> str:
    """What the loader offers first: the test's random checkpoint, until the pack brings one."""
    return information["Qwen21Loader"]["input"]["required"]["checkpoint"][1]["options"][0]


def ui_workflow(file: Path, checkpoint: str) -> dict:
    workflow = json.loads(file.read_text(encoding="utf-8"))
    for node in workflow["nodes"]:
        if node["type"] == "Qwen21Loader":
            node["widgets_values"][0] = node["widgets_values_named"]["checkpoint"] = checkpoint
    return workflow


def api_workflow(name: str, checkpoint: str) -> dict:
    graph = json.loads((REPOSITORY / "workflows/api" / f"{name}.json").read_text(encoding="utf-8"))
    for node in graph.values():
        if node["class_type"] == "Qwen21Loader":
            node["inputs"]["checkpoint"] = checkpoint
    return graph


@pytest.fixture(scope="module")
def reports(driver, comfy_server, checkpoint, tmp_path_factory) -> dict[str, dict]:
    """What the front end said about each workflow, by name; and about one that is broken on purpose."""
    folder = tmp_path_factory.mktemp("workflows")
    workflows = {file.stem: ui_workflow(file, checkpoint) for file in WORKFLOWS}
    broken = copy.deepcopy(workflows["edit_one_picture"])
    next(node for node in broken["nodes"] if node["type"] == "Qwen21Decode")["type"] = "NoSuchNode"
    files = []
    for name, workflow in {**workflows, "broken": broken}.items():
        files.append(folder / f"{name}.json")
        files[-1].write_text(json.dumps(workflow), encoding="utf-8")
    command = [driver, FRONTEND / "open.mjs", f"http://127.0.0.1:{comfy_server.port}", "--run", RUN, *files]
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return {report["name"]: report for report in json.loads(done.stdout)}


@pytest.mark.parametrize("name", NAMES)
def test_workflow_opens_without_complaint(reports, name):
    report = reports[name]
    assert (report["missing"], report["red"], report["complaints"], report["pageErrors"]) == ([], [], [], [])


@pytest.mark.parametrize("name", NAMES)
def test_workflow_queues_what_its_api_file_says(reports, checkpoint, name):
    expected = {key: {"class_type": node["class_type"], "inputs": node["inputs"]} for key, node in api_workflow(name, checkpoint).items()}
    assert reports[name]["prompt"] == expected


def test_workflow_runs_from_the_front_end(reports):
    assert reports[RUN]["run"] == {"status": "success", "pictures": 1}


def test_broken_workflow_is_noticed(reports):
    """The checks above can fail."""
    assert reports["broken"]["missing"] == ["NoSuchNode"]
    assert reports["broken"]["complaints"]


@pytest.mark.parametrize("name", NAMES)
def test_workflow_is_laid_out_without_overlap(name):
    """Every node lies in a group, no two nodes and no two groups overlap, and a note says which files are needed."""
    workflow = json.loads((REPOSITORY / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
    title = 30  # pixels of a node's title, above its position
    nodes = [(node["pos"][0], node["pos"][1] - title, node["pos"][0] + node["size"][0], node["pos"][1] + node["size"][1]) for node in workflow["nodes"]]
    groups = [(x, y, x + width, y + height) for x, y, width, height in (group["bounding"] for group in workflow["groups"])]
    for boxes in (nodes, groups):
        assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]]
    for left, top, right, bottom in nodes:
        assert any(g[0] <= left and g[1] <= top and right <= g[2] and bottom <= g[3] for g in groups)
    notes = [node["widgets_values"][0] for node in workflow["nodes"] if node["type"] == "MarkdownNote"]
    wanted = ("ComfyUI/models/", "diffusion_models/", "text_encoders/", "vae/", "diffusers/", "non-commercial")
    assert any(all(words in text for words in wanted) for text in notes)


@pytest.mark.parametrize("kind", ["ui", "api"])
@pytest.mark.parametrize("name", NAMES)
def test_workflow_passes_comfy_cli(information, checkpoint, tmp_path, name, kind):
    comfy = shutil.which("comfy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if comfy is None:
        pytest.skip("comfy-cli is not installed")
    workflow = ui_workflow(REPOSITORY / "workflows" / f"{name}.json", checkpoint) if kind == "ui" else api_workflow(name, checkpoint)
    (tmp_path / "workflow.json").write_text(json.dumps(workflow), encoding="utf-8")
    (tmp_path / "information.json").write_text(json.dumps(information), encoding="utf-8")
    command = [comfy, "--json", "workflow", "validate", "--workflow", tmp_path / "workflow.json", "--input", tmp_path / "information.json"]
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True, timeout=120)
    data = json.loads(done.stdout)["data"]
    assert (data["valid"], data["errors"], data["warnings"]) == (True, [], [])


def test_masked_edit_leaves_everything_else_to_the_bit(comfy_server, checkpoint):
    """With a picture whose sides are no multiples of 32, and a random model, so that the inside certainly changes."""
    width, height, box = 120, 72, (60, 40)
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(picture).save(comfy_server.base / "input/odd.png")
    graph = api_workflow("masked_edit", checkpoint)
    graph["own"] = {"class_type": "LoadImage", "inputs": {"image": "odd.png"}}
    (painted,) = (node["inputs"]["destination"] for node in graph.values() if node["class_type"] == "ImageCompositeMasked")
    for node in graph.values():
        inputs = node["inputs"]
        inputs |= {name: ["own", 0] for name, value in inputs.items() if value == painted}  # as its note says
        if node["class_type"] == "SolidMask" and inputs["value"]:
            inputs["width"], inputs["height"] = box
        elif node["class_type"] == "Qwen21Sampler":
            inputs["steps"] = 2
    finished = comfy_server.run(graph)
    assert finished.error is None
    saved = next(output["images"][0] for output in finished.history["outputs"].values() if "images" in output)
    result = np.asarray(Image.open(comfy_server.base / "output" / saved["subfolder"] / saved["filename"]))
    inside = np.zeros((height, width), dtype=bool)
    inside[: box[1], : box[0]] = True
    assert np.array_equal(result[~inside], picture[~inside])
    assert not np.array_equal(result[inside], picture[inside])


@pytest.mark.parametrize("node", NODES)
def test_help_page_is_served_and_names_every_input_and_output(comfy_server, information, node):
    with urllib.request.urlopen(f"http://127.0.0.1:{comfy_server.port}/extensions/qwen-image-21/docs/{node}.md", timeout=60) as answer:
        page = answer.read().decode()
    inputs = [name for group in information[node]["input"].values() for name in group if name not in ("images", "unique_id")]
    for name in [*inputs, *information[node]["output_name"]]:
        assert f"**{name}**" in page


@pytest.mark.parametrize("node", NODES)
def test_chinese_texts_cover_every_input_and_tooltip(comfy_server, information, node):
    texts = comfy_server.get("/i18n")["zh"]["nodeDefs"][node]
    assert texts["display_name"] and texts["description"]
    declared = {name: options for kind in ("required", "optional") for name, options in information[node]["input"].get(kind, {}).items()}
    assert set(texts["inputs"]) - {"control_after_generate"} == set(declared)
    for name, (_, *options) in declared.items():
        assert texts["inputs"][name]["name"]
        assert bool(texts["inputs"][name].get("tooltip")) or not (options and options[0].get("tooltip")), name
    assert len(texts["outputs"]) == len(information[node]["output"])
