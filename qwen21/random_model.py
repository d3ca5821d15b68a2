"""A small checkpoint of the same architecture with random weights, in the diffusers layout.

For tests and first steps: it loads wherever the real one does and paints coloured noise. The weights are large enough that a changed
letter, reference or seed moves the picture by tens of grey levels, so that comparing pictures means something.
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from .config import TransformerConfig, VAEConfig
from .errors import Qwen21Error
from .schedule import TURBO_SIGMAS
from .text_encoder import Qwen3VLModel
from .transformer import QwenImage21Transformer
from .vae import QwenImage21VAE

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
HIDDEN = 64
TRANSFORMER = TransformerConfig(num_layers=4, num_attention_heads=4, attention_head_dim=32, context_in_dim=HIDDEN, axes_dims_rope=(8, 12, 12))
VAE = VAEConfig(base_dim=8, decoder_base_dim=12)


def make_random(folder: str | Path, seed: int = 0, turbo: bool = False, resolution: int = 256) -> Path:
    """Write the checkpoint (about 14 MB, float32) to `folder`, which must not exist or be empty. The same seed gives the same weights."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Qwen21Error(f"{folder} is there already: name a new folder, nothing was written")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = _tokenizer()
        _write_encoder(folder / "text_encoder", tokenizer)
        _write(
            folder / "transformer", "QwenImage21Transformer2DModel", asdict(TRANSFORMER) | {"patch_size": 1, "causal_condition": True}, _transformer_weights()
        )
        statistics = {"latents_mean": torch.randn(VAE.z_dim).tolist(), "latents_std": (torch.rand(VAE.z_dim) + 0.5).tolist()}
        _write(
            folder / "vae", "AutoencoderKLQwenImage21", asdict(VAE) | statistics | {"is_residual": True, "patch_size": None, "attn_scales": []}, _vae_weights()
        )
    _write_processor(folder / "processor", tokenizer)
    _write_schedule(folder / "scheduler", turbo)
    index = {
        "_class_name": "QwenImage21Pipeline",
        "processor": ["transformers", "Qwen3VLProcessor"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
        "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage21"],
        "native_resolution": resolution,
    }
    _write_json(folder / "model_index.json", index | ({"sample_sigmas": TURBO_SIGMAS} if turbo else {}))
    return folder


def _transformer_weights() -> dict[str, torch.Tensor]:
    model = QwenImage21Transformer(TRANSFORMER)
    gains = {"proj_out.weight": 1.5, "to_out.0.weight": 2.0}
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            gain = next((value for ending, value in gains.items() if name.endswith(ending)), 1.2)
            nn.init.normal_(weight, std=gain / weight.shape[1] ** 0.5)
        elif name.endswith(("norm_q.weight", "norm_k.weight")):
            nn.init.uniform_(weight, 1.5, 3.0)  # sharp attention: what is attended to decides the picture
        else:
            nn.init.normal_(weight, std=0.1)
    return model.state_dict()


def _vae_weights() -> dict[str, torch.Tensor]:
    model = QwenImage21VAE(VAE)
    for name, weight in model.named_parameters():
        if weight.ndim == 4:
            nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
        elif name.endswith("gamma"):
            nn.init.normal_(weight, mean=1.0, std=0.1)
        else:
            nn.init.normal_(weight, std=0.1)
    model.decoder.conv_out.weight.data.mul_(0.6)  # keeps most of the picture away from the clamp at -1 and 1
    weights = model.state_dict()
    for name in [name for name in weights if name.endswith("gamma") and ".attentions." not in name]:
        weights[name] = weights[name][..., None]  # as published: these are norms over video
    return weights | _unused_time_convolutions(model)


def _unused_time_convolutions(model: QwenImage21VAE) -> dict[str, torch.Tensor]:
    """Published checkpoints hold these for their temporal levels; no single picture goes through them."""
    weights, count = {}, len(VAE.temperal_downsample)
    for level, temporal in enumerate(VAE.temperal_downsample):
        if not temporal:
            continue
        down, up = f"encoder.down_blocks.{level}.downsampler", f"decoder.up_blocks.{count - 1 - level}.upsampler"
        for name, factor in ((down, 1), (up, 2)):
            channels = model.get_submodule(name).resample[1].out_channels
            weights[f"{name}.time_conv.weight"] = torch.zeros(channels * factor, channels, 1, 1)
            weights[f"{name}.time_conv.bias"] = torch.zeros(channels * factor)
    return weights


def _tokenizer() -> Tokenizer:
    """Bytes, and the model's special tokens."""
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def _write_encoder(folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import Qwen3VLConfig

    config = Qwen3VLConfig(
        text_config={
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": HIDDEN,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 8192,
            "rope_theta": 5000000,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
        },
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": HIDDEN,
            "deepstack_visual_indexes": [1, 2, 3],
            "num_position_embeddings": 256,
        },
        tie_word_embeddings=True,
        **{
            f"{name}_token_id": tokenizer.token_to_id(f"<|{token}|>")
            for name, token in (("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end"))
        },
    )
    model = Qwen3VLModel(config)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=1.0 if "embed_tokens" in name else weight[0].numel() ** -0.5)
        else:
            nn.init.normal_(weight, mean=1.0 if "norm" in name and name.endswith("weight") else 0.0, std=0.1)
    folder.mkdir(parents=True)
    _write_json(folder / "config.json", config.to_dict() | {"architectures": ["Qwen3VLForConditionalGeneration"]})
    save_file({f"model.{name}": value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors", metadata={"format": "pt"})


def _write_processor(folder: Path, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"})
    pictures = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    limits = {"shortest_edge": 32 * 32, "longest_edge": 16384 * 32 * 32}  # areas in pixels, whatever the names say
    _write_json(folder / "preprocessor_config.json", pictures | {"image_processor_type": "Qwen2VLImageProcessor", "size": limits})


def _write_schedule(folder: Path, turbo: bool) -> None:
    folder.mkdir(parents=True)
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0, "time_shift_type": "exponential"}
    dynamic = {"base_image_seq_len": 256, "max_image_seq_len": 8192, "base_shift": 0.5, "max_shift": 0.9, "shift_terminal": 0.02}
    _write_json(folder / "scheduler_config.json", config | {"use_dynamic_shifting": not turbo} | ({} if turbo else dynamic))


def _write(folder: Path, class_name: str, config: dict, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    _write_json(folder / "config.json", {"_class_name": class_name} | config)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
