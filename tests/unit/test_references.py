"""Sizes that reference pictures get."""

import numpy as np
import pytest
from PIL import Image

from qwen21.errors import UsageError
from qwen21.references import near_copy_warning, prepare


def picture(width, height):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 4), dtype=np.uint8))


def test_official_resamples_to_the_area():
    prepared = prepare(picture(300, 200), "official", 256)
    assert prepared.picture.size == prepared.size == (320, 224) and prepared.note is None


def test_only_a_square_of_exactly_1024_is_moved():
    assert prepare(picture(700, 700), "auto", 1024).size == (1056, 1056)
    assert "1056" in prepare(picture(700, 700), "auto", 1024).note
    assert prepare(picture(700, 700), "official", 1024).size == (1024, 1024)
    assert prepare(picture(700, 500), "auto", 1024).size == prepare(picture(700, 500), "official", 1024).size
    assert prepare(picture(64, 64), "auto", 256).note is None


@pytest.mark.parametrize("size", [(1, 1), (31, 33), (64, 96), (5, 70)])
def test_keep_keeps_every_pixel_and_mirrors_the_rest(size):
    original = picture(*size)
    prepared = prepare(original, "keep", 256)
    padded, pixels = np.asarray(prepared.picture), np.asarray(original)
    assert prepared.size == size and all(side % 32 == 0 for side in prepared.picture.size)
    assert np.array_equal(padded[: size[1], : size[0]], pixels)
    if padded.shape[1] > size[0] + 1 > 2:
        assert np.array_equal(padded[0, size[0]], pixels[0, size[0] - 1])
        assert np.array_equal(padded[0, size[0] + 1], pixels[0, size[0] - 2])


def test_too_large_to_keep():
    with pytest.raises(UsageError, match="3000 x 2000"):
        prepare(Image.new("RGBA", (3000, 2000)), "keep", 1024)


def test_near_copy_is_only_warned_about_where_it_happens():
    square = (1024, 1024)
    assert "1056" in near_copy_warning(square, [(512, 512), square])
    assert near_copy_warning((1056, 1056), [square]) is None
    assert near_copy_warning(square, [(1056, 1056)]) is None
