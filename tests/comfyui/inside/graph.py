"""What the checks share: calling nodes, the core's own answer to compare with, small pictures, and counting calls."""

import importlib
from contextlib import contextmanager
from functools import cache

import folder_paths
import numpy as np
import torch
from comfy_api.latest import io
from PIL import Image, ImageFilter

import nodes


def core(module: str):
    """A module of the pack, such as "qwen21.sampling" or "nodes.sampler"."""
    package = nodes.NODE_CLASS_MAPPINGS["Qwen21Loader"].__module__.removesuffix(".nodes.loader")
    return importlib.import_module(f"{package}.{module}")


def call(node_id: str, **inputs) -> tuple:
    """The outputs of a node, called as ComfyUI calls it."""
    node = nodes.NODE_CLASS_MAPPINGS[node_id]
    if issubclass(node, io.ComfyNode):
        return node.PREPARE_CLASS_CLONE({"hidden_inputs": {io.Hidden.unique_id: None}}).execute(**inputs).args
    return getattr(node(), node.FUNCTION)(**inputs)


def sentence(function, *args, **kwargs) -> str:
    """The message of the pack's own error that `function` must raise: one line."""
    try:
        function(*args, **kwargs)
    except core("qwen21.errors").Qwen21Error as raised:
        text = str(raised)
        assert "\n" not in text and text, text
        return text
    raise AssertionError("nothing was refused")


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4, what: str = "") -> None:
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    assert difference <= tolerance, f"{what}: relative difference {difference:.2e}, at most {tolerance:.0e} allowed"


def equal(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    assert found.shape == expected.shape and torch.equal(found, expected), (
        f"{what}: differ by up to {(found - expected).abs().max() if found.shape == expected.shape else 'shape'}"
    )


def differs(found: torch.Tensor, expected: torch.Tensor, least: float = 1e-2, what: str = "") -> None:
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    assert difference >= least, f"{what}: relative difference {difference:.2e}, at least {least:.0e} expected"


@contextmanager
def counted(owner, name: str):
    """Counts the calls of `owner.name` in a list that holds their arguments."""
    calls, real = [], getattr(owner, name)

    def spy(*args, **kwargs):
        calls.append((args, kwargs))
        return real(*args, **kwargs)

    had_own = name in vars(owner)
    setattr(owner, name, spy)
    try:
        yield calls
    finally:
        setattr(owner, name, real) if had_own else delattr(owner, name)


def prefills(model):
    """Counts the prefills of a MODEL, whose cache is emptied first."""
    model.model.diffusion_model.cache.tree.clear()
    return counted(model.model.diffusion_model, "prefill")


@contextmanager
def replaced(owner, name: str, value):
    had_own, real = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real) if had_own else delattr(owner, name)


def picture(width: int = 64, height: int = 64, seed: int = 0, channels: int = 4) -> torch.Tensor:
    """IMAGE (1, height, width, channels) of blurred noise in steps of 1/255."""
    noise = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8))
    levels = np.asarray(noise.filter(ImageFilter.GaussianBlur(2))).astype(np.float32)
    levels = ((levels - levels.min()) / (levels.max() - levels.min()) * 255).round() / 255
    return torch.from_numpy(levels[None, ..., :channels].astype(np.float32))


@cache
def loaded(checkpoint: str = "random") -> tuple:
    """(MODEL, CLIP, VAE)."""
    return call("Qwen21Loader", checkpoint=checkpoint)


def folder(checkpoint: str = "random") -> str:
    return f"{folder_paths.get_folder_paths('diffusers')[0]}/{checkpoint}"


def opened(checkpoint: str = "random"):
    """The core's Checkpoint of that folder."""
    return core("qwen21.checkpoint").Checkpoint(folder(checkpoint))


def encode(prompt: str = "a red star", negative: str = "", images: dict | None = None, policy: str = "official", resolution: int = 0, clip=None) -> tuple:
    """(positive, negative) of Encode. The checkpoint's native size is 64."""
    clip = clip or loaded()[1]
    return call("Qwen21Encode", clip=clip, prompt=prompt, negative_prompt=negative, size_policy=policy, resolution=resolution, images=images or {})


