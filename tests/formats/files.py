"""Checkpoints in every layout people have, made from a small one.

Its heads and its vision tower have the published sizes, so that shapes alone say everything, and rows of whole GGUF blocks.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3VLConfig

from qwen21 import published
from qwen21.config import TransformerConfig
from qwen21.random_model import make_random
from qwen21.text_encoder import Qwen3VLModel
from qwen21.transformer import QwenImage21Transformer

Tensors = dict[str, torch.Tensor]
WIDTH = 256
PUBLISHED_WORDS = 151936
TRANSFORMER = TransformerConfig(num_layers=2, num_attention_heads=2, context_in_dim=WIDTH)
FILES = {
    "transformer": "transformer/diffusion_pytorch_model.safetensors",
    "text_encoder": "text_encoder/model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
}


def make_small(folder: Path, seed: int = 0, words: int | None = None) -> Path:
    """A checkpoint folder in the diffusers layout, float32, whose VAE has the published statistics. `words` is the size of the vocabulary."""
    make_random(folder, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = QwenImage21Transformer(TRANSFORMER)
        _fill(model)
        save_file(model.state_dict(), folder / FILES["transformer"])
        config = _encoder_config(words or json.loads((folder / "text_encoder/config.json").read_text())["text_config"]["vocab_size"])
        encoder = Qwen3VLModel(config)
        _fill(encoder)
        save_file({f"model.{name}": value for name, value in encoder.state_dict().items()}, folder / FILES["text_encoder"])
    _write(folder / "transformer/config.json", {"_class_name": "QwenImage21Transformer2DModel", **asdict(TRANSFORMER)})
    _write(folder / "text_encoder/config.json", config.to_dict())
    statistics = {"latents_mean": published.LATENTS_MEAN, "latents_std": published.LATENTS_STD}
    _write(folder / "vae/config.json", json.loads((folder / "vae/config.json").read_text()) | statistics)
    processor = folder / "processor/preprocessor_config.json"
    _write(processor, json.loads(processor.read_text()) | published.PICTURES)
    return folder


def _encoder_config(words: int) -> Qwen3VLConfig:
    text = {"vocab_size": words, "hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"depth": published.VISION_DEPTH, "hidden_size": 64, "intermediate_size": 128, "num_heads": published.VISION_HEADS, "out_hidden_size": WIDTH}
    vision |= {"num_position_embeddings": 256, "deepstack_visual_indexes": published.DEEPSTACK}
    return Qwen3VLConfig(text_config=text | {"head_dim": 128} | published.TEXT, vision_config=vision, **published.TOKEN_IDS)


def _fill(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
        else:
            nn.init.normal_(weight, mean=1.0 if "norm" in name and name.endswith("weight") and "text_norm" not in name else 0.0, std=0.1)


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value))


def write_singles(models: Path) -> None:
    """Into ComfyUI's model folders: `small.safetensors` of each part, bfloat16, as its users have them, for the published vocabulary."""
    folder = make_small(models / "made", words=PUBLISHED_WORDS)
    for part, root, make in (
        ("transformer", "diffusion_models", fused),
        ("text_encoder", "text_encoders", comfy_encoder),
        ("vae", "vae", lambda tensors: wan(conv3d(tensors))),
    ):
        (models / root).mkdir(exist_ok=True)
        save_file({name: value.bfloat16().contiguous() for name, value in make(load(folder, part)).items()}, models / root / "small.safetensors")
    shutil.rmtree(folder)


def load(folder: Path, part: str) -> Tensors:
    """A part's tensors under the names of the diffusers layout."""
    return load_file(folder / FILES[part])


# --- layouts of the denoiser


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    return {f"{prefix}{name}": value for name, value in tensors.items()}


def fused(tensors: Tensors) -> Tensors:
    """The MLP's first two matrices as one, `gate_layer` first."""
    made = {}
    for name, value in tensors.items():
        if ".img_mlp.gate_layer." in name:
            made[name.replace(".gate_layer.", ".gate_up.")] = torch.cat([value, tensors[name.replace(".gate_layer.", ".proj.")]])
        elif ".img_mlp.proj." not in name:
            made[name] = value
    return made


# --- layouts of the text encoder


def comfy_encoder(tensors: Tensors) -> Tensors:
    """`model.layers.*` and `visual.*`, with the head and the final norm that are never used."""
    made = {name.removeprefix("model.").replace("language_model.", "model."): value for name, value in tensors.items()}
    return made | {"lm_head.weight": torch.zeros(4, WIDTH), "lm_head.weight_scale": torch.ones(())}


# --- layouts of the VAE


