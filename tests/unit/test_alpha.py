"""Alpha after decoding: snapped at both ends, without arbitrary colour under clear pixels."""

import pytest
import torch

from qwen21.alpha import bleed, composite, snap


def rgba(height=17, width=23, seed=0):
    return torch.rand(2, 4, height, width, generator=torch.Generator().manual_seed(seed))


def test_snap_only_moves_the_ends():
    picture = rgba()
    picture[0, 3, 0, :4] = torch.tensor([248, 247, 4, 5]) / 255
    out = snap(picture)
    assert out[0, 3, 0, 0] == 1 and out[0, 3, 0, 2] == 0
    assert torch.equal(out[0, 3, 0, [1, 3]], picture[0, 3, 0, [1, 3]])
    visible = out[:, 3:] > 0
    assert torch.equal(torch.where(visible, out[:, :3], 0), torch.where(visible, picture[:, :3], 0))


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (32, 32), (17, 23)])
def test_colour_under_clear_pixels_comes_from_around_them(shape):
    rgb = torch.rand(1, 3, *shape, generator=torch.Generator().manual_seed(1))
    known = torch.zeros(1, 1, *shape)
    known[..., 0, 0] = 1
    filled = bleed(rgb, known)
    assert torch.allclose(filled, rgb[:, :, :1, :1].expand_as(rgb), atol=1e-6)


def test_the_edge_decides_its_side():
    rgb = torch.zeros(1, 3, 16, 64)
    rgb[:, 0, :, :8], rgb[:, 2, :, -8:] = 1, 1
    known = torch.zeros(1, 1, 16, 64)
    known[..., :8], known[..., -8:] = 1, 1
    filled = bleed(rgb, known)
    assert filled[0, 0, 8, 9] > 0.8 and filled[0, 2, 8, -10] > 0.8


def test_nothing_known_and_everything_known():
    picture = rgba()[:, :3]
    assert not bleed(picture, torch.zeros(2, 1, 17, 23)).any()
    assert bleed(picture, torch.ones(2, 1, 17, 23)) is picture


def test_composite():
    picture = torch.tensor([0.5, 0.25, 1.0, 0.25]).view(1, 4, 1, 1)
    assert torch.allclose(composite(picture, (1.0, 0.0, 0.0)).flatten(), torch.tensor([0.875, 0.0625, 0.25]))
