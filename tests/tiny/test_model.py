"""The checkpoint that ships: its size, its layout, and that diffusers paints the same with it."""

import json
import random

import numpy as np
import pytest
import torch
from oracle.reference import load_reference, paint_reference
from safetensors.torch import load_file, save_file

from qwen21.checkpoint import Checkpoint
from qwen21.tiny import MODEL, evaluate, export, models, train_joint, world
from qwen21.tiny.tokens import load_tokenizer

LIMIT = 32_000_000


def test_size():
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= LIMIT
    assert max(path.stat().st_size for path in files) < 16 * 2**20


def test_diffusers_paints_the_same():
    """At 256 x 256 with a reference: within 2 grey levels everywhere."""
    scene = world.draw_scene(random.Random(1), clear=0)
    prompt, picture = "make the background transparent", world.picture(scene)
    theirs = paint_reference(load_reference(MODEL), prompt, seed=3, steps=4, resolution=256, image=[picture])
    job = evaluate.Job("x", evaluate.Task("clear", "en", prompt, (scene,), scene), 3)
    (ours,) = evaluate.core_painter({"steps": "4", "device": "cpu", "dtype": "float32"}, progress=False)([job])
    assert np.ptp(ours) > 50
    assert np.abs(ours.astype(int) - theirs).max() <= 2


def test_paints_what_is_asked():
    """Unseen prompts, English and Chinese, read back: the weights are trained ones, and belong together. Random weights get none right."""
    kinds = [(kind, language) for kind in ("t2i", "add", "recolour", "transplant") for language in ("en", "zh")]
    jobs = [evaluate.Job("x", evaluate.draw_task(random.Random(41_000_000 + i), *how), i) for i, how in enumerate(kinds)]
    pictures = evaluate.core_painter({"device": "cpu"}, progress=False)(jobs)
    assert sum(score["all right"] for score in evaluate.score_all(jobs, pictures)) >= 6


def test_fp8_layers_paint_nearly_the_same():
    job = evaluate.Job("x", evaluate.draw_task(random.Random(0), "recolour"), 0)
    exact, ours = (evaluate.core_painter({"steps": "4", "device": "cpu"} | own, progress=False)([job])[0].astype(int) for own in ({}, {"dtype": "fp8"}))
    assert 0 < np.abs(ours - exact).mean() < 1


def test_preview_factors():
    factors = json.loads((MODEL / "latent_rgb_factors.json").read_text())
    assert np.shape(factors["factors"]) == (64, 3) and np.shape(factors["bias"]) == (3,)
    vae = Checkpoint(MODEL).vae(torch.device("cpu"), torch.float32)
    scene = world.draw_scene(random.Random(2), clear=0)
    pixels = world.render(*world.pack([scene]), 256, 256, world.palette())
    with torch.inference_mode():
        latents = vae.normalize(vae.encode(pixels))[0]
    preview = torch.einsum("crk,cx->xrk", latents, torch.tensor(factors["factors"])) + torch.tensor(factors["bias"])[:, None, None]
    small = torch.nn.functional.avg_pool2d(pixels[:, :3], 16)[0]
    assert (preview - small).abs().mean() < 0.15


def test_training_can_go_on():
    """From the parts of any checkpoint."""
    vae, mean, std = train_joint.load_vae(MODEL, "cpu")
    assert mean.shape == std.shape == (1, 64, 1, 1) and (std > 0.05).all()
    scenes = [world.draw_scene(random.Random(i), clear=0.5) for i in range(6)]
    jobs = [evaluate.Job("VAE", evaluate.Task("t2i", "en", "", (), scene), 0) for scene in scenes]
    scores = evaluate.reconstruction_scores(vae, jobs)
    assert scores["all right"] == 1 and scores["rgb dB"] > 38 and scores["alpha dB"] > 36
    encoder, transformer = train_joint.load_start(MODEL)
    assert "language_model.embed_tokens.weight" in encoder and "proj_out.weight" in transformer


def test_vae_has_the_published_layout():
    """The names and shapes of diffusers' own module, time convolutions included."""
    from diffusers.models import AutoencoderKLQwenImage21

    expected = AutoencoderKLQwenImage21.from_config(json.loads((MODEL / "vae" / "config.json").read_text())).state_dict()
    stored = load_file(MODEL / "vae" / "diffusion_pytorch_model.safetensors")
    assert {k: tuple(v.shape) for k, v in stored.items()} == {k: tuple(v.shape) for k, v in expected.items()}


def test_export_writes_a_checkpoint_that_paints(tmp_path):
    """Untrained weights through the whole export, opened by the core."""
    torch.manual_seed(0)
    joint = tmp_path / "joint"
    joint.mkdir()
    save_file({k: v.contiguous() for k, v in models.new_text_encoder(load_tokenizer()).state_dict().items()}, joint / "text_encoder.safetensors")
    save_file(dict(models.new_transformer().state_dict()), joint / "transformer.safetensors")
    export.export(MODEL, joint, tmp_path / "model")
    assert sum(path.stat().st_size for path in (tmp_path / "model").rglob("*") if path.is_file()) <= LIMIT
    task = evaluate.draw_task(random.Random(0), "insert")
    job = evaluate.Job("x", task, 0)
    (picture,) = evaluate.core_painter({"model": str(tmp_path / "model"), "steps": "2", "device": "cpu"}, progress=False)([job])
    assert picture.shape == (256, 256, 4) and np.ptp(picture) > 20


def test_unknown_settings_are_refused():
    with pytest.raises(SystemExit, match="unknown setting speed"):
        evaluate.core_painter({"speed": "3"})