def references(positive, negative, canvas: str = "width and height", width: int = 64, height: int = 96, batch_size: int = 1, vae=None) -> tuple:
    """(positive, negative, LATENT) of ReferenceLatents."""
    inputs = {"canvas": canvas, "width": width, "height": height, "batch_size": batch_size}
    return call("Qwen21ReferenceLatents", positive=positive, negative=negative, vae=vae or loaded()[2], **inputs)


def prepared(prompt: str = "a red star", negative: str = "", pictures: int = 0, **canvas) -> tuple:
    """(positive, negative, LATENT) with so many references, of different shapes."""
    sizes = [(64, 64), (96, 64), (64, 128)]
    images = {f"image_{i + 1}": picture(*sizes[i], seed=i) for i in range(pictures)}
    return references(*encode(prompt, negative, images), **canvas)


def sample(model, positive, negative, latent, seed: int = 7, steps: int = 3, cfg: float = 1.0, **inputs) -> tuple:
    """(LATENT, report) of the Sampler."""
    inputs = {"schedule": "auto", "sampler_name": "euler", "denoise": 1.0, "cfg_until": 1.0} | inputs
    return call("Qwen21Sampler", model=model, positive=positive, negative=negative, latent=latent, seed=seed, steps=steps, cfg=cfg, **inputs)


def samples(*args, **kwargs) -> torch.Tensor:
    return sample(*args, **kwargs)[0]["samples"]


@cache
def core_transformer(checkpoint: str = "random"):
    return opened(checkpoint).transformer(torch.device("cpu"), torch.float32)


@cache
def core_vae(checkpoint: str = "random"):
    return opened(checkpoint).vae(torch.device("cpu"), torch.float32)


@cache
def core_encoder(checkpoint: str = "random"):
    return opened(checkpoint).text_encoder(torch.device("cpu"), torch.float32)


def core_velocity(conditioning, transformer=None):
    """The core's velocity over the prefix that a conditioning describes, computed without ComfyUI."""
    (states, extra), *_ = conditioning
    transformer, vae = transformer or core_transformer(), core_vae()
    pictures = [vae.normalize(latents) for latents in extra.get("reference_latents", [])]
    slots = (list(extra.get("image_slots") or []) + [states.shape[1]] * len(pictures))[: len(pictures)]
    prefix = transformer.prefill(states.float(), slots, pictures)
    return lambda x, sigma: transformer.denoise(x, sigma, prefix)


def core_sigmas(rows: int, columns: int, steps: int | None = 3, checkpoint: str = "random") -> torch.Tensor:
    made = opened(checkpoint)
    return core("qwen21.schedule").sigmas("auto", steps, rows * columns, made.schedule, made.index.sample_sigmas)


def core_noise(latent: dict, seed: int = 7) -> torch.Tensor:
    _, _, rows, columns = latent["samples"].shape
    return core("qwen21.sampling").initial_noise(seed, rows, columns)


def core_paint(velocity, latent, steps: int = 3, seed: int = 7) -> torch.Tensor:
    """What the core makes of noise for `latent` along `velocity`, as a LATENT's samples: not normalised."""
    noise = core_noise(latent, seed)
    return core_vae().denormalize(core("qwen21.sampling").euler(noise, core_sigmas(*noise.shape[2:], steps), velocity))


def core_samples(positive, negative, latent, seed: int = 7, steps: int | None = 3, cfg: float = 1.0, sigmas=None, noise=None) -> torch.Tensor:
    """What the core paints, as a LATENT's samples: not normalised."""
    sampling = core("qwen21.sampling")
    noise = core_noise(latent, seed) if noise is None else noise
    sigmas = core_sigmas(*noise.shape[2:], steps) if sigmas is None else sigmas
    velocity = sampling.guided(core_velocity(positive), core_velocity(negative) if cfg != 1 else None, cfg)
    return core_vae().denormalize(sampling.euler(noise, sigmas, velocity))
