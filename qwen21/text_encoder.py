"""Qwen3-VL reads the prompt together with the pictures and gives the denoiser's text states.

What reaches the denoiser: the last decoder layer's output BEFORE the final norm, without the system turn, and without the vision tokens,
whose places are kept as `image_slots` for the VAE's latents. The network is transformers' own; this file owns the template, the
positions and the bookkeeping, so that 4.57 and 5.x behave alike.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import nn
from transformers import DynamicCache
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

try:  # transformers 5 keeps the Pillow version (no torchvision) in a module of its own
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as PictureProcessor
except ImportError:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as PictureProcessor

from tokenizers import Tokenizer

from .errors import UsageError
from .pictures import MAX_REFERENCES, flatten

SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
USER = "<|im_start|>user\n{references}{prompt}<|im_end|>\n<|im_start|>assistant\n"
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


def template(prompt: str, pictures: int) -> str:
    """The text that is tokenized: system turn, then a user turn that begins with the references. An empty prompt becomes a space."""
    for token in VISION_TOKENS:
        if token in prompt:
            raise UsageError(f"the prompt contains the vision token {token}, which only the template may place: remove it from the prompt")
    if pictures > MAX_REFERENCES:
        raise UsageError(f"{pictures} reference pictures were given, the model takes at most {MAX_REFERENCES}: leave some out")
    references = " ".join(f"<image{i}>{VISION}" for i in range(1, pictures + 1))
    return SYSTEM + USER.format(references=references, prompt=prompt or " ")


@dataclass(frozen=True)
class Encoding:
    """One prompt's text states (1, tokens, hidden), where each reference's latents go, and the token ids behind the states."""

    states: torch.Tensor
    image_slots: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class VisionFeatures:
    """What the tower makes of all pictures: merged tokens (vision tokens, hidden), the DeepStack taps, tokens (rows, columns) a picture."""

    tokens: torch.Tensor
    deepstack: list[torch.Tensor]
    grids: list[tuple[int, int]]


class TextEncoder:
    """Runs a transformers Qwen3VLModel on `device`, computing in `dtype`, over what its tokenizer and picture processor prepare."""

    def __init__(
        self,
        model: Qwen3VLModel,
        tokenizer: Tokenizer,
        picture_processor: PictureProcessor,
        device: torch.device = torch.device("cpu"),
        dtype: torch.dtype = torch.float32,
    ):
        self.model, self.tokenizer, self.picture_processor = model, tokenizer, picture_processor
        self.device, self.dtype = device, dtype
        model.language_model.norm = nn.Identity()  # the states are wanted before it
        self.image_token = tokenizer.token_to_id("<|image_pad|>")
        self.turn_token = tokenizer.token_to_id("<|im_start|>")
        self._cache_argument = "cache" if "cache" in inspect.signature(type(model.language_model).forward).parameters else "past_key_values"

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str], pictures: Sequence[Image.Image] = ()) -> list[Encoding]:
        """Encode each prompt with the same RGBA `pictures` (as `pictures.resize` leaves them: the VAE must see the same pixels).

        The vision tower runs once, and what a prompt shares with the one before it is not computed again.
        """
        features = self._see(pictures) if pictures else None
        encodings, cache, past_ids, states = [], DynamicCache(), [], None
        for prompt in prompts:
            ids = self._token_ids(template(prompt, len(pictures)), features.grids if features else [])
            common = min(_common_length(ids, past_ids), len(ids) - 1)
            if common < len(past_ids):
                cache.crop(common - len(past_ids))  # a negative number is what to remove, in transformers 4.57 and 5
            new = self._run(ids, common, features, cache)
            states = new if common == 0 else torch.cat([states[:, :common], new], dim=1)
            encodings.append(self._strip(ids, states))
            past_ids = ids
        return encodings

    def _see(self, pictures: Sequence[Image.Image]) -> VisionFeatures:
        """Run the vision tower on each picture over white. The processor resizes only what lies outside its limits of area."""
        patches, patch_grids = [], []
        for picture in pictures:
            inside = self.picture_processor.size["shortest_edge"] <= picture.width * picture.height <= self.picture_processor.size["longest_edge"]
            prepared = self.picture_processor(images=[flatten(picture)], do_resize=not inside, return_tensors="pt")
            patches.append(prepared["pixel_values"])
            patch_grids.append(prepared["image_grid_thw"])
        out = self.model.visual(torch.cat(patches).to(self.device, self.dtype), grid_thw=torch.cat(patch_grids).to(self.device))
        tokens, deepstack = out if isinstance(out, tuple) else (out.pooler_output, out.deepstack_features)
        merge = self.picture_processor.merge_size
        return VisionFeatures(tokens, list(deepstack), [(int(rows) // merge, int(columns) // merge) for _, rows, columns in torch.cat(patch_grids)])

    def _token_ids(self, text: str, grids: Sequence[tuple[int, int]]) -> list[int]:
        """The ids of `text`, each `<|image_pad|>` repeated once a vision token of its picture."""
        sizes = iter(grids)
        ids = []
        for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
            rows, columns = next(sizes) if token == self.image_token else (1, 1)
            ids.extend([token] * (rows * columns))
        return ids

    def _run(self, ids: list[int], common: int, features: VisionFeatures | None, cache: DynamicCache) -> torch.Tensor:
        """Hidden states (1, len(ids) - common, hidden) of `ids[common:]`, `cache` holding the keys and values of the rest."""
        language = self.model.language_model
        new = torch.tensor([ids[common:]], device=self.device)
        embeds = language.embed_tokens(new).to(self.dtype)
        vision = {}
        is_picture = new == self.image_token
        if is_picture.any():
            # References come before the instruction, so prompts over the same pictures differ only behind them: all are new, or none.
            embeds = embeds.masked_scatter(is_picture[..., None], features.tokens.to(self.dtype))
            vision = {"visual_pos_masks": is_picture, "deepstack_visual_embeds": features.deepstack}
        position_ids = self._positions(ids, features.grids if features else [])[:, None, common:].to(self.device)
        out = language(inputs_embeds=embeds, position_ids=position_ids, use_cache=True, **{self._cache_argument: cache}, **vision)
        return out.last_hidden_state

    def _positions(self, ids: list[int], grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        """int64 (4, tokens): the plain index, then Qwen3-VL's frame, row and column positions.

        A text token takes the running position on all axes; a picture lays its rows and columns from it, then it advances by the longer.
        """
        sizes, pieces, position, i = iter(grids), [], 0, 0
        while i < len(ids):
            if ids[i] == self.image_token:
                rows, columns = next(sizes)
                pieces.append(torch.cartesian_prod(torch.tensor([0]), torch.arange(rows), torch.arange(columns)).T + position)
                position, i = position + max(rows, columns), i + rows * columns
            else:
                pieces.append(torch.full((3, 1), position))
                position, i = position + 1, i + 1
        return torch.cat([torch.arange(len(ids))[None], torch.cat(pieces, dim=1)])

    def _strip(self, ids: list[int], states: torch.Tensor) -> Encoding:
        """Drop the system turn and the vision tokens."""
        first = ids.index(self.turn_token, ids.index(self.turn_token) + 1)
        kept, slots = [], []
        for i in range(first, len(ids)):
            if ids[i] != self.image_token:
                kept.append(i)
            elif ids[i - 1] != self.image_token:
                slots.append(len(kept))
        return Encoding(states[:, kept], tuple(slots), tuple(ids[i] for i in kept))


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
