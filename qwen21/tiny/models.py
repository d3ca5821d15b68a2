"""The tiny networks before training: their sizes and their initial weights."""

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from ..config import TransformerConfig
from ..transformer import QwenImage21Transformer

HIDDEN = 192
TRANSFORMER = TransformerConfig(num_layers=8, num_attention_heads=2, context_in_dim=HIDDEN)


def text_encoder_config(tokenizer: Tokenizer) -> Qwen3VLConfig:
    """A Qwen3-VL of 2.4 M parameters with a real vision tower and DeepStack into the language model's first three layers."""
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]}
    return Qwen3VLConfig(
        text_config={
            "vocab_size": tokenizer.get_vocab_size(), "hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64,
            "max_position_embeddings": 8192, "rope_theta": 5000000, "rope_scaling": rope, "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": HIDDEN,
            "deepstack_visual_indexes": [1, 2, 3], "num_position_embeddings": 256,
        },
        tie_word_embeddings=True,
        **{f"{name}_token_id": tokenizer.token_to_id(f"<|{token}|>") for name, token in (
            ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end"))},
    )  # fmt: skip


def new_text_encoder(tokenizer: Tokenizer) -> Qwen3VLModel:
    """Random weights of unit gain; branches of the language model start at half."""
    model = Qwen3VLModel(text_encoder_config(tokenizer))
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            nn.init.normal_(weight, std=0.5)
        elif "pos_embed" in name:
            nn.init.normal_(weight, std=0.3)
        elif weight.ndim > 1:
            half = 0.5 if "language_model" in name and ("o_proj" in name or "down_proj" in name) else 1.0
            nn.init.normal_(weight, std=half * weight[0].numel() ** -0.5)
        elif "norm" in name and name.endswith("weight"):
            nn.init.ones_(weight)
        else:
            nn.init.zeros_(weight)
    return model


def new_transformer() -> QwenImage21Transformer:
    """Random weights: small branches, open gates (std 1 before the tanh), scales near 1, a velocity of zero."""
    model = QwenImage21Transformer(TRANSFORMER)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            nn.init.constant_(weight, 0.0 if name == "txt_in.text_norm.weight" else 1.0)
        elif name == "proj_out.weight":
            nn.init.zeros_(weight)
        else:
            branch = (2 * TRANSFORMER.num_layers) ** -0.5 if "to_out" in name or "img_mlp.out" in name else 1.0
            nn.init.normal_(weight, std=(0.01 if name == "norm_out.linear.weight" else branch * weight.shape[1] ** -0.5))
    with torch.no_grad():
        features = nn.functional.silu(model.time_text_embed(torch.linspace(0, 1, 64)))
        size = features.square().sum(1).mean().sqrt()
        for index, std in enumerate((0.1, 1.0, 0.1, 1.0)):  # scale, gate, scale, gate
            model.modulation[1].weight[index * TRANSFORMER.dim : (index + 1) * TRANSFORMER.dim].normal_(0, float(std / size))
    return model
