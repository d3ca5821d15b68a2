"""Block-causal attention, exact and without a mask over the whole sequence.

`allowed(q, k) = (q >= k) or same picture` falls apart into one call a segment over the keys [0, end of the segment): a picture needs no
mask, a run of text a causal one aligned to the bottom right. Every tensor is (batch, heads, tokens, head_dim).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from . import kernels
from .sequence import Segment, bounds

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every query sees every key. The target's attention, and a picture's."""
    return kernels.attention(q, k, v)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Query i sees the keys up to and including its own, the queries being the LAST tokens of the keys."""
    queries, keys = q.shape[2], k.shape[2]
    if queries == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if q.is_cuda and torch.version.hip is None:  # ROCm's kernels align to the upper left, other devices have no such kernel
        mask = causal_lower_right(queries, keys)
    else:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def prefix_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Sequence[Segment], past: int = 0, full: Attention = full_attention
) -> torch.Tensor:
    """Block-causal attention of the prefix tokens in `segments`.

    `q` holds their queries; `k` and `v` hold `past` earlier tokens in front of theirs. `full` computes the unmasked calls.
    """
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)  # heads side by side, as the next layer wants them
    for start, end, segment in bounds(segments):
        attend = causal_attention if segment.is_text else full
        attended = attend(q[:, :, start:end], k[:, :, : past + end], v[:, :, : past + end])
        kernels.place(attended.transpose(1, 2), None, None, out[:, :, start:end])
    return out
