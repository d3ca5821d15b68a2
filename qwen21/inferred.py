"""A part's config: from its config.json, else from the shapes of its tensors; what shapes do not tell is as published.

Rows of matrices and lengths of vectors are looked at, which no way of quantising packs.
"""

import re

from . import published
from .config import ModelIndex, TransformerConfig, VAEConfig
from .errors import Qwen21Error
from .files import json_of
from .layouts import WANTED
from .part import Part
from .schedule import TURBO_SIGMAS

_TITLES = ("modelspec.title", "general.name")  # where metadata names the model


class _Shapes:
    """Shapes by name, of the tensors of a `part`."""

    def __init__(self, part: Part):
        self.pieces, self.part, self.source = part.pieces, part.name, part.source

    def of(self, name: str, dimensions: int) -> tuple[int, ...]:
        if name not in self.pieces:
            raise Qwen21Error(f"{self.source} lacks the tensor {name}, expected {WANTED[self.part]}")
        shape = self.pieces[name].shape
        if len(shape) < dimensions or 0 in shape:
            raise Qwen21Error(f"{self.source}: the tensor {name} has shape {shape}, expected {dimensions} dimensions: download the file again")
        return shape

    def rows(self, name: str) -> int:
        return self.of(name, 1)[0]

    def count(self, pattern: str) -> int:
        """How many different numbers the group of `pattern` takes."""
        return len({found[1] for found in map(re.compile(pattern).match, self.pieces) if found})

    def ratio(self, what: str, whole: int, part: int) -> int:
        if whole % part or not whole:
            raise Qwen21Error(f"{self.source}: {what} is {whole} by {part}, expected a whole number of times, {WANTED[self.part]}")
        return whole // part

    def config_needed(self, what: str) -> Qwen21Error:
        return Qwen21Error(f"{self.source} has {what}, expected {WANTED[self.part]}; a model of another size needs its config.json beside it")


def sample_sigmas(transformer: Part) -> tuple[float, ...]:
    """The sigmas a denoiser's file brings in its metadata, or the published Turbo ones if its name or title says that it is one; else none."""
    noted = json_of(transformer.files.metadata, "sample_sigmas")
    if isinstance(noted, list) and noted:
        return ModelIndex.from_dict({"sample_sigmas": noted}, str(transformer.source)).sample_sigmas
    names = [transformer.source.name, *(transformer.files.metadata.get(title, "") for title in _TITLES)]
    return TURBO_SIGMAS if any("turbo" in name.lower() for name in names) else ()


def transformer_config(part: Part) -> TransformerConfig:
    """Raises Qwen21Error if shapes do not fit one another, or the heads are not the published ones'."""
    if part.config is not None:
        return TransformerConfig.from_dict(part.config, str(part.config_path))
    shapes = _Shapes(part)
    dim, head_dim = shapes.rows("img_in.weight"), shapes.rows("transformer_blocks.0.attn.norm_q.weight")
    if head_dim != TransformerConfig.attention_head_dim:
        raise shapes.config_needed(f"heads of {head_dim} channels (the published ones have {TransformerConfig.attention_head_dim})")
    channels = shapes.rows("proj_out.weight")
    values = {
        "in_channels": channels,
        "out_channels": channels,
        "num_layers": shapes.count(r"transformer_blocks\.(\d+)\."),
        "num_attention_heads": shapes.ratio("the width by the heads'", dim, head_dim),
        "attention_head_dim": head_dim,
        "context_in_dim": shapes.rows("txt_in.text_norm.weight"),
        "mlp_ratio": shapes.ratio("the MLP's width by the stream's", shapes.rows("transformer_blocks.0.img_mlp.gate_layer.weight"), dim),
    }
    return TransformerConfig.from_dict(values, str(part.source))


