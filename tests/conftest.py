"""Fixtures for every test: small random checkpoints, their parts, and pictures to put in."""

import os
import shutil

import torch

os.environ["TRITON_INTERPRET"] = str(int(not torch.cuda.is_available()))  # read when Triton is imported, which transformers does

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image, ImageFilter

from qwen21.checkpoint import Checkpoint
from qwen21.random_model import make_random

torch.set_num_threads(1)  # these matrices are too small to share: threads cost more than they bring
settings.register_profile("exact", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("exact")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A small random checkpoint of the same architecture."""
    return make_random(tmp_path_factory.mktemp("checkpoint") / "model", seed=0)


@pytest.fixture(scope="session")
def turbo_folder(tmp_path_factory) -> Path:
    """The same with fixed sigmas."""
    return make_random(tmp_path_factory.mktemp("checkpoint") / "turbo", seed=0, turbo=True)


@pytest.fixture(scope="session")
def checkpoint(model_folder) -> Checkpoint:
    return Checkpoint(model_folder)


@pytest.fixture(scope="session")
def transformer(checkpoint):
    return checkpoint.transformer(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def vae(checkpoint):
    return checkpoint.vae(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def text_encoder(checkpoint):
    return checkpoint.text_encoder(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """A small checkpoint folder whose heads have the published sizes, so that single files of it need no config."""
    from formats.files import make_small

    return make_small(tmp_path_factory.mktemp("formats") / "small")


@pytest.fixture
def singles(small, tmp_path) -> dict[str, Path]:
    """Part -> a single file of `small`, the tokenizer beside the text encoder's."""
    from formats.files import FILES

    files = {part: tmp_path / "models" / part / f"{part}.safetensors" for part in FILES}
    for part, path in files.items():
        path.parent.mkdir(parents=True)
        shutil.copy(small / FILES[part], path)
    shutil.copy(small / "processor/tokenizer.json", files["text_encoder"].parent)
    return files


@pytest.fixture(scope="session")
def reference(model_folder):
    """The diffusers pipeline over `model_folder`."""
    from oracle.reference import load_reference

    return load_reference(model_folder)


@pytest.fixture(scope="session")
def smooth_picture() -> Callable[..., Image.Image]:
    """`smooth_picture(width, height, seed, mode)`: blurred noise, so that resizing matters. Mode P has transparent palette entries."""

    def make(width: int, height: int, seed: int = 0, mode: str = "RGBA") -> Image.Image:
        noise = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
        picture = Image.fromarray(noise).filter(ImageFilter.GaussianBlur(3))
        levels = np.asarray(picture).astype(float)
        levels = (levels - levels.min()) / (levels.max() - levels.min()) * 255  # blurring left little contrast
        picture = Image.fromarray(levels.astype(np.uint8))
        if mode != "P":
            return picture.convert(mode)
        palette = picture.convert("RGB").quantize(16)
        palette.info["transparency"] = bytes(range(0, 256, 17))
        return palette

    return make
