"""Keys and values of a prefix: in parts, so that prefixes which begin alike share memory as far as they are alike.

K carries the rotary embedding and is the sensitive half, so V alone can be stored in 8 bits. In FP8 E4M3 each token and head has one
FP32 scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import kernels

PRECISIONS = ("default", "fp8_v", "fp8_kv")


@dataclass(frozen=True)
class StoredTensor:
    """(1, heads, tokens, head_dim) in its own dtype, or in FP8 with `scale` (1, heads, tokens, 1) in FP32."""

    values: torch.Tensor
    scale: torch.Tensor | None = None

    @classmethod
    def quantized(cls, x: torch.Tensor) -> "StoredTensor":
        """`x` (1, heads, tokens, head_dim), any float dtype, in FP8 E4M3 with the largest value of each token and head at its maximum."""
        values, scale, _ = kernels.quantize_rows(x)
        return cls(values, scale[..., None])

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (self.scale.nbytes if self.scale is not None else 0)

    def slice(self, start: int, stop: int) -> "StoredTensor":
        """Tokens `start` to `stop`, in memory of their own."""
        return StoredTensor(*(x if x is None else _copied(x[:, :, start:stop], x.is_pinned()) for x in (self.values, self.scale)))

    def to(self, device: torch.device) -> "StoredTensor":
        """On `device`; in pinned memory if that is the host of a GPU, so that copies can overlap computing."""
        return StoredTensor(*(x if x is None else _moved(x, device) for x in (self.values, self.scale)))

    def write(self, out: torch.Tensor) -> None:
        """As it was stored, to each row of `out` (batch, heads, tokens, head_dim), which may lie on another device."""
        values = self.values.to(out.device, non_blocking=True)
        if self.scale is None:
            out.copy_(values)
        else:
            kernels.widen(values, self.scale.to(out.device, non_blocking=True), out)


def _moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return _copied(x, pinned=True) if device.type == "cpu" and x.device.type == "cuda" else x.to(device)


def _copied(x: torch.Tensor, pinned: bool) -> torch.Tensor:
    """A contiguous copy, where `x` is or in pinned host memory."""
    device = torch.device("cpu") if pinned else x.device
    return torch.empty(x.shape, dtype=x.dtype, device=device, pin_memory=pinned).copy_(x)


@dataclass(frozen=True)
class KVPart:
    """Keys (after RoPE) and values of consecutive tokens, one pair a layer. `dtype` is what they were computed in. Never written to."""

    layers: tuple[tuple[StoredTensor, StoredTensor], ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> "KVPart":
        """`layers` holds one pair of (1, heads, tokens, head_dim) a layer."""
        return cls(tuple((StoredTensor(k), StoredTensor(v)) for k, v in layers), layers[0][0].dtype)

    @property
    def tokens(self) -> int:
        return self.layers[0][0].values.shape[2]

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.layers)

    @property
    def device(self) -> torch.device:
        return self.layers[0][0].values.device

    def slice(self, start: int, stop: int) -> "KVPart":
        """Tokens `start` to `stop`, in memory of their own."""
        return KVPart(tuple((k.slice(start, stop), v.slice(start, stop)) for k, v in self.layers), self.dtype)

    def to(self, device: torch.device) -> "KVPart":
        return self if self.device == device else KVPart(tuple((k.to(device), v.to(device)) for k, v in self.layers), self.dtype)

    def quantized(self, precision: str) -> "KVPart":
        """Stored in `precision`, one of PRECISIONS: V, or K and V, in FP8."""
        return KVPart(tuple(_in_precision(*pair, precision) for pair in self.layers), self.dtype)


def _in_precision(k: StoredTensor, v: StoredTensor, precision: str) -> tuple[StoredTensor, StoredTensor]:
    return StoredTensor.quantized(k.values) if precision == "fp8_kv" else k, v if precision == "default" else StoredTensor.quantized(v.values)


def divide(layers: list[tuple[StoredTensor, StoredTensor]], lengths: Sequence[int], precision: str, devices: Sequence[torch.device]) -> list[KVPart]:
    """Parts of `lengths` tokens in memory of their own, in `precision` and on `devices`. Empties `layers`, so that only one layer is ever held twice."""
    dtype, parts = layers[0][0].values.dtype, [[] for _ in lengths]
    while layers:
        pair, start = layers.pop(0), 0
        for part, length, device in zip(parts, lengths, devices):
            piece = pair if len(parts) == 1 else (x.slice(start, start + length) for x in pair)
            part.append(tuple(x.to(device) for x in _in_precision(*piece, precision)))
            start += length
    return [KVPart(tuple(part), dtype) for part in parts]


@dataclass(frozen=True, eq=False)
class PrefixKV:
    """A prefix as parts in order, equal to itself alone. `position` is the running position after it: where whatever follows begins."""

    parts: tuple[KVPart, ...] = ()
    position: int = 0

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)
