"""`batch`: many jobs in one process, sharing what they have in common."""

import json

import numpy as np
import pytest
from PIL import Image

from qwen21.__main__ import main

SMALL = {"steps": 2, "resolution": 64}


@pytest.fixture
def batch(tmp_path, model_folder, capsys):
    """Run jobs (dicts, or lines as they are): (exit code, JSON lines of stdout, stderr). Outputs are in tmp_path."""
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 4), dtype=np.uint8)).save(tmp_path / "picture.png")

    def run(*jobs, options=()):
        lines = []
        for job in jobs:
            if isinstance(job, dict):
                job = job | {"output": str(tmp_path / job["output"])} if "output" in job else job
                job = json.dumps(job)
            lines.append(job)
        (tmp_path / "jobs.jsonl").write_text("\n".join(lines), encoding="utf-8")
        code = main(["batch", str(tmp_path / "jobs.jsonl"), "--model", str(model_folder), "--json", *options])
        out, err = capsys.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], err

    return run


def pixels(path):
    return np.asarray(Image.open(path)).astype(int)


def test_equals_generate(batch, tmp_path, model_folder):
    image = str(tmp_path / "picture.png")
    code, lines, _ = batch(
        {"prompt": "a star", "output": "a.png", **SMALL},
        {"prompt": "a moon", "output": "b.png", "images": [image], "cfg": 2.0, "negative": "blur", "seed": 5, **SMALL},
        {"prompt": "a sun", "output": "c.png", "images": [image], "seed": 5, **SMALL},
    )
    assert code == 0 and [line.get("outcome") for line in lines] == ["painted"] * 3 + [None]
    alone = ["--model", str(model_folder), "--steps", "2", "--resolution", "64"]
    main(["generate", "a star", "-o", str(tmp_path / "a1.png"), *alone])
    main(["generate", "a moon", "-o", str(tmp_path / "b1.png"), "--image", image, "--cfg", "2", "--negative", "blur", "--seed", "5", *alone])
    main(["generate", "a sun", "-o", str(tmp_path / "c1.png"), "--image", image, "--seed", "5", *alone])
    for name in "abc":
        assert abs(pixels(tmp_path / f"{name}.png") - pixels(tmp_path / f"{name}1.png")).max() <= 1


def test_what_jobs_share_is_computed_once(batch, tmp_path):
    job = {"prompt": "a star", "images": [str(tmp_path / "picture.png")], **SMALL}
    _, lines, _ = batch(job | {"output": "a.png"}, job | {"output": "b.png", "seed": 1}, job | {"output": "c.png", "prompt": "a sun"})
    first, seed, instruction, _ = lines
    assert first["prefix"]["reused_tokens"] == 0 and first["prefix"]["computed_tokens"] > 0
    assert seed["prefix"]["computed_tokens"] == 0 and seed["prefix"]["hits"] == 1 and seed["seconds"]["vae encode"] == 0
    assert 0 < instruction["prefix"]["computed_tokens"] < 20 and instruction["prefix"]["saved_ms"] > 0


def test_run_keeps_nothing_between_jobs(batch):
    job = {"prompt": "a star", **SMALL}
    _, lines, _ = batch(job | {"output": "a.png"}, job | {"output": "b.png", "seed": 1}, options=["--kv-cache", "run"])
    assert lines[1]["prefix"]["reused_tokens"] == 0


@pytest.mark.parametrize("mode", ["off", "fp8_v", "fp8_kv"])
def test_modes_paint(batch, tmp_path, mode):
    job = {"prompt": "a star", **SMALL}
    assert batch(job | {"output": "exact.png"})[0] == 0
    assert batch(job | {"output": "mode.png"}, options=["--kv-cache", mode, "--kv-device", "cpu"])[0] == 0
    off = abs(pixels(tmp_path / "exact.png") - pixels(tmp_path / "mode.png"))
    assert off.max() <= 1 if mode == "off" else 0 < off.mean() < 40


def test_a_failed_job_does_not_stop_the_rest(batch, tmp_path):
    good = {"prompt": "a star", **SMALL}
    bad = [
        "not json",
        "[1]",
        {"prompt": "x"},
        {"prompt": "x", "output": "x.png", "stepps": 3},
        {"prompt": "x", "output": "x.png", "steps": "3"},
        {"prompt": "x", "output": "x.png", "images": ["missing.png"]},
        {"prompt": "x", "output": "x.jpg"},
        {"prompt": "x", "output": "x.png", "schedule": "karras"},
        {"prompt": "<|image_pad|>", "output": "x.png"},
    ]
    code, lines, err = batch(*bad, good | {"output": "good.png"})
    assert code == 1 and (tmp_path / "good.png").exists()
    *jobs, total = lines
    assert [job["outcome"] for job in jobs] == ["failed"] * len(bad) + ["painted"]
    assert (total["painted"], total["skipped"], total["failed"]) == (1, 0, len(bad))
    assert all(f"line {i + 1}: " in err for i in range(len(bad)))


def test_finished_pictures_are_skipped_and_changed_jobs_painted(batch, tmp_path):
    job = {"prompt": "a star", "output": "a.png", "batch": 2, **SMALL}
    assert batch(job)[1][0]["outcome"] == "painted"
    (tmp_path / "a-1.png").unlink()
    before = (tmp_path / "a-0.png").stat().st_mtime_ns
    code, lines, _ = batch(job)
    assert code == 0 and len(lines[0]["outputs"]) == 1 and (tmp_path / "a-1.png").exists()
    assert (tmp_path / "a-0.png").stat().st_mtime_ns == before
    assert batch(job)[1][0]["outcome"] == "skipped"
    assert batch(job | {"prompt": "a sun"})[1][0]["outcome"] == "painted"
    assert batch(job | {"prompt": "a sun"}, options=["--dtype", "bfloat16"])[1][0]["outcome"] == "painted"


def test_another_picture_under_the_same_name_is_painted(batch, tmp_path):
    job = {"prompt": "a star", "output": "a.png", "images": [str(tmp_path / "other.png")], **SMALL}
    for colour, outcome in (("red", "painted"), ("red", "skipped"), ("blue", "painted")):
        Image.new("RGB", (64, 64), colour).save(tmp_path / "other.png")
        assert batch(job)[1][0]["outcome"] == outcome


def test_no_such_file(model_folder, capsys):
    assert main(["batch", "nothing.jsonl", "--model", str(model_folder)]) == 1
    assert "nothing.jsonl" in capsys.readouterr().err
