"""The autoencoder's Triton kernels against plain PyTorch: on a GPU if there is one, else in Triton's interpreter."""

import copy
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="needs Triton")

from qwen21 import kernels
from qwen21.kernels import maps
from qwen21.vae import ChannelAverage, ChannelRepeat, ResidualBlock

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def float32_convolutions():
    """Not in TF32, as cuDNN does unless told otherwise."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@pytest.fixture
def both(monkeypatch):
    """`both(function)`: its result with kernels and without, channels together for the first."""

    def run(function, *tensors: torch.Tensor):
        with monkeypatch.context() as patched, torch.inference_mode():
            patched.setattr(kernels, "fusible", lambda x: True)
            ours = function(*(x.clone().contiguous(memory_format=torch.channels_last) for x in tensors))
        with monkeypatch.context() as patched, torch.inference_mode():
            patched.setattr(kernels, "fusible", lambda x: False)
            return ours, function(*(x.clone() for x in tensors))

    return run


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.shape == theirs.shape and ((ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()).item()


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("channels", [12, 64])
def test_norm(both, silu, in_place, channels):
    gamma = random(channels, 1, 1, seed=1)
    assert close(*both(lambda x: maps.rms_norm(x, gamma, None, silu, in_place), random(2, channels, 5, 3)))


def test_norm_of_nothing_is_nothing(both):
    ours, _ = both(lambda x: maps.rms_norm(x, torch.ones(8, 1, 1, device=DEVICE)), torch.zeros(1, 8, 2, 2, device=DEVICE))
    assert not ours.any()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [12, 40])  # padded, and not
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_convolution_and_the_bias_behind_it(both, kernel, outputs, bias):
    conv = nn.Conv2d(8, outputs, kernel, padding=kernel // 2, bias=bias, device=DEVICE)
    gamma = random(outputs, 1, 1, seed=1)
    assert close(*both(lambda x: maps.rms_norm(*_swapped(gamma, *maps.convolve(conv, x))), random(1, 8, 6, 5)))
    assert close(*both(lambda x, shortcut: maps.add(*maps.convolve(conv, x), shortcut), random(1, 8, 6, 5), random(1, outputs, 6, 5, seed=2)))


def _swapped(gamma, x, bias):
    return x, gamma, bias


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel, stride", [(1, 1), (3, 1), (3, 2), (1, 2)])
@pytest.mark.parametrize("outputs", [4, 12, 40])
@pytest.mark.parametrize("view", ["together", "slice", "rows first"])
def test_a_convolution_as_a_whole(both, view, outputs, kernel, stride, bias):
    conv = nn.Conv2d(8, outputs, kernel, stride, padding=kernel // 2, bias=bias, device=DEVICE)
    views = {"together": lambda x: x, "slice": lambda x: x[:, :, 1:6, 2:], "rows first": lambda x: x.contiguous()}
    x = random(2, 8, 7, 5)
    ours, theirs = both(lambda x: maps.convolved(conv, views[view](x)), x)
    assert close(ours, theirs)
    assert torch.equal(theirs, conv(views[view](x)))


def test_few_outputs_are_padded_and_1x1_is_no_convolution(monkeypatch):
    monkeypatch.setattr(kernels, "fusible", lambda x: True)
    with mock.patch.object(maps.F, "conv2d", wraps=maps.F.conv2d) as conv2d:
        for outputs, kernel in ((4, 3), (32, 3), (40, 3), (4, 1)):
            maps.convolved(nn.Conv2d(8, outputs, kernel, device=DEVICE), random(1, 8, 5, 5))
    assert [call.args[1].shape[0] for call in conv2d.call_args_list] == [32, 32, 40]


class HostConv(nn.Conv2d):
    """A host's: its weights are no use in its own hands."""

    def forward(self, x):
        return 2 * super().forward(x)


