"""GGUF's quantised blocks as PyTorch tensors, on whatever device they lie.

A block stores 32 or 256 weights: half-precision scales first or last, then the integers, packed. The layouts are ggml's (`ggml-common.h`);
the tests compare every one with the `gguf` package, which reads the types that are not here, on the CPU and slowly.
"""

import math
from collections.abc import Callable
from functools import cache

import torch

# The 16 levels of IQ4_NL and IQ4_XS.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize(blocks: torch.Tensor, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The weights of `shape` in `dtype`, computed in float32, of the bytes `blocks` (uint8, any shape) of GGUF's type `kind`."""
    if kind not in BLOCKS:
        return _through_package(blocks, kind, shape).to(blocks.device, dtype)
    size, weights = BLOCKS[kind]
    return weights(blocks.reshape(-1, size)).to(dtype).reshape(shape)


@cache
def is_readable(kind: str) -> bool:
    """Whether `dequantize` knows GGUF's type `kind`. The package names types that it only ever skips, such as Q8_K."""
    if kind in BLOCKS:
        return True
    import gguf

    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    try:
        _through_package(torch.zeros(size, dtype=torch.uint8), kind, (weights,))
    except NotImplementedError:
        return False
    return True


def _through_package(blocks: torch.Tensor, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    import gguf

    rows = blocks.cpu().reshape(math.prod(shape[:-1]), -1)
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])).reshape(shape)


def _half(field: torch.Tensor) -> torch.Tensor:
    """(blocks, 2 n) bytes as (blocks, n) float32."""
    return field.contiguous().view(torch.float16).float()


def _bits(field: torch.Tensor, width: int) -> torch.Tensor:
    """(blocks, ..., n) bytes to (blocks, ..., 8 / width, n): their lowest `width` bits, then the next ones."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=field.device)[:, None]
    return (field[..., None, :] >> shifts) & (2**width - 1)


def _nibbles(field: torch.Tensor) -> torch.Tensor:
    """(blocks, 16) bytes to (blocks, 32): all low halves, then all high ones."""
    return _bits(field, 4).flatten(1)


def _fifth_bits(field: torch.Tensor) -> torch.Tensor:
    """(blocks, 4) bytes to (blocks, 32): bit i belongs to weight i. Worth 16."""
    return _bits(field, 1).transpose(1, 2).flatten(1) << 4


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale, q = blocks.split([2, 32], dim=1)
    return _half(scale) * q.contiguous().view(torch.int8)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    scale, q = blocks.split([2, 16], dim=1)
    return _half(scale) * (_nibbles(q).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    scale, least, q = blocks.split([2, 2, 16], dim=1)
    return _half(scale) * _nibbles(q) + _half(least)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    scale, high, q = blocks.split([2, 4, 16], dim=1)
    return _half(scale) * ((_nibbles(q) | _fifth_bits(high)).float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    scale, least, high, q = blocks.split([2, 2, 4, 16], dim=1)
    return _half(scale) * (_nibbles(q) | _fifth_bits(high)) + _half(least)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    scale, q = blocks.split([2, 16], dim=1)
    return _half(scale) * _iq4_levels(_nibbles(q))


def _iq4_levels(indices: torch.Tensor) -> torch.Tensor:
    return torch.tensor(IQ4_LEVELS, dtype=torch.float32, device=indices.device)[indices.int()]


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 groups of 16 weights: 2 bits each, a scale and a minimum of 4 bits a group."""
    groups, q, scale, least = blocks.split([16, 64, 2, 2], dim=1)
    q = _bits(q.reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return ((_half(scale) * (groups & 15))[..., None] * q - (_half(least) * (groups >> 4))[..., None]).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 groups of 16 weights: 2 bits each and a third in `high`, which takes 4 off where it is not set; 6-bit scales."""
    high, q, packed, scale = blocks.split([32, 64, 12, 2], dim=1)
    low, top = packed.split([8, 4], dim=1)
    groups = _bits(low, 4).flatten(1) | (_bits(top, 2).flatten(1) << 4)
    q = _bits(q.reshape(-1, 2, 32), 2).reshape(-1, 16, 16).float() + 4.0 * _bits(high, 1).reshape(-1, 16, 16) - 4
    return ((_half(scale) * (groups.float() - 32))[..., None] * q).flatten(1)


def _scales_and_minimums(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks, 12) bytes to 8 scales and 8 minimums a block, of 6 bits: the first four of each plain, the others split over two bytes."""
    scales, least, rest = packed.split(4, dim=1)
    return (
        torch.cat([scales & 63, (rest & 15) | ((scales >> 6) << 4)], dim=1),
        torch.cat([least & 63, (rest >> 4) | ((least >> 6) << 4)], dim=1),
    )


def _of_eight(scale: torch.Tensor, least: torch.Tensor, packed: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """8 groups of 32 weights `q` (blocks, 8, 32), each with its scale and its minimum."""
    scales, minimums = _scales_and_minimums(packed)
    return ((_half(scale) * scales)[..., None] * q - (_half(least) * minimums)[..., None]).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, least, packed, q = blocks.split([2, 2, 12, 128], dim=1)
    return _of_eight(scale, least, packed, _bits(q.reshape(-1, 4, 32), 4).reshape(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, least, packed, high, q = blocks.split([2, 2, 12, 32, 128], dim=1)
    return _of_eight(scale, least, packed, _bits(q.reshape(-1, 4, 32), 4).reshape(-1, 8, 32) | (_bits(high, 1) << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 groups of 16 weights: 4 bits in `low`, 2 in `high`, an 8-bit scale a group."""
    low, high, groups, scale = blocks.split([128, 64, 16, 2], dim=1)
    low = _bits(low.reshape(-1, 2, 64), 4).reshape(-1, 8, 32)
    high = _bits(high.reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    q = (low | (high << 4)).reshape(-1, 16, 16).float() - 32
    return ((_half(scale) * groups.contiguous().view(torch.int8))[..., None] * q).flatten(1)


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """8 groups of 32 weights: indices into 16 levels, scales of 4 bits in `low` and 2 in `high`."""
    scale, high, low, q = blocks.split([2, 2, 4, 128], dim=1)
    high = _bits(high, 2).transpose(1, 2).flatten(1)
    groups = (_bits(low, 4).transpose(1, 2).flatten(1) | (high << 4)).float() - 32
    return ((_half(scale) * groups)[..., None] * _iq4_levels(_bits(q.reshape(-1, 8, 16), 4).reshape(-1, 8, 32))).flatten(1)


# Type -> bytes a block, and what turns blocks into weights.
BLOCKS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "IQ4_NL": (18, _iq4_nl),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "IQ4_XS": (136, _iq4_xs),
}
