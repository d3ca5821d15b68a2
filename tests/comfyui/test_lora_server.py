"""The LoRA node behind a real queue."""

import numpy as np
import pytest
import torch
from comfyui.graphs import painting
from PIL import Image
from unit.lora_files import random_factors, write_layout


@pytest.fixture(scope="session")
def loras(comfy_server, transformer):
    """Names of two files among the server's; the second is another model's."""
    folder, factors = comfy_server.base / "models/loras", random_factors(transformer)
    write_layout(folder / "style.safetensors", "diffusers", factors)
    write_layout(folder / "other.safetensors", "diffusers", {f"double_blocks.{name}": one for name, one in factors.items()} | {"img_in": factors["img_in"]})
    torch.save({name: one.up for name, one in factors.items()}, folder / "pickled.pt")
    return "style.safetensors", "other.safetensors", "pickled.pt"


def graph(lora: str, strength: float = 1.0, **options) -> dict:
    made = painting(**options)
    made["lora"] = {"class_type": "Qwen21Lora", "inputs": {"model": ["load", 0], "lora": lora, "strength": strength}}
    made["sample"]["inputs"]["model"] = ["lora", 0]
    made["show"] = {"class_type": "PreviewAny", "inputs": {"source": ["lora", 1]}}
    return made


def picture(server, made: dict) -> tuple[np.ndarray, str]:
    """The saved picture, and the report shown."""
    finished = server.run(made)
    assert finished.error is None, finished.error
    outputs = finished.history["outputs"]
    file = outputs["save"]["images"][0]
    return np.asarray(Image.open(server.base / "output" / file["subfolder"] / file["filename"])).astype(int), outputs.get("show", {}).get("text", [""])[0]


def test_a_run_with_it_and_without_it_again(comfy_server, loras):
    plain, _ = picture(comfy_server, painting(seed=71))
    found, report = picture(comfy_server, graph(loras[0], seed=71))
    assert abs(found - plain).max() > 20 and report == "style.safetensors: all 11 layers matched (11 LoRA of rank 4); strength 1"
    halved, _ = picture(comfy_server, graph(loras[0], 0.5, seed=71))
    assert abs(halved - found).max() > 5
    zero, report = picture(comfy_server, graph(loras[0], 0.0, seed=71))
    assert np.array_equal(zero, plain) and "not applied" in report
    again, _ = picture(comfy_server, painting(seed=71, prompt="a red star"))
    assert np.array_equal(again, plain)


@pytest.mark.parametrize(("number", "words"), [(1, "fits 1 of its 12 layers"), (2, "pickled.pt is not safetensors")])
def test_what_does_not_fit_stops_the_run(comfy_server, loras, number, words):
    finished = comfy_server.run(graph(loras[number], seed=72))
    assert finished.error and words in finished.error and "\n" not in finished.error, finished.error
    assert finished.of("execution_error")[0]["node_id"] == "lora"
    assert comfy_server.run(graph(loras[0], seed=73)).error is None