def vae_config(part: Part) -> VAEConfig:
    """`time_conv` weights tell the temporal levels; a file without any has the published ones. Raises Qwen21Error if this is a VAE of other latents."""
    if part.config is not None:
        return VAEConfig.from_dict(part.config, str(part.config_path))
    shapes, source = _Shapes(part), part.source
    channels = shapes.rows("post_quant_conv.weight")
    if channels != VAEConfig.z_dim:
        raise Qwen21Error(f"{source} is a VAE of {channels} latent channels, expected {WANTED['vae']}")
    base, levels = shapes.rows("encoder.conv_in.weight"), shapes.count(r"encoder\.down_blocks\.(\d+)\.")
    temporal = (re.search(r"encoder\.down(?:_block|sample)s\.(\d+)\..*time_conv\.", name) for name in part.files.tensors)
    levels_with_time = {int(found[1]) for found in temporal if found}
    values = {
        "base_dim": base,
        "decoder_base_dim": shapes.rows("decoder.norm_out.gamma"),
        "z_dim": channels,
        "dim_mult": [shapes.ratio("a level by the first", shapes.rows(f"encoder.down_blocks.{i}.resnets.0.conv2.weight"), base) for i in range(levels)],
        "num_res_blocks": shapes.count(r"encoder\.down_blocks\.0\.resnets\.(\d+)\."),
        "in_channels": shapes.of("encoder.conv_in.weight", 2)[1],
        "out_channels": shapes.rows("decoder.conv_out.weight"),
        "latents_mean": published.LATENTS_MEAN,
        "latents_std": published.LATENTS_STD,
    }
    if levels_with_time:
        values["temperal_downsample"] = [level in levels_with_time for level in range(levels - 1)]
    return VAEConfig.from_dict(values, str(source))


def encoder_values(part: Part) -> dict:
    """The text encoder's `config.json`, or what it would say. Raises Qwen21Error if the heads or the tower are not the published ones'."""
    if part.config is not None:
        return part.config
    shapes = _Shapes(part)
    head_dim = shapes.rows("language_model.layers.0.self_attn.q_norm.weight")
    if head_dim != published.TEXT_HEAD_DIM:
        raise shapes.config_needed(f"heads of {head_dim} channels (the published ones have {published.TEXT_HEAD_DIM})")
    depth = shapes.count(r"visual\.blocks\.(\d+)\.")
    if depth != published.VISION_DEPTH:
        raise shapes.config_needed(f"a vision tower of {depth} layers (the published one has {published.VISION_DEPTH})")
    widths = (shapes.rows(f"language_model.layers.0.self_attn.{name}.weight") for name in ("q_proj", "k_proj"))
    heads, kv_heads = (shapes.ratio("an attention's width by its heads'", width, head_dim) for width in widths)
    text = {
        "vocab_size": shapes.rows("language_model.embed_tokens.weight"),
        "hidden_size": shapes.rows("language_model.layers.0.input_layernorm.weight"),
        "intermediate_size": shapes.rows("language_model.layers.0.mlp.gate_proj.weight"),
        "num_hidden_layers": shapes.count(r"language_model\.layers\.(\d+)\."),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    width, _, temporal, patch, _ = shapes.of("visual.patch_embed.proj.weight", 5)[:5]
    area = shapes.ratio("a merged patch by the tower's width", shapes.rows("visual.merger.linear_fc1.weight"), width)
    vision = {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": shapes.rows("visual.blocks.0.mlp.linear_fc1.weight"),
        "num_heads": published.VISION_HEADS,
        "patch_size": patch,
        "temporal_patch_size": temporal,
        "spatial_merge_size": round(area**0.5),
        "out_hidden_size": shapes.rows("visual.merger.linear_fc2.weight"),
        "num_position_embeddings": shapes.rows("visual.pos_embed.weight"),
        "deepstack_visual_indexes": published.DEEPSTACK,
    }
    return {"model_type": "qwen3_vl", "text_config": text | published.TEXT, "vision_config": vision, **published.TOKEN_IDS}
