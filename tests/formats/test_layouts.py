"""Every layout of denoiser, text encoder and VAE, loaded and compared with the folder it was made from."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from formats import files
from formats.files import FILES, load, matrices
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from qwen21.checkpoint import Checkpoint
from qwen21.config import ScheduleConfig
from qwen21.errors import Qwen21Error
from qwen21.schedule import TURBO_SCHEDULE
from qwen21.stored import StoredLinear

CPU = torch.device("cpu")
ALL_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


def velocity(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the denoiser makes of fixed inputs with a reference, float32."""
    model = checkpoint.transformer(CPU, dtype)
    generator = torch.manual_seed(0)
    context, target = torch.randn(1, 7, files.WIDTH, generator=generator, dtype=torch.float32), torch.randn(1, 64, 4, 6, generator=generator)
    reference = torch.randn(1, 64, 2, 4, generator=generator)
    with torch.inference_mode():
        return model.denoise(target.to(dtype), 0.7, model.prefill(context.to(dtype), [3], [reference.to(dtype)])).float()


def states(checkpoint: Checkpoint) -> torch.Tensor:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (256, 256, 4), dtype=np.uint8))
    return checkpoint.text_encoder(CPU, torch.float32).encode(["make it red"], [picture])[0].states


def painted(checkpoint: Checkpoint) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised latents of a picture, and the picture of them."""
    vae = checkpoint.vae(CPU, torch.float32)
    with torch.inference_mode():
        latents = vae.encode(torch.rand(1, 4, 64, 32, generator=torch.manual_seed(0)) * 2 - 1)
        return vae.normalize(latents), vae.decode(latents)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape and (found - expected).abs().max() <= tolerance * expected.abs().max()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def save(tmp_path):
    """`save(tensors, name, metadata)` -> the file."""

    def write(tensors: dict, name: str = "file.safetensors", metadata: dict | None = None) -> Path:
        path = tmp_path / name
        save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata=metadata)
        return path

    return write


PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "transformer.", "net.", "module.model.")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("fuse", [False, True], ids=["split", "fused"])
def test_denoiser_of_a_single_file(small, save, prefix, fuse):
    tensors = load(small, "transformer")
    path = save(files.prefixed(files.fused(tensors) if fuse else tensors, prefix))
    checkpoint = Checkpoint(small, transformer=path)
    assert checkpoint.transformer_config == Checkpoint(small).transformer_config and checkpoint.parts["transformer"].layout.prefix == prefix
    close(velocity(checkpoint), velocity(Checkpoint(small)))


@pytest.mark.parametrize("inner", ["", "transformer"])
def test_denoiser_of_another_folder(small, tmp_path, inner):
    shutil.copytree(small, tmp_path / "other")
    close(velocity(Checkpoint(small, transformer=tmp_path / "other" / inner)), velocity(Checkpoint(small)))


def test_denoiser_in_half_precision_is_that_of_the_folder(small, save):
    path = save({name: value.bfloat16() for name, value in load(small, "transformer").items()})
    assert difference(velocity(Checkpoint(small, transformer=path)), velocity(Checkpoint(small))) < 0.02


def test_plain_8_bit_floats_stay_so_in_memory(small, save):
    tensors = load(small, "transformer")
    path = save(files.cast8(tensors))
    checkpoint = Checkpoint(small, transformer=path)
    layer = checkpoint.transformer(CPU, torch.bfloat16).transformer_blocks[0].attn.to_q
    assert layer.weight.dtype == torch.float8_e4m3fn and layer.dequantized(torch.bfloat16).dtype == torch.bfloat16
    meant = save({name: value.float() for name, value in files.cast8(tensors).items()}, "meant.safetensors")
    close(velocity(checkpoint), velocity(Checkpoint(small, transformer=meant)))
    assert 1e-4 < difference(velocity(checkpoint), velocity(Checkpoint(small))) < 0.1


NOTES = {
    "comfy_quant": (files.comfy_note, {}, {}),
    "bare weight_scale": (lambda layer, scale: {f"{layer}.weight_scale": scale}, {}, {}),
    "scale_weight": (files.older_note, {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}, {}),
    "metadata": (lambda layer, scale: {f"{layer}.weight_scale": scale}, {}, {"_quantization_metadata": '{"layers": {}}'}),
}


@pytest.mark.parametrize("note", NOTES)
@pytest.mark.parametrize("fuse", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("scale", ["one scale", "a scale a row", "a list of scales"])
def test_scaled_8_bit_floats(small, save, note, fuse, scale):
    noted, more, metadata = NOTES[note]
    tensors = load(small, "transformer")
    scaled = files.scaled8(files.fused(tensors) if fuse else tensors, noted, rows=scale != "one scale")
    if scale == "a list of scales":
        scaled = {name: value.flatten() if "scale" in name else value for name, value in scaled.items()}
    path = save(files.prefixed(scaled | more, "model.diffusion_model."), metadata=metadata)
    checkpoint = Checkpoint(small, transformer=path)
    assert isinstance(checkpoint.transformer(CPU, torch.float32).transformer_blocks[1].img_mlp.proj, StoredLinear)
    found, exact = velocity(checkpoint), velocity(Checkpoint(small))
    assert 1e-4 < difference(found, exact) < 0.05


def test_gguf_of_every_type_against_the_weights_it_stands_for(small, save, tmp_path):
    pytest.importorskip("gguf")
    packed, meant = files.quantized_gguf(load(small, "transformer"), ALL_KINDS)
    files.write_gguf(tmp_path / "x.gguf", packed)
    checkpoint = Checkpoint(small, transformer=tmp_path / "x.gguf")
    layers = [layer for layer in checkpoint.transformer(CPU, torch.float32).modules() if isinstance(layer, StoredLinear)]
    assert {layer.kind for layer in layers} == set(ALL_KINDS) and {layer.weight.dtype for layer in layers} == {torch.uint8}
    close(velocity(checkpoint), velocity(Checkpoint(small, transformer=save(meant))))


@pytest.mark.parametrize("arch", ["qwen_image21", "qwen_image", "pig", None])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("fuse", [False, True], ids=["split", "fused"])
def test_gguf_is_recognised_by_its_tensors(small, save, tmp_path, arch, prefix, fuse):
    pytest.importorskip("gguf")
    tensors = load(small, "transformer")
    packed, meant = files.quantized_gguf(files.fused(tensors) if fuse else tensors, ["Q8_0", "Q4_K"])
    files.write_gguf(tmp_path / "x.gguf", files.prefixed(packed, prefix), arch, general__name="something else")
    found, exact = velocity(Checkpoint(small, transformer=tmp_path / "x.gguf")), velocity(Checkpoint(small, transformer=save(meant)))
    close(found, exact)


def test_gguf_in_half_precision_and_bfloat16(small, tmp_path):
    gguf = pytest.importorskip("gguf")
    tensors = load(small, "transformer")
    halves = {
        name: (gguf.quants.quantize(tensors[name].numpy(), gguf.GGMLQuantizationType[kind]), kind) for name, kind in zip(matrices(tensors), ["F16", "BF16"])
    }
    files.write_gguf(tmp_path / "x.gguf", tensors | halves)
    assert difference(velocity(Checkpoint(small, transformer=tmp_path / "x.gguf")), velocity(Checkpoint(small))) < 0.01


def test_a_type_that_the_package_only_names_is_refused(small, tmp_path):
    pytest.importorskip("gguf")
    path, tensors = tmp_path / "x.gguf", load(small, "transformer")
    name = matrices(tensors)[0]
    rows, columns = tensors[name].shape
    files.write_gguf(path, tensors | {name: (np.zeros((rows, columns // 256 * 292), dtype=np.uint8), "Q8_K")})
    with pytest.raises(Qwen21Error, match=f"stores {name} as Q8_K, which the gguf package does not read"):
        Checkpoint(small, transformer=path).transformer(CPU, torch.float32)


def test_gguf_without_its_package_says_what_to_install(small, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(Qwen21Error, match="pip install gguf"):
        Checkpoint(small, transformer=tmp_path / "x.gguf")


@pytest.mark.parametrize("make", [lambda tensors: tensors, files.comfy_encoder, lambda t: files.prefixed(files.comfy_encoder(t), "text_encoders.qwen3vl_8b.transformer.")],
                         ids=["Hugging Face", "ComfyUI", "prefixed"])  # fmt: skip
def test_text_encoder_of_a_single_file(small, save, make):
    path = save(make(load(small, "text_encoder")))
    shutil.copy(small / "processor/tokenizer.json", path.parent)
    close(states(Checkpoint(small, text_encoder=path)), states(Checkpoint(small)))


@pytest.mark.parametrize("make", [files.cast8, files.scaled8, lambda t: files.scaled8(t, files.comfy_note, rows=True)], ids=["cast", "scaled", "comfy_quant"])
def test_text_encoder_in_8_bit_floats(small, save, make):
    path = save(make(files.comfy_encoder(load(small, "text_encoder"))))
    shutil.copy(small / "processor/tokenizer.json", path.parent)
    found = difference(states(Checkpoint(small, text_encoder=path)), states(Checkpoint(small)))
    assert 1e-4 < found < 0.2


@pytest.mark.parametrize("inner", ["", "text_encoder"])
def test_text_encoder_of_another_folder(small, tmp_path, inner):
    shutil.copytree(small, tmp_path / "other")
    close(states(Checkpoint(small, text_encoder=tmp_path / "other" / inner)), states(Checkpoint(small)))


def test_text_encoder_in_hugging_faces_own_folder(small, tmp_path):
    """Weights, config and tokenizer side by side."""
    shutil.copytree(small / "text_encoder", tmp_path / "Qwen3-VL")
    shutil.copytree(small / "processor", tmp_path / "Qwen3-VL", dirs_exist_ok=True)
    close(states(Checkpoint(small, text_encoder=tmp_path / "Qwen3-VL")), states(Checkpoint(small)))


@pytest.mark.parametrize("names", [lambda t: t, files.wan, lambda t: files.prefixed(files.wan(t), "vae."), lambda t: files.prefixed(t, "first_stage_model.")],
                         ids=["diffusers", "Wan", "prefixed Wan", "prefixed"])  # fmt: skip
@pytest.mark.parametrize("shape", [lambda t: t, files.conv3d], ids=["Conv2d", "Conv3d"])
@pytest.mark.parametrize("time", [True, False], ids=["with time_conv", "without"])
def test_vae_of_a_single_file(small, save, names, shape, time):
    tensors = {name: value for name, value in load(small, "vae").items() if time or "time_conv" not in name}
    checkpoint = Checkpoint(small, vae=save(names(shape(tensors))))
    assert checkpoint.vae_config == Checkpoint(small).vae_config
    for found, expected in zip(painted(checkpoint), painted(Checkpoint(small))):
        close(found, expected)


def test_three_files_and_no_folder(small, singles):
    found, folder = Checkpoint(**singles), Checkpoint(small)
    close(velocity(found), velocity(folder))
    close(states(found), states(folder))
    close(painted(found)[1], painted(folder)[1])
    assert (found.schedule, found.index.sample_sigmas, found.index.native_resolution) == (type(found.schedule)(), (), 1024)
    assert found.name == "transformer.safetensors+vae.safetensors+text_encoder.safetensors"


def test_one_file_with_all_three_parts(small, save):
    everything = files.prefixed(load(small, "transformer"), "model.diffusion_model.") | files.prefixed(files.wan(load(small, "vae")), "vae.")
    everything |= files.prefixed(files.comfy_encoder(load(small, "text_encoder")), "text_encoders.qwen3vl_8b.transformer.")
    path = save(everything)
    shutil.copy(small / "processor/tokenizer.json", path.parent)
    found, folder = Checkpoint(transformer=path, text_encoder=path, vae=path), Checkpoint(small)
    close(velocity(found), velocity(folder))
    close(states(found), states(folder))
    close(painted(found)[0], painted(folder)[0])


def test_a_config_beside_a_file_is_its_own_only_if_it_says_so(small, save, model_folder):
    """The random checkpoint's heads have another size, which shapes do not tell."""
    path = save(load(model_folder, "transformer"))
    with pytest.raises(Qwen21Error, match="heads of 32 channels.*config.json beside it"):
        Checkpoint(small, transformer=path)
    shutil.copy(model_folder / "transformer/config.json", path.parent)
    with pytest.raises(Qwen21Error, match="width 64"):  # read; it is the text encoder that does not fit
        Checkpoint(small, transformer=path)
    (path.parent / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    with pytest.raises(Qwen21Error, match="heads of 32 channels"):
        Checkpoint(small, transformer=path)


TITLES = [
    ("qwen_image_2.1_turbo_bf16.safetensors", {}, 8),
    ("Qwen-Image-2.1-TURBO.safetensors", {}, 8),
    ("file.safetensors", {"modelspec.title": "Qwen-Image 2.1 Turbo"}, 8),
    ("file.safetensors", {"sample_sigmas": "[1.0, 0.6, 0.2]"}, 3),
    ("file.safetensors", {"sample_sigmas": "{"}, 0),
    ("file.safetensors", {}, 0),
]


@pytest.mark.parametrize(("name", "metadata", "steps"), TITLES)
def test_a_turbo_file_brings_its_sigmas(small, save, name, metadata, steps):
    checkpoint = Checkpoint(small, transformer=save(load(small, "transformer"), name, metadata))
    assert len(checkpoint.index.sample_sigmas) == steps and checkpoint.schedule.use_dynamic_shifting == (steps == 0)


def test_a_turbo_gguf_brings_its_sigmas(small, tmp_path):
    pytest.importorskip("gguf")
    files.write_gguf(tmp_path / "x.gguf", load(small, "transformer"), general__name="Qwen Image 2.1 Turbo")
    assert len(Checkpoint(small, transformer=tmp_path / "x.gguf").index.sample_sigmas) == 8


@pytest.fixture
def turbo_small(small, tmp_path):
    """The small folder as a Turbo."""
    folder = tmp_path / "folder"
    shutil.copytree(small, folder)
    for name, values in (("model_index.json", {"sample_sigmas": [1.0, 0.5]}), ("scheduler/scheduler_config.json", {"use_dynamic_shifting": False})):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | values))
    return folder


