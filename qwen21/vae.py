"""The RGBA autoencoder: pixels (batch, 4, height, width) in [-1, 1] to 64-channel latents 16 times smaller, and back.

It is the single-frame case of a causal video VAE, written as the plain 2-D network that remains: temporal kernels are 1, `time_conv`
weights are never used for one frame, and of a temporal level's shortcut only the part that one frame reaches is left (see
ChannelAverage and ChannelRepeat). Parameters carry the names of the published checkpoint.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from .config import VAEConfig
from .errors import Qwen21Error
from .kernels import maps

# How far a result of Decoder.up (in latent positions) and of Encoder.down (in pixels, rounded up to whole latents) can see. The
# published depth: per level, two 3x3 convolutions a residual block, and one that changes the size.
DECODER_HALO = 13
ENCODER_HALO = 144


def tiled(network: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tile: int | None, halo: int, scale: float) -> torch.Tensor:
    """network(x) in tiles of `tile` x `tile` input positions, each computed with `halo` more on every side, which is cut off again.

    Equal to the whole, without seams, when nothing in `network` sees further than `halo`. `scale` is output size by input size;
    `tile` and `halo` times `scale` must be whole. None: no tiles.
    """
    if tile is None:
        return network(x)
    height, width = x.shape[2:]
    out = None
    for top in range(0, height, tile):
        for left in range(0, width, tile):
            bottom, right = min(top + tile, height), min(left + tile, width)
            first_row, first_column = max(top - halo, 0), max(left - halo, 0)
            piece = network(x[:, :, first_row : bottom + halo, first_column : right + halo])
            if out is None:
                out = piece.new_empty(*piece.shape[:2], int(height * scale), int(width * scale))
            rows, columns = (slice(int(a * scale), int(b * scale)) for a, b in ((top, bottom), (left, right)))
            row, column = int((top - first_row) * scale), int((left - first_column) * scale)
            out[:, :, rows, columns] = piece[:, :, row : row + rows.stop - rows.start, column : column + columns.stop - columns.start]
    return out


class RMSNorm2d(nn.Module):
    """x / |x| * sqrt(channels) * gamma over the channels, in fp32 for half types."""

    def __init__(self, channels: int, device=None, dtype=None):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels, 1, 1, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None, silu: bool = False, in_place: bool = False) -> torch.Tensor:
        """Adds `bias` before and applies SiLU after, if wanted; `x` may be written to if `in_place`."""
        return maps.rms_norm(x, self.gamma, bias, silu, in_place)


class ResidualBlock(nn.Module):
    """Two normed 3x3 convolutions beside the input, (batch, inputs, rows, columns) to (batch, outputs, rows, columns)."""

    def __init__(self, inputs: int, outputs: int, operations, **factory):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm2d(inputs, **factory), RMSNorm2d(outputs, **factory)
        self.conv1 = operations.Conv2d(inputs, outputs, 3, padding=1, **factory)
        self.conv2 = operations.Conv2d(outputs, outputs, 3, padding=1, **factory)
        self.conv_shortcut = operations.Conv2d(inputs, outputs, 1, **factory) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, bias = maps.convolve(self.conv1, self.norm1(x, silu=True))
        h, bias = maps.convolve(self.conv2, self.norm2(h, bias, silu=True, in_place=True))
        return maps.add(h, bias, maps.convolved(self.conv_shortcut, x))


class AttentionBlock(nn.Module):
    """Single-head self-attention over all positions, with a residual."""

    def __init__(self, channels: int, operations, **factory):
        super().__init__()
        self.norm = RMSNorm2d(channels, **factory)
        self.to_qkv = operations.Conv2d(channels, 3 * channels, 1, **factory)
        self.proj = operations.Conv2d(channels, channels, 1, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = maps.convolved(self.to_qkv, self.norm(x))
        q, k, v = rearrange(qkv, "batch (three channels) rows columns -> three batch 1 (rows columns) channels", three=3)
        h = F.scaled_dot_product_attention(q, k, v)
        return x + maps.convolved(self.proj, rearrange(h, "batch 1 (rows columns) channels -> batch channels rows columns", rows=x.shape[2]))


class MidBlock(nn.Module):
    """Residual block, attention, residual block, at the latents' size: the only part that sees the whole picture."""

    def __init__(self, channels: int, operations, **factory):
        super().__init__()
        self.resnets = nn.ModuleList(ResidualBlock(channels, channels, operations, **factory) for _ in range(2))
        self.attentions = nn.ModuleList([AttentionBlock(channels, operations, **factory)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class ChannelAverage(nn.Module):
    """Shortcut of a down level: 2x2 pixels (and 2 frames if temporal) go into channels, which are averaged in groups.

    A single frame is padded with a zero frame IN FRONT, so in a temporal level half of what is averaged is zero.
    """

    def __init__(self, outputs: int, factor: int, temporal: bool):
        super().__init__()
        self.outputs, self.factor, self.temporal = outputs, factor, temporal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pixel_unshuffle(x, self.factor)
        if self.temporal:
            frame = rearrange(x, "batch (channels pixels) rows columns -> batch channels pixels rows columns", pixels=self.factor**2)
            x = torch.cat([torch.zeros_like(frame), frame], dim=2).flatten(1, 2)
        return rearrange(x, "batch (outputs group) rows columns -> batch outputs group rows columns", outputs=self.outputs).mean(dim=2)


class ChannelRepeat(nn.Module):
    """Shortcut of an up level: channels are repeated and laid out as 2x2 pixels (and 2 frames if temporal, of which the last is kept)."""

    def __init__(self, inputs: int, outputs: int, temporal: bool):
        super().__init__()
        self.frames = 2 if temporal else 1
        self.repeats = outputs * 4 * self.frames // inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.repeat_interleave(self.repeats, dim=1)
        x = rearrange(x, "batch (channels frames pixels) rows columns -> batch channels frames pixels rows columns", frames=self.frames, pixels=4)
        return F.pixel_shuffle(x[:, :, -1].flatten(1, 2), 2)


class Downsample(nn.Module):
    """Half the size by a stride-2 convolution, padded at the right and the bottom only."""

    def __init__(self, channels: int, operations, **factory):
        super().__init__()
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), operations.Conv2d(channels, channels, 3, stride=2, **factory))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.resample(x)


