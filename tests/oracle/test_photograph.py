"""A real photograph, 451 x 300, through the command."""

from pathlib import Path

import numpy as np
import skimage
from oracle.reference import generate, levels, paint_reference
from PIL import Image


def test_a_photograph_at_512_pixels(model_folder, reference, tmp_path):
    photograph = Path(skimage.data_dir) / "chelsea.png"  # one of those that the package itself carries
    generate("a cat in the snow", "-o", tmp_path / "out.png", "--model", model_folder, "--image", photograph, "--resolution", 512, "--steps", 2)
    ours = Image.open(tmp_path / "out.png")
    assert ours.size == (640, 416)
    theirs = paint_reference(reference, "a cat in the snow", image=Image.open(photograph), resolution=512, steps=2)
    assert np.abs(levels(ours) - theirs).max() <= 1
