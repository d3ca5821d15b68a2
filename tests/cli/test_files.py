"""Single files on the command line, and what `inspect` says of them."""

import json
import shutil

import numpy as np
import pytest
import torch
from formats import files
from formats.files import FILES, load
from PIL import Image
from safetensors.torch import save_file


def pixels(path) -> bytes:
    with Image.open(path) as picture:
        return picture.tobytes()


@pytest.fixture
def paint_small(run_command, tmp_path):
    """`paint_small(option, ...)`: one step at 64 x 64; the picture's bytes, or the run if it failed."""
    output = tmp_path / "out.png"

    def run(*options: object):
        done = run_command("generate", "a cat", "-o", output, "--width", 64, "--height", 64, "--steps", 1, *options)
        return pixels(output) if done.code == 0 else done

    return run


def options(singles, *parts: str) -> list:
    return [value for part in parts for value in (f"--{part.replace('_', '-')}", singles[part])]


def test_three_files_paint_what_their_folder_paints(paint_small, small, singles):
    assert paint_small(*options(singles, *FILES)) == paint_small("--model", small)


@pytest.mark.parametrize("part", FILES)
def test_one_file_in_the_place_of_a_folders_part(paint_small, small, singles, part):
    assert paint_small("--model", small, *options(singles, part)) == paint_small("--model", small)


@pytest.mark.parametrize("part", FILES)
def test_a_missing_part_is_named(paint_small, singles, part):
    line = paint_small(*options(singles, *(FILES.keys() - {part}))).failed(2)
    assert f"there is no {part}" in line and f"--{part.replace('_', '-')}" in line and "--model" in line


def test_gguf_paints(paint_small, small, singles, tmp_path):
    pytest.importorskip("gguf")
    packed, meant = files.quantized_gguf(load(small, "transformer"), ["Q8_0"])
    files.write_gguf(tmp_path / "x.gguf", packed)
    save_file(meant, singles["transformer"])
    assert paint_small("--model", small, "--transformer", tmp_path / "x.gguf") == paint_small("--model", small, *options(singles, "transformer"))


def test_fp8_is_made_at_load_and_a_quantised_file_stays_as_it_is(run_command, small, singles, tmp_path):
    weights = load(small, "transformer")
    cast = {name: weight.to(torch.float8_e4m3fn) if name.startswith("transformer_blocks.") and weight.ndim == 2 else weight for name, weight in weights.items()}
    save_file(cast, tmp_path / "cast.safetensors")

    def paint(*options: object) -> tuple[list[str], str, np.ndarray]:
        """The lines on stderr, the precision in the PNG, and the pixels."""
        output = tmp_path / "x.png"
        run = run_command("generate", "a cat", "-o", output, "--width", 64, "--height", 64, "--steps", 1, "--device", "cpu", "--model", small, *options)
        assert run.code == 0, run
        with Image.open(output) as picture:
            return run.lines, json.loads(picture.text["settings"])["dtype"], np.asarray(picture).astype(int)

    (_, _, exact), (lines, precision, found) = paint(), paint("--dtype", "fp8")
    assert (lines, precision) == ([], "fp8") and 0 < abs(found - exact).mean() < 20
    own = ("--transformer", tmp_path / "cast.safetensors")
    (_, _, exact), (lines, precision, found) = paint(*own), paint(*own, "--dtype", "fp8")
    assert lines == ["note: cast.safetensors is quantised already and stays as it is: fp8 is made of weights in 16 or 32 bits"]
    assert precision == "float32" and np.array_equal(found, exact)


def test_the_record_names_the_files(run_command, singles, small, tmp_path):
    run = run_command("generate", "a cat", "-o", tmp_path / "x.png", "--width", 64, "--height", 64, "--steps", 1, "--model", small, *options(singles, "vae"))
    assert run.code == 0
    with Image.open(tmp_path / "x.png") as picture:
        assert "small+vae.safetensors" in " ".join(str(value) for value in picture.info.values())


def test_jobs_take_files(run_command, singles, tmp_path):
    (tmp_path / "jobs.jsonl").write_text(json.dumps({"prompt": "a cat", "output": str(tmp_path / "a.png"), "width": 64, "height": 64, "steps": 1}))
    assert run_command("batch", tmp_path / "jobs.jsonl", *options(singles, *FILES)).code == 0 and (tmp_path / "a.png").is_file()


