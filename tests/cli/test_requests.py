"""What can be asked for: wrong requests are refused before anything is loaded, odd ones work, and what was changed is said."""

import json

import pytest
import torch
from PIL import Image


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--width", 16], "width is 16, expected 32 to"),
        (["--width", 0], "width is 0"),
        (["--height", -5], "height is -5"),
        (["--height", 10**9], "height is 1000000000"),
        (["--resolution", 31], "resolution is 31"),
        (["--width", "64.5"], "--width"),
        (["--steps", 0], "steps is 0, expected 1 to"),
        (["--steps", -1], "steps is -1"),
        (["--steps", 10**12], "steps is 1000000000000"),
        (["--cfg", -1], "cfg is -1"),
        (["--cfg", "nan"], "cfg is nan"),
        (["--cfg", "inf"], "cfg is inf"),
        (["--cfg", "much"], "--cfg"),
        (["--seed", -1], "seed is -1"),
        (["--seed", 2**64], f"seed is {2**64}"),
        (["--seed", 2**64 - 1, "--batch", 2], f"expected 0 to {2**64 - 2}"),
        (["--batch", 0], "batch is 0"),
        (["--batch", 10**9], "batch is 1000000000"),
        (["--dtype", "int8"], "--dtype"),
        (["--device", "tpu"], "--device"),
        (["--schedule", "fast"], "--schedule"),
        (["--kv-cache", "on"], "--kv-cache"),
        (["--output", "out.jpg"], "does not end in .png"),
        (["--unheard-of"], "unrecognized"),
        (["--negative", "a <|image_pad|>", "--cfg", 2], "vision token <|image_pad|>"),
    ],
)
def test_a_wrong_option_is_refused(paint, options, expected):
    assert expected in paint(*options).failed(2)
    assert not list(paint.output.parent.iterdir())


@pytest.mark.parametrize("token", ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>"])
def test_a_vision_token_in_the_prompt_is_refused(paint, token):
    assert f"vision token {token}" in paint(prompt=f"a {token} cat").failed(2)


def test_a_prompt_that_is_not_text_is_refused(paint):
    assert "UTF-8" in paint(prompt="a \udcff cat").failed(2)  # how Python hands over a byte that is not UTF-8


def test_eleven_references_are_refused(paint, tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    assert "11 reference pictures" in paint(*["--image", tmp_path / "a.png"] * 11).failed(2)


def test_steps_that_contradict_fixed_sigmas(paint, turbo_folder):
    assert "steps is 4, but these sigmas are fixed at 8 steps" in paint("--steps", 4, model=turbo_folder).failed(2)
    assert "fixed at 8 steps" in paint("--steps", 4, "--schedule", "turbo").failed(2)
    assert paint("--steps", 8, model=turbo_folder).code == 0


@pytest.mark.parametrize("missing", [["generate"], ["generate", "a cat"], ["batch"], ["make-random"], [], ["paint"]])
def test_missing_arguments(run_command, missing):
    assert "error: " in run_command(*missing).failed(2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there(paint):
    assert "the device cuda is not available" in paint("--device", "cuda").failed(1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8"])
def test_each_dtype_works(paint, dtype):
    run = paint("--dtype", dtype, "--steps", 2, "--cfg", 2)
    assert (run.code, run.lines) == (0, [])
    with Image.open(paint.output) as picture:
        assert (picture.mode, picture.size) == ("RGBA", (64, 64)) and len(picture.getcolors(10**6)) > 100


@pytest.mark.parametrize(
    "prompt",
    ["", "Ein Käse, 漢字 🧀", "{x} {} {0} {prompt}", "two\nlines", "word " * 600, "%s \\n <image1> <|im_end|>", "-- --json"],
    ids=["empty", "unicode", "braces", "newline", "3000", "escapes", "dashes"],
)
def test_any_prompt_works_and_is_kept(paint, prompt):
    run = paint(prompt=prompt)
    assert (run.code, run.lines) == (0, [])
    with Image.open(paint.output) as picture:
        assert picture.text["prompt"] == prompt and json.loads(picture.text["settings"])["prompt"] == prompt


def test_sides_are_rounded_down_and_it_is_said(paint):
    run = paint("--width", 95, "--height", 70, "--json")
    notes = ["width 95 is not a multiple of 32: painting 64", "height 70 is not a multiple of 32: painting 64"]
    assert run.lines == [f"note: {note}" for note in notes]
    report = json.loads(run.stdout)
    assert (report["width"], report["height"], report["notes"]) == (64, 64, notes)


def test_a_negative_prompt_without_guidance_is_said(paint):
    assert "not used" in paint("--negative", "blur").lines[0]
    assert paint("--negative", "blur", "--cfg", 2).lines == []


def test_the_largest_seeds_work(paint):
    assert paint("--seed", 2**64 - 2, "--batch", 2).code == 0
    assert len(list(paint.output.parent.iterdir())) == 2


def test_debug_shows_the_traceback_and_keeps_the_code(paint, tmp_path):
    run = paint("--width", 1, "--debug")
    assert run.code == 2 and run.lines[0].startswith("Traceback") and run.lines[-1].startswith("error: width is 1")
    run = paint("--debug", model=tmp_path / "absent")
    assert run.code == 1 and run.lines[0].startswith("Traceback")


def test_an_unforeseen_failure_is_one_line_too(paint, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr("qwen21.commands.Checkpoint", fail)
    assert "ZeroDivisionError: a b" in paint().failed(1)


def test_make_random_leaves_an_existing_folder_alone(run_command, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    assert "is there already" in run_command("make-random", tmp_path).failed(1)
    assert "is there already" in run_command("make-random", tmp_path / "mine.txt").failed(1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
