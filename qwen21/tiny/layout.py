"""Prompts and pictures of different lengths as arrays of one length: what a batched forward needs to equal the unpadded one.

Everything is right-padded. The encoder's tokens and the denoiser's prefix are gathered from wherever they come (embeddings, vision tokens,
encoder states, reference latents) by index, so every task, from plain captions to three references, is the same computation.
"""

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from .tokens import IMAGE, PAD, template

REFERENCE_TOKENS = 256  # latents of one reference, at most
VISION_TOKENS = REFERENCE_TOKENS // 4
# (rows, columns) of latents. References always have an area near 256 x 256.
REFERENCE_GRIDS = ((16, 16), (12, 20), (20, 12), (14, 18), (18, 14))
SMALL_GRIDS = (*REFERENCE_GRIDS, (8, 8), (10, 10), (12, 12), (8, 16), (16, 8), (10, 24), (24, 10), (8, 32), (32, 8))
LARGE_GRIDS = ((32, 32), (24, 24), (20, 20), (16, 24), (24, 16), (16, 32), (32, 16), (24, 32), (32, 24))
GRIDS = SMALL_GRIDS + LARGE_GRIDS


@dataclass(frozen=True)
class Room:
    """Lengths that a batch is padded to: text tokens without the system turn, references, target latents."""

    text: int
    references: int = 0
    target: int = 256

    @property
    def prefix(self) -> int:
        return self.text + self.references * REFERENCE_TOKENS


ROOMS = {"t2i": Room(56), "large": Room(56, target=1024), "edit": Room(48, 1), "compose": Room(64, 3)}


def padded(values: np.ndarray, length: int, fill: int = 0) -> np.ndarray:
    """`values` (tokens, ...) as int16 of `length`."""
    out = np.full((length, *values.shape[1:]), fill, dtype=np.int16)
    out[: len(values)] = values
    return out


def picture_positions(frame: int, rows: int, columns: int, centred: bool) -> np.ndarray:
    """(rows * columns, 3): the denoiser lays a grid around zero, the encoder counts on from `frame` on all axes."""
    r, c = (side.reshape(-1) for side in np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"))
    offsets = (-(rows - rows // 2), -(columns - columns // 2)) if centred else (frame, frame)
    return np.stack([np.full(rows * columns, frame), r + offsets[0], c + offsets[1]], axis=1)


def text_positions(start: int, length: int) -> np.ndarray:
    return np.repeat(np.arange(start, start + length)[:, None], 3, axis=1)


class Layouter:
    """Prompts to arrays. All indices are int16."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.pad, self.image, self.start = (tokenizer.token_to_id(token) for token in (PAD, IMAGE, "<|im_start|>"))
        ids = tokenizer.encode(template("a", 0)).ids
        self.system = ids.index(self.start, 1)  # tokens of the system turn

    def encoder_length(self, room: Room) -> int:
        return self.system + room.text + room.references * VISION_TOKENS

    def __call__(self, prompt: str, references: list[int], target: int, room: Room) -> dict[str, np.ndarray] | None:
        """The arrays of one sample, pictures given as indices into GRIDS; None if the prompt is too long for the room. Fewer references fit, too.

        ids, vision, text_position: the encoder's tokens (vision: index into the sample's 64-a-picture vision tokens, or -1);
        source, position, block: the prefix's tokens (source: encoder token, or encoder length + 256 * picture + latent; block: picture, or -1);
        length, frame: valid tokens of the prefix, and the running position after it.
        """
        raw = np.array(self.tokenizer.encode(template(prompt, len(references))).ids)
        if len(raw) - self.system - len(references) > room.text:
            return None
        encoder, cut = self.encoder_length(room), np.flatnonzero(raw == self.image)
        ids, vision, places = [], [], []  # encoder
        source, position, block = [], [], []  # prefix
        here = e = p = 0
        for index, piece in enumerate(np.split(raw, cut)):
            if index:
                rows, columns = GRIDS[references[index - 1]]
                tokens = rows * columns // 4
                ids.append(np.full(tokens, self.image))
                vision.append((index - 1) * VISION_TOKENS + np.arange(tokens))
                places.append(picture_positions(e, rows // 2, columns // 2, centred=False))
                source.append(encoder + (index - 1) * REFERENCE_TOKENS + np.arange(rows * columns))
                position.append(picture_positions(p, rows, columns, centred=True))
                block.append(np.full(rows * columns, index - 1))
                here, e, p = here + tokens, e + max(rows, columns) // 2, p + max(rows, columns)
                piece = piece[1:]
            skip = 0 if index else self.system
            ids.append(piece)
            vision.append(np.full(len(piece), -1))
            places.append(text_positions(e, len(piece)))
            source.append(np.arange(here + skip, here + len(piece)))
            position.append(text_positions(p, len(piece) - skip))
            block.append(np.full(len(piece) - skip, -1))
            here, e, p = here + len(piece), e + len(piece), p + len(piece) - skip
        join = np.concatenate
        return {
            "ids": padded(join(ids), encoder, self.pad), "vision": padded(join(vision), encoder, -1), "text_position": padded(join(places), encoder),
            "source": padded(join(source), room.prefix), "position": padded(join(position), room.prefix), "block": padded(join(block), room.prefix, -1),
            "length": np.int16(sum(len(s) for s in source)), "frame": np.int16(p), "reference_grids": padded(np.array(references, dtype=np.int16), room.references), "target_grid": np.int16(target),
        }  # fmt: skip
