"""The Triton kernels. Each reads its inputs once, computes in float32 and rounds once. Imported only where Triton is.

Rows are tokens; a row's batch is its number divided by `tokens`. Widths are compile-time constants of the model, and sizes that follow
prompt and canvas are not specialised on, so that a new size compiles nothing. Strides are: all are multiples of the head's width, and a
kernel that knows it reads 16 bytes at once.
"""

import torch
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
TINY = 1e-30


@triton.jit
def _store_fp8(values, out, scales, row, columns, mask, FP8_MAX: tl.constexpr, TINY: tl.constexpr):
    """A row with its largest value at FP8's maximum, and the scale that undoes it."""
    scale = tl.maximum(tl.max(tl.abs(values), axis=0), TINY) / FP8_MAX
    tl.store(out + columns, (values / scale).to(tl.float8e4nv), mask)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["tokens"])
def _residual_norm_kernel(
    x, branch, gate, scale, x_out, h_out, h_scales, tokens, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    at, batch = row * WIDTH + columns, row // tokens * WIDTH + columns
    values = tl.load(x + at, mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        values += tl.load(gate + batch, mask, other=0.0).to(tl.float32) * tl.load(branch + at, mask, other=0.0).to(tl.float32)
        stored = values.to(x_out.dtype.element_ty)
        tl.store(x_out + at, stored, mask)
        values = stored.to(tl.float32)  # the norm sees what the next reader of x sees
    if NORM:
        centred = tl.where(mask, values - tl.sum(values, axis=0) / WIDTH, 0.0)
        values = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + eps) * tl.load(scale + batch, mask, other=0.0).to(tl.float32)
        if FP8:
            _store_fp8(values, h_out + row * WIDTH, h_scales, row, columns, mask, FP8_MAX, TINY)
        else:
            tl.store(h_out + at, values.to(h_out.dtype.element_ty), mask)


@triton.jit
def _swiglu_kernel(gate, up, out, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, TINY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    at = row * WIDTH + columns
    values = tl.load(gate + at, mask, other=0.0).to(tl.float32)
    values = values * tl.sigmoid(values) * tl.load(up + at, mask, other=0.0).to(tl.float32)
    if FP8:
        _store_fp8(values, out + row * WIDTH, scales, row, columns, mask, FP8_MAX, TINY)
    else:
        tl.store(out + at, values.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["tokens"])
def _quantize_rows_kernel(
    x, out, scales, tokens, x_batch, x_token, x_head,
    WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, FP8_MAX: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    source = x + (row // tokens * x_batch + row % tokens * x_token)
    values = tl.load(source + columns // DIM * x_head + columns % DIM, mask, other=0.0).to(tl.float32)
    _store_fp8(values, out + row * WIDTH, scales, row, columns, mask, FP8_MAX, TINY)


@triton.jit(do_not_specialize=["tokens"])
def _place_kernel(
    x, weight, table, out, tokens, x_batch, x_token, x_head, out_batch, out_token, out_head, eps,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    heads, channels = tl.arange(0, BLOCK)[:, None], tl.arange(0, DIM)[None, :]
    mask = (heads < HEADS) & (channels < DIM)
    source = x + (batch * x_batch + token * x_token)
    values = tl.load(source + heads * x_head + channels, mask, other=0.0).to(tl.float32)
    if NORM:
        mean_square = tl.sum(values * values, axis=1) / DIM
        values = values * tl.rsqrt(mean_square + eps)[:, None] * tl.load(weight + tl.arange(0, DIM)).to(tl.float32)[None, :]
    if ROTATE:
        even, odd = tl.split(tl.reshape(values, (BLOCK, DIM // 2, 2)))
        cos, sin = tl.split(tl.reshape(tl.load(table + token * DIM + tl.arange(0, DIM)), (DIM // 2, 2)))
        cos, sin = cos[None, :], sin[None, :]
        values = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK, DIM))
    target = out + (batch * out_batch + token * out_token)
    tl.store(target + heads * out_head + channels, values.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows", "tokens"])
def _widen_kernel(x, scales, out, rows, tokens, out_batch, out_head, out_token, ROWS: tl.constexpr, DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    channels = tl.arange(0, DIM)[None, :]
    mask = inside[:, None] & (channels < DIM)
    values = tl.load(x + row[:, None] * DIM + channels, mask, other=0.0).to(tl.float32) * tl.load(scales + row, inside, other=0.0)[:, None]
    at = (tl.program_id(1).to(tl.int64) * out_batch + row // tokens * out_head + row % tokens * out_token)[:, None] + channels
    tl.store(out + at, values.to(out.dtype.element_ty), mask)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def _rows(x: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for rows like those of `x`: as they are, or in FP8 with their scales."""
    return torch.empty_like(x, dtype=FP8 if fp8 else None), x.new_empty(x.shape[:-1], dtype=torch.float32) if fp8 else x


def residual_norm(
    x: torch.Tensor, branch: torch.Tensor | None, gate: torch.Tensor | None, scale: torch.Tensor | None, eps: float, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x + gate * branch, its layer norm * scale, scales of the latter's rows in FP8), without what is None; x (batch, tokens, width)."""
    x = x.contiguous()
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    x_out = x if branch is None else torch.empty_like(x)
    h_out, h_scales = (x, x) if scale is None else _rows(x, fp8)
    batch, tokens = x.shape[:2]
    gate, scale = (x if one is None else one.expand(batch, 1, width).contiguous() for one in (gate, scale))
    norm = h_out is not x
    _residual_norm_kernel[(batch * tokens,)](
        x, x if branch is None else branch.contiguous(), gate, scale, x_out, h_out, h_scales, tokens, eps,
        width, block, branch is not None, norm, fp8, FP8_MAX, TINY, num_warps=_warps(block),
    )  # fmt: skip
    return x_out, h_out, h_scales


def swiglu(gate: torch.Tensor, up: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up, (..., width), and the scales of its rows in FP8."""
    gate, up = gate.contiguous(), up.contiguous()
    width = gate.shape[-1]
    block = triton.next_power_of_2(width)
    out, scales = _rows(gate, fp8)
    _swiglu_kernel[(gate.numel() // width,)](gate, up, out, scales, width, block, fp8, FP8_MAX, TINY, num_warps=_warps(block))
    return out, scales


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., width) in FP8 and the scales (...) of its rows."""
    rows = x.contiguous().view(1, -1, 1, x.shape[-1])
    values, scales = quantize_heads(rows)
    return values.view(x.shape), scales.view(x.shape[:-1])


def quantize_heads(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (batch, tokens, heads, head_dim), strides free but for the last, in FP8 as (batch, tokens, heads * head_dim); the scales (batch, tokens) of its rows."""
    batch, tokens, heads, dim = x.shape
    width = heads * dim
    block = triton.next_power_of_2(width)
    out, scales = x.new_empty(batch, tokens, width, dtype=FP8), x.new_empty(batch, tokens, dtype=torch.float32)
    _quantize_rows_kernel[(batch * tokens,)](
        x, out, scales, tokens, x.stride(0), x.stride(1), x.stride(2), width, dim, block, FP8_MAX, TINY, num_warps=_warps(block)
    )
    return out, scales


def place(x: torch.Tensor, weight: torch.Tensor | None, eps: float, table: torch.Tensor | None, out: torch.Tensor) -> None:
    """x (batch, tokens, heads, head_dim), normed by `weight` and rotated by `table` where given, to `out` (batch, heads, tokens, head_dim)."""
    batch, tokens, heads, dim = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    block = triton.next_power_of_2(heads)
    _place_kernel[(batch * tokens,)](
        x, x if weight is None else weight, x if table is None else torch.view_as_real(table), out, tokens,
        x.stride(0), x.stride(1), x.stride(2), out.stride(0), out.stride(2), out.stride(1), eps,
        heads, block, dim, weight is not None, table is not None, num_warps=_warps(block * dim),
    )  # fmt: skip


def widen(values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """FP8 `values` (1, heads, tokens, head_dim) times `scale` (1, heads, tokens, 1), to each row of `out` (batch, heads, tokens, head_dim)."""
    _, heads, tokens, dim = values.shape
    rows, together = heads * tokens, 16
    _widen_kernel[(triton.cdiv(rows, together), len(out))](
        values.contiguous(), scale.contiguous(), out, rows, tokens, out.stride(0), out.stride(1), out.stride(2), together, dim, num_warps=4
    )
