"""The autoencoder in tiles gives what it gives whole: the halo is all that a tile sees, and no more than that."""

import copy
import math

import pytest
import torch

from qwen21.vae import DECODER_HALO, ENCODER_HALO

ROUNDING = 4e-6  # of the largest value, in float32: a tile's convolutions may be summed in another order
RATIO = 16  # pixels a latent position
SIZES = [(2, 47, 9), (31, 3, 16), (17, 18, 8), (5, 4, 8)]  # rows, columns and tile in latent positions: tiles with a halo on every side, cut, and whole


@pytest.fixture
def latents():
    return lambda rows, columns: torch.randn(1, 64, rows, columns, generator=torch.Generator().manual_seed(rows))


@pytest.fixture
def pixels():
    return lambda rows, columns: 2 * torch.rand(1, 4, RATIO * rows, RATIO * columns, generator=torch.Generator().manual_seed(rows)) - 1


def same(ours: torch.Tensor, whole: torch.Tensor) -> bool:
    return ours.shape == whole.shape and ((ours - whole).abs().max() <= ROUNDING * whole.abs().max()).item()


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("rows, columns, tile", SIZES)
@torch.inference_mode()
def test_tiles_equal_the_whole(vae, latents, pixels, rows, columns, tile):
    assert same(vae.decode(latents(rows, columns), tile), vae.decode(latents(rows, columns)))
    assert same(vae.encode(pixels(rows, columns), RATIO * tile), vae.encode(pixels(rows, columns)))


@torch.inference_mode()
def test_tiles_are_as_exact_as_the_whole_in_half_precision(vae, latents, pixels):
    half = copy.deepcopy(vae).bfloat16()
    for exact, run, x, tile in (
        (vae.decode(latents(17, 18)), half.decode, latents(17, 18), 8),
        (vae.encode(pixels(17, 18)), half.encode, pixels(17, 18), 8 * RATIO),
    ):
        assert error(run(x.bfloat16(), tile).float(), exact) <= 1.05 * error(run(x.bfloat16()).float(), exact)


def spoilt(network, x: torch.Tensor, column: int) -> tuple[int, int]:
    """First and last column of network(x) that column `column` of `x` has a say in: NaN goes wherever it is read."""
    x = x.clone()
    x[..., column] = math.nan
    columns = network(x).isnan().flatten(0, 2).any(dim=0).nonzero().flatten()
    return int(columns[0]), int(columns[-1])


@torch.inference_mode()
def test_the_decoder_sees_as_far_as_its_halo(vae):
    x = torch.ones(1, vae.decoder.conv_in.out_channels, 1, 41)
    first, last = spoilt(vae.decoder.up, x, 20)
    assert first // RATIO == 20 - DECODER_HALO and last // RATIO == 20 + DECODER_HALO


@torch.inference_mode()
def test_the_encoder_sees_as_far_as_its_halo(vae):
    """Which is in whole latents: from the first pixel of one, and from the last."""
    x = torch.ones(1, 4, RATIO, 41 * RATIO)
    halo = ENCODER_HALO // RATIO
    first, _ = spoilt(vae.encoder.down, x, 20 * RATIO)
    _, last = spoilt(vae.encoder.down, x, 21 * RATIO - 1)
    assert first == 20 - halo and last <= 20 + halo
