"""Reference pictures of every kind become RGBA of the right size and values."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from qwen21.pictures import area_size, flatten, from_pixels, open_rgba, resize, to_pixels, to_rgba

RED, HALF_RED = (255, 0, 0, 255), (255, 0, 0, 128)


def grey(level: int) -> tuple[int, int, int, int]:
    return (level, level, level, 255)


def array_picture(kind, *values) -> Image.Image:
    return Image.fromarray(np.array([values], dtype=kind))


def palette(mode: str) -> Image.Image:
    """Two pixels: red, and blue that is clear."""
    picture = Image.new("P", (2, 1))
    picture.putpalette([255, 0, 0, 0, 0, 255])
    picture.putdata([0, 1])
    if mode == "P":
        picture.info["transparency"] = 1
        return picture
    picture = picture.convert("PA")
    picture.putalpha(Image.fromarray(np.array([[255, 0]], dtype=np.uint8)))
    return picture


MODES = {
    "1": (Image.fromarray(np.array([[False, True]])), [grey(0), grey(255)]),
    "L": (array_picture(np.uint8, 0, 77), [grey(0), grey(77)]),
    "LA": (Image.merge("LA", [array_picture(np.uint8, 9, 77), array_picture(np.uint8, 0, 200)]), [(9, 9, 9, 0), (77, 77, 77, 200)]),
    "P": (palette("P"), [RED, (0, 0, 255, 0)]),
    "PA": (palette("PA"), [RED, (0, 0, 255, 0)]),
    "I;16": (array_picture(np.uint16, 0, 257 * 128, 65535), [grey(0), grey(128), grey(255)]),
    "I": (array_picture(np.int32, 0, 257 * 128, 65535), [grey(0), grey(128), grey(255)]),
    "F": (array_picture(np.float32, 0, 128, 255), [grey(0), grey(128), grey(255)]),
    "CMYK": (Image.new("CMYK", (2, 1), (0, 255, 255, 0)), [RED, RED]),
    "YCbCr": (Image.new("YCbCr", (1, 1), (128, 128, 128)), [grey(128)]),
    "RGB": (Image.new("RGB", (1, 1), RED[:3]), [RED]),
    "RGBA": (Image.new("RGBA", (1, 1), HALF_RED), [HALF_RED]),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgba(mode):
    picture, expected = MODES[mode]
    assert picture.mode == mode
    rgba = to_rgba(picture)
    assert rgba.mode == "RGBA" and rgba.size == picture.size
    assert np.asarray(rgba).reshape(-1, 4).tolist() == [list(pixel) for pixel in expected]


FILES = [("1", "png"), ("L", "jpg"), ("LA", "png"), ("P", "png"), ("P", "gif"), ("I;16", "png"), ("I;16", "tiff"), ("F", "tiff"), ("CMYK", "jpg")]


@pytest.mark.parametrize("mode, suffix", FILES)
def test_files_of_every_kind_open(tmp_path, mode, suffix):
    picture, expected = MODES[mode]
    picture.save(tmp_path / f"picture.{suffix}")
    opened = np.asarray(open_rgba(tmp_path / f"picture.{suffix}")).reshape(-1, 4).astype(int)
    visible = opened[:, 3:] > 0
    assert np.abs((opened - expected) * visible).max() <= (20 if suffix == "jpg" else 0)


@given(resolution=st.integers(32, 2048), width=st.integers(1, 5000), height=st.integers(1, 5000))
def test_size_is_the_area_in_the_pictures_proportions(resolution, width, height):
    wide, high = area_size(resolution, width, height)
    exact = (resolution * (width / height) ** 0.5, resolution * (height / width) ** 0.5)
    assert wide % 32 == high % 32 == 0 and min(wide, high) >= 32
    assert all(abs(side - want) <= 16 + 1e-6 or (side == 32 and want < 32) for side, want in zip((wide, high), exact))


@pytest.mark.parametrize("size", [(5000, 1), (1, 5000), (1, 1)])
@pytest.mark.parametrize("resolution", [32, 512, 1024])
def test_extreme_pictures_have_a_size_and_can_be_resized(size, resolution):
    wide, high = area_size(resolution, *size)
    assert min(wide, high) >= 32
    picture = resize(Image.new("RGBA", size, HALF_RED), wide, high)
    assert picture.size == (wide, high)
    assert picture.getcolors() == [(wide * high, HALF_RED)]


def test_colour_under_clear_pixels_does_not_bleed():
    left, both = Image.new("RGBA", (8, 8), RED), Image.new("RGBA", (16, 8), (0, 255, 0, 0))
    both.paste(left, (0, 0))
    pixels = np.asarray(resize(both, 8, 4))
    assert pixels[..., 1][pixels[..., 3] > 8].max() <= 8


def test_flattening_puts_white_behind():
    assert flatten(Image.new("RGBA", (1, 1), (255, 0, 0, 0))).getpixel((0, 0)) == (255, 255, 255)
    assert flatten(Image.new("RGBA", (1, 1), HALF_RED)).getpixel((0, 0)) == (255, 127, 127)


def test_pixels_and_back():
    levels = np.arange(1024, dtype=np.int64).reshape(16, 16, 4) % 256
    picture = Image.fromarray(levels.astype(np.uint8))
    pixels = to_pixels(picture)
    assert pixels.shape == (1, 4, 16, 16) and pixels.dtype == torch.float32
    assert pixels[0, 3, 2, 1].item() == pytest.approx(levels[2, 1, 3] / 127.5 - 1, abs=1e-6)
    assert np.array_equal(np.asarray(from_pixels(pixels)), levels)


def test_pixels_are_rounded_to_the_nearest_level():
    values = torch.tensor([127.4, 127.6, 300.0, -5.0]) / 127.5 - 1
    assert np.asarray(from_pixels(values.reshape(1, 4, 1, 1))).reshape(-1).tolist() == [127, 128, 255, 0]
