"""Where a prefix's keys and values are kept while it is not in use: on which device, and in which precision.

K carries the rotary embedding and is the sensitive half, so V alone can be stored in 8 bits. In FP8 E4M3 each token and head has one
FP32 scale.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .transformer import PrefixKV

PRECISIONS = ("default", "fp8_v", "fp8_kv")
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


@dataclass(frozen=True)
class StoredTensor:
    """(1, heads, tokens, head_dim) in its own dtype, or in FP8 with `scale` (1, heads, tokens, 1) in FP32."""

    values: torch.Tensor
    scale: torch.Tensor | None = None

    @classmethod
    def of(cls, x: torch.Tensor, device: torch.device, fp8: bool) -> "StoredTensor":
        if not fp8:
            return cls(x.to(device))
        scale = x.float().abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / FP8_MAX
        return cls((x.float() / scale).to(FP8).to(device), scale.to(device))

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (self.scale.nbytes if self.scale is not None else 0)

    def load(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        values = self.values.to(device, non_blocking=True)
        return values if self.scale is None else (values.float() * self.scale.to(device, non_blocking=True)).to(dtype)


class StoredPrefix:
    """Stands in for a PrefixKV: `layers` brings each layer's K and V to the compute device, in the compute dtype, as it is asked for."""

    def __init__(self, kv: PrefixKV, device: torch.device, precision: str = "default"):
        """Store `kv` on `device` in `precision`, one of PRECISIONS."""
        self.position, self.tokens = kv.position, kv.tokens
        first = kv.layers[0][0]
        self._device, self._dtype = first.device, first.dtype
        self._layers = [(StoredTensor.of(k, device, precision == "fp8_kv"), StoredTensor.of(v, device, precision != "default")) for k, v in kv.layers]

    @property
    def layers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for k, v in self._layers:
            yield k.load(self._device, self._dtype), v.load(self._device, self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held where it is stored."""
        return sum(k.nbytes + v.nbytes for k, v in self._layers)
