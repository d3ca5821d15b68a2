"""Where kernels run, the autoencoder's convolutions in ComfyUI take the core's own way, with weights that ComfyUI lends for a call."""

from contextlib import ExitStack, contextmanager

import comfy.ops
import torch
import torch.nn.functional as F
from graph import close, core, core_vae, counted, equal, opened, replaced
from torch import nn


class Kernels:
    """The autoencoder's kernels in PyTorch: ComfyUI's Python need not have Triton."""

    @staticmethod
    def rms_norm(x, gamma, bias, silu, eps, in_place):
        x = F.normalize(_biased(x, bias), dim=1, eps=eps) * x.shape[1] ** 0.5 * gamma
        return F.silu(x) if silu else x

    @staticmethod
    def add(x, bias, shortcut):
        return _biased(x, bias) + shortcut

    @staticmethod
    def averaged_add(x, bias, large, factor, frames):
        return _biased(x, bias) + core("qwen21.vae").ChannelAverage(x.shape[1], factor, frames == 2)(large)

    @staticmethod
    def upsampled_add(x, bias, small, channels, frames, repeats, phases):
        out = core("qwen21.vae").ChannelRepeat(small.shape[1], channels, frames == 2)(small)
        if not phases:
            return out + _biased(x, bias)
        _, _, rows, columns = small.shape
        for number, phase in enumerate(x.chunk(4, dim=1)):
            top, left = divmod(number, 2)
            out[:, :, top::2, left::2] += _biased(phase[:, :, top : top + rows, left : left + columns], bias)
        return out


def _biased(x, bias):
    return x if bias is None else x + bias[:, None, None]


@contextmanager
def with_kernels():
    """The kernels' way, and lists of what ComfyUI handed over and was given back."""
    with ExitStack() as stack:
        stack.enter_context(replaced(core("qwen21.kernels"), "fusible", lambda x: True))
        stack.enter_context(replaced(core("qwen21.kernels.maps"), "_fused", lambda: Kernels))
        yield tuple(stack.enter_context(counted(comfy.ops, name)) for name in ("cast_bias_weight", "uncast_bias_weight"))


def autoencoder():
    return core("nodes.bridge_vae").load_vae(opened()).first_stage_model


def convolutions(module) -> int:
    return sum(isinstance(one, nn.Conv2d) for one in module.modules())


LATENTS = torch.randn(1, 64, 3, 2, generator=torch.Generator().manual_seed(0))
PIXELS = torch.rand(1, 4, 48, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1


def check_the_cores_own_way_with_lent_weights():
    ours, exact = autoencoder(), core_vae()
    plain = exact.decode(LATENTS), exact.encode(PIXELS)
    with with_kernels() as (lent, back):
        equal(ours.decode(LATENTS), exact.decode(LATENTS), "decoded")
        assert len(lent) == len(back) == convolutions(ours.decoder), (len(lent), len(back))  # the first is called, and one comes before
        equal(ours.encode(PIXELS), exact.encode(PIXELS), "encoded")
        assert len(lent) == len(back) == convolutions(ours) - 3, (len(lent), len(back))  # the encoder's first and last are called too
        close(ours.decode(LATENTS), plain[0], what="decoded")
        close(ours.encode(PIXELS), plain[1], what="encoded")


def check_what_comfyui_copies_for_a_call_is_used_within_it():
    """As with weights that stay in host memory: the copies are overwritten once they are given back."""
    ours, exact = autoencoder(), core_vae()

    def copied(conv, *args, **kwargs):
        return conv.weight.clone(), conv.bias.clone(), None

    def overwrite(conv, weight, bias, stream):
        weight.fill_(torch.nan)
        bias.fill_(torch.nan)

    with with_kernels(), replaced(comfy.ops, "cast_bias_weight", copied), replaced(comfy.ops, "uncast_bias_weight", overwrite):
        equal(ours.decode(LATENTS), exact.decode(LATENTS), "decoded")
        equal(ours.encode(PIXELS), exact.encode(PIXELS), "encoded")


def check_patched_weights_are_lent_patched():
    ours = autoencoder()
    for conv in (ours.decoder.up_blocks[0].upsampler.resample[1], ours.decoder.conv_out, ours.decoder.mid_block.attentions[0].proj):
        conv.weight_function, conv.bias_function = [lambda weight: 1.5 * weight], [lambda bias: bias + 0.25]
    expected = ours.decode(LATENTS)
    with with_kernels():
        close(ours.decode(LATENTS), expected)
        conv.weight_function, conv.bias_function = [], []
        assert not torch.allclose(ours.decode(LATENTS), expected)


def check_a_weight_is_given_back_when_the_convolution_raises():
    conv, maps = autoencoder().decoder.conv_out, core("qwen21.kernels.maps")
    with with_kernels() as (lent, back):
        try:
            maps.convolve(conv, torch.zeros(1, conv.in_channels + 1, 4, 4))
            raise AssertionError("it did not raise")
        except RuntimeError as error:
            assert "channels" in str(error), error
    assert len(lent) == len(back) == 1


def check_seamless_padding_is_seen():
    """Nodes for seamless tiles set `padding_mode`."""
    ours = autoencoder()
    for conv in ours.decoder.modules():
        if isinstance(conv, nn.Conv2d) and conv.kernel_size == (3, 3):
            conv.padding_mode = "circular"
    expected = ours.decode(LATENTS)
    with with_kernels():
        close(ours.decode(LATENTS), expected)
