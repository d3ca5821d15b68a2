"""What is written: the picture with its text, the line of JSON, and nothing half-done when writing or memory fails."""

import errno
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from qwen21.pipeline import STAGES


def test_stdout_is_empty_without_json(paint):
    run = paint()
    assert (run.code, run.stdout, run.lines) == (0, "", [])


def test_json_is_one_line_with_the_documented_fields(paint, tmp_path):
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a b.png")
    run = paint("--json", "--image", tmp_path / "a b.png", "--cfg", 2, "--negative", "x", "--steps", 2)
    assert run.stdout.count("\n") == 1 and run.stdout.endswith("\n")
    report = json.loads(run.stdout)
    assert report.keys() == {"outputs", "width", "height", "steps", "tokens", "seconds", "prefix", "loras", "notes", "device", "peak_memory_bytes"}
    assert report["outputs"] == [str(paint.output)]
    assert (report["width"], report["height"], report["steps"], report["device"]) == (64, 64, 2, "cpu")
    assert report["tokens"].keys() == {"text", "negative text", "references", "target"}
    assert (report["tokens"]["references"], report["tokens"]["target"]) == (16, 16)
    assert tuple(report["seconds"]) == STAGES and all(seconds > 0 for seconds in report["seconds"].values())
    assert report["peak_memory_bytes"] > 10**6


def test_json_has_every_stage_without_the_cache(paint):
    assert tuple(json.loads(paint("--json", "--kv-cache", "off").stdout)["seconds"]) == STAGES


def test_the_picture_says_how_it_was_made(paint, tmp_path, model_folder):
    Image.new("RGB", (64, 64), "red").save(tmp_path / "naïve 🧀.png")
    assert paint("--image", tmp_path / "naïve 🧀.png", "--seed", 7, "--cfg", 1.5, "--negative", "böse").code == 0
    with Image.open(paint.output) as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGBA")
        assert (picture.text["prompt"], picture.text["seed"]) == ("a cat", "7")
        settings = json.loads(picture.text["settings"])
    expected = {"prompt": "a cat", "negative": "böse", "images": ["naïve 🧀.png"], "seed": 7, "steps": 1, "cfg": 1.5, "width": 64, "height": 64}
    assert settings.items() >= (expected | {"dtype": "float32", "model": model_folder.name}).items()


def test_a_batch_is_a_file_a_seed(paint):
    run = paint("--batch", 3, "--seed", 5, "--json")
    names = ["out-5.png", "out-6.png", "out-7.png"]
    assert sorted(path.name for path in paint.output.parent.iterdir()) == names == [Path(path).name for path in json.loads(run.stdout)["outputs"]]
    assert len({(paint.output.parent / name).read_bytes() for name in names}) == 3


@pytest.mark.parametrize(
    ("output", "options", "expected"),
    [
        ("absent/out.png", [], "does not exist"),
        ("folder.png", [], "is a folder"),
        ("many.png", ["--batch", 2], "is a folder"),
        ("x" * 300 + ".png", [], "cannot be written"),
        ("x" * 250 + ".png", ["--batch", 2], "cannot be written"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_the_work(paint, tmp_path, monkeypatch, output, options, expected):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "many-1.png").mkdir()
    monkeypatch.setattr("qwen21.commands.Checkpoint", lambda _: pytest.fail("the work began"))
    assert expected in paint("-o", tmp_path / output, *options).failed(1)


def test_a_folder_without_permission_is_refused_before_the_work(paint, monkeypatch):
    def refuse(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("qwen21.commands.Checkpoint", lambda _: pytest.fail("the work began"))
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert "Permission denied" in paint().failed(1)


def test_a_long_name_can_be_written(paint):
    output = paint.output.with_name("x" * 251 + ".png")
    assert paint("-o", output).code == 0 and output.is_file()


@pytest.mark.parametrize("stage", ["save", "replace"])
def test_a_full_disk_leaves_the_old_picture(paint, monkeypatch, stage):
    paint.output.write_bytes(b"old")

    def fill(self, path, *_, **__):
        if stage == "save":
            Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*{"save": (Image.Image, "save", fill), "replace": (Path, "replace", fill)}[stage])
    assert "No space left on device" in paint().failed(1)
    assert [path.name for path in paint.output.parent.iterdir()] == ["out.png"] and paint.output.read_bytes() == b"old"


def test_a_failure_in_the_second_picture_keeps_the_first(paint, monkeypatch):
    save, calls = Image.Image.save, []

    def save_once(self, *arguments, **options):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        save(self, *arguments, **options)

    monkeypatch.setattr(Image.Image, "save", save_once)
    assert "interrupted" in paint("--batch", 3).failed(130)
    assert [path.name for path in paint.output.parent.iterdir()] == ["out-0.png"]


@pytest.mark.parametrize(
    ("stage", "target", "error", "option"),
    [
        ("load", "checkpoint.Checkpoint.text_encoder", torch.OutOfMemoryError("CUDA out of memory"), "--dtype bfloat16"),
        ("load", "checkpoint.Checkpoint.vae", MemoryError(), "--dtype bfloat16"),
        ("load", "checkpoint.Checkpoint.transformer", RuntimeError("can't allocate memory"), "--dtype bfloat16"),
        ("encode", "text_encoder.TextEncoder.encode", torch.OutOfMemoryError("CUDA out of memory"), "--resolution"),
        ("vae encode", "vae.QwenImage21VAE.encode", RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), "--resolution"),
        ("prefill", "transformer.QwenImage21Transformer.prefill", torch.OutOfMemoryError("CUDA out of memory"), "--resolution"),
        ("steps", "transformer.QwenImage21Transformer.denoise", torch.OutOfMemoryError("CUDA out of memory"), "--width"),
        ("decode", "vae.QwenImage21VAE.decode", MemoryError(), "--width"),
    ],
)
def test_out_of_memory_names_stage_and_way_out(paint, tmp_path, monkeypatch, stage, target, error, option):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")

    def run_out(*_, **__):
        raise error

    monkeypatch.setattr(f"qwen21.{target}", run_out)
    line = paint("--image", tmp_path / "a.png").failed(1)
    assert f"out of memory on cpu in the stage '{stage}'" in line and option in line
    assert not list(paint.output.parent.iterdir())
