"""A denoiser's weights as ComfyUI stores 8-bit ones, so that its own operations, LoRA patches and offloading take them.

ComfyUI's layout has one scale a tensor, where the core's own FP8 layers (qwen21/fp8.py) have one an output channel.
"""

import json

import torch

from ..qwen21.fp8 import SENSITIVE
from ..qwen21.kernels import FP8, FP8_MAX, TINY

MARKER = torch.tensor(list(json.dumps({"format": "float8_e4m3fn"}).encode()), dtype=torch.uint8)


def fp8_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`weights` (name -> tensor) with the blocks' matrices in FP8 E4M3, each with "weight_scale" (FP32) and "comfy_quant" beside it.

    What is quantised already, and what qwen21.fp8 finds sensitive, stays as it is.
    """
    out = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if (
            type(weight) is not torch.Tensor
            or weight.ndim != 2
            or not weight.is_floating_point()
            or weight.dtype.itemsize == 1
            or f"{layer}.comfy_quant" in weights
            or name.startswith(SENSITIVE)
        ):
            out[name] = weight
            continue
        scale = weight.float().abs().max().clamp_min(TINY) / FP8_MAX
        out |= {name: (weight.float() / scale).to(FP8), f"{layer}.weight_scale": scale, f"{layer}.comfy_quant": MARKER}
    return out