def wan(tensors: Tensors) -> Tensors:
    """The names of Wan 2.2's VAE."""
    made = {}
    for name, value in tensors.items():
        names = [
            ("post_quant_conv.", "conv2."), ("quant_conv.", "conv1."), (".conv_in.", ".conv1."), (".norm_out.", ".head.0."), (".conv_out.", ".head.2."),
            (".mid_block.resnets.0.", ".middle.0."), (".mid_block.attentions.0.", ".middle.1."), (".mid_block.resnets.1.", ".middle.2."),
        ]  # fmt: skip
        if ".resnets." in name:
            names += [(".norm1.", ".residual.0."), (".conv1.", ".residual.2."), (".norm2.", ".residual.3."), (".conv2.", ".residual.6.")]
            names += [(".conv_shortcut.", ".shortcut."), (".resnets.", ".{}samples.")]
        names += [(".downsampler.", ".downsamples.2."), (".upsampler.", ".upsamples.3."), (".down_blocks.", ".downsamples."), (".up_blocks.", ".upsamples.")]
        for ours, theirs in names:
            name = name.replace(ours, theirs)
        made[name.replace("{}", "down" if name.startswith("encoder") else "up")] = value
    return made


def conv3d(tensors: Tensors) -> Tensors:
    """Convolutions over one frame."""
    return {
        name: value[:, :, None] if value.ndim == 4 and ".attentions." not in name and ".resample." not in name else value for name, value in tensors.items()
    }


# --- 8-bit floats


def matrices(tensors: Tensors) -> list[str]:
    """What people quantise: the matrices of the layers."""
    return [name for name, value in tensors.items() if value.ndim == 2 and ("transformer_blocks." in name or "layers." in name) and name.endswith(".weight")]


def cast8(tensors: Tensors) -> Tensors:
    """Plain casts of the matrices to 8-bit floats."""
    return tensors | {name: tensors[name].to(torch.float8_e4m3fn) for name in matrices(tensors)}


def scaled8(tensors: Tensors, noted: Callable[[str, Tensors], Tensors] = lambda layer, scale: {f"{layer}.weight_scale": scale}, rows: bool = False) -> Tensors:
    """8-bit floats with a scale of the whole, or of each row, which `noted` names."""
    made = dict(tensors)
    for name in matrices(tensors):
        weight = tensors[name]
        scale = (weight.abs().amax(dim=1, keepdim=True) if rows else weight.abs().max()) / torch.finfo(torch.float8_e4m3fn).max
        made[name] = (weight / scale).to(torch.float8_e4m3fn)
        made |= noted(name.removesuffix(".weight"), scale)
    return made


def comfy_note(layer: str, scale: torch.Tensor, kind: str = "float8_e4m3fn") -> Tensors:
    """As ComfyUI writes it beside a weight."""
    return {f"{layer}.weight_scale": scale, f"{layer}.comfy_quant": torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8)}


def older_note(layer: str, scale: torch.Tensor) -> Tensors:
    """As it was written before."""
    return {f"{layer}.scale_weight": scale}


# --- GGUF


def write_gguf(path: Path, tensors: Mapping[str, torch.Tensor | tuple[np.ndarray, str]], arch: str | None = "qwen_image21", **metadata: str) -> None:
    """`tensors` in float32, or (bytes, GGUF's type) of quantised ones. `arch` None leaves the metadata out."""
    import gguf

    writer = gguf.GGUFWriter(path, arch or "none")
    if arch is None:
        writer.kv_data[0].clear()
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=gguf.GGMLQuantizationType[value[1]])
        else:
            writer.add_tensor(name, value.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized_gguf(tensors: Tensors, kinds: Iterable[str]) -> tuple[dict, Tensors]:
    """(what `write_gguf` takes, what it stands for): matrices in the types `kinds`, in turn. Types that the package cannot make get random weights."""
    import gguf

    kinds, packed, meant = list(kinds), {}, dict(tensors)
    for i, name in enumerate(matrices(tensors)):
        kind, value = kinds[i % len(kinds)], tensors[name]
        kind_type = gguf.GGMLQuantizationType[kind]
        try:
            data = gguf.quants.quantize(value.numpy(), kind_type)
        except NotImplementedError:
            data = random_blocks(kind, *value.shape, seed=i)
        packed[name] = (data, kind)
        meant[name] = torch.from_numpy(gguf.quants.dequantize(data, kind_type)).reshape(value.shape)
    return {**tensors, **packed}, meant


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Bytes of whole GGUF blocks, uint8 (rows, bytes a row): random integers, and finite scales of about 0.001."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    packed = random.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    for offset in HALVES.get(kind, (0,)):
        scales = (random.random(len(packed)) * 0.0005 + 0.0005).astype(np.float16)
        packed[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return packed.reshape(rows, -1)


# Where a block holds half-precision numbers, if not at its beginning.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ2_0": (64,)}
