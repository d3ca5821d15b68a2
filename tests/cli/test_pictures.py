"""Reference pictures of every kind: what works, and what fails with one line."""

import random
import zlib

import numpy as np
import pytest
from PIL import Image

from qwen21.errors import Qwen21Error
from qwen21.pictures import open_rgba


def png16(path, colour_type: int, levels: np.ndarray) -> None:
    """A 16-bit PNG, (height, width) grey or (height, width, 3) RGB, which Pillow itself does not write."""
    height, width = levels.shape[:2]

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([16, colour_type, 0, 0, 0])
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def gif(path) -> None:
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue")]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def palette(path) -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([255, 0, 0, 0, 0, 255])
    picture.putpixel((1, 0), 1)
    picture.save(path, transparency=bytes([255, 0]))


def rotated(path) -> None:
    picture = Image.new("RGB", (40, 20), "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera turned: the picture stands upright
    picture.save(path, exif=exif)


@pytest.mark.parametrize(
    ("name", "write", "size", "first"),
    [
        ("animated.gif", gif, (40, 30), (255, 0, 0, 255)),
        ("pixel.png", lambda path: Image.new("RGB", (1, 1), (1, 2, 3)).save(path), (1, 1), (1, 2, 3, 255)),
        ("line.png", lambda path: Image.new("L", (5000, 1), 9).save(path), (5000, 1), (9, 9, 9, 255)),
        ("grey16.png", lambda path: png16(path, 0, np.full((2, 3), 0x80FF)), (3, 2), (128, 128, 128, 255)),
        ("rgb16.png", lambda path: png16(path, 2, np.full((2, 3, 3), [0xFFFF, 0x8080, 0])), (3, 2), (255, 128, 0, 255)),
        ("palette.png", palette, (2, 1), (255, 0, 0, 255)),
        ("cmyk.jpg", lambda path: Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(path), (8, 8), (254, 0, 0, 255)),
        ("grey.jpg", lambda path: Image.new("L", (8, 8), 77).save(path), (8, 8), (77, 77, 77, 255)),
        ("grey alpha.png", lambda path: Image.new("LA", (8, 8), (77, 5)).save(path), (8, 8), (77, 77, 77, 5)),
        ("bilevel.png", lambda path: Image.new("1", (8, 8), 1).save(path), (8, 8), (255, 255, 255, 255)),
        ("float.tiff", lambda path: Image.new("F", (8, 8), 200.0).save(path), (8, 8), (200, 200, 200, 255)),
        ("rotated.jpg", rotated, (20, 40), (254, 0, 0, 255)),
        ("Fjord 漢字 🧀.webp", lambda path: Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(path, lossless=True, exact=True), (8, 8), (0, 0, 0, 0)),
    ],
)
def test_pictures_that_work(paint, tmp_path, name, write, size, first):
    write(tmp_path / name)
    picture = open_rgba(tmp_path / name)
    assert (picture.mode, picture.size) == ("RGBA", size)
    assert np.abs(np.subtract(picture.getpixel((0, 0)), first)).max() <= 1
    run = paint("--image", tmp_path / name)
    assert (run.code, run.lines) == (0, [])


@pytest.mark.filterwarnings("error")
def test_a_large_picture_opens_without_a_warning(paint, tmp_path, monkeypatch):
    Image.new("L", (40, 40)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow warns above this, and refuses above twice this
    run = paint("--image", tmp_path / "large.png")
    assert (run.code, run.lines) == (0, [])


def test_a_decompression_bomb_is_refused(paint, tmp_path, monkeypatch):
    Image.new("L", (50, 50)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert "bomb.png cannot be read" in paint("--image", tmp_path / "bomb.png").failed(1)


@pytest.mark.parametrize(("name", "content"), [("absent.png", None), ("empty.png", b""), ("text.png", b"not a picture"), ("folder", "folder")])
def test_what_is_no_picture_is_named(paint, tmp_path, name, content):
    path = tmp_path / name
    path.mkdir() if content == "folder" else path.write_bytes(content) if content is not None else None
    assert f"the picture {path}" in paint("--image", path).failed(1)


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "webp", "tiff", "bmp"])
def test_damaged_pictures_open_or_fail_with_their_name(tmp_path, suffix):
    """Whatever a decoder raises on broken bytes becomes the one error."""
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / f"whole.{suffix}")
    whole = (tmp_path / f"whole.{suffix}").read_bytes()
    chance = random.Random(0)
    failures = 0
    for i in range(80):
        content = bytearray(whole[: chance.randrange(len(whole))] if i % 2 else whole)
        for _ in range(8 if content else 0):
            content[chance.randrange(min(len(content), 200))] = chance.randrange(256)
        path = tmp_path / f"{i}.{suffix}"
        path.write_bytes(content)
        try:
            assert open_rgba(path).mode == "RGBA"
        except Qwen21Error as error:
            failures += 1
            assert str(path) in str(error)
    assert failures
