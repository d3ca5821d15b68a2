"""What a checkpoint says about itself, read from its own config files into frozen dataclasses.

Defaults are the published model's. A key this code does not act on is ignored; a value it cannot honour is an error that names the key.
"""

import json
import math
import reprlib
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin

from .errors import Qwen21Error

PIPELINE = "QwenImage21Pipeline"  # `_class_name` in the model_index.json of a checkpoint folder


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises Qwen21Error if the file is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Qwen21Error(f"{path} is missing: expected a Qwen-Image 2.1 checkpoint folder in the diffusers layout") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Qwen21Error(f"{path} cannot be read as JSON ({error}): download the file again") from None
    if not isinstance(value, dict):
        raise Qwen21Error(f"{path} holds a JSON {type(value).__name__}, expected an object: download the file again")
    return value


def _known(cls, values: dict[str, Any], source: str):
    """Build `cls` from those of `values` that it has a field for. Lists become tuples; every number must be finite, every int at least 1."""
    chosen = {}
    for field in fields(cls):
        if field.name in values:
            value = values[field.name]
            try:
                chosen[field.name] = _as(field.type, value)
            except (TypeError, ValueError):
                like = f"a value like {field.default!r}" if field.default else "a list of numbers"
                raise Qwen21Error(f"{source}: `{field.name}` is {reprlib.repr(value)}, expected {like}: this is not a Qwen-Image 2.1 config") from None
    return cls(**chosen)


def _as(kind: Any, value: Any) -> Any:
    """`value` from JSON as `kind`: bool, int, float, or a tuple of one of them. Raises TypeError or ValueError if it is none."""
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError
        return tuple(_as(get_args(kind)[0], item) for item in value)
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, int | float):
        raise TypeError
    if not math.isfinite(value) or kind(value) != value or (kind is int and value < 1):
        raise ValueError
    return kind(value)


def _require(source: str, values: dict[str, Any], **expected: Any) -> None:
    for key, want in expected.items():
        if key in values and values[key] != want:
            raise Qwen21Error(f"{source}: `{key}` is {values[key]!r}, Qwen-Image 2.1 has {want!r}: this checkpoint is another model")


@dataclass(frozen=True)
class TransformerConfig:
    """The denoiser (`transformer/config.json`)."""

    in_channels: int = 64
    out_channels: int = 64
    num_layers: int = 32
    num_attention_heads: int = 32
    attention_head_dim: int = 128
    context_in_dim: int = 4096
    mlp_ratio: int = 3
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)
    eps: float = 1e-6

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "transformer config") -> "TransformerConfig":
        _require(source, values, _class_name="QwenImage21Transformer2DModel", patch_size=1, causal_condition=True)
        config = _known(cls, values, source)
        axes = config.axes_dims_rope
        if len(axes) != 3 or any(dim % 2 for dim in axes) or sum(axes) != config.attention_head_dim:
            raise Qwen21Error(
                f"{source}: `axes_dims_rope` {list(axes)} must be three even numbers that add up to "
                f"`attention_head_dim` {config.attention_head_dim}: the config is damaged"
            )
        if config.out_channels != config.in_channels:
            raise Qwen21Error(f"{source}: `out_channels` is {config.out_channels}, expected {config.in_channels} as `in_channels`: the config is damaged")
        return config


