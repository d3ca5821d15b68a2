"""Reference pictures: files to RGBA, and RGBA to the sizes and value ranges that the vision tower and the VAE read."""

import math
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from .errors import Qwen21Error

MULTIPLE = 32  # pixels: one vision token, two latent rows or columns
MAX_REFERENCES = 10
_TO_RGBA = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX"}  # modes Pillow turns into RGBA in one step


def open_rgba(path: str | Path) -> Image.Image:
    """The picture in `path` as RGBA, rotated as its EXIF says. Of an animation, the first frame.

    Raises Qwen21Error if it cannot be read or has more than twice `Image.MAX_IMAGE_PIXELS` (about 179 million) pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata, and of large pictures that do open
            with Image.open(path) as picture:
                return to_rgba(ImageOps.exif_transpose(picture))
    except FileNotFoundError:
        raise Qwen21Error(f"the picture {path} does not exist: check its name") from None
    except MemoryError:
        raise Qwen21Error(f"the picture {path} does not fit in memory: make it smaller") from None
    except Exception as error:  # Pillow's decoders raise all kinds on damaged files
        raise Qwen21Error(f"the picture {path} cannot be read ({error}): give a PNG, JPEG, WebP or another format that Pillow opens") from None


def to_rgba(picture: Image.Image) -> Image.Image:
    """Any Pillow mode as 8-bit RGBA, transparency of palettes and grey-alpha kept. 16-bit greys keep their top 8 bits' meaning."""
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture).clip(0, 65535) / 257).round().astype(np.uint8))
    return (picture if picture.mode in _TO_RGBA else picture.convert("RGB")).convert("RGBA")


def area_size(resolution: int, width: int, height: int) -> tuple[int, int]:
    """(width, height) of area `resolution`^2 in the proportions of `width` x `height`, each rounded to 32 and at least 32."""
    ratio = width / height
    wide = math.sqrt(resolution * resolution * ratio)
    return tuple(max(MULTIPLE, round(side / MULTIPLE) * MULTIPLE) for side in (wide, wide / ratio))


def resize(picture: Image.Image, width: int, height: int) -> Image.Image:
    """Lanczos; Pillow premultiplies alpha, so colour under clear pixels does not bleed."""
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def flatten(picture: Image.Image) -> Image.Image:
    """RGB over white: what the vision tower was trained on."""
    white = Image.new("RGB", picture.size, (255, 255, 255))
    white.paste(picture, mask=picture.getchannel("A"))
    return white


def to_pixels(picture: Image.Image) -> torch.Tensor:
    """RGBA to float32 (1, 4, height, width) in [-1, 1]."""
    pixels = np.array(picture).astype(np.float32) / 255.0
    return torch.from_numpy(pixels).permute(2, 0, 1)[None] * 2.0 - 1.0


def from_pixels(pixels: torch.Tensor) -> Image.Image:
    """(1, 4, height, width) in [-1, 1] to an RGBA picture, rounded to the nearest of 256 levels."""
    levels = (pixels[0].float() * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0).cpu().numpy() * 255
    return Image.fromarray(levels.round().astype(np.uint8))
