"""Linear layers in FP8 E4M3: weights with one scale an output channel, inputs with one a token, found as they come.

Both scales put the largest value at FP8's maximum, so a product of two rows is exact up to the rounding of its factors (1 part in 16 each)
and is summed in float32. The layers outside the blocks stay as they are: they cost next to nothing and every token passes through them.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from . import kernels
from .errors import Qwen21Error
from .kernels import Fp8Rows
from .part import Part
from .stored import PLAIN

SENSITIVE = ("img_in", "txt_in", "time_text_embed", "modulation", "norm_out", "proj_out")


class Fp8Linear(nn.Module):
    """A linear layer without bias, (..., inputs) to (..., outputs) in the dtype of its input. Takes rows that are in FP8 already."""

    def __init__(self, weight: torch.Tensor):
        """`weight` (outputs, inputs), any float dtype."""
        super().__init__()
        values, scales, _ = kernels.quantize_rows(weight)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def takes_rows(self, x: torch.Tensor) -> bool:
        """Not under a LoRA (lora/attach.py), whose hook or changed weight multiplies the input itself."""
        return kernels.untouched(self)

    def dequantized(self) -> torch.Tensor:
        """The weight (outputs, inputs) in float32."""
        return self.weight.float() * self.scales[:, None]

    def forward(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        return multiply_rows(x if isinstance(x, Fp8Rows) else kernels.quantize_rows(x), self.weight, self.scales)


def multiply_rows(rows: Fp8Rows, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`rows` (..., inputs) by `weight` (outputs, inputs) in FP8 with FP32 `scales`, one an output or one for all: (..., outputs) in the rows' dtype."""
    values, row_scales, dtype = rows
    scales = scales.view(-1, 1).expand(weight.shape[0], 1)
    if not values.is_cuda:  # the same numbers, for tests and figures
        return F.linear(rows.dequantized(), weight.float() * scales).to(dtype)
    out = torch._scaled_mm(
        values.view(-1, values.shape[-1]),
        weight.t(),
        scale_a=row_scales.view(-1, 1),
        scale_b=scales.t().contiguous(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out.view(*values.shape[:-1], -1).to(dtype)


def takes_rows(x: torch.Tensor, *layers: nn.Module) -> bool:
    """Whether all of `layers` take Fp8Rows in place of `x`, so that what they share is quantised once. Most have nothing to say about it."""
    return all((asked := getattr(type(layer), "takes_rows", None)) and asked(layer, x) for layer in layers)


def already_quantized(part: Part) -> str:
    """A sentence if the file of the denoiser's `part` holds nothing that can be brought to FP8; empty if it does."""
    for name, piece in part.pieces.items():
        if name.endswith(".weight") and len(piece.shape) == 2 and piece.stored.dtype in PLAIN and not name.startswith(SENSITIVE):
            return ""
    return f"{part.source.name} is quantised already and stays as it is: fp8 is made of weights in 16 or 32 bits"


@cache
def multiplies_rows(device: torch.device) -> bool:
    """Whether `device` makes and multiplies FP8 with a scale for each row: CUDA devices from Ada on, but for some PyTorch has no such kernel. Try, once.

    Raises torch.OutOfMemoryError, which says nothing about the device and is not remembered.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < kernels.FP8_CAPABILITY:
        return False
    ones = torch.ones(16, 32, device=device, dtype=torch.bfloat16)

    def trial() -> None:
        multiply_rows(kernels.quantize_rows(ones), ones.to(kernels.FP8), ones[:, 0].float())
        torch.cuda.synchronize(device)

    return kernels.tried(device, trial, f"{device} does not multiply FP8 with a scale for each row")


def check_device(device: torch.device) -> None:
    """Raises Qwen21Error if `device` cannot multiply in FP8. A CPU does the same sums in float32."""
    if device.type == "cpu" or multiplies_rows(device):
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    raise Qwen21Error(f"{name} does not multiply in FP8, which takes an Ada, Hopper or newer GPU and a PyTorch that knows it: use bfloat16")


def quantize_linears(model: nn.Module, device: torch.device | None = None, sensitive: tuple[str, ...] = SENSITIVE) -> None:
    """Replace every linear layer of `model` that is not inside a module of `sensitive` by an Fp8Linear, one by one; what is quantised stays.

    With a `device` all of the model moves there, layer by layer, so that the unquantised model need not fit. Raises Qwen21Error as `check_device`.
    """
    device = device or next(model.parameters()).device
    check_device(device)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and not f"{name}.".startswith(tuple(f"{one}." for one in sensitive)):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, Fp8Linear(layer.weight.to(device)))
    model.to(device)
