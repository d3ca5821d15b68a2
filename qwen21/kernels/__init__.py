"""The denoiser's steps between matrix products, which are bound by memory traffic, and attention: as one Triton kernel each where that runs
(attention's on Hopper GPUs alone, hopper.py), else plain PyTorch, with norm and rotation by comfy-kitchen where that has kernels.

Plain PyTorch is what the reference does, operation by operation, rounding after each. A kernel reads and writes each tensor once and rounds
once, at the end, so in half precision it is closer to float32, not equal to the bit.
"""

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import Qwen21Error
from ..rope import apply_rotary

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
FP8_CAPABILITY = (8, 9)  # of the first CUDA devices that compute in it
HOPPER = (9, 0)  # compute capability
HOPPER_HEAD_DIM = 128  # of the heads that attention's kernel is written for
LEAST_SCORES = 2**22  # queries times keys, a head: with fewer, PyTorch's attention is launched and done sooner
TINY = 1e-30  # a row of zeros has this largest value: its scale must not be one that devices flush to zero


def fusible(x: torch.Tensor) -> bool:
    """Whether kernels take `x`: on the current CUDA device if Triton works there, bfloat16 or float32, without gradients. torch.compile makes its own."""
    return _launches_on(x, torch.bfloat16, torch.float32) and run_on(x.device)


def _launches_on(x: torch.Tensor, *dtypes: torch.dtype) -> bool:
    """Whether a kernel for `dtypes` may be launched on `x`, which happens on the current device."""
    if torch.compiler.is_compiling() or not x.is_cuda or x.dtype not in dtypes or torch.is_grad_enabled():
        return False
    return x.device.index == torch.cuda.current_device()


def tried(device: torch.device, trial: Callable[[], object], failing: str) -> bool:
    """Whether `trial` raises nothing on CUDA `device`; else logs `failing` and why. Raises when memory runs out, which says nothing about the device."""
    try:
        with torch.cuda.device(device):
            trial()
    except Exception as error:  # whatever PyTorch and Triton raise
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            raise
        logging.warning("%s: %s", failing, _reason(error))
        return False
    return True


def _reason(error: Exception) -> str:
    """One line of what `error` says: compilers say it last, if not before a command that would do it again."""
    said = [line.strip() for line in str(error).partition("Repro command")[0].splitlines() if line.strip()]
    return said[-1] if said else type(error).__name__


@cache
def run_on(device: torch.device) -> bool:
    """Whether kernels run on `device`. Triton needs a compiler on the machine and a CUDA device it knows: try, once."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    x = torch.ones(1, 16, device=device, dtype=torch.bfloat16)
    return tried(device, lambda: _fused().swiglu(x, x, fp8=False), f"Kernels are not fused, for Triton does not work on {device}")


def kitchen_fits(x: torch.Tensor) -> bool:
    """Whether comfy-kitchen's kernels take `x`: on the current CUDA device, in half precision, without gradients."""
    return _launches_on(x, torch.bfloat16, torch.float16) and _kitchen_works()


@cache
def _kitchen_works() -> bool:
    try:
        return _kitchen().works()
    except ImportError:
        return False
    except Exception as error:
        logging.warning("comfy-kitchen's kernels are left out: %s", error)
        return False


def _kitchen():
    from . import kitchen

    return kitchen


def _knows_fp8(x: torch.Tensor) -> bool:
    """Whether kernels on the device of `x` can read and write FP8; PyTorch's own can everywhere."""
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= FP8_CAPABILITY


def _fused():
    from . import fused

    return fused


class Fp8Rows(NamedTuple):
    """A tensor (..., width) in FP8 E4M3, with a FP32 scale (...) for each row that puts its largest value at FP8's maximum; `dtype` is what it was in."""

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    def dequantized(self) -> torch.Tensor:
        """The tensor (..., width) in float32."""
        return self.values.float() * self.scales[..., None]


def norm_scale(x: torch.Tensor, norm: nn.LayerNorm, scale: torch.Tensor, fp8: bool = False) -> torch.Tensor | Fp8Rows:
    """norm(x) * scale: `x` (batch, tokens, width), `norm` without weights, `scale` (batch or 1, 1, width). With `fp8`, in rows for FP8 layers."""
    if fusible(x):
        return _result(*_fused().residual_norm(x, None, None, scale, norm.eps, fp8)[1:], x.dtype, fp8)
    normed = norm(x) * scale
    return quantize_rows(normed) if fp8 else normed


