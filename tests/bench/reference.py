"""diffusers' parts of the model, and its pipeline, over the weights of ours."""

import sys
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImage21Pipeline
from diffusers.models import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLModel

from qwen21.checkpoint import TINY_FOLDER, meta_parameters
from qwen21.transformer import QwenImage21Transformer
from qwen21.vae import QwenImage21VAE

sys.path.append(str(Path(__file__).parents[1]))
from oracle.reference import load_processor


def reference_transformer(ours: QwenImage21Transformer) -> QwenImage21Transformer2DModel:
    """Shares its weights with `ours`."""
    c = ours.config
    with meta_parameters():
        model = QwenImage21Transformer2DModel(
            num_layers=c.num_layers,
            attention_head_dim=c.attention_head_dim,
            num_attention_heads=c.num_attention_heads,
            context_in_dim=c.context_in_dim,
            axes_dims_rope=c.axes_dims_rope,
        )
    model.load_state_dict(ours.state_dict(), assign=True)
    return model.to(ours.proj_out.weight.device).eval()


def reference_vae(ours: QwenImage21VAE) -> AutoencoderKLQwenImage21:
    """With copies of the weights of `ours`; what it never uses for a single frame is random."""
    c, like = ours.config, ours.quant_conv.weight
    with torch.device(like.device):
        model = AutoencoderKLQwenImage21(
            base_dim=c.base_dim, decoder_base_dim=c.decoder_base_dim, z_dim=c.z_dim, dim_mult=list(c.dim_mult), num_res_blocks=c.num_res_blocks,
            temperal_downsample=list(c.temperal_downsample), latents_mean=list(c.latents_mean), latents_std=list(c.latents_std),
            is_residual=True, in_channels=c.in_channels, out_channels=c.out_channels, patch_size=None, attn_scales=[],
        )  # fmt: skip
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    unused = model.load_state_dict({name: weight.reshape(shapes[name]) for name, weight in ours.state_dict().items()}, strict=False)
    assert not unused.unexpected_keys and all(".time_conv." in name for name in unused.missing_keys)
    return model.to(like.dtype).eval()


def reference_encoder(ours: Qwen3VLModel) -> Qwen3VLForConditionalGeneration:
    """Around `ours` itself. The words' weights stand in for its head's, which ours does without."""
    with meta_parameters():
        model = Qwen3VLForConditionalGeneration(ours.config)
    model.model = ours
    model.lm_head.weight = ours.language_model.embed_tokens.weight
    return model.eval()


def scheduler(turbo: bool) -> FlowMatchEulerDiscreteScheduler:
    """As published; Turbo's takes its sigmas as they are."""
    return FlowMatchEulerDiscreteScheduler() if turbo else FlowMatchEulerDiscreteScheduler.from_pretrained(TINY_FOLDER / "scheduler")


def reference_pipeline(transformer: QwenImage21Transformer, vae: QwenImage21VAE, encoder: Qwen3VLModel) -> QwenImage21Pipeline:
    """With the tiny checkpoint's tokenizer and schedule."""
    pipeline = QwenImage21Pipeline(
        scheduler=scheduler(turbo=False),
        vae=reference_vae(vae),
        text_encoder=reference_encoder(encoder),
        processor=load_processor(TINY_FOLDER / "processor"),
        transformer=reference_transformer(transformer),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
