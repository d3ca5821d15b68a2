"""`--lora` of generate and batch: the picture follows the files and their strengths, and no keys and values of other weights."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from unit.lora_files import random_factors, write_layout

from qwen21.__main__ import main
from qwen21.checkpoint import Checkpoint


@pytest.fixture
def lora(transformer, tmp_path):
    """`lora(name, seed)`: a file that changes the picture a lot, with a colon in its name."""

    def make(name: str = "style", seed: int = 0):
        return write_layout(tmp_path / f"{name}:1.safetensors", "kohya and musubi", random_factors(transformer, seed=seed), alpha=4.0)[0]

    return make


def pixels(path):
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


@pytest.fixture
def painted(paint):
    def run(*options):
        assert paint(*options).code == 0
        return pixels(paint.output)

    return run


def test_the_picture_is_that_of_changed_weights(painted, lora, transformer, model_folder, monkeypatch):
    path, factors = lora(), random_factors(transformer)
    plain, found = painted(), painted("--lora", f"{path}:0.5")
    load = Checkpoint.transformer

    def changed(self, *args):
        model = load(self, *args)
        for layer, one in factors.items():
            owner = model.get_submodule(layer)
            owner.weight.copy_(owner.weight.double() + one.delta(0.5))
        return model

    monkeypatch.setattr(Checkpoint, "transformer", changed)
    assert abs(found - painted()).max() <= 1
    assert abs(found - plain).max() > 20


def test_strength_zero_is_the_same_picture(painted, lora):
    assert np.array_equal(painted("--lora", f"{lora()}:0"), painted())


def test_stacked_and_negative(painted, lora):
    one, two = lora("one", 1), lora("two", 2)
    both = painted("--lora", one, "--lora", f"{two}:-0.5")
    assert abs(both - painted("--lora", one)).max() > 5 and abs(both - painted("--lora", f"{two}:-0.5")).max() > 5
    assert abs(painted("--lora", one, "--lora", f"{one}:-1") - painted()).max() <= 1


@pytest.mark.parametrize("mode", ["off", "run", "default", "fp8_kv"])
def test_every_cache_mode(painted, lora, mode):
    assert abs(painted("--lora", lora(), "--kv-cache", mode) - painted("--lora", lora())).mean() < (40 if mode == "fp8_kv" else 1)


def test_on_fp8_layers(painted, lora):
    found = painted("--lora", lora(), "--dtype", "fp8")
    assert abs(found - painted("--lora", lora())).mean() < 40 and abs(found - painted("--dtype", "fp8")).max() > 20


def test_report_and_settings(paint, lora):
    run = paint("--lora", f"{lora()}:0.5", "--json")
    assert json.loads(run.stdout)["loras"] == ["style:1.safetensors: all 11 layers matched (11 LoRA of rank 4)"]
    with Image.open(paint.output) as picture:
        (name, digest, strength), *others = json.loads(picture.text["settings"])["lora"]
    assert (name, strength, len(digest), others) == ("style:1.safetensors", 0.5, 64, [])


def test_a_missing_file_is_a_wrong_request(paint, tmp_path):
    assert "b.safetensors is not a file" in paint("--lora", tmp_path / "b.safetensors:0.5").failed(2)


def test_another_models_lora_is_refused_before_anything_is_loaded(paint, tmp_path, transformer, monkeypatch):
    factors = random_factors(transformer)
    path, _ = write_layout(tmp_path / "a.safetensors", "bare", {f"double_blocks.{name}": one for name, one in factors.items()})
    monkeypatch.setattr(Checkpoint, "text_encoder", None)
    assert "fits no layer of Qwen-Image 2.1" in paint("--lora", path).failed(1)


def run_batch(tmp_path, model_folder, capsys, jobs, *options):
    lines = [json.dumps({"prompt": "a star", "steps": 2, "resolution": 64} | job | {"output": str(tmp_path / job["output"])}) for job in jobs]
    (tmp_path / "jobs.jsonl").write_text("\n".join(lines))
    capsys.readouterr()
    code = main(["batch", str(tmp_path / "jobs.jsonl"), "--model", str(model_folder), "--json", *map(str, options)])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_jobs_of_a_batch_never_share_keys_of_other_weights(tmp_path, model_folder, capsys, lora):
    one, two = str(lora("one", 1)), str(lora("two", 2))
    loras = {"a": [], "b": [one], "c": [two], "d": [f"{one}:0.5"], "e": [one, two], "f": [one], "g": [], "h": [f"{two}:0"]}
    code, lines = run_batch(tmp_path, model_folder, capsys, [{"output": f"{name}.png", "lora": files} for name, files in loras.items()])
    assert code == 0
    prefixes = {name: line["prefix"]["computed_tokens"] for name, line in zip(loras, lines)}
    assert all(prefixes[name] > 0 for name in "abcde") and not any(prefixes[name] for name in "fgh"), prefixes
    for name, files in loras.items():
        options = [part for file in files for part in ("--lora", file)]
        main(["generate", "a star", "-o", str(tmp_path / "alone.png"), "--model", str(model_folder), "--steps", "2", "--resolution", "64", *options])
        assert abs(pixels(tmp_path / f"{name}.png") - pixels(tmp_path / "alone.png")).max() <= 1, name
    assert np.array_equal(pixels(tmp_path / "a.png"), pixels(tmp_path / "g.png"))
    assert np.array_equal(pixels(tmp_path / "a.png"), pixels(tmp_path / "h.png"))
    assert len({(tmp_path / f"{name}.png").read_bytes() for name in "abcde"}) == 5


def test_the_option_is_for_jobs_without_their_own(tmp_path, model_folder, capsys, lora):
    one, two = lora("one", 1), lora("two", 2)
    jobs = [{"output": "a.png"}, {"output": "b.png", "lora": [str(two)]}, {"output": "c.png", "lora": []}]
    _, lines = run_batch(tmp_path, model_folder, capsys, jobs, "--lora", one)
    assert [[text.split(":")[0] for text in line["loras"]] for line in lines[:3]] == [["one"], ["two"], []]


def test_a_changed_file_or_strength_is_painted_again(tmp_path, model_folder, capsys, lora, transformer):
    path = lora()
    outcomes = []
    for job in ({}, {}, {"lora": [f"{path}:0.5"]}, {"lora": []}):
        outcomes.append(run_batch(tmp_path, model_folder, capsys, [{"output": "a.png"} | job], "--lora", path)[1][0]["outcome"])
    lora(seed=5)
    outcomes.append(run_batch(tmp_path, model_folder, capsys, [{"output": "a.png", "lora": []}], "--lora", path)[1][0]["outcome"])
    outcomes += [run_batch(tmp_path, model_folder, capsys, [{"output": "a.png"}], "--lora", path)[1][0]["outcome"] for _ in range(2)]
    assert outcomes == ["painted", "skipped", "painted", "painted", "skipped", "painted", "skipped"]


def test_a_lora_that_fails_leaves_the_other_jobs_alone(tmp_path, model_folder, capsys, lora):
    jobs = [{"output": "a.png", "lora": [str(lora())]}, {"output": "b.png", "lora": [str(tmp_path / "none.safetensors")]}, {"output": "c.png"}]
    code, lines = run_batch(tmp_path, model_folder, capsys, jobs)
    assert code == 1 and [line["outcome"] for line in lines[:3]] == ["painted", "failed", "painted"]
    assert "is not a file" in lines[1]["error"]


def test_only_the_files_of_this_job_are_kept(model_folder, lora):
    from qwen21.pipeline import Pipeline, Report, Request

    pipeline = Pipeline(Checkpoint(model_folder), torch.device("cpu"), torch.float32, keep=True)
    one, two = str(lora("one", 1)), str(lora("two", 2))
    for files in ([one], [one, two], [two], []):
        list(pipeline.generate(Request("a star", steps=1, resolution=64, loras=[(file, 1.0) for file in files]), [0], Report()))
        assert len(pipeline._loras) == len(files)
