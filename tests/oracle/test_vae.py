"""The plain 2-D autoencoder equals the reference's video one on a single frame."""

import shutil

import pytest
import torch
from oracle.reference import relative_error
from safetensors.torch import load_file, save_file

from qwen21.checkpoint import Checkpoint

SIZES = [(64, 64), (96, 32), (48, 80), (16, 16)]  # (height, width), also with an odd number of latent rows


@pytest.mark.parametrize("height, width", SIZES)
@torch.inference_mode()
def test_encode_gives_the_mode(vae, reference, height, width):
    pixels = torch.rand(2, 4, height, width, generator=torch.Generator().manual_seed(height)) * 2 - 1
    distribution = reference.vae.encode(pixels[:, :, None]).latent_dist
    mean, log_variance = vae.moments(pixels)
    assert relative_error(vae.encode(pixels), distribution.mode()[:, :, 0]) <= 1e-5
    assert relative_error(mean, distribution.mean[:, :, 0]) <= 1e-5
    assert relative_error(log_variance.clamp(-30, 20), distribution.logvar[:, :, 0]) <= 1e-5


@pytest.mark.parametrize("height, width", SIZES)
@torch.inference_mode()
def test_decode(vae, reference, height, width):
    latents = torch.randn(2, 64, height // 16, width // 16, generator=torch.Generator().manual_seed(width))
    pixels = reference.vae.decode(latents[:, :, None]).sample[:, :, 0]
    assert relative_error(vae.decode(latents), pixels) <= 1e-5
    assert (pixels.abs() < 1).float().mean() > 0.5  # most values are compared, not clamped


@torch.inference_mode()
def test_normalize_equals_what_the_pipeline_does(vae, reference):
    pixels = torch.rand(1, 4, 64, 64) * 2 - 1
    theirs = reference._encode_vae_image(pixels[:, :, None], None)[:, :, 0]
    assert relative_error(vae.normalize(vae.encode(pixels)), theirs) <= 1e-5
    assert relative_error(vae.denormalize(theirs), vae.encode(pixels)) <= 1e-5


def test_weights_of_single_frame_3d_convolutions_load_alike(model_folder, vae, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (path,) = (folder / "vae").glob("*.safetensors")
    weights = {name: value[:, :, None] if value.ndim == 4 and name.endswith("weight") else value for name, value in load_file(path).items()}
    assert any(value.ndim == 5 for value in weights.values())
    save_file({name: value.contiguous() for name, value in weights.items()}, path)
    loaded = Checkpoint(folder).vae(torch.device("cpu"), torch.float32).state_dict()
    assert loaded.keys() == vae.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in vae.state_dict().items())
