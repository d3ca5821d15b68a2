"""GGUF blocks as one of ComfyUI's quantised tensors: it moves and patches them as it does its own, and a layer becomes a matrix as it is used."""

from dataclasses import dataclass

import torch
from comfy.quant_ops import QuantizedLayout, QuantizedTensor, register_layout_class
from comfy_kitchen.tensor import BaseLayoutParams

from ..qwen21.ggml import dequantize

LAYOUT = "Qwen21GGUFLayout"


class GGUFLayout(QuantizedLayout):
    """Bytes of GGUF's type `kind`; there is no way back from floats."""

    @dataclass(frozen=True)
    class Params(BaseLayoutParams):
        """`scale` is unused: the blocks hold their own."""

        kind: str = ""

    @classmethod
    def quantize(cls, tensor: torch.Tensor, **_):
        raise NotImplementedError("GGUF weights are read, never made")

    @classmethod
    def dequantize(cls, qdata: torch.Tensor, params: Params) -> torch.Tensor:
        return dequantize(qdata, params.kind, params.orig_shape, params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor: QuantizedTensor) -> tuple[torch.Tensor, ...]:
        return (qtensor._qdata,)

    @classmethod
    def state_dict_tensors(cls, qdata: torch.Tensor, params: Params) -> dict[str, torch.Tensor]:
        return {"": qdata}


register_layout_class(LAYOUT, GGUFLayout)


def gguf_tensor(blocks: torch.Tensor, kind: str, shape: tuple[int, ...]) -> QuantizedTensor:
    """The weight of `shape` that the bytes `blocks` (uint8) of GGUF's type `kind` stand for."""
    return QuantizedTensor(blocks, LAYOUT, GGUFLayout.Params(torch.zeros(()), torch.bfloat16, tuple(shape), kind))
