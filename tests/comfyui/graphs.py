"""Graphs in API format: small ones, and those of workflows/api made small."""

import copy
import json
from pathlib import Path

CHECKPOINT = "random"
SMALL = {"steps": 2, "width": 64, "height": 64, "resolution": 64}


def painting(prompt: str = "a red star", steps: int = 2, seed: int = 1, **sampler) -> dict:
    """Text to a picture of 64 x 96, saved as RGBA."""
    return {
        "load": {"class_type": "Qwen21Loader", "inputs": {"checkpoint": CHECKPOINT, "text_encoder": "auto", "vae": "auto", "weight_dtype": "default"}},
        "encode": {
            "class_type": "Qwen21Encode",
            "inputs": {"clip": ["load", 1], "prompt": prompt, "negative_prompt": "", "size_policy": "auto", "resolution": 64},
        },
        "empty": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 96, "batch_size": 1}},
        "sample": {
            "class_type": "Qwen21Sampler",
            "inputs": {
                "model": ["load", 0], "positive": ["encode", 0], "negative": ["encode", 1], "latent": ["empty", 0], "seed": seed, "steps": steps, "cfg": 1.0,
                "schedule": "auto", "sampler_name": "euler", "denoise": 1.0, "cfg_until": 1.0,
            } | sampler,
        },
        "decode": {"class_type": "Qwen21Decode", "inputs": {"vae": ["load", 2], "latent": ["sample", 0], "alpha": "as decoded", "colour": "#ffffff"}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 2], "filename_prefix": "test"}},
    }  # fmt: skip


def editing(image: str, steps: int = 2, policy: str = "keep", **sampler) -> dict:
    """The same over a picture from the input folder, on its canvas."""
    graph = painting(steps=steps, **sampler)
    graph["open"] = {"class_type": "LoadImage", "inputs": {"image": image}}
    graph["encode"]["inputs"] |= {"size_policy": policy, "images.image_1": ["open", 0]}
    graph["empty"] = {
        "class_type": "Qwen21ReferenceLatents",
        "inputs": {
            "positive": ["encode", 0], "negative": ["encode", 1], "vae": ["load", 2], "canvas": "last reference", "width": 64, "height": 64, "batch_size": 1,
        },
    }  # fmt: skip
    graph["sample"]["inputs"] |= {"positive": ["empty", 0], "negative": ["empty", 1], "latent": ["empty", 2]}
    return graph


def made_small(file: Path, image: str) -> dict:
    """A workflow of the repository with the test's checkpoint and pictures, few steps and small sizes."""
    graph = copy.deepcopy(json.loads(file.read_text(encoding="utf-8")))
    for node in graph.values():
        inputs = node["inputs"]
        inputs |= {name: value for name, value in SMALL.items() if isinstance(inputs.get(name), int)}
        if node["class_type"] == "Qwen21Loader":
            inputs |= {"checkpoint": CHECKPOINT, "text_encoder": "auto", "vae": "auto"}
        if node["class_type"] in ("LoadImage", "LoadImageMask"):
            inputs["image"] = image
    return graph
