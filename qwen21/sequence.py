"""The joint sequence: text runs and picture blocks in order, and where each token stands.

    [text A][reference 1][text B][reference 2] ... [text end] | [target]
    `------------------------ prefix ----------------------'

A picture block is bidirectional inside and sees everything before it; text is causal. Two adjacent pictures stay two blocks.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .errors import Qwen21Error


@dataclass(frozen=True)
class Segment:
    """A run of text tokens (`grid` is None) or one picture's latents (`grid` is (rows, columns))."""

    length: int
    grid: tuple[int, int] | None = None

    @classmethod
    def picture(cls, rows: int, columns: int) -> "Segment":
        return cls(rows * columns, (rows, columns))

    @property
    def is_text(self) -> bool:
        return self.grid is None

    @property
    def advance(self) -> int:
        """How far the running position moves past this segment."""
        return self.length if self.grid is None else max(self.grid)


def prefix_segments(text_tokens: int, image_slots: Sequence[int], grids: Sequence[tuple[int, int]]) -> list[Segment]:
    """Splice pictures into `text_tokens` tokens of text.

    `image_slots[i]` is the index in the text at which picture i, of latent size `grids[i]` = (rows, columns), is inserted. A slot at 0
    or at `text_tokens` is allowed, and so are equal slots: the pictures then follow one another. Raises Qwen21Error when slots and
    pictures differ in number, or when slots fall or lie outside the text.
    """
    if len(image_slots) != len(grids):
        raise Qwen21Error(
            f"the prompt has {len(image_slots)} image slots but {len(grids)} reference latents were given: encode the prompt with the same pictures"
        )
    if any(a > b for a, b in zip([0, *image_slots], [*image_slots, text_tokens])):
        raise Qwen21Error(f"image slots {list(image_slots)} must rise from 0 to at most the {text_tokens} text tokens: encode the prompt again")
    segments, start = [], 0
    for slot, (rows, columns) in zip(image_slots, grids):
        if slot > start:
            segments.append(Segment(slot - start))
        segments.append(Segment.picture(rows, columns))
        start = slot
    if text_tokens > start:
        segments.append(Segment(text_tokens - start))
    return segments


def common_length(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """How many items `a` and `b` have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def bounds(segments: Sequence[Segment]) -> Iterator[tuple[int, int, Segment]]:
    """(first token, one past the last token, segment), in order."""
    end = 0
    for segment in segments:
        start, end = end, end + segment.length
        yield start, end, segment


def positions(segments: Sequence[Segment], start: int = 0) -> torch.Tensor:
    """(frame, row, column) of every token: int64 (tokens, 3). The running position begins at `start`.

    Text advances it by one a token, the same on all three axes. A picture holds the frame axis and lays its grid centred on zero,
    rows -(h - h // 2) ... h // 2 - 1 (so an odd grid has one more row before zero than after it), then advances it by max(h, w).
    """
    pieces = []
    for segment in segments:
        if segment.grid is None:
            pieces.append(torch.arange(start, start + segment.length)[:, None].expand(-1, 3))
        else:
            rows, columns = (torch.arange(n) - (n - n // 2) for n in segment.grid)
            pieces.append(torch.cartesian_prod(torch.tensor([start]), rows, columns))
        start += segment.advance
    return torch.cat(pieces) if pieces else torch.empty(0, 3, dtype=torch.int64)
