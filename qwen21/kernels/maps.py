"""Steps of the autoencoder around its convolutions, on feature maps (batch, channels, rows, columns), as kernels or in plain PyTorch.

Tensor cores want a position's channels together in memory (channels_last). PyTorch's own norms and shortcuts are slow there, so the format
is chosen only where the kernels run. They also take over the bias of a convolution that PyTorch would add in a pass of its own. A host's
convolutions take part if they have `lend(x)`: a context manager of the weight and bias that `x` is convolved with, of which the bias stays
good after it ends. Others are called as they are.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from .. import kernels

NORM_EPS = 1e-12  # F.normalize's
FEWEST_OUTPUTS = 32  # with which cuDNN convolves on tensor cores; the last convolution of the decoder has 4


def arranged(x: torch.Tensor) -> torch.Tensor:
    """`x` in the memory format that suits its device."""
    return x.contiguous(memory_format=torch.channels_last) if kernels.fusible(x) else x


def convolve(conv: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """conv(x), and the bias that is still to be added, None if it has been. On the kernels' way 1x1 is a matrix product, and few outputs are padded."""
    with _lent(conv, x) as lent:
        if lent is None:
            return conv(x), None
        weight, bias = lent
        if conv.kernel_size == conv.stride == (1, 1) and conv.padding == (0, 0):
            return F.linear(x.permute(0, 2, 3, 1), weight[:, :, 0, 0], bias).permute(0, 3, 1, 2), None
        if conv.out_channels < FEWEST_OUTPUTS:
            weight = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, FEWEST_OUTPUTS - conv.out_channels))
        return F.conv2d(x, weight, None, conv.stride, conv.padding)[:, : conv.out_channels], bias


def _lent(conv: nn.Module, x: torch.Tensor) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor | None] | None]:
    """Of weight and bias to convolve `x` with, or of None where `conv` must be called: no kernels, or what it computes was changed from outside."""
    if not kernels.fusible(x) or not isinstance(conv, nn.Conv2d) or not _untouched(conv):
        return nullcontext()
    if type(conv) is nn.Conv2d:
        return nullcontext((conv.weight, conv.bias))
    return conv.lend(x) if hasattr(conv, "lend") else nullcontext()


def _untouched(conv: nn.Conv2d) -> bool:
    """As kernels.untouched. Nodes for seamless tiles change how a convolution is padded, or replace what its `forward` calls."""
    return kernels.untouched(conv) and conv.padding_mode == "zeros" and "_conv_forward" not in vars(conv)


def convolved(conv: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """conv(x), for where nothing takes over the bias."""
    y, bias = convolve(conv, x)
    return y if bias is None else y + bias[:, None, None]


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, bias: torch.Tensor | None = None, silu: bool = False, in_place: bool = False) -> torch.Tensor:
    """x / |x| * sqrt(channels) * gamma over the channels, in fp32 for half types, then SiLU; `bias` comes first. May be written to `x` if `in_place`."""
    gamma = gamma.to(device=x.device, dtype=x.dtype)
    if kernels.fusible(x):
        return _fused().rms_norm(x, gamma.contiguous(), bias, silu, NORM_EPS, in_place)
    unit = F.normalize(x if x.dtype == torch.float32 else x.float(), dim=1).to(x.dtype)
    x = unit * x.shape[1] ** 0.5 * gamma
    return F.silu(x) if silu else x


def add(x: torch.Tensor, bias: torch.Tensor | None, shortcut: torch.Tensor) -> torch.Tensor:
    """x + bias + shortcut. May be written to `x`."""
    return _fused().add(x, bias, shortcut) if kernels.fusible(x) else x + shortcut


def averaged_add(x: torch.Tensor, bias: torch.Tensor | None, shortcut: nn.Module, large: torch.Tensor) -> torch.Tensor:
    """x + bias + shortcut(large), a ChannelAverage. May be written to `x`."""
    if kernels.fusible(x):
        return _fused().averaged_add(x, bias, large, shortcut.factor, 2 if shortcut.temporal else 1)
    return x + shortcut(large)


def upsampled_add(upsample: nn.Sequential, x: torch.Tensor, shortcut: nn.Module, small: torch.Tensor) -> torch.Tensor:
    """upsample(x) + shortcut(small): twice the size by repeating pixels and a 3x3 convolution, beside a ChannelRepeat.

    The kernels' way convolves before the size is doubled: of the 3x3 taps on repeated pixels only 2x2 differ, other ones for each pixel of a
    2x2 square. That takes 4/9 of the products.
    """
    if not kernels.fusible(x):
        return upsample(x) + shortcut(small)
    conv = upsample[1]
    with _lent(conv, x) as lent:
        y, bias = (upsample(x), None) if lent is None else (F.conv2d(x, _phase_weights(lent[0]), padding=1), lent[1])
    return _fused().upsampled_add(y, bias, small, conv.out_channels, shortcut.frames, shortcut.repeats, phases=lent is not None)


def _phase_weights(weight: torch.Tensor) -> torch.Tensor:
    """(outputs, inputs, 3, 3) to (4 outputs, inputs, 2, 2): for the pixels of a 2x2 square, row by row."""
    summed = _phases(_phases(weight.float(), -2), -1)
    return rearrange(summed, "b a o i t u -> (a b o) i t u").to(weight.dtype).contiguous(memory_format=torch.channels_last)


def _phases(weight: torch.Tensor, axis: int) -> torch.Tensor:
    """Three taps along `axis` on repeated pixels are two on the pixels themselves; a new first axis for the first and the second of two repeats."""
    before, here, after = weight.unbind(axis)
    return torch.stack([torch.stack([before, here + after], axis), torch.stack([before + here, after], axis)])


def _fused():
    from . import fused_maps

    return fused_maps
