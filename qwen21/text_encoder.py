"""Qwen3-VL reads the prompt together with the pictures and gives the denoiser's text states.

What reaches the denoiser: the last decoder layer's output BEFORE the final norm, without the system turn, and without the vision tokens,
whose places are kept as `image_slots` for the VAE's latents. The network is transformers' own; this file owns the template, the
positions and the bookkeeping, so that 4.57 and 5.x behave alike.
"""

import hashlib
import inspect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

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
from .sequence import common_length

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
    """One prompt's text states (1, tokens, hidden), where each reference's latents go, and the token ids behind the states.

    `keys` holds one entry a token, equal where ids and pictures up to there are: for one encoder, equal keys mean equal states.
    """

    states: torch.Tensor
    image_slots: tuple[int, ...]
    token_ids: tuple[int, ...]
    keys: tuple[Hashable, ...]


@dataclass(frozen=True)
class PictureFeatures:
    """What the tower makes of a picture: merged tokens (rows * columns, hidden), the DeepStack taps, and (rows, columns)."""

    tokens: torch.Tensor
    deepstack: list[torch.Tensor]
    grid: tuple[int, int]


@dataclass
class _Past:
    """The last sequence: what identifies each of its tokens, keys and values of every layer, and states (1, tokens, hidden)."""

    keys: list[Hashable] = field(default_factory=list)
    cache: DynamicCache = field(default_factory=DynamicCache)
    states: torch.Tensor | None = None


class TextEncoder:
    """Runs a transformers Qwen3VLModel on `device`, computing in `dtype`, over what its tokenizer and picture processor prepare.

    With `remember`, pictures and the last sequence stay known from one call to the next, until `forget`: a new instruction on the same
    pictures then costs its own tokens only.
    """

    def __init__(
        self,
        model: Qwen3VLModel,
        tokenizer: Tokenizer,
        picture_processor: PictureProcessor,
        device: torch.device = torch.device("cpu"),
        dtype: torch.dtype = torch.float32,
        remember: bool = False,
    ):
        self.model, self.tokenizer, self.picture_processor = model, tokenizer, picture_processor
        self.device, self.dtype, self.remember = device, dtype, remember
        self.forget()
        model.language_model.norm = nn.Identity()  # the states are wanted before it
        self.image_token = tokenizer.token_to_id("<|image_pad|>")
        self.turn_token = tokenizer.token_to_id("<|im_start|>")
        self._cache_argument = "cache" if "cache" in inspect.signature(type(model.language_model).forward).parameters else "past_key_values"

    def forget(self) -> None:
        """Drop what is remembered."""
        self._past = _Past()
        self._seen: dict[bytes, PictureFeatures] = {}

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str], pictures: Sequence[Image.Image] = ()) -> list[Encoding]:
        """Encode each prompt with the same RGBA `pictures` (as `pictures.resize` leaves them: the VAE must see the same pixels).

        The vision tower runs once a picture, and what a prompt shares with the one before it is not computed again.
        """
        complete = False
        try:
            digests = [picture_digest(picture) for picture in pictures]
            features = self._features(pictures, digests)
            encodings = [self._encode(prompt, features, digests) for prompt in prompts]
            complete = True
            return encodings
        finally:
            if not (complete and self.remember):
                self.forget()

    def _encode(self, prompt: str, features: Sequence[PictureFeatures], digests: Sequence[bytes]) -> Encoding:
        ids = self._token_ids(template(prompt, len(features)), features)
        keys = self._keys(ids, features, digests)
        past = self._past
        common = min(common_length(keys, past.keys), len(ids) - 1)
        if common < len(past.keys):
            past.cache.crop(common - len(past.keys))  # a negative number is what to remove, in transformers 4.57 and 5
        new = self._run(ids, common, features, past.cache)
        past.states = new if common == 0 else torch.cat([past.states[:, :common], new], dim=1)
        past.keys = keys
        return self._strip(ids, keys, past.states)

    def _features(self, pictures: Sequence[Image.Image], digests: Sequence[bytes]) -> list[PictureFeatures]:
        """The tower's features of each picture; only those not seen before are looked at."""
        new = {digest: picture for picture, digest in zip(pictures, digests) if digest not in self._seen}
        if new:
            self._seen.update(zip(new, self._see(list(new.values()))))
        self._seen = {digest: self._seen[digest] for digest in digests}
        return [self._seen[digest] for digest in digests]

    def _see(self, pictures: Sequence[Image.Image]) -> list[PictureFeatures]:
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
        grids = [(int(rows) // merge, int(columns) // merge) for _, rows, columns in torch.cat(patch_grids)]
        sizes = [rows * columns for rows, columns in grids]
        taps = zip(*(tap.split(sizes) for tap in deepstack))
        return [PictureFeatures(*parts) for parts in zip(tokens.split(sizes), map(list, taps), grids, strict=True)]

    def _keys(self, ids: Sequence[int], features: Sequence[PictureFeatures], digests: Sequence[bytes]) -> list[Hashable]:
        """What identifies each token beside its forerunners: its id, or the picture it is of."""
        pictures = iter([digest for one, digest in zip(features, digests) for _ in range(one.grid[0] * one.grid[1])])
        return [next(pictures) if token == self.image_token else token for token in ids]

    def _token_ids(self, text: str, features: Sequence[PictureFeatures]) -> list[int]:
        """The ids of `text`, each `<|image_pad|>` repeated once a vision token of its picture."""
        pictures = iter(features)
        ids = []
        for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
            rows, columns = next(pictures).grid if token == self.image_token else (1, 1)
            ids.extend([token] * (rows * columns))
        return ids

    def _run(self, ids: list[int], common: int, features: Sequence[PictureFeatures], cache: DynamicCache) -> torch.Tensor:
        """Hidden states (1, len(ids) - common, hidden) of `ids[common:]`, `cache` holding the keys and values of the rest."""
        language = self.model.language_model
        new = torch.tensor([ids[common:]], device=self.device)
        embeds = language.embed_tokens(new).to(self.dtype)
        vision = {}
        is_picture = new == self.image_token
        if is_picture.any():
            known = ids[:common].count(self.image_token)
            tokens, *deepstack = (torch.cat(parts)[known:] for parts in zip(*([one.tokens, *one.deepstack] for one in features)))
            embeds = embeds.masked_scatter(is_picture[..., None], tokens.to(self.dtype))
            vision = {"visual_pos_masks": is_picture, "deepstack_visual_embeds": deepstack}
        position_ids = self._positions(ids, [one.grid for one in features])[:, None, common:].to(self.device)
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

    def _strip(self, ids: list[int], keys: Sequence[Hashable], states: torch.Tensor) -> Encoding:
        """Drop the system turn and the vision tokens."""
        first = ids.index(self.turn_token, ids.index(self.turn_token) + 1)
        kept, slots, seen, text_keys = [], [], b"", []
        for i in range(first, len(ids)):
            if ids[i] != self.image_token:
                kept.append(i)
                text_keys.append((ids[i], seen))
            elif ids[i - 1] != self.image_token:
                slots.append(len(kept))
                seen = hashlib.sha256(seen + keys[i]).digest()
        return Encoding(states[:, kept], tuple(slots), tuple(ids[i] for i in kept), tuple(text_keys))


def picture_digest(picture: Image.Image) -> bytes:
    """What a picture's size, mode and pixels are recognised by."""
    return hashlib.sha256(repr((picture.size, picture.mode)).encode() + picture.tobytes()).digest()
