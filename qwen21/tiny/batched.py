"""The networks' forwards for training: many prompts and pictures at once, right-padded, over the very parameters of the core's modules.

`encode_text` equals the text encoder (transformers' Qwen3-VL, last layer before the final norm), `prefill` and `denoise` equal the core's
transformer; tests hold them to that. Blocks are functions of tensors, so that one compiled graph serves all layers.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .layout import GRIDS, REFERENCE_GRIDS, REFERENCE_TOKENS, VISION_TOKENS, picture_positions

HEAD = 128  # of the denoiser
AXES = (16, 56, 56)


class Batch(NamedTuple):
    """Stacked arrays of `layout.Layouter` and the pictures they speak of.

    patches (batch, references, 256, 768): uint8 pixels of the references over white, patch by patch in the tower's order;
    reference_latents (batch, references, 256, 64) and target (batch, target tokens, 64): normalised.
    """

    ids: torch.Tensor
    vision: torch.Tensor
    text_position: torch.Tensor
    source: torch.Tensor
    position: torch.Tensor
    block: torch.Tensor
    length: torch.Tensor
    frame: torch.Tensor
    reference_grids: torch.Tensor
    target_grid: torch.Tensor
    patches: torch.Tensor
    reference_latents: torch.Tensor
    target: torch.Tensor


class Compiler(NamedTuple):
    """The blocks, plain or compiled."""

    vision_block: object
    text_block: object
    stream_block: object
    last_prefix_block: object


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rows_of(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`table[index]` as a product, whose gradient costs a GPU far less than scattering."""
    return (index[..., None] == torch.arange(len(table), device=index.device)).to(table.dtype) @ table


