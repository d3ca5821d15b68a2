"""The diffusers pipeline as the oracle: loaded from the same folder, asked for the same things."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImage21Pipeline
from diffusers.models import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel
from diffusers.models.transformers import transformer_qwenimage21
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from PIL import Image
from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from qwen21.__main__ import main
from qwen21.text_encoder import PictureProcessor

CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"


class NoVideo:
    model_input_names = ()
    merge_size = temporal_patch_size = 2


class StillProcessor(Qwen3VLProcessor):
    """Qwen3VLProcessor that takes any part: the stock video processor needs torchvision, and no test has a video."""

    def check_argument_for_proper_class(self, name, argument):
        return type(argument)


def load_processor(folder: Path) -> StillProcessor:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    for name, token in (("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end")):
        setattr(tokenizer, f"{name}_token", f"<|{token}|>")
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{token}|>"))
    pictures = PictureProcessor.from_pretrained(folder)
    return StillProcessor(image_processor=pictures, tokenizer=tokenizer, video_processor=NoVideo(), chat_template=CHAT_TEMPLATE)


def load_reference(folder: Path) -> QwenImage21Pipeline:
    pipeline = QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        vae=AutoencoderKLQwenImage21.from_pretrained(folder / "vae"),
        text_encoder=Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=torch.float32),
        processor=load_processor(folder / "processor"),
        transformer=QwenImage21Transformer2DModel.from_pretrained(folder / "transformer"),
        sample_sigmas=json.loads((folder / "model_index.json").read_text()).get("sample_sigmas"),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def levels(picture: Image.Image) -> np.ndarray:
    """Grey levels of all four channels, signed so that they can be subtracted."""
    return np.asarray(picture.convert("RGBA")).astype(int)


def paint_reference(pipeline: QwenImage21Pipeline, prompt: str, *, seed: int = 0, steps: int = 4, resolution: int = 96, **options) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return levels(pipeline(prompt, num_inference_steps=steps, output_resolution=resolution, generator=generator, **options).images[0])


def generate(*arguments: str | os.PathLike | float) -> None:
    """`python -m qwen21 generate`, in this process, in float32 on the CPU."""
    assert main(["generate", *map(str, arguments), "--device", "cpu", "--dtype", "float32"]) == 0


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def rows_of(latents: torch.Tensor) -> torch.Tensor:
    """(batch, channels, rows, columns) to the reference's (batch, tokens, channels)."""
    return latents.flatten(2).transpose(1, 2)


@torch.inference_mode()
def reference_velocity(
    model: QwenImage21Transformer2DModel,
    context: torch.Tensor,
    image_slots: Sequence[int],
    references: Sequence[torch.Tensor],
    target: torch.Tensor,
    sigma: float,
    cache: QwenImage21KVCache | None = None,
    mode: str | None = None,
) -> torch.Tensor:
    """The reference's velocity for any layout, also those its pipeline never makes.

    Stock, each slot of its `img_mask` stands for 2 x 2 latent tokens, which rules out odd grids between text. The factor is one module
    constant; with 1 instead of 4 there is a slot for each latent token and every grid can be put anywhere, while embedding,
    positions, block ids, attention and modulation run as they are. Its forward still appends target / 4 slots by itself, so the states
    hold places for the rest of the target; whatever stands in an image's place is overwritten.
    """
    batch, tokens = target.shape[0], target[0, 0].numel()
    pieces, mask, start = [], [], 0
    for slot, latents in zip([*image_slots, context.shape[1]], [*references, target]):
        size = latents[0, 0].numel()
        pieces += [context[:, start:slot], context.new_zeros(1, size, context.shape[2])]
        mask += [False] * (slot - start) + [True] * size
        start = slot
    states = torch.cat(pieces, dim=1)[:, : len(mask) - tokens // 4].expand(batch, -1, -1)
    t = torch.full((batch,), 1000 * float(torch.tensor(sigma, dtype=torch.float32))).to(target.dtype) / 1000
    with mock.patch.object(transformer_qwenimage21, "_IMG_TOKENS_PER_SLOT", 1):
        out = model(
            hidden_states=torch.cat([rows_of(latents).expand(batch, -1, -1) for latents in (*references, target)], dim=1),
            encoder_hidden_states=states,
            timestep=t,
            img_shapes=[[(1, *latents.shape[2:]) for latents in (*references, target)]] * batch,
            img_mask=torch.tensor([mask]),
            kv_cache=cache,
            kv_cache_mode=mode,
            return_dict=False,
        )[0]
    return out[:, -tokens:].transpose(1, 2).unflatten(2, target.shape[2:])
