"""The denoiser: a single stream of text, reference and target tokens under block-causal attention.

Text and references are modulated at t = 0 and never see the target, so they are an immutable prefix: `prefill` computes their keys and
values once, `denoise` runs the target's tokens against them, once a step. Parameters carry the names of the published checkpoint.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from . import kernels
from .attention import Attention, full_attention, prefix_attention
from .config import TransformerConfig
from .errors import Qwen21Error
from .fp8 import takes_rows
from .kernels import Fp8Rows
from .prefix import KVPart, PrefixKV
from .rope import rotary_table
from .sequence import Segment, positions, prefix_segments
from .workspace import Workspace

TIME_CHANNELS = 256
TIME_PERIOD = 10000
FP16_MAX = 65504.0


class Modulation(NamedTuple):
    """Shared by every block, each (batch, 1, dim): factors on the normed input and on the branch's output, attention then MLP."""

    scale1: torch.Tensor
    gate1: torch.Tensor
    scale2: torch.Tensor
    gate2: torch.Tensor


class ZeroCenteredRMSNorm(nn.Module):
    """RMS norm in fp32 whose stored weight is the scale minus one."""

    def __init__(self, dim: int, eps: float, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight.to(device=x.device, dtype=torch.float32) + 1
        return F.rms_norm(x.float(), x.shape[-1:], scale, self.eps).to(x.dtype)


class TextProjection(nn.Module):
    """Encoder states (..., context_in_dim) to the stream's width."""

    def __init__(self, config: TransformerConfig, operations, **factory):
        super().__init__()
        self.text_norm = ZeroCenteredRMSNorm(config.context_in_dim, config.eps, **factory)
        self.in_layer = operations.Linear(config.context_in_dim, config.dim, bias=False, **factory)
        self.out_layer = operations.Linear(config.dim, config.dim, bias=False, **factory)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.out_layer(F.gelu(self.in_layer(self.text_norm(states)), approximate="tanh"))


class TimestepMLP(nn.Module):
    """Sinusoids (batch, 256) to (batch, dim)."""

    def __init__(self, dim: int, operations, **factory):
        super().__init__()
        self.linear_1 = operations.Linear(TIME_CHANNELS, dim, bias=False, **factory)
        self.linear_2 = operations.Linear(dim, dim, bias=False, **factory)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear_2(F.silu(self.linear_1(features)))


class TimeEmbedding(nn.Module):
    """t in [0, 1], (batch,), to (batch, dim): sinusoids of 1000 t in fp32 (cosines first), then an MLP in t's dtype."""

    def __init__(self, dim: int, operations, **factory):
        super().__init__()
        self.timestep_embedder = TimestepMLP(dim, operations, **factory)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        half = TIME_CHANNELS // 2
        frequencies = torch.exp(-math.log(TIME_PERIOD) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
        angles = (1000.0 * t.float())[:, None] * frequencies
        return self.timestep_embedder(torch.cat([angles.cos(), angles.sin()], dim=-1).to(t.dtype))


class Attend(Protocol):
    """What to do with a block's projections, each (batch, tokens, heads, head_dim): norm, rotate, attend.

    Returns (batch, heads, tokens, head_dim).
    """

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn: "SelfAttention") -> torch.Tensor: ...


class SelfAttention(nn.Module):
    """Projections around whatever `attend` does; it owns neither positions nor keys of other tokens."""

    def __init__(self, config: TransformerConfig, operations, **factory):
        super().__init__()
        self.heads = config.num_attention_heads
        self.to_q, self.to_k, self.to_v = (operations.Linear(config.dim, config.dim, bias=False, **factory) for _ in range(3))
        self.to_out = nn.ModuleList([operations.Linear(config.dim, config.dim, bias=False, **factory)])
        self.norm_q, self.norm_k = (operations.RMSNorm(config.attention_head_dim, eps=config.eps, **factory) for _ in range(2))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return rearrange(x, "batch tokens (heads dim) -> batch tokens heads dim", heads=self.heads)

    def keys_values(self, x: torch.Tensor | Fp8Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """K (neither normed nor rotated) and V of `x` (batch, tokens, dim), each (batch, tokens, heads, head_dim)."""
        return self._split(self.to_k(x)), self._split(self.to_v(x))

    def forward(self, x: torch.Tensor | Fp8Rows, attend: Attend) -> torch.Tensor:
        """`x` and the result (batch, tokens, dim)."""
        out = attend(self._split(self.to_q(x)), *self.keys_values(x), self)
        return self.to_out[0](kernels.gather(out, takes_rows(out, self.to_out[0])))


class SwiGLU(nn.Module):
    """(batch, tokens, dim) to the same, through `mlp_ratio` times the width."""

    def __init__(self, config: TransformerConfig, operations, **factory):
        super().__init__()
        hidden = config.dim * config.mlp_ratio
        self.gate_layer, self.proj = (operations.Linear(config.dim, hidden, bias=False, **factory) for _ in range(2))
        self.out = operations.Linear(hidden, config.dim, bias=False, **factory)

    def takes_rows(self, x: torch.Tensor) -> bool:
        """Whether `x` is best handed over in FP8."""
        return takes_rows(x, self.gate_layer, self.proj)

    def forward(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        return self.out(self._gated(x))

    def _gated(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor | Fp8Rows:
        """What goes into `out`. Both factors are let go of before it does."""
        gate, up = self.gate_layer(x), self.proj(x)
        return kernels.swiglu(gate, up, takes_rows(gate, self.out))


class Block(nn.Module):
    """One of the identical layers. It owns no modulation; the model computes one for all of them."""

    def __init__(self, config: TransformerConfig, operations, **factory):
        super().__init__()
        self.img_norm1, self.img_norm2 = (operations.LayerNorm(config.dim, eps=config.eps, elementwise_affine=False, **factory) for _ in range(2))
        self.attn = SelfAttention(config, operations, **factory)
        self.img_mlp = SwiGLU(config, operations, **factory)

    def keys_values(self, x: torch.Tensor, modulation: Modulation) -> tuple[torch.Tensor, torch.Tensor]:
        """What `forward` would hand to its `attend` as keys and values, without the rest of the block."""
        return self.attn.keys_values(self._attention_input(x, modulation))

    def forward(self, x: torch.Tensor, modulation: Modulation, attend: Attend) -> torch.Tensor:
        """`x` and the result (batch, tokens, dim)."""
        branch = self.attn(self._attention_input(x, modulation), attend)
        x, normed = kernels.residual_norm_scale(x, branch, modulation.gate1, self.img_norm2, modulation.scale2, takes_rows(x, self.img_mlp))
        x = kernels.residual(x, self.img_mlp(normed), modulation.gate2)
        return x.clip(-FP16_MAX, FP16_MAX) if x.dtype == torch.float16 else x

    def _attention_input(self, x: torch.Tensor, modulation: Modulation) -> torch.Tensor | Fp8Rows:
        return kernels.norm_scale(x, self.img_norm1, modulation.scale1, takes_rows(x, self.attn.to_q, self.attn.to_k, self.attn.to_v))


class Hooks:
    """What a host may do to tokens on their way. This one does nothing; a host's own overrides what it needs."""

    def embedded(self, x: torch.Tensor) -> torch.Tensor:
        """The embedded tokens (batch, tokens, dim) before the first block."""
        return x

    @property
    def sees_attention(self) -> bool:
        """Whether `attention` does anything. If not it is not called, and norm and rotation are one kernel."""
        return type(self).attention is not Hooks.attention

    def attention(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values (batch, heads, tokens, head_dim) of these tokens, normed, before rotation."""
        return q, k, v

    def block(self, layer: int, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """The tokens (batch, tokens, dim) after block `layer`, which `run` computes."""
        return run(x)


class FinalNorm(nn.Module):
    """Layer norm of (batch, tokens, dim) scaled by what the time embedding (batch, dim) says; no shift."""

    def __init__(self, config: TransformerConfig, operations, **factory):
        super().__init__()
        self.linear = operations.Linear(config.dim, config.dim, bias=False, **factory)
        self.norm = operations.LayerNorm(config.dim, eps=config.eps, elementwise_affine=False, **factory)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return kernels.norm_scale(x, self.norm, (1 + self.linear(F.silu(time)))[:, None])


def _place(
    hooks: Hooks,
    layer: int,
    attn: SelfAttention,
    rotary: torch.Tensor,
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor | None:
    """Queries, keys and values (batch, tokens, heads, head_dim) through norm, hooks and rotation, to (batch, heads, tokens, head_dim): the
    queries are returned, keys and values written to `keys` and `values`."""
    norm_q, norm_k = attn.norm_q, attn.norm_k
    if hooks.sees_attention:
        k, v = kernels.place(k, norm_k, None), kernels.place(v, None, None)
        hooked = hooks.attention(layer, k if q is None else kernels.place(q, norm_q, None), k, v)
        hooked_q, k, v = (x.transpose(1, 2) for x in hooked)
        q = None if q is None else hooked_q
        norm_q = norm_k = None
    kernels.place(k, norm_k, rotary, keys)
    kernels.place(v, None, None, values)
    return None if q is None else kernels.place(q, norm_q, rotary)


class QwenImage21Transformer(nn.Module):
    """The denoiser of Qwen-Image 2.1.

    `operations` supplies Linear, LayerNorm and RMSNorm: torch.nn, or a host's own for quantised and offloaded weights. A host's RMSNorm may say
    that its `weight_is_ready` to be read by kernels, its Linear that it `takes_rows` in FP8 (kernels.Fp8Rows) in place of a tensor.
    """

    def __init__(self, config: TransformerConfig, operations=nn, device=None, dtype=None):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.config = config
        self.img_in = operations.Linear(config.in_channels, config.dim, bias=False, **factory)
        self.txt_in = TextProjection(config, operations, **factory)
        self.time_text_embed = TimeEmbedding(config.dim, operations, **factory)
        self.modulation = nn.Sequential(nn.SiLU(), operations.Linear(config.dim, 4 * config.dim, bias=False, **factory))
        self.transformer_blocks = nn.ModuleList(Block(config, operations, **factory) for _ in range(config.num_layers))
        self.norm_out = FinalNorm(config, operations, **factory)
        self.proj_out = operations.Linear(config.dim, config.out_channels, bias=False, **factory)

    def prefill(
        self,
        context: torch.Tensor,
        image_slots: Sequence[int] = (),
        reference_latents: Sequence[torch.Tensor] = (),
        past: PrefixKV = PrefixKV(),
        attention: Attention = full_attention,
        hooks: Hooks = Hooks(),
    ) -> PrefixKV:
        """Keys and values of text and references, which no step changes.

        `context` (1, text tokens, context_in_dim): the encoder's states without vision tokens, in the dtype to compute in.
        `reference_latents[i]` (1, 64, rows, columns), normalised, is spliced in before text token `image_slots[i]`.
        With `past`, these tokens continue that prefix, slots counting from the first token of `context`; the result holds both, without
        a copy of what was there.
        `attention` computes the calls that need no mask, on (batch, heads, tokens, head_dim); `hooks` see these tokens.
        Raises Qwen21Error when shapes, slots and pictures do not belong together.
        """
        segments = self._prefix_segments(context, image_slots, reference_latents)
        if not segments:
            if not past.parts:
                raise Qwen21Error("the prefix is empty: give at least one text token or reference")
            return past
        x = hooks.embedded(self._splice(context, segments, reference_latents))
        modulation = self._modulation(self.time_text_embed(x.new_zeros(1)))
        rotary = self._rotary(segments, past.position, x.device)
        past_tokens = past.tokens
        own_shape = (1, self.config.num_attention_heads, x.shape[1], self.config.attention_head_dim)
        layers: list[tuple[torch.Tensor, torch.Tensor]] = []

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn: SelfAttention) -> torch.Tensor:
            layer, own = len(layers), (k.new_empty(own_shape), v.new_empty(own_shape))
            layers.append(own)
            q = _place(hooks, layer, attn, rotary, q, k, v, *own)
            if reader is None:
                return prefix_attention(q, *own, segments, 0, attention)
            with reader.layer(layer) as room:
                room.own_keys.copy_(own[0])
                room.own_values.copy_(own[1])
                return prefix_attention(q, room.keys, room.values, segments, past_tokens, attention)

        with Workspace().reading(past, own_shape, x) if past.parts else nullcontext() as reader:
            for layer, block in enumerate(self.transformer_blocks[:-1]):
                x = hooks.block(layer, lambda x, block=block: block(x, modulation, attend), x)
        # Nothing reads what the last block would make of the prefix: it needs no queries.
        last = self.transformer_blocks[-1]
        k, v = last.keys_values(x, modulation)
        own = k.new_empty(own_shape), v.new_empty(own_shape)
        _place(hooks, len(layers), last.attn, rotary, None, k, v, *own)
        return PrefixKV((*past.parts, KVPart.of([*layers, own])), past.position + sum(segment.advance for segment in segments))

    def denoise(
        self,
        target: torch.Tensor,
        sigma: float | torch.Tensor,
        prefix: PrefixKV,
        attention: Attention = full_attention,
        hooks: Hooks = Hooks(),
        workspace: Workspace | None = None,
    ) -> torch.Tensor:
        """The flow-matching velocity of `target` (batch, 64, rows, columns), normalised latents in the dtype to compute in; same shape.

        `sigma` in [0, 1], one number or (batch,). Every row of the batch sees the same `prefix`, through unmasked `attention`; `hooks` see
        the target's tokens. Steps of a run share a `workspace`.
        """
        self._check_latents("the target", target)
        batch, _, rows, columns = target.shape
        # The reference rounds 1000 sigma to the compute dtype and divides there: two roundings in half precision.
        t = (1000 * torch.as_tensor(sigma, dtype=torch.float32, device=target.device)).to(target.dtype).expand(batch) / 1000
        time = self.time_text_embed(t)
        modulation = self._modulation(time)
        workspace = workspace or Workspace()
        grid = Segment.picture(rows, columns)
        rotary = workspace.once((grid, prefix.position, target.device), lambda: self._rotary([grid], prefix.position, target.device))
        x = hooks.embedded(self.img_in(rearrange(target, "batch channels rows columns -> batch (rows columns) channels")))

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn: SelfAttention) -> torch.Tensor:
            with reader.layer(layer) as room:
                q = _place(hooks, layer, attn, rotary, q, k, v, room.own_keys, room.own_values)
                return attention(q, room.keys, room.values)

        own_shape = (batch, self.config.num_attention_heads, x.shape[1], self.config.attention_head_dim)
        with workspace.reading(prefix, own_shape, x) as reader:
            for layer, block in enumerate(self.transformer_blocks):
                x = hooks.block(layer, lambda x, block=block, layer=layer: block(x, modulation, partial(attend, layer)), x)
        velocity = self.proj_out(self.norm_out(x, time))
        return rearrange(velocity, "batch (rows columns) channels -> batch channels rows columns", rows=rows)

    def _modulation(self, time: torch.Tensor) -> Modulation:
        scale1, gate1, scale2, gate2 = self.modulation(time)[:, None].chunk(4, dim=-1)
        return Modulation(1 + scale1, gate1.tanh(), 1 + scale2, gate2.tanh())

    def _rotary(self, segments: Sequence[Segment], start: int, device: torch.device) -> torch.Tensor:
        return rotary_table(positions(segments, start).to(device), self.config.axes_dims_rope)

    def _prefix_segments(self, context: torch.Tensor, image_slots: Sequence[int], reference_latents: Sequence[torch.Tensor]) -> list[Segment]:
        width = self.config.context_in_dim
        if context.ndim != 3 or context.shape[0] != 1 or context.shape[2] != width:
            raise Qwen21Error(
                f"the text states have shape {tuple(context.shape)}, this denoiser takes (1, tokens, {width}): use the text encoder that belongs to it"
            )
        for number, latents in enumerate(reference_latents, start=1):
            self._check_latents(f"reference {number}", latents)
            if latents.shape[0] != 1:
                raise Qwen21Error(f"reference {number} is a batch of {latents.shape[0]}, expected one picture: give each picture its own slot")
        return prefix_segments(context.shape[1], image_slots, [tuple(latents.shape[2:]) for latents in reference_latents])

    def _check_latents(self, what: str, latents: torch.Tensor) -> None:
        channels = self.config.in_channels
        if latents.ndim != 4 or latents.shape[1] != channels:
            raise Qwen21Error(
                f"{what} has latents of shape {tuple(latents.shape)}, expected (batch, {channels}, rows, columns): encode it with the Qwen-Image 2.1 VAE"
            )

    def _splice(self, context: torch.Tensor, segments: Sequence[Segment], reference_latents: Sequence[torch.Tensor]) -> torch.Tensor:
        """The prefix's embedded tokens, (1, tokens, dim)."""
        text = iter(self.txt_in(context).split([segment.length for segment in segments if segment.is_text], dim=1))
        pictures = iter(reference_latents)
        pieces = [
            next(text)
            if segment.is_text
            else self.img_in(rearrange(next(pictures), "one channels rows columns -> one (rows columns) channels").to(context.dtype))
            for segment in segments
        ]
        return torch.cat(pieces, dim=1)
