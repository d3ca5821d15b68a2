"""Whole pictures through the command equal the reference pipeline's, to one grey level in every pixel and channel."""

import numpy as np
import pytest
import torch
from oracle.reference import generate, levels, load_reference, paint_reference
from PIL import Image

PROMPT = "a cat on a mat"


@pytest.fixture(scope="module")
def files(tmp_path_factory, smooth_picture):
    """Reference pictures of every kind on disk, by mode: their shapes differ, and none is a multiple of 32."""
    folder = tmp_path_factory.mktemp("pictures")
    shapes = {"RGBA": (90, 60), "RGB": (50, 70), "P": (61, 61), "LA": (40, 130)}
    paths = {}
    for seed, (mode, shape) in enumerate(shapes.items()):
        paths[mode] = folder / f"{mode}.png"
        smooth_picture(*shape, seed=seed, mode=mode).save(paths[mode])
        assert Image.open(paths[mode]).mode == mode
        assert mode == "RGB" or Image.open(paths[mode]).convert("RGBA").getchannel("A").getextrema()[0] < 100
    return paths


def check(pipeline, folder, out, prompt=PROMPT, *, images=(), seed=0, steps=4, resolution=96, width=None, height=None, negative=None, cfg=None, more=()):
    """Paint with the command and with the reference, compare, and return the picture."""
    options = {"--seed": seed, "--steps": steps, "--resolution": resolution, "--width": width, "--height": height, "--negative": negative, "--cfg": cfg}
    given = [part for pair in options.items() if pair[1] is not None for part in pair]
    generate(prompt, "-o", out, "--model", folder, *given, *(part for path in images for part in ("--image", path)), *more)
    size = {name: value for name, value in (("width", width), ("height", height)) if value}
    guidance = {} if cfg is None else {"true_cfg_scale": cfg, "negative_prompt": negative or ""}
    opened = [Image.open(path) for path in images]
    theirs = paint_reference(pipeline, prompt, seed=seed, steps=steps or 8, resolution=resolution, image=opened or None, **size, **guidance)
    ours = Image.open(out)
    assert ours.mode == "RGBA"
    assert levels(ours).shape == theirs.shape
    assert np.abs(levels(ours) - theirs).max() <= 1
    return levels(ours)


@pytest.mark.parametrize("width, height", [(96, 96), (64, 128), (160, 32), (224, 96)])
def test_text_to_image(model_folder, reference, tmp_path, width, height):
    assert check(reference, model_folder, tmp_path / "out.png", width=width, height=height).shape == (height, width, 4)


@pytest.mark.parametrize("prompt", ["a", "一只猫坐在垫子上", "🐈‍⬛ on a 🟥 mat", "", " ", "A sign that says 'it costs {5} %s'\nand more"])
def test_prompts(model_folder, reference, tmp_path, prompt):
    check(reference, model_folder, tmp_path / "out.png", prompt)


def test_square_of_the_checkpoints_native_size_unless_told(model_folder, reference, tmp_path):
    generate(PROMPT, "-o", tmp_path / "out.png", "--model", model_folder, "--steps", 2)
    theirs = paint_reference(reference, PROMPT, steps=2, resolution=256)
    assert np.abs(levels(Image.open(tmp_path / "out.png")) - theirs).max() <= 1


@pytest.mark.parametrize("modes", ["RGB", "RGBA", "P", "LA", "RGB RGBA", "P LA", "LA P RGBA", "RGBA RGB P"])
def test_references(model_folder, reference, tmp_path, files, modes):
    """The canvas is the last reference's."""
    check(reference, model_folder, tmp_path / "out.png", images=[files[mode] for mode in modes.split()])


@pytest.mark.parametrize("prompt", ["", "把背景换成红色", "🎨"])
def test_prompts_beside_references(model_folder, reference, tmp_path, files, prompt):
    check(reference, model_folder, tmp_path / "out.png", prompt, images=[files["RGBA"], files["P"]])


def test_a_canvas_unlike_the_references(model_folder, reference, tmp_path, files):
    check(reference, model_folder, tmp_path / "out.png", images=[files["RGBA"], files["LA"]], width=160, height=96, resolution=64)


@pytest.mark.parametrize("negative", ["dull", "a much longer text about everything that should not be there, 模糊", None])
@pytest.mark.parametrize("modes", [[], ["RGBA"], ["P", "RGB"]], ids=str)
def test_guidance(model_folder, reference, tmp_path, files, modes, negative):
    check(reference, model_folder, tmp_path / "out.png", images=[files[mode] for mode in modes], cfg=3.5, negative=negative)


def test_one_more_seed(model_folder, reference, tmp_path):
    check(reference, model_folder, tmp_path / "out.png", seed=2**40 + 7)


@pytest.mark.parametrize("modes", [[], ["RGBA", "LA"]], ids=str)
def test_turbo(turbo_folder, tmp_path, files, modes):
    """The checkpoint's own eight sigmas."""
    check(load_reference(turbo_folder), turbo_folder, tmp_path / "out.png", images=[files[mode] for mode in modes], steps=None)


@pytest.mark.parametrize("modes", [[], ["RGBA", "P"]], ids=str)
def test_without_kept_keys_and_values(model_folder, reference, tmp_path, files, modes):
    """The prefix computed anew at every step: the same as the reference, and as computed once."""
    case = {"images": [files[mode] for mode in modes], "cfg": 2.0, "negative": "dull"}
    off = check(reference, model_folder, tmp_path / "off.png", **case, more=("--kv-cache", "off"))
    run = check(reference, model_folder, tmp_path / "run.png", **case, more=("--kv-cache", "run"))
    assert np.abs(off - run).max() <= 1


@pytest.mark.parametrize("modes", [[], ["RGBA", "P"]], ids=str)
def test_batch(model_folder, reference, tmp_path, files, modes):
    """One prompt with a list of generators in the reference; each file is what its seed alone gives, to the bit."""
    pictures = [part for mode in modes for part in ("--image", files[mode])]
    common = ["--model", model_folder, "--resolution", 96, "--steps", 4, *pictures]
    generate(PROMPT, "-o", tmp_path / "out.png", "--batch", 3, "--seed", 5, *common)
    theirs = reference(
        PROMPT,
        image=[Image.open(files[mode]) for mode in modes] or None,
        num_images_per_prompt=3,
        generator=[torch.Generator().manual_seed(seed) for seed in (5, 6, 7)],
        num_inference_steps=4,
        output_resolution=96,
    ).images
    assert len(list(tmp_path.iterdir())) == len(theirs) == 3
    for seed, picture in zip((5, 6, 7), theirs):
        ours = levels(Image.open(tmp_path / f"out-{seed}.png"))
        assert np.abs(ours - levels(picture)).max() <= 1
        generate(PROMPT, "-o", tmp_path / "single.png", "--seed", seed, *common)
        assert np.array_equal(ours, levels(Image.open(tmp_path / "single.png")))