def residual(x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x + gate * branch: (batch, tokens, width), `gate` (batch or 1, 1, width)."""
    if fusible(x):
        return _fused().residual_norm(x, branch, gate, None, 0.0, fp8=False)[0]
    return x + gate * branch


def residual_norm_scale(
    x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, norm: nn.LayerNorm, scale: torch.Tensor, fp8: bool = False
) -> tuple[torch.Tensor, torch.Tensor | Fp8Rows]:
    """`residual`, and `norm_scale` of it."""
    if fusible(x):
        x, *normed = _fused().residual_norm(x, branch, gate, scale, norm.eps, fp8)
        return x, _result(*normed, x.dtype, fp8)
    x = x + gate * branch
    return x, norm_scale(x, norm, scale, fp8)


def swiglu(gate: torch.Tensor, up: torch.Tensor, fp8: bool = False) -> torch.Tensor | Fp8Rows:
    """silu(gate) * up, of one shape. With `fp8`, in rows for an FP8 layer."""
    if fusible(gate):
        return _result(*_fused().swiglu(gate, up, fp8), gate.dtype, fp8)
    out = F.silu(gate) * up
    return quantize_rows(out) if fp8 else out


def quantize_rows(x: torch.Tensor) -> Fp8Rows:
    """`x` (..., width), any float dtype, in FP8."""
    if fusible(x) and _knows_fp8(x):
        return Fp8Rows(*_fused().quantize_rows(x), x.dtype)
    x = x.contiguous()
    scales = x.float().abs().amax(dim=-1).clamp_min(TINY) / FP8_MAX
    return Fp8Rows((x.float() / scales[..., None]).to(FP8), scales, x.dtype)


def _result(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, fp8: bool) -> torch.Tensor | Fp8Rows:
    return Fp8Rows(values, scales, dtype) if fp8 else values


def place(x: torch.Tensor, norm: nn.Module | None, table: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
    """`x` (batch, tokens, heads, head_dim) normed over each head and rotated by `table` (tokens, head_dim / 2), where they are given.

    Returns it as (batch, heads, tokens, head_dim): in `out`, or in memory of its own. By a kernel of Triton's, or else of comfy-kitchen's.
    """
    if norm is not None and not _reads_weight(norm, x):
        x, norm = norm(x), None
    if fusible(x) and x.shape[-1].bit_count() == 1:
        out = x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) if out is None else out
        _fused().place(x, *((None, 0.0) if norm is None else (norm.weight, norm.eps)), table, out)
        return out
    x = x.transpose(1, 2)
    if table is not None and kitchen_fits(x):
        return _kitchen().rotate_(x.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(x), norm, table)
    x = x if norm is None else norm(x)
    x = x if table is None else apply_rotary(x, table)
    return x if out is None else out.copy_(x)


def untouched(module: nn.Module) -> bool:
    """Whether neither hooks nor another `forward`, put on `module` from outside, have a say in what it computes. Its own may have been put back."""
    own = getattr(module.forward, "__func__", None) is type(module).forward and module.forward.__self__ is module
    return own and not (module._forward_hooks or module._forward_pre_hooks)


def _reads_weight(norm: nn.Module, x: torch.Tensor) -> bool:
    """Whether a kernel on the device of `x` may read the weight of `norm` instead of calling it. A host's norm says so itself (`weight_is_ready`)."""
    ready = type(norm) is nn.RMSNorm or getattr(norm, "weight_is_ready", False)
    return ready and untouched(norm) and norm.weight is not None and norm.weight.device == x.device and norm.weight.dtype.itemsize > 1


def gather(x: torch.Tensor, fp8: bool = False) -> torch.Tensor | Fp8Rows:
    """`x` (batch, heads, tokens, head_dim) as (batch, tokens, heads * head_dim). With `fp8`, in rows for an FP8 layer."""
    x = x.transpose(1, 2)
    if fusible(x) and x.shape[-1].bit_count() == 1 and x.stride(3) == 1:
        if fp8 and _knows_fp8(x):
            return Fp8Rows(*_fused().quantize_heads(x), x.dtype)
        if not x.is_contiguous():
            x = place(x, None, None, torch.empty_like(x, memory_format=torch.contiguous_format).transpose(1, 2)).transpose(1, 2)
    x = x.flatten(2)
    return quantize_rows(x) if fp8 else x


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention in which every query sees every key: (batch, heads, tokens, head_dim), heads and tokens in any order in memory.

    By a kernel on Hopper GPUs in bfloat16 where there is enough to do, with a token's heads together in its result; else by PyTorch."""
    if fusible(q) and q.shape[2] * k.shape[2] >= LEAST_SCORES and _attends(q, k, v) and attention_runs_on(q.device):
        return _hopper().attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)


def _attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether nothing is broadcast, and a Hopper GPU can fetch tiles of each by itself, 16 bytes at a time."""
    shapes_fit = q.shape[:2] == k.shape[:2] and k.shape == v.shape
    return shapes_fit and all(
        (x.dtype, x.device, x.shape[3], x.stride(3), x.data_ptr() % 16) == (torch.bfloat16, q.device, HOPPER_HEAD_DIM, 1, 0)
        and all(stride > 0 and stride % 8 == 0 for stride in x.stride()[:3])
        for x in (q, k, v)
    )


@cache
def attention_runs_on(device: torch.device) -> bool:
    """Whether the kernel for attention works on `device`. Gluon, in which it is written, may change with any version of Triton: try and compare, once.

    With more to do than processors, so that each does several pieces, and keys and queries that do not fill their last tile.
    Raises torch.OutOfMemoryError, which says nothing about the device and is not remembered.
    """
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != HOPPER:
        return False

    def trial() -> None:
        import triton

        if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
            raise Qwen21Error(f"it takes Triton 3.6 or newer, this is {triton.__version__}")
        generator = torch.Generator(device).manual_seed(0)
        shapes = ((1, 32, tokens, HOPPER_HEAD_DIM) for tokens in (600, 300, 300))
        q, k, v = (torch.randn(shape, device=device, generator=generator).to(torch.bfloat16) for shape in shapes)
        expected = (q.float() @ k.float().mT * HOPPER_HEAD_DIM**-0.5).softmax(-1) @ v.float()
        error = ((_hopper().attention(q, k, v) - expected).norm() / expected.norm()).item()
        if not error < 0.02:  # bfloat16's own is 0.002; one row in a thousand left out makes 0.03
            raise Qwen21Error(f"its result is off by {error:.2g}")

    return tried(device, trial, f"Attention on {device} is PyTorch's, for the kernel for Hopper GPUs does not work")


def _hopper():
    from . import hopper

    return hopper


def widen(values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """FP8 `values` (1, heads, tokens, head_dim) times `scale` (1, heads, tokens, 1), in float32 and rounded to `out` (batch, heads, tokens, head_dim)."""
    if fusible(out) and _knows_fp8(out) and values.shape[-1].bit_count() == 1:
        _fused().widen(values, scale, out)
        return out
    return out.copy_(values.float() * scale)
