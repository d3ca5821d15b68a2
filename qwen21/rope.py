"""Rotary position embedding over three axes (frame, row, column), interleaved pairs, computed in fp32."""

from collections.abc import Sequence

import torch

THETA = 10000


def rotary_table(positions: torch.Tensor, axes_dims: Sequence[int]) -> torch.Tensor:
    """Unit rotations for `positions`, int64 (tokens, 3): complex64 (tokens, head_dim / 2), axis after axis."""
    angles = []
    for axis, dim in enumerate(axes_dims):
        frequencies = 1.0 / torch.pow(THETA, torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim)
        angles.append(torch.outer(positions[:, axis].float(), frequencies))
    angle = torch.cat(angles, dim=-1)
    return torch.polar(torch.ones_like(angle), angle)


def apply_rotary(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate `x` (batch, heads, tokens, head_dim) by `table` (tokens, head_dim / 2); channels 2i and 2i + 1 are a pair. Keeps the dtype."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)