def test_a_text_encoder_without_a_tokenizer_says_where_to_put_one(paint_small, small, singles):
    (singles["text_encoder"].parent / "tokenizer.json").unlink()
    line = paint_small("--model", small, *options(singles, "text_encoder")).failed(1)
    assert str(singles["text_encoder"]) in line and "comes without a tokenizer: put the tokenizer.json" in line


def test_a_text_encoder_in_comfyuis_folder_takes_its_tokenizer(paint_small, small, singles, tmp_path):
    bundled, root = tmp_path / "ComfyUI/comfy/text_encoders/qwen25_tokenizer", tmp_path / "ComfyUI/models/text_encoders"
    bundled.mkdir(parents=True)
    root.mkdir(parents=True)
    shutil.copy(small / "processor/tokenizer.json", bundled)
    shutil.move(singles["text_encoder"], root / "qwen3vl_8b_bf16.safetensors")
    assert paint_small("--model", small, "--text-encoder", root / "qwen3vl_8b_bf16.safetensors") == paint_small("--model", small)


# --- inspect


@pytest.fixture
def inspect(run_command):
    """`inspect(path, code)`: the object that --json prints, and the lines of the table."""

    def run(path, code: int = 0) -> tuple[dict, list[str]]:
        as_json, as_table = run_command("inspect", path, "--json"), run_command("inspect", path)
        assert (as_json.code, as_table.code) == (code, code) and len(as_json.lines) == (code != 0), (as_json, as_table)
        return json.loads(as_json.stdout), as_table.stdout.splitlines()

    return run


def row(lines: list[str], name: str) -> str:
    return next(line.split(maxsplit=1)[1] for line in lines if line.startswith(f"  {name}"))


def test_inspect_a_checkpoint(inspect, turbo_folder):
    found, lines = inspect(turbo_folder)
    assert [part["part"] for part in found["parts"]] == ["text_encoder", "transformer", "vae"] and found["problems"] == []
    transformer = found["parts"][1]
    assert (transformer["layout"], transformer["stored_as"], transformer["turbo"], len(transformer["sigmas"])) == (
        "split MLP",
        {"F32": transformer["parameters"]},
        True,
        8,
    )
    assert row(lines, "turbo") == "yes, 8 steps" and lines[-1] == "no problems found"


