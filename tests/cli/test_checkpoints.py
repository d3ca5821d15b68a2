"""Checkpoint folders that are missing something, damaged, or another model's: one line that names the file, and no picture."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from cli.running import change_json, replace
from safetensors.torch import load_file, save_file

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
ENCODER = "text_encoder/model.safetensors"
CONFIGS = ["model_index.json", "transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json", "text_encoder/config.json"]
PROCESSOR = ["processor/tokenizer.json", "processor/preprocessor_config.json"]


@pytest.fixture
def paint_damaged(paint, damaged):
    """Paint with the damaged folder, with a reference picture, and return the one line that it failed with."""

    def run() -> str:
        line = paint(model=damaged).failed(1)
        assert line.startswith("error: ") and not list(paint.output.parent.iterdir())
        assert "not foreseen" not in line
        return line

    return run


def change_weights(path: Path, change) -> None:
    """Let `change` edit the dict of tensors in `path`."""
    weights = load_file(path)
    change(weights)
    path.unlink()
    save_file(weights, path)


def shard(path: Path, shards: int = 2) -> list[Path]:
    """Split a safetensors file into shards with an index, as save_pretrained does."""
    weights = load_file(path)
    path.unlink()
    names = sorted(weights)
    files = [path.with_name(f"{path.stem}-{i + 1:05}-of-{shards:05}.safetensors") for i in range(shards)]
    for i, file in enumerate(files):
        save_file({name: weights[name] for name in names[i::shards]}, file)
    weight_map = {name: files[i % shards].name for i, name in enumerate(names)}
    path.with_name(f"{path.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


@pytest.mark.parametrize("model", ["absent", "file.safetensors", "", "empty"])
def test_a_model_that_is_no_checkpoint_folder(paint, tmp_path, model):
    (tmp_path / "file.safetensors").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    assert "Qwen-Image 2.1" in paint(model=tmp_path / "empty" / model if not model else tmp_path / model).failed(1)


@pytest.mark.parametrize("name", [*CONFIGS, *PROCESSOR, TRANSFORMER, VAE, ENCODER])
def test_a_missing_file_is_named(paint_damaged, damaged, name):
    (damaged / name).unlink()
    expected = name if name.endswith(".json") else name.split("/")[0]
    assert expected in paint_damaged()


@pytest.mark.parametrize("name", [*CONFIGS, *PROCESSOR])
@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null", b"\xff\xfe\x00", "[" * 100000], ids=["empty", "cut", "list", "null", "bytes", "deep"])
def test_a_broken_json_is_named(paint_damaged, damaged, name, content):
    replace(damaged / name, content)
    assert (name if name in CONFIGS else "processor") in paint_damaged()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model_index.json", {"_class_name": "QwenImagePipeline"}),
        ("model_index.json", {"sample_sigmas": "fast"}),
        ("model_index.json", {"sample_sigmas": 3}),
        ("model_index.json", {"sample_sigmas": [0.5, 0.9]}),
        ("model_index.json", {"sample_sigmas": [1.0, float("nan")]}),
        ("model_index.json", {"native_resolution": "2k"}),
        ("model_index.json", {"native_resolution": 0}),
        ("model_index.json", {"native_resolution": 16}),
        ("transformer/config.json", {"_class_name": "QwenImageTransformer2DModel"}),
        ("transformer/config.json", {"patch_size": 2}),
        ("transformer/config.json", {"causal_condition": False}),
        ("transformer/config.json", {"num_attention_heads": 0}),
        ("transformer/config.json", {"num_layers": "four"}),
        ("transformer/config.json", {"num_layers": 2.5}),
        ("transformer/config.json", {"num_layers": True}),
        ("transformer/config.json", {"num_layers": None}),
        ("transformer/config.json", {"mlp_ratio": -3}),
        ("transformer/config.json", {"eps": float("nan")}),
        ("transformer/config.json", {"in_channels": 16}),
        ("transformer/config.json", {"out_channels": 16}),
        ("transformer/config.json", {"axes_dims_rope": [8, 24]}),
        ("transformer/config.json", {"axes_dims_rope": [8, 11, 13]}),
        ("transformer/config.json", {"axes_dims_rope": ["8", "12", "12"]}),
        ("transformer/config.json", {"axes_dims_rope": 32}),
        ("transformer/config.json", {"context_in_dim": 48}),
        ("vae/config.json", {"_class_name": "AutoencoderKLQwenImage"}),
        ("vae/config.json", {"z_dim": 16}),
        ("vae/config.json", {"base_dim": 0}),
        ("vae/config.json", {"decoder_base_dim": None, "base_dim": ...}),
        ("vae/config.json", {"dim_mult": [1, 2, 4, 4]}),
        ("vae/config.json", {"dim_mult": [1, 2, 4, 8, None]}),
        ("vae/config.json", {"temperal_downsample": [False, True]}),
        ("vae/config.json", {"latents_mean": [0.0] * 16}),
        ("vae/config.json", {"latents_mean": [float("inf")] * 64}),
        ("vae/config.json", {"latents_std": ...}),
        ("vae/config.json", {"latents_std": [0.0] * 64}),
        ("scheduler/scheduler_config.json", {"use_karras_sigmas": True}),
        ("scheduler/scheduler_config.json", {"time_shift_type": "linear"}),
        ("scheduler/scheduler_config.json", {"base_shift": "0.5"}),
        ("scheduler/scheduler_config.json", {"shift_terminal": 1}),
        ("scheduler/scheduler_config.json", {"shift": 0}),
        ("scheduler/scheduler_config.json", {"base_image_seq_len": 8192}),
        ("text_encoder/config.json", {"model_type": "qwen2_5_vl"}),
        ("text_encoder/config.json", {"text_config": ...}),
        ("text_encoder/config.json", {"text_config": [1]}),
        ("text_encoder/config.json", {"vision_config": ...}),
    ],
)
def test_a_config_that_cannot_be_honoured_names_file_and_key(paint_damaged, damaged, name, values):
    change_json(damaged / name, **values)
    line = paint_damaged()
    assert f"{name}: `" in line or f"{name}`" in line or "denoiser" in line
    assert any(key in line for key in [*values, "hidden_size", "VAE has"])


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("text_config", {"hidden_size": 48}),
        ("text_config", {"num_attention_heads": 0}),
        ("text_config", {"num_hidden_layers": "many"}),
        ("text_config", {"hidden_act": "unheard of"}),
        ("text_config", {"rope_parameters": [1], "rope_scaling": None}),
        ("text_config", {"vocab_size": 100}),
        ("text_config", {"vocab_size": None}),
        ("vision_config", {"patch_size": 14}),
        ("vision_config", {"spatial_merge_size": 3}),
        ("vision_config", {"depth": -1}),
        ("vision_config", {"num_heads": 0}),
    ],
)
def test_a_text_encoder_config_that_cannot_be_used(paint_damaged, damaged, part, values):
    path = damaged / "text_encoder/config.json"
    change_json(path, **{part: json.loads(path.read_text())[part] | values})
    assert any(word in paint_damaged() for word in ("text_encoder", "text encoder"))


@pytest.mark.parametrize("name", [TRANSFORMER, VAE, ENCODER])
@pytest.mark.parametrize("length", [0, 4, 8, 100, "header", "half", -1])
def test_a_truncated_file_is_named(paint_damaged, damaged, name, length):
    content = (damaged / name).read_bytes()
    cut = {"header": 8 + int.from_bytes(content[:8], "little"), "half": len(content) // 2}.get(length, length)
    replace(damaged / name, content[:cut])
    line = paint_damaged()
    assert name in line and "damaged or truncated" in line


def test_shards_paint_the_same(paint, damaged, model_folder):
    for name in (TRANSFORMER, VAE, ENCODER):
        shard(damaged / name)
    pictures = []
    for folder in (model_folder, damaged):
        assert paint(model=folder).code == 0
        pictures.append(paint.output.read_bytes().split(b"IDAT", 1)[1])
    assert pictures[0] == pictures[1]


def _index(path: Path, change) -> None:
    index = path.with_name(f"{path.name}.index.json")
    content = json.loads(index.read_text())
    change(content["weight_map"])
    replace(index, content)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path, shards: shards[1].unlink(), "00002-of-00002.safetensors is missing"),
        (lambda path, shards: replace(shards[1], shards[1].read_bytes()[:-10]), "00002-of-00002.safetensors is damaged or truncated"),
        (lambda path, shards: replace(path.with_name(f"{path.name}.index.json"), "{"), "index.json cannot be read"),
        (lambda path, shards: replace(path.with_name(f"{path.name}.index.json"), {}), "weight_map"),
        (lambda path, shards: replace(path.with_name(f"{path.name}.index.json"), {"weight_map": ["a"]}), "weight_map"),
        (lambda path, shards: replace(path.with_name(f"{path.name}.index.json"), {"weight_map": {"a": 1}}), "weight_map"),
        (lambda path, shards: replace(path.with_name(f"{path.name}.index.json"), {"weight_map": {"a": "pytorch_model.bin"}}), "weight_map"),
        (lambda path, shards: _index(path, lambda names: names.update({"made.up": shards[0].name})), "lacks the tensor made.up"),
        (lambda path, shards: _index(path, lambda names: names.pop(min(names))), "lacks 1 of "),
        (lambda path, shards: replace(path.with_name("other.safetensors.index.json"), {"weight_map": {}}), "2 indexes"),
    ],
    ids=["missing", "truncated", "broken index", "empty index", "list", "number", "bin", "absent tensor", "unlisted tensor", "two indexes"],
)
def test_damaged_shards(paint_damaged, damaged, damage, expected):
    damage(damaged / ENCODER, shard(damaged / ENCODER))
    line = paint_damaged()
    assert expected in line and "text_encoder" in line


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (TRANSFORMER, "transformer_blocks.0.attn.to_q.weight"),
        (VAE, "decoder.conv_in.weight"),
        (ENCODER, "model.language_model.layers.0.mlp.up_proj.weight"),
    ],
)
@pytest.mark.parametrize("damage", ["shape", "missing", "unknown"])
def test_a_tensor_that_does_not_fit_is_named(paint_damaged, damaged, name, tensor, damage):
    shapes = []

    def change(weights: dict) -> None:
        value = weights.pop(tensor)
        wrong = torch.zeros(3, 5)
        shapes.extend([tuple(value.shape), tuple(wrong.shape)])
        weights.update({"shape": {tensor: wrong}, "missing": {}, "unknown": {tensor: value, f"{tensor}_scale": torch.ones(1)}}[damage])

    change_weights(damaged / name, change)
    line = paint_damaged()
    assert tensor.removeprefix("model.") in line and name.split("/")[0] in line
    assert damage != "shape" or all(str(shape) in line for shape in shapes)


class Trap:
    """Unpickling it says so."""

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", [TRANSFORMER, VAE, ENCODER])
@pytest.mark.parametrize("beside", [True, False])
def test_a_pickle_is_never_opened(paint, damaged, tmp_path, name, beside):
    trap = Trap()
    trap.path = tmp_path / "sprung"
    for file in ("pytorch_model.bin", "diffusion_pytorch_model.bin", "model.pt", "x.ckpt"):
        (damaged / name).with_name(file).write_bytes(pickle.dumps(trap))
    if not beside:
        (damaged / name).unlink()
    run = paint(model=damaged)
    assert not trap.path.exists()
    if beside:
        assert run.code == 0
    else:
        assert "pytorch_model.bin" in run.failed(1) and "safetensors" in run.failed(1)


@pytest.mark.parametrize("token", ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_end|>"])
def test_a_tokenizer_without_the_special_tokens(paint_damaged, damaged, token):
    path = damaged / "processor/tokenizer.json"
    replace(path, path.read_text().replace(token, token.replace("|", "/")))
    assert f"lacks the token {token}" in paint_damaged()


@pytest.mark.parametrize(
    "values",
    [
        {"patch_size": 14},
        {"merge_size": 3},
        {"temporal_patch_size": 1},
        {"size": {"shortest_edge": 0, "longest_edge": 100}},
        {"size": {"shortest_edge": 5000, "longest_edge": 1024}},
        {"size": {"shortest_edge": "small", "longest_edge": 1024}},
        {"size": {"height": 224, "width": 224}},
        {"size": [1, 2]},
    ],
)
def test_a_picture_processor_that_does_not_fit(paint_damaged, damaged, values):
    change_json(damaged / "processor/preprocessor_config.json", **values)
    assert "picture processor" in paint_damaged()


@pytest.mark.parametrize(("name", "stage"), [(TRANSFORMER, "steps"), (VAE, "decode"), (ENCODER, "encode")])
def test_nan_in_the_weights_is_no_black_picture(paint_damaged, damaged, name, stage):
    tensor = {TRANSFORMER: "proj_out.weight", VAE: "decoder.conv_in.bias", ENCODER: "model.language_model.embed_tokens.weight"}[name]
    change_weights(damaged / name, lambda weights: weights[tensor].fill_(float("nan")))
    line = paint_damaged()
    assert f"stage '{stage}'" in line and "not finite" in line
