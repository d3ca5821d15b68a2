"""LoRA files in every trainer's spelling, made from one set of random changes, and what they do to the weights."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

RANK = 4
LAYERS = (
    "img_in",
    "txt_in.in_layer",
    "time_text_embed.timestep_embedder.linear_1",
    "modulation.1",
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.1.attn.to_out.0",
    "transformer_blocks.2.img_mlp.gate_layer",
    "transformer_blocks.2.img_mlp.proj",
    "transformer_blocks.3.img_mlp.out",
    "norm_out.linear",
    "proj_out",
)


@dataclass(frozen=True)
class Factors:
    """`up` (out, rank) and `down` (rank, in), float32."""

    up: torch.Tensor
    down: torch.Tensor

    def delta(self, scale: float = 1.0) -> torch.Tensor:
        """In float64."""
        return scale * (self.up.double() @ self.down.double())


def random_factors(model: nn.Module, layers=LAYERS, rank: int = RANK, seed: int = 0) -> dict[str, Factors]:
    generator = torch.Generator().manual_seed(seed)

    def factors(weight: torch.Tensor) -> Factors:
        out, columns = weight.shape
        return Factors(torch.randn(out, rank, generator=generator) * 0.2, torch.randn(rank, columns, generator=generator) / columns**0.5)

    return {layer: factors(model.get_submodule(layer).weight) for layer in layers}


def write(path: Path, tensors: Mapping[str, torch.Tensor], **metadata: str) -> Path:
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"} | metadata)
    return path


def spelled(factors: Mapping[str, Factors], down: str, up: str, layer: Callable[[str], str] = str, alpha: str | None = None, value: float = 1.0) -> dict:
    """Tensors under names such as `transformer.{}.lora_A.weight`; `alpha` likewise, if the layout has it."""
    tensors = {}
    for name, one in factors.items():
        tensors |= {down.format(layer(name)): one.down, up.format(layer(name)): one.up}
        if alpha:
            tensors[alpha.format(layer(name))] = torch.tensor(value)
    return tensors


def underscores(name: str) -> str:
    return name.replace(".", "_")


def config(**values: object) -> str:
    """PEFT's, as diffusers packs it into a file."""
    return json.dumps({f"transformer.{name}": value for name, value in values.items()}, indent=2, sort_keys=True)


# name -> (names of down, up and alpha, how the layer is written, alpha, the scale it stands for)
LAYOUTS = {
    "diffusers": ("transformer.{}.lora_A.weight", "transformer.{}.lora_B.weight", str, None),
    "PEFT with the adapter's name": ("base_model.model.{}.lora_A.default.weight", "base_model.model.{}.lora_B.default.weight", str, None),
    "PEFT in diffusers": ("base_model.model.transformer.{}.lora_A.weight", "base_model.model.transformer.{}.lora_B.weight", str, None),
    "ComfyUI and ai-toolkit": ("diffusion_model.{}.lora_A.weight", "diffusion_model.{}.lora_B.weight", str, None),
    "whole checkpoint's prefix": ("model.diffusion_model.{}.lora_A.weight", "model.diffusion_model.{}.lora_B.weight", str, None),
    "DiffSynth": ("{}.lora_A.default.weight", "{}.lora_B.default.weight", str, None),
    "DiffSynth with its pipeline": ("pipe.dit.{}.lora_A.default.weight", "pipe.dit.{}.lora_B.default.weight", str, None),
    "bare": ("{}.lora_A.weight", "{}.lora_B.weight", str, None),
    "without .weight": ("{}.lora_A", "{}.lora_B", str, None),
    "down and up": ("diffusion_model.{}.lora_down.weight", "diffusion_model.{}.lora_up.weight", str, "diffusion_model.{}.alpha"),
    "old diffusers": ("transformer.{}.lora.down.weight", "transformer.{}.lora.up.weight", str, None),
    "older diffusers": ("transformer.{}_lora.down.weight", "transformer.{}_lora.up.weight", str, None),
    "linear layer": ("{}.lora_linear_layer.down.weight", "{}.lora_linear_layer.up.weight", str, None),
    "kohya and musubi": ("lora_unet_{}.lora_down.weight", "lora_unet_{}.lora_up.weight", underscores, "lora_unet_{}.alpha"),
    "two underscores": ("lora_unet__{}.lora_down.weight", "lora_unet__{}.lora_up.weight", underscores, "lora_unet__{}.alpha"),
    "OneTrainer": ("lora_transformer_{}.lora_down.weight", "lora_transformer_{}.lora_up.weight", underscores, "lora_transformer_{}.alpha"),
    "SimpleTuner's LyCORIS": ("lycoris_{}.lora_down.weight", "lycoris_{}.lora_up.weight", underscores, "lycoris_{}.alpha"),
}


def write_layout(path: Path, layout: str, factors: Mapping[str, Factors], alpha: float = 2.0) -> tuple[Path, float]:
    """A file in one of LAYOUTS, and the scale that its alpha stands for."""
    down, up, layer, name = LAYOUTS[layout]
    rank = next(iter(factors.values())).down.shape[0]
    return write(path, spelled(factors, down, up, layer, name, alpha)), alpha / rank if name else 1.0