def bias(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """True where a key is seen, as what attention adds to its scores (finite, so that no kernel can make NaN of it)."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -1e4)


# ------------------------------------------------------------------------------------------------------------ vision tower


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    a, b = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


def vision_block(x, cos, sin, mask, heads: int, norm1, norm2, qkv, out, up, down):
    """`norm1` ... `down` are (weight, bias) pairs; mask (batch, 1, 1, tokens) as `bias` makes it."""
    batch, tokens, width = x.shape
    q, k, v = F.linear(F.layer_norm(x, (width,), *norm1, 1e-6), *qkv).view(batch, tokens, 3, heads, -1).unbind(2)
    q, k = rotate_half(q, cos, sin), rotate_half(k, cos, sin)
    mask = mask.expand(batch, heads, tokens, tokens)
    h = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.to(q.dtype).transpose(1, 2), attn_mask=mask)
    x = x + F.linear(h.transpose(1, 2).reshape(batch, tokens, width), *out)
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,), *norm2, 1e-6), *up), approximate="tanh"), *down)


def pair(module) -> tuple[torch.Tensor, torch.Tensor]:
    return module.weight, module.bias


class VisionTower:
    """Runs transformers' tower on (pictures, 256, 768) patches, with a table row for each reference grid."""

    def __init__(self, tower, device):
        self.tower = tower
        side = tower.num_grid_per_side
        frequencies = tower.rotary_pos_emb.inv_freq.float().cpu()
        blends, angles, valid = [], [], []
        for rows, columns in REFERENCE_GRIDS:
            order = torch.arange(rows * columns).view(rows // 2, 2, columns // 2, 2).transpose(1, 2).reshape(-1)  # 2x2 merge order
            r, c = (index.reshape(-1)[order] for index in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
            fr, fc = torch.linspace(0, side - 1, rows)[r], torch.linspace(0, side - 1, columns)[c]
            r0, c0 = fr.int().long(), fc.int().long()
            r1, c1 = (r0 + 1).clamp(max=side - 1), (c0 + 1).clamp(max=side - 1)
            dr, dc = fr - r0, fc - c0
            fill = lambda x: torch.cat([x, x.new_zeros(REFERENCE_TOKENS - len(x), *x.shape[1:])])
            corners = torch.stack([r0 * side + c0, r0 * side + c1, r1 * side + c0, r1 * side + c1], dim=1)
            weights = torch.stack([(1 - dr) * (1 - dc), (1 - dr) * dc, dr * (1 - dc), dr * dc], dim=1)
            blends.append(fill(torch.zeros(len(r), side * side).scatter_add_(1, corners, weights)))
            angle = torch.cat([r[:, None] * frequencies, c[:, None] * frequencies], dim=-1)
            angles.append(fill(torch.cat([angle, angle], dim=-1)))
            valid.append(fill(torch.ones(rows * columns)).bool())
        self.blends, self.angles, self.valid = (torch.stack(x).to(device) for x in (blends, angles, valid))

    def __call__(self, patches: torch.Tensor, grids: torch.Tensor, block) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(pictures, 64, hidden) tokens for the language model, and DeepStack's for its first layers."""
        tower = self.tower
        kernel = tower.patch_embed.proj.weight.sum(2).flatten(1)  # both frames of a still are the same
        x = F.linear(patches / 127.5 - 1, kernel, tower.patch_embed.proj.bias)
        x = x + rows_of((self.blends @ tower.pos_embed.weight).flatten(1), grids).view(len(x), REFERENCE_TOKENS, -1).to(x.dtype)
        cos, sin = self.angles[grids].cos()[:, :, None], self.angles[grids].sin()[:, :, None]
        mask = bias(self.valid[grids][:, None, None], x.dtype)
        deep = []
        for index, b in enumerate(tower.blocks):
            parts = (b.norm1, b.norm2, b.attn.qkv, b.attn.proj, b.mlp.linear_fc1, b.mlp.linear_fc2)
            x = block(x, cos, sin, mask, b.attn.num_heads, *(pair(m) for m in parts))
            if index in tower.deepstack_visual_indexes:
                deep.append(self._merge(tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(index)], x))
        return self._merge(tower.merger, x), deep

    @staticmethod
    def _merge(merger, x: torch.Tensor) -> torch.Tensor:
        group = lambda y: y.reshape(len(y), VISION_TOKENS, -1)
        x = group(x) if merger.use_postshuffle_norm else x
        x = group(F.layer_norm(x, x.shape[-1:], *pair(merger.norm), 1e-6))
        return F.linear(F.gelu(F.linear(x, *pair(merger.linear_fc1))), *pair(merger.linear_fc2))


# ---------------------------------------------------------------------------------------------------------- language model


def text_block(x, cos, sin, head: int, norm1, norm2, q, k, v, out, q_norm, k_norm, gate, up, down):
    """Causal, so right padding needs no mask."""
    batch, tokens, _ = x.shape
    h = rms(x, norm1)
    split = lambda w: F.linear(h, w).view(batch, tokens, -1, head)
    queries, keys, values = rotate_half(rms(split(q), q_norm), cos, sin), rotate_half(rms(split(k), k_norm), cos, sin), split(v)
    repeats = queries.shape[2] // keys.shape[2]
    keys, values = keys.repeat_interleave(repeats, dim=2), values.repeat_interleave(repeats, dim=2)
    h = F.scaled_dot_product_attention(queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True)
    x = x + F.linear(h.transpose(1, 2).reshape(batch, tokens, -1), out)
    h = rms(x, norm2)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


class TextEncoder:
    """Runs transformers' Qwen3VLModel on a Batch."""

    def __init__(self, model, device):
        self.model = model
        self.tower = VisionTower(model.visual, device)
        rotary = model.language_model.rotary_emb
        self.frequencies = rotary.inv_freq.float().to(device)
        axis = torch.zeros(len(self.frequencies), dtype=torch.long)
        for index in (1, 2):  # interleaved: frame, row, column, frame, row, column, ...
            axis[index : 3 * rotary.mrope_section[index] : 3] = index
        self.axis = axis.to(device)

    def __call__(self, batch: Batch, blocks: Compiler) -> torch.Tensor:
        """(batch, encoder tokens, hidden): the last layer's output before the final norm, vision tokens and system turn included."""
        language = self.model.language_model
        x = rows_of(language.embed_tokens.weight, batch.ids.long())
        deep, seen = [], None
        if batch.patches.shape[1]:
            tokens, deep = self.tower(batch.patches.flatten(0, 1), batch.reference_grids.long().flatten(), blocks.vision_block)
            seen = batch.vision.long()[..., None]
            place = lambda v: v.reshape(len(x), -1, x.shape[-1]).gather(1, seen.clamp(min=0).expand(-1, -1, x.shape[-1])).to(x.dtype)
            x = torch.where(seen >= 0, place(tokens), x)
        angle = batch.text_position.float()[..., self.axis] * self.frequencies
        angle = torch.cat([angle, angle], dim=-1)[:, :, None]
        cos, sin = angle.cos(), angle.sin()
        for index, layer in enumerate(language.layers):
            a, m = layer.self_attn, layer.mlp
            parts = (
                layer.input_layernorm,
                layer.post_attention_layernorm,
                a.q_proj,
                a.k_proj,
                a.v_proj,
                a.o_proj,
                a.q_norm,
                a.k_norm,
                m.gate_proj,
                m.up_proj,
                m.down_proj,
            )
            x = blocks.text_block(x, cos, sin, a.head_dim, *(part.weight for part in parts))
            if index < len(deep):
                x = x + torch.where(seen >= 0, place(deep[index]), 0)
        return x


# ---------------------------------------------------------------------------------------------------------------- denoiser


class Prefix(NamedTuple):
    """Keys and values of a batch of prefixes a layer, (batch, tokens, heads, head_dim); which tokens are real; where targets begin."""

    layers: list
    valid: torch.Tensor
    frame: torch.Tensor


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Channels 2i and 2i + 1 are a pair; x (batch, tokens, heads, head_dim), cos and sin (batch, tokens, 1, head_dim / 2)."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """Every row `times` times, one after another."""
    return x if times == 1 else x[:, None].expand(-1, times, *x.shape[1:]).flatten(0, 1)


def normed(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def stream_block(x, modulation, cos, sin, mask, past, q, k, v, out, q_norm, k_norm, gate, up, down):
    """One block; `past` is None or the prefix's (keys, values). Returns x and its own keys and values. mask: see `bias`."""
    scale1, gate1, scale2, gate2 = modulation
    batch, tokens, width = x.shape
    h = normed(x) * scale1
    split = lambda w: F.linear(h, w).view(batch, tokens, -1, HEAD)
    queries, keys, values = rotate_pairs(rms(split(q), q_norm), cos, sin), rotate_pairs(rms(split(k), k_norm), cos, sin), split(v)
    all_keys, all_values = (keys, values) if past is None else (torch.cat([old, new], dim=1) for old, new in zip(past, (keys, values)))
    mask = mask.expand(batch, queries.shape[2], tokens, all_keys.shape[1])
    h = F.scaled_dot_product_attention(queries.transpose(1, 2), all_keys.transpose(1, 2), all_values.transpose(1, 2), attn_mask=mask)
    x = x + gate1 * F.linear(h.transpose(1, 2).reshape(batch, tokens, width), out)
    h = normed(x) * scale2
    x = x + gate2 * F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
    return x, keys, values


def last_prefix_block(x, modulation, cos, sin, k, v, k_norm):
    """Only keys and values: nothing reads what the last block would make of the prefix."""
    h = normed(x) * modulation[0]
    split = lambda w: F.linear(h, w).view(*h.shape[:2], -1, HEAD)
    return rotate_pairs(rms(split(k), k_norm), cos, sin), split(v)


PLAIN_BLOCKS = Compiler(vision_block, text_block, stream_block, last_prefix_block)


class Denoiser:
    """Runs the core's QwenImage21Transformer on a Batch."""

    def __init__(self, model, device):
        self.model = model
        self.frequencies = [(1.0 / torch.pow(10000.0, torch.arange(0, n, 2) / n)).to(device) for n in AXES]
        longest = max(rows * columns for rows, columns in GRIDS)
        table = torch.zeros(len(GRIDS), longest, 3)
        valid = torch.zeros(len(GRIDS), longest, dtype=torch.bool)
        for index, (rows, columns) in enumerate(GRIDS):
            table[index, : rows * columns] = torch.from_numpy(picture_positions(0, rows, columns, centred=True))
            valid[index, : rows * columns] = True
        self.target_positions, self.target_valid = table.to(device), valid.to(device)

    def _rotary(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = torch.cat([position[..., i : i + 1].float() * f for i, f in enumerate(self.frequencies)], dim=-1)[:, :, None]
        return angle.cos(), angle.sin()

    def _time(self, sigma: torch.Tensor) -> torch.Tensor:
        mlp = self.model.time_text_embed.timestep_embedder
        angle = 1000.0 * sigma.float()[:, None] * torch.exp(-math.log(10000) * torch.arange(128, device=sigma.device).float() / 128)
        return F.linear(F.silu(F.linear(torch.cat([angle.cos(), angle.sin()], dim=-1), mlp.linear_1.weight)), mlp.linear_2.weight)

    def _modulation(self, time: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale1, gate1, scale2, gate2 = F.linear(F.silu(time), self.model.modulation[1].weight)[:, None].chunk(4, dim=-1)
        return 1 + scale1, gate1.tanh(), 1 + scale2, gate2.tanh()

    @staticmethod
    def _weights(block) -> tuple[torch.Tensor, ...]:
        a, m = block.attn, block.img_mlp
        return tuple(part.weight for part in (a.to_q, a.to_k, a.to_v, a.to_out[0], a.norm_q, a.norm_k, m.gate_layer, m.proj, m.out))

    def prefill(self, states: torch.Tensor, batch: Batch, blocks: Compiler) -> Prefix:
        """`states` as TextEncoder gives them."""
        model, text = self.model, self.model.txt_in
        h = rms(states, text.text_norm.weight + 1)
        x = F.linear(F.gelu(F.linear(h, text.in_layer.weight), approximate="tanh"), text.out_layer.weight)
        if batch.reference_latents.shape[1]:
            x = torch.cat([x, F.linear(batch.reference_latents.flatten(1, 2).to(x.dtype), model.img_in.weight)], dim=1)
        x = x.gather(1, batch.source.long()[..., None].expand(-1, -1, x.shape[-1]))
        tokens = torch.arange(x.shape[1], device=x.device)
        valid = tokens < batch.length[:, None]
        block = batch.block
        mask = (tokens[:, None] >= tokens) | ((block[:, :, None] == block[:, None]) & (block[:, None] >= 0))
        mask = bias((mask & valid[:, None])[:, None], x.dtype)
        modulation = self._modulation(self._time(x.new_zeros(1)))
        cos, sin = self._rotary(batch.position)
        layers = []
        for layer in model.transformer_blocks[:-1]:
            x, keys, values = blocks.stream_block(x, modulation, cos, sin, mask, None, *self._weights(layer))
            layers.append((keys, values))
        _, k, v, _, _, k_norm, *_ = self._weights(model.transformer_blocks[-1])
        layers.append(blocks.last_prefix_block(x, modulation, cos, sin, k, v, k_norm))
        return Prefix(layers, valid, batch.frame)

    def denoise(self, target: torch.Tensor, sigma: torch.Tensor, grid: torch.Tensor, prefix: Prefix, blocks: Compiler) -> torch.Tensor:
        """Velocity of `target` (batch * times, tokens, 64): rows `times` i ... are noised differently and share prefix i. sigma (batch * times,)."""
        model, times, tokens = self.model, len(target) // len(prefix.frame), target.shape[1]
        repeat = lambda x: repeated(x, times)
        grid = repeat(grid.long())
        position = self.target_positions[grid, :tokens].clone()
        position[..., 0] += repeat(prefix.frame)[:, None]
        cos, sin = self._rotary(position)
        time = self._time(sigma)
        modulation = self._modulation(time)
        x = F.linear(target, model.img_in.weight)
        mask = bias(torch.cat([repeat(prefix.valid), self.target_valid[grid, :tokens]], dim=1)[:, None, None], x.dtype)
        for layer, past in zip(model.transformer_blocks, prefix.layers):
            x, _, _ = blocks.stream_block(x, modulation, cos, sin, mask, tuple(repeat(p) for p in past), *self._weights(layer))
        scale = 1 + F.linear(F.silu(time), model.norm_out.linear.weight)[:, None]
        return F.linear(normed(x) * scale, model.proj_out.weight)

    def valid(self, grid: torch.Tensor, tokens: int) -> torch.Tensor:
        """(batch, tokens): which target tokens are real."""
        return self.target_valid[grid.long(), :tokens]