class Upsample(nn.Module):
    """Twice the size by repeating pixels, then a convolution."""

    def __init__(self, channels: int, operations, **factory):
        super().__init__()
        self.resample = nn.Sequential(nn.Upsample(scale_factor=2.0, mode="nearest-exact"), operations.Conv2d(channels, channels, 3, padding=1, **factory))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.resample(x)


class DownBlock(nn.Module):
    """Residual blocks, then half the size (except in the last level), beside a parameter-free shortcut."""

    def __init__(self, inputs: int, outputs: int, blocks: int, temporal: bool, last: bool, operations, **factory):
        super().__init__()
        self.avg_shortcut = ChannelAverage(outputs, 1 if last else 2, temporal)
        self.resnets = nn.ModuleList(ResidualBlock(inputs if i == 0 else outputs, outputs, operations, **factory) for i in range(blocks))
        self.downsampler = nn.Identity() if last else Downsample(outputs, operations, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for resnet in self.resnets:
            h = resnet(h)
        return maps.averaged_add(*self.downsampled(h), self.avg_shortcut, x)

    def downsampled(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The convolution's result and what of its bias is left to add."""
        if isinstance(self.downsampler, nn.Identity):
            return x, None
        pad, conv = self.downsampler.resample
        return maps.convolve(conv, pad(x))


class UpBlock(nn.Module):
    """Residual blocks, then twice the size beside a parameter-free shortcut (except in the last level, which has neither)."""

    def __init__(self, inputs: int, outputs: int, blocks: int, temporal: bool, last: bool, operations, **factory):
        super().__init__()
        self.avg_shortcut = None if last else ChannelRepeat(inputs, outputs, temporal)
        self.resnets = nn.ModuleList(ResidualBlock(inputs if i == 0 else outputs, outputs, operations, **factory) for i in range(blocks))
        self.upsampler = None if last else Upsample(outputs, operations, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for resnet in self.resnets:
            h = resnet(h)
        return h if self.upsampler is None else maps.upsampled_add(self.upsampler.resample, h, self.avg_shortcut, x)


class Encoder(nn.Module):
    """Pixels (batch, 4, height, width) to mean and log-variance before `quant_conv`, (batch, 128, height / 16, width / 16)."""

    def __init__(self, config: VAEConfig, operations, **factory):
        super().__init__()
        widths = [config.base_dim * multiple for multiple in (1, *config.dim_mult)]
        temporal = (*config.temperal_downsample, False)
        last = len(config.dim_mult) - 1
        self.conv_in = operations.Conv2d(config.in_channels, widths[0], 3, padding=1, **factory)
        self.down_blocks = nn.ModuleList(
            DownBlock(widths[i], widths[i + 1], config.num_res_blocks, temporal[i], i == last, operations, **factory) for i in range(last + 1)
        )
        self.mid_block = MidBlock(widths[-1], operations, **factory)
        self.norm_out = RMSNorm2d(widths[-1], **factory)
        self.conv_out = operations.Conv2d(widths[-1], 2 * config.z_dim, 3, padding=1, **factory)

    def down(self, x: torch.Tensor) -> torch.Tensor:
        """Everything before the middle: what only looks at a neighbourhood."""
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        x = tiled(self.down, x, tile, ENCODER_HALO, 1 / 2 ** (len(self.down_blocks) - 1))
        return self.conv_out(self.norm_out(self.mid_block(x), silu=True, in_place=True))


class Decoder(nn.Module):
    """What `post_quant_conv` gives, (batch, 64, rows, columns), to unclamped pixels (batch, 4, 16 rows, 16 columns)."""

    def __init__(self, config: VAEConfig, operations, **factory):
        super().__init__()
        widths = [config.decoder_base_dim * multiple for multiple in (config.dim_mult[-1], *reversed(config.dim_mult))]
        temporal = (*reversed(config.temperal_downsample), False)
        last = len(config.dim_mult) - 1
        self.conv_in = operations.Conv2d(config.z_dim, widths[0], 3, padding=1, **factory)
        self.mid_block = MidBlock(widths[0], operations, **factory)
        self.up_blocks = nn.ModuleList(
            UpBlock(widths[i], widths[i + 1], config.num_res_blocks + 1, temporal[i], i == last, operations, **factory) for i in range(last + 1)
        )
        self.norm_out = RMSNorm2d(widths[-1], **factory)
        self.conv_out = operations.Conv2d(widths[-1], config.out_channels, 3, padding=1, **factory)

    def up(self, x: torch.Tensor) -> torch.Tensor:
        """Everything after the middle: what only looks at a neighbourhood."""
        for block in self.up_blocks:
            x = block(x)
        return maps.convolved(self.conv_out, self.norm_out(x, silu=True, in_place=True))

    def forward(self, z: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        return tiled(self.up, self.mid_block(self.conv_in(z)), tile, DECODER_HALO, 2 ** (len(self.up_blocks) - 1))


class QwenImage21VAE(nn.Module):
    """The autoencoder of Qwen-Image 2.1. `operations` supplies Conv2d."""

    def __init__(self, config: VAEConfig, operations=nn, device=None, dtype=None):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.config = config
        self.encoder = Encoder(config, operations, **factory)
        self.quant_conv = operations.Conv2d(2 * config.z_dim, 2 * config.z_dim, 1, **factory)
        self.post_quant_conv = operations.Conv2d(config.z_dim, config.z_dim, 1, **factory)
        self.decoder = Decoder(config, operations, **factory)

    def moments(self, pixels: torch.Tensor, tile: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and log-variance of the latents' distribution, each (batch, 64, height / 16, width / 16)."""
        ratio = self.config.spatial_ratio
        if pixels.ndim != 4 or pixels.shape[1] != self.config.in_channels or pixels.shape[2] % ratio or pixels.shape[3] % ratio:
            raise Qwen21Error(
                f"the VAE was given pixels of shape {tuple(pixels.shape)}, expected (batch, {self.config.in_channels}, height, width) with sides that "
                f"are multiples of {ratio}: resize or pad the picture"
            )
        return maps.convolved(self.quant_conv, self.encoder(maps.arranged(pixels), tile)).chunk(2, dim=1)

    def encode(self, pixels: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        """Latents (batch, 64, height / 16, width / 16) of `pixels` (batch, 4, height, width) in [-1, 1]: the mode, NOT normalised.

        `tile` (pixels, a multiple of 16) takes less memory and more time for the same result.
        """
        return self.moments(pixels, tile)[0]

    def decode(self, latents: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        """Pixels (batch, 4, 16 rows, 16 columns) in [-1, 1] of `latents` (batch, 64, rows, columns) that are NOT normalised.

        `tile` (latent positions) takes less memory and more time for the same result.
        """
        if latents.ndim != 4 or latents.shape[1] != self.config.z_dim:
            raise Qwen21Error(
                f"the VAE was given latents of shape {tuple(latents.shape)}, expected (batch, {self.config.z_dim}, rows, columns): they come from another model"
            )
        return self.decoder(maps.convolved(self.post_quant_conv, maps.arranged(latents)), tile).clamp(-1, 1)

    def normalize(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents as `encode` gives them, to what the denoiser works on."""
        return normalize(latents, self.config)

    def denormalize(self, latents: torch.Tensor) -> torch.Tensor:
        """The inverse of `normalize`."""
        return denormalize(latents, self.config)


def normalize(latents: torch.Tensor, config: VAEConfig) -> torch.Tensor:
    """(batch, 64, rows, columns) less the mean and by the standard deviation of each channel, from the VAE's `config`."""
    mean, std = _statistics(latents, config)
    return (latents - mean) / std


def denormalize(latents: torch.Tensor, config: VAEConfig) -> torch.Tensor:
    """The inverse of `normalize`."""
    mean, std = _statistics(latents, config)
    return latents * std + mean


def _statistics(like: torch.Tensor, config: VAEConfig) -> tuple[torch.Tensor, ...]:
    return tuple(like.new_tensor(values)[:, None, None] for values in (config.latents_mean, config.latents_std))