def test_inspect_the_built_in_checkpoint_by_its_name(inspect, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [part["part"] for part in inspect("tiny")[0]["parts"]] == ["text_encoder", "transformer", "vae"]


@pytest.mark.parametrize("ending", ["oft_blocks", "a1", "set_weight", "lokr_w1", "hada_w1_a", "dora_scale"])
def test_inspect_knows_a_lora_of_any_kind(inspect, tmp_path, ending):
    save_file({f"transformer_blocks.0.attn.to_q.{ending}": torch.ones(2, 2)}, tmp_path / "x.safetensors")
    assert inspect(tmp_path / "x.safetensors", 1)[0]["lora"]["layers"] == 1


def test_inspect_a_fused_file_in_8_bit_floats(inspect, small, tmp_path):
    tensors = files.prefixed(files.scaled8(files.fused(load(small, "transformer")), files.comfy_note), "model.diffusion_model.")
    save_file(tensors, tmp_path / "turbo.safetensors")
    found, lines = inspect(tmp_path / "turbo.safetensors")
    (part,) = found["parts"]
    assert (part["layout"], part["prefix"], part["turbo"], part["config"]) == ("fused MLP", "model.diffusion_model.", True, "from the tensors' shapes")
    assert set(part["quantised_layers"]) == {"float8_e4m3fn"} and part["read_by"] == ["nodes", "command"]
    assert "F8_E4M3" in row(lines, "stored as") and "2 blocks of width 256" in row(lines, "shape")


def test_inspect_what_only_the_nodes_read(inspect, small, tmp_path):
    tensors = load(small, "transformer")
    for name in files.matrices(tensors):
        tensors |= {name: tensors[name].to(torch.int8)} | files.comfy_note(name.removesuffix(".weight"), torch.ones(()), "int8_tensorwise")
    save_file(tensors, tmp_path / "x.safetensors")
    (part,) = inspect(tmp_path / "x.safetensors")[0]["parts"]
    assert part["read_by"] == ["nodes"] and set(part["quantised_layers"]) == {"int8_tensorwise"}


def test_inspect_gguf(inspect, small, tmp_path):
    pytest.importorskip("gguf")
    packed, _ = files.quantized_gguf(load(small, "transformer"), ["Q8_0", "Q4_K"])
    files.write_gguf(tmp_path / "x.gguf", packed)
    found, lines = inspect(tmp_path / "x.gguf")
    assert {"Q8_0", "Q4_K", "F32"} == set(found["parts"][0]["stored_as"]) and row(lines, "container") == "GGUF"


@pytest.mark.parametrize(("part", "make", "layout"), [("text_encoder", files.comfy_encoder, "ComfyUI"), ("vae", lambda t: files.wan(files.conv3d(t)), "Wan")])
def test_inspect_other_parts(inspect, small, tmp_path, part, make, layout):
    save_file({name: value.contiguous() for name, value in make(load(small, part)).items()}, tmp_path / "x.safetensors")
    (found,) = inspect(tmp_path / "x.safetensors")[0]["parts"]
    assert (found["part"], found["layout"]) == (part, layout)


def test_inspect_a_lora(inspect, tmp_path):
    shapes = {"attn.to_q": (4096, 4096), "img_mlp.out": (12288, 4096)}
    tensors = {}
    for block in range(2):
        for target, (inputs, outputs) in shapes.items():
            name = f"diffusion_model.transformer_blocks.{block}.{target}"
            tensors |= {f"{name}.lora_A.weight": torch.zeros(4, inputs), f"{name}.lora_B.weight": torch.zeros(outputs, 4), f"{name}.alpha": torch.tensor(8.0)}
    save_file(tensors, tmp_path / "lora.safetensors")
    found, lines = inspect(tmp_path / "lora.safetensors")
    assert found["lora"] == {
        "layers": 4, "ranks": {"4": 4}, "alpha": True, "unknown": [], "fits": True, "kinds": {"LoRA of rank 4": 4},
        "targets": {"diffusion_model.transformer_blocks.*.attn.to_q": 2, "diffusion_model.transformer_blocks.*.img_mlp.out": 2},
    }  # fmt: skip
    assert row(lines, "rank") == "4 (4 layers)" and row(lines, "fits") == "Qwen-Image 2.1"
    name = "transformer_blocks.0.attn.add_q_proj"
    save_file(tensors | {f"{name}.lora_A.weight": torch.zeros(4, 8), f"{name}.lora_B.weight": torch.zeros(8, 4)}, tmp_path / "lora.safetensors")
    found, _ = inspect(tmp_path / "lora.safetensors", 1)
    assert not found["lora"]["fits"] and "a layer of the first Qwen-Image" in found["problems"][0]


def test_inspect_says_what_does_not_fit_and_why(inspect, small, tmp_path):
    tensors = load(small, "transformer")
    tensors |= {"transformer_blocks.0.attn.to_q.weight": torch.zeros(3, 5), "surplus.weight": torch.zeros(1)}
    del tensors["transformer_blocks.1.attn.to_k.weight"]
    save_file(tensors, tmp_path / "x.safetensors")
    found, lines = inspect(tmp_path / "x.safetensors", 1)
    assert len(found["problems"]) == 3 and sum(line.startswith("problem: ") for line in lines) == 3
    for words in ("has shape (3, 5), its other tensors ask for (256, 256)", "surplus.weight", "lacks 1 of"):
        assert any(words in problem for problem in found["problems"]), words


@pytest.mark.parametrize("content", [b"", b"\0" * 100])
def test_inspect_a_damaged_file(inspect, tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    found, _ = inspect(tmp_path / "x.safetensors", 1)
    assert "damaged or truncated" in found["problems"][0]


def test_inspect_nothing(run_command, tmp_path):
    assert "is missing" in run_command("inspect", tmp_path / "x").failed(1)
    (tmp_path / "x").mkdir()
    assert "0 safetensors files" in run_command("inspect", tmp_path / "x").lines[0]