@dataclass(frozen=True)
class VAEConfig:
    """The RGBA autoencoder (`vae/config.json`). `temperal_downsample` is spelled as in the checkpoints."""

    base_dim: int = 96
    decoder_base_dim: int = 144
    z_dim: int = 64
    dim_mult: tuple[int, ...] = (1, 2, 4, 8, 8)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True, True)
    in_channels: int = 4
    out_channels: int = 4
    latents_mean: tuple[float, ...] = ()
    latents_std: tuple[float, ...] = ()

    @property
    def spatial_ratio(self) -> int:
        """Pixels a latent row or column stands for (16 in the published model)."""
        return 2 ** (len(self.dim_mult) - 1)

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "VAE config") -> "VAEConfig":
        if values.get("decoder_base_dim", 0) is None:
            values = values | {"decoder_base_dim": values.get("base_dim")}
        if values.get("z_dim", 64) != 64:
            raise Qwen21Error(
                f"{source}: `z_dim` is {values['z_dim']}, Qwen-Image 2.1 has a 64-channel VAE: take the vae folder of a Qwen-Image 2.1 checkpoint"
            )
        _require(source, values, _class_name="AutoencoderKLQwenImage21", in_channels=4, out_channels=4, is_residual=True, patch_size=None, attn_scales=[])
        config = _known(cls, values, source)
        for key in ("latents_mean", "latents_std"):
            if len(getattr(config, key)) != config.z_dim:
                raise Qwen21Error(f"{source}: `{key}` has {len(getattr(config, key))} values, expected {config.z_dim}: the config is damaged")
        for key in ("dim_mult", "temperal_downsample"):
            found, expected = len(getattr(config, key)), len(getattr(cls, key))
            if found != expected:
                raise Qwen21Error(f"{source}: `{key}` has {found} values, expected {expected} (the picture is 16 times the latents' size): this is another VAE")
        if min(config.latents_std) <= 0:
            raise Qwen21Error(f"{source}: `latents_std` holds {min(config.latents_std)}, expected numbers above 0: the config is damaged")
        return config


@dataclass(frozen=True)
class ScheduleConfig:
    """Flow-matching sigmas (`scheduler/scheduler_config.json`). `shift_terminal` 0 leaves the schedule unstretched."""

    base_image_seq_len: int = 256
    max_image_seq_len: int = 8192
    base_shift: float = 0.5
    max_shift: float = 0.9
    shift: float = 1.0
    use_dynamic_shifting: bool = True
    shift_terminal: float = 0.02

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "scheduler config") -> "ScheduleConfig":
        for key in ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas", "stochastic_sampling"):
            _require(source, values, **{key: False})
        if values.get("use_dynamic_shifting", True):
            _require(source, values, time_shift_type="exponential")
        config = _known(cls, {"shift_terminal": 0.0} | values | ({"shift_terminal": 0.0} if values.get("shift_terminal", 0) is None else {}), source)
        if not 0 <= config.shift_terminal < 1:
            raise Qwen21Error(f"{source}: `shift_terminal` is {config.shift_terminal}, expected at least 0 and less than 1: the config is damaged")
        if config.shift <= 0:
            raise Qwen21Error(f"{source}: `shift` is {config.shift}, expected more than 0: the config is damaged")
        if config.base_image_seq_len == config.max_image_seq_len:
            raise Qwen21Error(
                f"{source}: `base_image_seq_len` and `max_image_seq_len` are both {config.max_image_seq_len}, expected two sizes: the config is damaged"
            )
        return config


@dataclass(frozen=True)
class ModelIndex:
    """`model_index.json`: which sigmas the checkpoint brings (Turbo) and the picture size it was made for."""

    sample_sigmas: tuple[float, ...] = ()
    native_resolution: int = 1024

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "model_index.json") -> "ModelIndex":
        _require(source, values, _class_name=PIPELINE)
        config = _known(cls, values | {"sample_sigmas": values.get("sample_sigmas") or []}, source)
        falling = (1.0, *config.sample_sigmas, 0.0)
        if any(a < b for a, b in pairwise(falling)) or 0 in config.sample_sigmas:
            raise Qwen21Error(f"{source}: `sample_sigmas` {list(config.sample_sigmas)} must fall from at most 1 towards 0: the file is damaged")
        if config.native_resolution < 32:
            raise Qwen21Error(f"{source}: `native_resolution` is {config.native_resolution}, expected at least 32 pixels: the file is damaged")
        return config