class LendingConv(HostConv):
    """Lends what it computes with, and takes back the weight."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lent, self.back = [], 0

    @contextmanager
    def lend(self, x):
        self.lent.append(2 * self.weight)
        try:
            yield self.lent[-1], None if self.bias is None else 2 * self.bias
        finally:
            self.lent[-1].fill_(torch.nan)
            self.back += 1


@pytest.mark.parametrize("kernel", [1, 3])
def test_convolutions_of_a_host_are_called(both, kernel):
    conv = HostConv(8, 4, kernel, device=DEVICE)
    x = random(1, 8, 6, 5)
    assert all(close(y, 2 * nn.Conv2d.forward(conv, x)) for y in both(lambda x: maps.convolved(conv, x), x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel, outputs", [(1, 12), (3, 12), (3, 40)])
def test_convolutions_of_a_host_that_lends_are_as_the_cores_own(both, kernel, outputs, bias):
    conv = LendingConv(8, outputs, kernel, padding=kernel // 2, bias=bias, device=DEVICE)
    x, shortcut = random(1, 8, 6, 5), random(1, outputs, 6, 5, seed=2)
    ours, theirs = both(lambda x, shortcut: maps.add(*maps.convolve(conv, x), shortcut), x, shortcut)
    assert close(ours, theirs) and conv.back == len(conv.lent) == 1


def test_a_lent_weight_is_given_back_when_the_convolution_raises(monkeypatch):
    monkeypatch.setattr(kernels, "fusible", lambda x: True)
    upsample = nn.Sequential(nn.Upsample(scale_factor=2.0), LendingConv(8, 8, 3, padding=1, device=DEVICE))
    for number, run in enumerate((lambda x: maps.convolve(upsample[1], x), lambda x: maps.upsampled_add(upsample, x, None, x)), start=1):
        with pytest.raises(RuntimeError, match="channels"):
            run(random(1, 7, 4, 4))
        assert upsample[1].back == len(upsample[1].lent) == number


CHANGES = {
    "circular padding": lambda conv: setattr(conv, "padding_mode", "circular"),
    "a hook": lambda conv: conv.register_forward_hook(lambda module, inputs, y: 2 * y),
    "another forward": lambda conv: setattr(conv, "forward", lambda x: nn.Conv2d.forward(conv, 3 * x)),
    "another convolution": lambda conv: setattr(conv, "_conv_forward", lambda x, weight, bias: nn.functional.conv2d(3 * x, weight, bias, padding=1)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [nn.Conv2d, LendingConv])
def test_a_convolution_that_was_changed_is_called(both, kind, change):
    conv = kind(8, 8, 3, padding=1, device=DEVICE)
    upsample, shortcut = nn.Sequential(nn.Upsample(scale_factor=2.0), conv), ChannelRepeat(8, 8, False)
    x = random(1, 8, 4, 4)
    before = conv(x)
    CHANGES[change](conv)
    ours, theirs = both(lambda x: maps.convolved(conv, x), x)
    assert close(ours, theirs) and not close(ours, before)
    assert close(*both(lambda x: maps.upsampled_add(upsample, x, shortcut, x), x))


@pytest.mark.parametrize("outputs", [8, 12])
def test_a_residual_block(both, outputs):
    block = ResidualBlock(8, outputs, nn, device=DEVICE)
    for i, parameter in enumerate(block.parameters()):
        parameter.data = random(*parameter.shape, seed=i)
    assert close(*both(block, random(2, 8, 5, 3)))
    assert close(*both(lambda x: block(x[:, :, 1:, :2]), random(2, 8, 5, 3)))


@pytest.mark.parametrize("temporal", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 8), (12, 6)])
@pytest.mark.parametrize("kind", [nn.Conv2d, HostConv, LendingConv])
def test_upsampling(both, inputs, outputs, temporal, kind):
    conv = kind(outputs, outputs, 3, padding=1, device=DEVICE)
    upsample = nn.Sequential(nn.Upsample(scale_factor=2.0, mode="nearest-exact"), conv)
    shortcut = ChannelRepeat(inputs, outputs, temporal)
    h, small = random(2, outputs, 3, 5), random(2, inputs, 3, 5, seed=1)
    assert close(*both(lambda h, small: maps.upsampled_add(upsample, h, shortcut, small), h, small))
    assert kind is not LendingConv or conv.back == len(conv.lent) == 1


@pytest.mark.parametrize(("inputs", "outputs", "factor", "temporal"), [(8, 8, 2, False), (8, 16, 2, True), (8, 8, 2, True), (8, 8, 1, False), (8, 4, 1, False)])
def test_averaging(both, inputs, outputs, factor, temporal):
    shortcut, bias = ChannelAverage(outputs, factor, temporal), random(outputs, seed=2)

    def run(x, large):
        return maps.averaged_add(x if kernels.fusible(x) else x + bias[:, None, None], bias, shortcut, large)

    assert close(*both(run, random(2, outputs, 3, 5), random(2, inputs, 3 * factor, 5 * factor, seed=1)))


@pytest.mark.parametrize("tile", [None, 32])
def test_the_whole_autoencoder(both, vae, tile):
    vae = copy.deepcopy(vae).to(DEVICE)
    ours, theirs = both(lambda pixels: vae.encode(pixels, tile), random(1, 4, 64, 32).clamp(-1, 1))
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    ours, theirs = both(lambda latents: vae.decode(latents, tile and tile // 16), theirs)
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