@pytest.mark.parametrize(("name", "metadata", "steps"), TITLES)
def test_another_denoiser_does_not_take_a_turbo_folders_sigmas(small, turbo_small, save, name, metadata, steps):
    checkpoint = Checkpoint(turbo_small, transformer=save(load(small, "transformer"), name, metadata))
    assert len(checkpoint.index.sample_sigmas) == steps and checkpoint.schedule == (TURBO_SCHEDULE if steps else ScheduleConfig())
    assert checkpoint.index.native_resolution == Checkpoint(turbo_small).index.native_resolution
    assert Checkpoint(turbo_small, transformer=small).index.sample_sigmas == ()
    assert Checkpoint(small, transformer=turbo_small, vae=small).index.sample_sigmas == (1.0, 0.5)
    assert Checkpoint(turbo_small, vae=small, text_encoder=small).index.sample_sigmas == (1.0, 0.5)


def test_a_denoiser_inside_a_turbo_folder_keeps_that_folders_sigmas(small, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(small, other)
    index = json.loads((other / "model_index.json").read_text())
    (other / "model_index.json").write_text(json.dumps(index | {"sample_sigmas": [1.0, 0.5]}))
    for source in (other, other / "transformer", other / FILES["transformer"]):
        assert Checkpoint(small, transformer=source).index.sample_sigmas == (1.0, 0.5)


REFUSED = {
    "a text-only Qwen3": ("text_encoder", {"model.layers.0.self_attn.q_norm.weight": (128,)}, "Qwen3 without a vision tower"),
    "the prompt expander": ("text_encoder", {"model.language_model.layers.0.linear_attn.A_log": (32,), "model.visual.deepstack_merger_list.0.norm.weight": (4,)}, "prompt expander"),
    "Qwen2.5-VL": ("text_encoder", {"visual.blocks.0.mlp.gate_proj.weight": (4, 4), "model.layers.0.self_attn.q_proj.weight": (4, 4)}, "Qwen2.5-VL"),
    "a T5": ("text_encoder", {"encoder.block.0.layer.0.SelfAttention.q.weight": (4, 4)}, "T5"),
    "the first Qwen-Image": ("transformer", {"transformer_blocks.0.attn.add_q_proj.weight": (4, 4)}, "first Qwen-Image"),
    "a Flux": ("transformer", {"double_blocks.0.img_attn.qkv.weight": (4, 4)}, "Flux"),
    "a LoRA": ("transformer", {"transformer.transformer_blocks.0.attn.to_q.lora_A.weight": (4, 4)}, "a LoRA"),
    "the VAE of Wan 2.1": ("vae", {"decoder.middle.0.residual.0.gamma": (4, 1, 1, 1)}, "16-channel VAE"),
    "a 16-channel VAE": ("vae", {"decoder.up_blocks.0.resnets.0.norm1.gamma": (4, 1, 1, 1), "post_quant_conv.weight": (16, 16, 1, 1, 1)}, "16 latent channels"),
    "an SD VAE": ("vae", {"decoder.mid.block_1.norm1.weight": (4,)}, "VAE of another model"),
    "a VAE as denoiser": ("transformer", {"decoder.up_blocks.0.resnets.0.norm1.gamma": (4, 1, 1)}, "holds the VAE of Qwen-Image 2.1"),
    "nothing": ("transformer", {"a": (1,)}, "no model that is known here"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_another_model_is_refused_by_name(small, save, what):
    part, shapes, expected = REFUSED[what]
    path = save({name: torch.zeros(shape) for name, shape in shapes.items()})
    with pytest.raises(Qwen21Error, match=expected) as raised:
        Checkpoint(small, **{part: path})
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_a_smaller_qwen3vl_is_refused_by_its_width(small, save):
    """As the 4B is, whose names are the same."""
    tensors = {
        name: value[..., :128] if value.shape[-1:] == (files.WIDTH,) and "visual" not in name else value for name, value in load(small, "text_encoder").items()
    }
    with pytest.raises(Qwen21Error, match="`hidden_size` is 128, the denoiser in .* expects a text encoder of width 256"):
        Checkpoint(small, text_encoder=save(tensors))


def test_a_qwen3vl_with_another_tower_is_refused_by_its_depth(small, save):
    """As the 4B and the 2B are."""
    tensors = {name: value for name, value in load(small, "text_encoder").items() if not re.search(r"visual\.blocks\.2[456]\.", name)}
    with pytest.raises(Qwen21Error, match="vision tower of 24 layers .*, expected Qwen3-VL 8B"):
        Checkpoint(small, text_encoder=save(tensors))


def test_what_only_comfyui_can_read_is_named(small, save):
    tensors = load(small, "transformer")
    name = matrices(tensors)[0]
    tensors |= {name: tensors[name].to(torch.int8)} | files.comfy_note(name.removesuffix(".weight"), torch.ones(()), "int8_tensorwise")
    checkpoint = Checkpoint(small, transformer=save(tensors))
    with pytest.raises(Qwen21Error, match="quantised for ComfyUI.*int8_tensorwise.*load it with the nodes"):
        checkpoint.transformer(CPU, torch.float32)


def test_mxfp8_keeps_8_bit_floats_too_but_not_by_one_scale(small, save):
    tensors = load(small, "transformer")
    name = matrices(tensors)[0]
    scales = torch.full((tensors[name].shape[0], tensors[name].shape[1] // 32), 127, dtype=torch.uint8)
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn)} | files.comfy_note(name.removesuffix(".weight"), scales, "mxfp8")
    with pytest.raises(Qwen21Error, match="quantised for ComfyUI.*mxfp8.*load it with the nodes"):
        Checkpoint(small, transformer=save(tensors)).transformer(CPU, torch.float32)


LAYER = "transformer_blocks.0.attn.to_q"
MISFITS = {
    "no scale": ({}, [f"{LAYER}.weight_scale"], "lacks its scale"),
    "a scale of another length": (
        {f"{LAYER}.weight_scale": torch.ones(3)},
        [],
        r"a scale of shape \(3,\), expected one number, or one for each of its 256 rows",
    ),
    "a scale a block": ({f"{LAYER}.weight_scale": torch.ones(2, 2)}, [], r"a scale of shape \(2, 2\)"),
    "another shape": ({f"{LAYER}.weight": torch.zeros(100, 256, dtype=torch.float8_e4m3fn)}, [], r"has shape \(100, 256\), expected \(256, 256\)"),
    "another dtype": ({f"{LAYER}.weight": torch.zeros(256, 256)}, [], "stored as F32, but noted as float8_e4m3fn"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_scaled_8_bit_floats_that_do_not_fit_are_refused(small, save, what):
    more, without, expected = MISFITS[what]
    tensors = files.scaled8(load(small, "transformer"), files.comfy_note) | more
    path = save({name: value for name, value in tensors.items() if name not in without})
    with pytest.raises(Qwen21Error, match=expected) as raised:
        Checkpoint(small, transformer=path).transformer(CPU, torch.float32)
    assert f"{path}: tensor {LAYER}.weight" in str(raised.value)


def test_integers_that_nothing_explains_are_refused(small, save):
    tensors = load(small, "transformer")
    name = matrices(tensors)[0]
    checkpoint = Checkpoint(small, transformer=save(tensors | {name: tensors[name].to(torch.int8)}))
    with pytest.raises(Qwen21Error, match="as I8 without saying how it is quantised"):
        checkpoint.transformer(CPU, torch.float32)


def test_a_quantised_layer_that_the_model_has_not_is_refused(small, save):
    tensors = load(small, "transformer") | {"surplus.weight": torch.zeros(2, 2)} | files.comfy_note("surplus", torch.ones(()))
    with pytest.raises(Qwen21Error, match="holds the tensor surplus"):
        Checkpoint(small, transformer=save(tensors)).transformer(CPU, torch.float32)


@pytest.mark.parametrize("note", [b"{", b"[1]", b'{"format": 3}', b"\xff" * 9, b" " * 5000])
def test_a_broken_note_about_quantisation_is_named(small, save, note):
    tensors = load(small, "transformer")
    layer = matrices(tensors)[0].removesuffix(".weight")
    checkpoint = Checkpoint(small, transformer=save(tensors | {f"{layer}.comfy_quant": torch.frombuffer(bytearray(note), dtype=torch.uint8)}))
    with pytest.raises(Qwen21Error, match=f"{layer}.comfy_quant does not say"):
        checkpoint.transformer(CPU, torch.float32)


@pytest.mark.parametrize("note", [1, {"fmt": "int8_tensorwise"}, {"format": None}])
def test_a_broken_note_in_the_metadata_is_named(small, save, note):
    tensors = load(small, "transformer")
    layer = matrices(tensors)[0].removesuffix(".weight")
    path = save(
        tensors | {f"{layer}.weight": torch.zeros(256, 256, dtype=torch.int8)}, metadata={"_quantization_metadata": json.dumps({"layers": {layer: note}})}
    )
    with pytest.raises(Qwen21Error, match=f"{layer}.weight does not say"):
        Checkpoint(small, transformer=path).transformer(CPU, torch.float32)


@pytest.mark.parametrize(
    ("part", "folder", "held"), [("transformer", "text_encoder", "Qwen3-VL text encoder"), ("vae", "text_encoder", "Qwen3-VL text encoder")]
)
def test_the_folder_of_another_part_is_refused_by_what_it_holds(small, part, folder, held):
    with pytest.raises(Qwen21Error, match=f"{folder} holds the {held}, expected"):
        Checkpoint(small, **{part: small / folder})


def test_linear_layers_keep_their_sizes(small, save):
    """What puts something beside a layer, such as a LoRA, asks for them."""
    model = Checkpoint(small, transformer=save(files.cast8(load(small, "transformer")))).transformer(CPU, torch.float32)
    plain = Checkpoint(small).transformer(CPU, torch.float32)
    sizes = [
        {name: (layer.in_features, layer.out_features) for name, layer in one.named_modules() if isinstance(layer, nn.Linear | StoredLinear)}
        for one in (model, plain)
    ]
    assert sizes[0] == sizes[1] and [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
