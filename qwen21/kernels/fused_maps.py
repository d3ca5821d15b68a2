"""The Triton kernels of the autoencoder, on feature maps whose channels lie together (channels_last). Imported only where Triton is.

A program takes some positions and all or some of their channels, computes in float32 and rounds once. Sizes that follow the picture are not
specialised on, so that a new size compiles nothing; `elements` is, for it is a multiple of the channels, and a kernel that knows it reads 16
bytes at once.
"""

import torch
import triton
import triton.language as tl

ELEMENTS = 4096  # that a program holds


@triton.jit(do_not_specialize=["positions"])
def _rms_norm_kernel(
    x, bias, gamma, out, positions, factor, eps,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, POSITIONS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    inside = channel < CHANNELS
    mask = inside & (position < positions)
    at = position * CHANNELS + channel
    values = tl.load(x + at, mask, other=0.0).to(tl.float32)
    if BIAS:
        values += tl.load(bias + channel, inside, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(values * values, axis=1))
    values = values * (factor / tl.maximum(length, eps))[:, None] * tl.load(gamma + channel, inside, other=0.0).to(tl.float32)
    if SILU:
        values = values * tl.sigmoid(values)
    tl.store(out + at, values.to(out.dtype.element_ty), mask)


@triton.jit
def _add_kernel(x, bias, shortcut, elements: tl.int64, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    values = tl.load(x + at, mask, other=0.0).to(tl.float32) + tl.load(shortcut + at, mask, other=0.0).to(tl.float32)
    if BIAS:
        values += tl.load(bias + at % CHANNELS, mask, other=0.0).to(tl.float32)
    tl.store(x + at, values.to(x.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["positions", "rows", "columns"])
def _upsampled_add_kernel(
    x, bias, small, out, positions, rows, columns,
    CHANNELS: tl.constexpr, INPUTS: tl.constexpr, FRAMES: tl.constexpr, REPEATS: tl.constexpr,
    BLOCK: tl.constexpr, POSITIONS: tl.constexpr, BIAS: tl.constexpr, PHASES: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = channel < CHANNELS
    mask = inside & (position < positions)
    row, column = position // (2 * columns), position % (2 * columns)
    picture, row = (row // (2 * rows)).to(tl.int64), row % (2 * rows)
    a, b, i, j = row % 2, column % 2, row // 2, column // 2
    at = position.to(tl.int64) * CHANNELS + channel
    if PHASES:  # x holds the four positions of a 2 x 2 square as channels, on a grid one wider and higher
        source = ((picture * (rows + 1) + i + a) * (columns + 1) + j + b) * (4 * CHANNELS) + (2 * a + b) * CHANNELS + channel
    else:
        source = at
    values = tl.load(x + source, mask, other=0.0).to(tl.float32)
    if BIAS:
        values += tl.load(bias + channel, inside, other=0.0).to(tl.float32)
    repeated = (channel * (4 * FRAMES) + 4 * (FRAMES - 1) + 2 * a + b) // REPEATS
    values += tl.load(small + ((picture * rows + i) * columns + j) * INPUTS + repeated, mask, other=0.0).to(tl.float32)
    tl.store(out + at, values.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["positions", "rows", "columns"])
def _averaged_add_kernel(
    x, bias, large, positions, rows, columns,
    CHANNELS: tl.constexpr, INPUTS: tl.constexpr, FRAMES: tl.constexpr, FACTOR: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, POSITIONS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = channel < CHANNELS
    mask = inside & (position < positions)
    row, column = position // columns, position % columns
    picture, row = (row // rows).to(tl.int64), row % rows
    total = tl.zeros((POSITIONS, BLOCK), tl.float32)
    for member in tl.static_range(GROUP):
        flat = channel * GROUP + member
        pixel = flat % (FACTOR * FACTOR)
        frame = flat // (FACTOR * FACTOR) % FRAMES
        source_row, source_column = row * FACTOR + pixel // FACTOR, column * FACTOR + pixel % FACTOR
        source = ((picture * (rows * FACTOR) + source_row) * (columns * FACTOR) + source_column) * INPUTS + flat // (FACTOR * FACTOR * FRAMES)
        total += tl.load(large + source, mask & (frame == FRAMES - 1), other=0.0).to(tl.float32)
    at = position.to(tl.int64) * CHANNELS + channel
    values = tl.load(x + at, mask, other=0.0).to(tl.float32) + total / GROUP
    if BIAS:
        values += tl.load(bias + channel, inside, other=0.0).to(tl.float32)
    tl.store(x + at, values.to(x.dtype.element_ty), mask)


def _together(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _tile(channels: int) -> tuple[int, int]:
    """Channels and positions of a program that need not see all channels."""
    block = min(triton.next_power_of_2(channels), 256)
    return block, ELEMENTS // 2 // block


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, bias: torch.Tensor | None, silu: bool, eps: float, in_place: bool) -> torch.Tensor:
    """(x + bias) / |x + bias| * sqrt(channels) * gamma over the channels of x (batch, channels, rows, columns), then SiLU if wanted."""
    x = _together(x)
    channels = x.shape[1]
    out = x if in_place else torch.empty_like(x)
    block = triton.next_power_of_2(channels)
    together = max(ELEMENTS // block, 1)
    positions = x.numel() // channels
    _rms_norm_kernel[(triton.cdiv(positions, together),)](
        x, x if bias is None else bias, gamma, out, positions, channels**0.5, eps,
        channels, block, together, bias is not None, silu, num_warps=max(4, together * block // 1024),
    )  # fmt: skip
    return out


def add(x: torch.Tensor, bias: torch.Tensor | None, shortcut: torch.Tensor) -> torch.Tensor:
    """x + bias + shortcut, written to x."""
    x, shortcut = _together(x), _together(shortcut)
    _add_kernel[(triton.cdiv(x.numel(), ELEMENTS),)](x, x if bias is None else bias, shortcut, x.numel(), x.shape[1], ELEMENTS, bias is not None, num_warps=8)
    return x


def upsampled_add(x: torch.Tensor, bias: torch.Tensor | None, small: torch.Tensor, channels: int, frames: int, repeats: int, phases: bool) -> torch.Tensor:
    """x + bias + `small` (batch, inputs, rows, columns) with its channels repeated and laid out as 2 x 2 pixels, of which the last frame is kept.

    x (batch, channels, 2 rows, 2 columns), which is written to; or with `phases` (batch, 4 channels, rows + 1, columns + 1).
    """
    x, small = _together(x), _together(small)
    batch, inputs, rows, columns = small.shape
    size = batch, channels, 2 * rows, 2 * columns
    out = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last) if phases else x
    block, together = _tile(channels)
    positions = out.numel() // channels
    _upsampled_add_kernel[(triton.cdiv(positions, together), triton.cdiv(channels, block))](
        x, x if bias is None else bias, small, out, positions, rows, columns,
        channels, inputs, frames, repeats, block, together, bias is not None, phases, num_warps=4,
    )  # fmt: skip
    return out


def averaged_add(x: torch.Tensor, bias: torch.Tensor | None, large: torch.Tensor, factor: int, frames: int) -> torch.Tensor:
    """x (batch, channels, rows, columns) + bias + the average of groups of `large` (batch, inputs, factor rows, factor columns), written to x."""
    x, large = _together(x), _together(large)
    _, channels, rows, columns = x.shape
    inputs = large.shape[1]
    block, together = _tile(channels)
    positions = x.numel() // channels
    _averaged_add_kernel[(triton.cdiv(positions, together), triton.cdiv(channels, block))](
        x, x if bias is None else bias, large, positions, rows, columns,
        channels, inputs, frames, factor, inputs * factor**2 * frames // channels, block, together, bias is not None, num_warps=4,
    )  # fmt: skip
    return x
