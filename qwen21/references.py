"""How a reference picture gets the size that the vision tower and the VAE see."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from .errors import UsageError
from .pictures import MULTIPLE, area_size, resize

POLICIES = ("auto", "official", "keep")
MAX_KEPT_PIXELS = 4_500_000  # the largest size the publisher names (2752 x 1536) and a little more
# A square reference of exactly this side, on a canvas of the same side, can come back as an over-sharpened near-copy; 32 pixels more do not.
NEAR_COPY_SIDE = 1024


@dataclass(frozen=True)
class Prepared:
    """An RGBA picture whose sides are multiples of 32, the (width, height) of it that is not padding, and what there is to say about it."""

    picture: Image.Image
    size: tuple[int, int]
    note: str | None = None


def prepare(picture: Image.Image, policy: str, resolution: int) -> Prepared:
    """Size an RGBA `picture`.

    "official": resampled to an area of `resolution`^2, sides rounded to 32. "auto": likewise, but a square that would get exactly 1024 x 1024
    gets 1056. "keep": its own pixels, mirrored at the right and bottom up to a multiple of 32. Raises UsageError if it is too large to keep.
    """
    if policy == "keep":
        return _kept(picture)
    width, height = area_size(resolution, *picture.size)
    note = None
    if policy == "auto" and width == height == NEAR_COPY_SIDE:
        width = height = NEAR_COPY_SIDE + MULTIPLE
        note = f"a reference goes to {width} x {height}: at exactly {NEAR_COPY_SIDE} the model may return a near-copy of it"
    return Prepared(resize(picture, width, height), (width, height), note)


def _kept(picture: Image.Image) -> Prepared:
    width, height = picture.size
    if width * height > MAX_KEPT_PIXELS:
        raise UsageError(
            f"a reference is {width} x {height}, size policy 'keep' takes at most {MAX_KEPT_PIXELS / 1e6} megapixels: scale it down first, or choose 'official'"
        )
    right, bottom = -width % MULTIPLE, -height % MULTIPLE
    padded = np.pad(np.asarray(picture), ((0, bottom), (0, right), (0, 0)), mode="symmetric")
    return Prepared(Image.fromarray(padded), (width, height))


def near_copy_warning(canvas: tuple[int, int], references: Sequence[tuple[int, int]]) -> str | None:
    """A sentence if a 1024 x 1024 reference meets a 1024 x 1024 canvas. Sizes are (width, height)."""
    square = (NEAR_COPY_SIDE, NEAR_COPY_SIDE)
    if canvas != square or square not in references:
        return None
    return (
        f"a {NEAR_COPY_SIDE} x {NEAR_COPY_SIDE} reference on a canvas of the same size can come back as an over-sharpened near-copy: "
        f"paint at {NEAR_COPY_SIDE + MULTIPLE} or {NEAR_COPY_SIDE - MULTIPLE} pixels instead"
    )
