"""What a checkpoint says about itself, read from its own config files into frozen dataclasses.

Defaults are the published model's. A key this code does not act on is ignored; a value it cannot honour is an error that names the key.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .errors import Qwen21Error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises Qwen21Error if the file is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Qwen21Error(f"{path} is missing: expected a Qwen-Image 2.1 checkpoint folder in the diffusers layout") from None
    except (OSError, ValueError) as error:
        raise Qwen21Error(f"{path} cannot be read as JSON ({error}): download the file again") from None
    if not isinstance(value, dict):
        raise Qwen21Error(f"{path} holds a JSON {type(value).__name__}, expected an object: download the file again")
    return value


def _known(cls, values: dict[str, Any], source: str):
    """Build `cls` from those of `values` that it has a field for. Lists become tuples; types must match the defaults'."""
    chosen = {}
    for field in fields(cls):
        if field.name not in values:
            continue
        value, default = values[field.name], field.default
        value = tuple(value) if isinstance(value, list) else value
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = number if isinstance(default, (int, float)) and not isinstance(default, bool) else isinstance(value, type(default))
        if default is not None and not fits:
            raise Qwen21Error(f"{source}: `{field.name}` is {value!r}, expected a value like {default!r}: this is not a Qwen-Image 2.1 config")
        chosen[field.name] = value
    return cls(**chosen)


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
        if len(config.axes_dims_rope) != 3 or sum(config.axes_dims_rope) != config.attention_head_dim:
            raise Qwen21Error(
                f"{source}: `axes_dims_rope` {list(config.axes_dims_rope)} must be three numbers that add up to "
                f"`attention_head_dim` {config.attention_head_dim}: the config is damaged"
            )
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
            values = values | {"decoder_base_dim": values["base_dim"]}
        if values.get("z_dim", 64) != 64:
            raise Qwen21Error(f"{source}: `z_dim` is {values['z_dim']}, Qwen-Image 2.1 has a 64-channel VAE: take the vae folder of a Qwen-Image 2.1 checkpoint")
        _require(source, values, _class_name="AutoencoderKLQwenImage21", in_channels=4, out_channels=4, is_residual=True, patch_size=None, attn_scales=[])
        config = _known(cls, values, source)
        for key in ("latents_mean", "latents_std"):
            if len(getattr(config, key)) != config.z_dim:
                raise Qwen21Error(f"{source}: `{key}` has {len(getattr(config, key))} values, expected {config.z_dim}: the config is damaged")
        if len(config.temperal_downsample) != len(config.dim_mult) - 1:
            raise Qwen21Error(f"{source}: `temperal_downsample` has {len(config.temperal_downsample)} values, expected {len(config.dim_mult) - 1}: the config is damaged")
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
        return _known(cls, {"shift_terminal": 0.0} | values | ({"shift_terminal": 0.0} if values.get("shift_terminal", 0) is None else {}), source)


@dataclass(frozen=True)
class ModelIndex:
    """`model_index.json`: which sigmas the checkpoint brings (Turbo) and the picture size it was made for."""

    sample_sigmas: tuple[float, ...] = ()
    native_resolution: int = 1024

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "model_index.json") -> "ModelIndex":
        _require(source, values, _class_name="QwenImage21Pipeline")
        sigmas = values.get("sample_sigmas") or []
        if not all(isinstance(s, (int, float)) and 0 < s <= 1 for s in sigmas) or list(sigmas) != sorted(sigmas, reverse=True):
            raise Qwen21Error(f"{source}: `sample_sigmas` {sigmas} must fall from at most 1 towards 0: the file is damaged")
        return _known(cls, values | {"sample_sigmas": list(sigmas)}, source)
