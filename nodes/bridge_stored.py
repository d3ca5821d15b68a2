"""A part's weights as ComfyUI's operations take them: plain, with the scales and notes of its own quantisations, or as GGUF blocks.

8-bit floats with a scale for each row become bfloat16: they are of no layout that ComfyUI has.
"""

import json

import torch
from torch import nn

from ..qwen21.part import Part, Weight
from ..qwen21.stored import FLOAT8, is_packed, matrix


def state_dict(part: Part, module: nn.Module) -> dict[str, torch.Tensor]:
    """Every weight of `module` from `part`, in the file's dtype. Raises Qwen21Error as `Part.weights`."""
    state = {}
    for weight in part.weights(module):
        layer, _, leaf = weight.name.rpartition(".")
        if _has_scales_by_row(weight):
            state[weight.name] = matrix(weight.tensor, weight.kind, weight.shape, torch.bfloat16, weight.beside["weight_scale"])
            continue
        state[weight.name] = weight.tensor
        state |= {f"{layer}.{name}": tensor for name, tensor in weight.beside.items()}
        if weight.quantization is not None:
            state[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(weight.quantization).encode()), dtype=torch.uint8)
        if is_packed(weight.kind):
            if leaf == "weight" and isinstance(module.get_submodule(layer), nn.Linear):
                from .bridge_gguf import gguf_tensor

                state[weight.name] = gguf_tensor(weight.tensor, weight.kind, weight.shape)
            else:
                state[weight.name] = matrix(weight.tensor, weight.kind, weight.shape, torch.float32)
    return state


def _has_scales_by_row(weight: Weight) -> bool:
    """Of 8-bit floats, for which ComfyUI's layout takes one scale a tensor: its CUDA kernel refuses more, and Triton's reads the first alone."""
    return weight.quantization is not None and weight.quantization["format"] in FLOAT8.values() and weight.beside["weight_scale"].numel() > 1


def quantization_of(part: Part) -> dict | None:
    """What ComfyUI's `mixed_precision_ops` wants to be told; None if nothing of `part` needs them."""
    quantised = part.quantization or any(is_packed(piece.stored.dtype) for piece in part.pieces.values())
    return {"mixed_ops": True} if quantised else None


def finish(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Put right what loading `state` left. ComfyUI stores a whole model in one dtype: where that has 8 bits, what the file holds in more, such as
    norms, comes back; and it wants a name for each layer's quantisation."""
    for name, parameter in list(module.named_parameters()):
        tensor, (owner, _, leaf) = state.get(name), name.rpartition(".")
        layer = module.get_submodule(owner)
        if tensor is None:
            continue
        if type(tensor) is not torch.Tensor:
            layer.quant_format = "gguf"
        elif type(parameter.data) is torch.Tensor and parameter.dtype.itemsize == 1 and tensor.dtype.itemsize > 1:
            setattr(layer, leaf, nn.Parameter(tensor.to(parameter.device), requires_grad=False))
