"""Linear layers whose weight stays in memory as its file stores it, and is a matrix only while it is used."""

import re

import torch
import torch.nn.functional as F
from torch import nn

from .ggml import dequantize

PLAIN = ("F64", "F32", "F16", "BF16")  # what is simply cast to the dtype to compute in
FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}  # as safetensors and as PyTorch call them
_PACKED = re.compile(r"(I?Q|TQ)\d|MXFP4|NVFP4")


def is_packed(kind: str) -> bool:
    """Whether tensors of a file's dtype `kind` are GGUF blocks."""
    return _PACKED.match(kind) is not None


def matrix(weight: torch.Tensor, kind: str, shape: tuple[int, ...], dtype: torch.dtype, scale: torch.Tensor | None = None) -> torch.Tensor:
    """What a stored `weight` of a file's dtype `kind` stands for: `shape` in `dtype`, on its device.

    `weight` is as the file's reader gives it; `scale` is a factor of the whole or, (rows, 1), of each row.
    """
    if is_packed(kind):
        return dequantize(weight, kind, shape, dtype)
    return weight.to(dtype) if scale is None else weight.to(torch.float32, copy=True).mul_(scale).to(dtype)


class StoredLinear(nn.Module):
    """In the place of `linear`: `weight` as stored (see `matrix`), of file dtype `kind`, and the bias if `linear` has one."""

    def __init__(self, linear: nn.Linear, weight: torch.Tensor, kind: str, scale: torch.Tensor | None = None):
        super().__init__()
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", linear.bias)
        self.register_buffer("scale", scale)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight (out_features, in_features) in `dtype`."""
        return matrix(self.weight, self.kind, (self.out_features, self.in_features), dtype, self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features), computed in the dtype of `x`."""
        return F.linear(x, self.dequantized(x.dtype), self.bias)
