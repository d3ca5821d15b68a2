"""The VAE's training: reconstruction, weighted near edges, in two phases.

First encoder and decoder together. Then the encoder is frozen, latents keep their meaning, and the decoder alone learns on, half of its
latents with noise added, so that it also draws clean shapes from what a denoiser nearly got right.
"""

import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from ..config import VAEConfig
from ..vae import QwenImage21VAE, ResidualBlock, RMSNorm2d
from . import world
from .run import MovingAverage, Run, clip

CONFIG = VAEConfig(base_dim=16, decoder_base_dim=16, latents_mean=(0.0,) * 64, latents_std=(1.0,) * 64)
SLOTS = 8
EVERY_ODD = 12  # one step in so many is at another size than 256
ODD_SIZES = ((128, 128), (192, 320), (320, 192), (384, 384), (160, 448))
NOISE = 0.3  # most noise the decoder learns to undo, in standard deviations of the latents


def new_vae(seed: int) -> QwenImage21VAE:
    torch.manual_seed(seed)
    vae = QwenImage21VAE(CONFIG)
    for module in vae.modules():
        if isinstance(module, RMSNorm2d):
            torch.nn.init.ones_(module.gamma)
        if isinstance(module, ResidualBlock):  # residual branches start small
            module.conv2.weight.data.mul_(0.2)
    return vae


def random_colours(device) -> torch.Tensor:
    """The world's palette and 244 other colours."""
    return torch.cat([world.palette(device), torch.rand(244, 3, device=device) * 2 - 1])


def random_pictures(batch: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed scenes wider than the world's own: up to 8 things, half of them on the 3 x 3 places, of all sizes, a third in odd colours."""
    uniform = lambda *shape: torch.rand(*shape, device=device)
    integers = lambda low, high, *shape: torch.randint(low, high, shape, device=device).float()
    on_grid = uniform(batch, 1) < 0.6
    things = torch.empty(batch, SLOTS, 5, device=device)
    things[..., 0] = torch.where(uniform(batch, SLOTS) < 0.15 + 0.85 * uniform(batch, 1), integers(0, len(world.SHAPES), batch, SLOTS), -1.0)
    things[..., 1] = torch.where(uniform(batch, SLOTS) < 0.7, integers(0, world.OBJECT_COLOURS, batch, SLOTS), integers(12, 256, batch, SLOTS))
    places = torch.rand(batch, 9, device=device).argsort(dim=1)[:, :SLOTS]
    centres = torch.tensor(world.CENTRES, device=device)
    for axis, index in ((2, places % 3), (3, places // 3)):
        placed = centres[index] + world.POSITION_JITTER / world.NATIVE * (2 * uniform(batch, SLOTS) - 1)
        things[..., axis] = torch.where(on_grid, placed, uniform(batch, SLOTS))
    radii = torch.tensor(world.RADII, device=device)[torch.randint(0, 3, (batch, SLOTS), device=device)] * (
        1 + world.RADIUS_JITTER * (2 * uniform(batch, SLOTS) - 1)
    )
    things[..., 4] = torch.where(on_grid & (uniform(batch, SLOTS) < 0.8), radii, 10 + 60 * uniform(batch, SLOTS) ** 2)
    backgrounds = torch.empty(batch, 4, device=device)
    kinds = torch.tensor([world.PLAIN, world.PLAIN, world.GRADIENT, world.STRIPES, world.CLEAR], device=device).float()
    backgrounds[:, 0] = kinds[torch.randint(0, 5, (batch,), device=device)]
    for column in (1, 2):
        backgrounds[:, column] = torch.where(uniform(batch) < 0.75, integers(0, 12, batch), integers(12, 256, batch))
    # what lies hidden under alpha 0: mostly white, as in the world, else anything (resized and foreign pictures)
    hidden = torch.where(uniform(batch) < 0.6, float(world.WHITE), backgrounds[:, 1])
    backgrounds[:, 1] = torch.where(backgrounds[:, 0] == world.CLEAR, hidden, backgrounds[:, 1])
    backgrounds[:, 2] = torch.where((backgrounds[:, 0] == world.PLAIN) | (backgrounds[:, 0] == world.CLEAR), backgrounds[:, 1], backgrounds[:, 2])
    backgrounds[:, 3] = integers(0, 2, batch)
    return things, backgrounds


def reconstruction_loss(made: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """L1 and squared error, edges four times as heavy, and the difference of neighbours' differences. Hidden colours count a sixth."""
    steps = lambda x: (x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1])
    vertical, horizontal = steps(pixels)
    edges = F.pad(vertical.abs().amax(1, keepdim=True), (0, 0, 0, 1)) + F.pad(horizontal.abs().amax(1, keepdim=True), (0, 1))
    edges = F.max_pool2d((edges > 0.15).float(), 5, stride=1, padding=2)
    seen = F.max_pool2d(pixels[:, 3:], 9, stride=1, padding=4) * 0.5 + 0.5
    weight = (1 + 3 * edges) * torch.cat([(seen * 0.85 + 0.15).expand(-1, 3, -1, -1), torch.ones_like(seen)], dim=1)
    error = made - pixels
    slope = sum((a - b).abs().mean() for a, b in zip(steps(made), (vertical, horizontal)))
    return (weight * (error.abs() + 4 * error.square())).mean() / weight.mean() + 0.5 * slope


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean over pictures in [-1, 1]."""
    error = ((a - b) / 2).square().flatten(1).mean(1).clamp(min=1e-10)
    return float((-10 * error.log10()).mean())


def over_white(pixels: torch.Tensor) -> torch.Tensor:
    alpha = pixels[:, 3:] * 0.5 + 0.5
    return pixels[:, :3] * alpha + 1 - alpha


@torch.no_grad()
def quality(vae: QwenImage21VAE, scenes: list[world.Scene], device) -> dict[str, float]:
    """PSNR in dB of reconstructions: RGB over white, alpha of the transparent pictures, and both from noisy latents."""
    things, backgrounds = (x.to(device) for x in world.pack(scenes))
    pixels = torch.cat([world.render(things[i : i + 32], backgrounds[i : i + 32], 256, 256, world.palette(device)) for i in range(0, len(scenes), 32)])
    clear = backgrounds[:, 0] == world.CLEAR
    latents = torch.cat([vae.encode(x) for x in pixels.split(32)])
    spread = latents.std(dim=(0, 2, 3), keepdim=True)
    made = torch.cat([vae.decode(z) for z in latents.split(32)])
    noisy = torch.cat([vae.decode(z) for z in (latents + 0.15 * spread * torch.randn_like(latents)).split(32)])
    return {
        "rgb": round(psnr(over_white(made), over_white(pixels)), 2), "alpha": round(psnr(made[clear, 3:], pixels[clear, 3:]), 2),
        "rgb_noisy": round(psnr(over_white(noisy), over_white(pixels)), 2), "alpha_noisy": round(psnr(noisy[clear, 3:], pixels[clear, 3:]), 2),
    }  # fmt: skip


@torch.no_grad()
def latent_statistics(vae: QwenImage21VAE, scenes: list[world.Scene], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each channel of the latents' samples over the world's own pictures."""
    things, backgrounds = (x.to(device) for x in world.pack(scenes))
    means, logvars = [], []
    for i in range(0, len(scenes), 32):
        mean, logvar = vae.moments(world.render(things[i : i + 32], backgrounds[i : i + 32], 256, 256, world.palette(device)))
        means.append(mean)
        logvars.append(logvar.clamp(-14, 6))
    mean, logvar = torch.cat(means), torch.cat(logvars)
    return mean.mean(dim=(0, 2, 3)), (mean.var(dim=(0, 2, 3)) + logvar.exp().mean(dim=(0, 2, 3))).sqrt()


def train(
    out: Path, seconds: float, seed: int = 0, batch: int = 48, rate: float = 2e-3, kl: float = 5e-4, together: float = 0.65, start: Path | None = None
) -> None:
    """Train for `seconds`, of which the fraction `together` before the encoder is frozen. `start` continues from a saved file."""
    run = Run("vae", out, seed, seconds=seconds, batch=batch, rate=rate, kl=kl, together=together)
    torch.backends.cudnn.benchmark = True
    vae = new_vae(seed)
    if start:
        vae.load_state_dict(run.load("vae_encoder", start) | run.load("vae_decoder", start))
    vae = vae.to(run.device, memory_format=torch.channels_last)
    run.same_weights(vae.parameters())
    torch.manual_seed(1000 * seed + run.rank)
    parameters = list(vae.parameters())
    decoder = [*vae.post_quant_conv.parameters(), *vae.decoder.parameters()]
    frozen = {id(p) for p in parameters} - {id(p) for p in decoder}
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=1e-4, fused=run.cuda)
    average = MovingAverage(parameters, 0.999)
    rng = random.Random(999)
    judged = [world.draw_scene(rng) for _ in range(256 if run.cuda else 8)]
    measured = [world.draw_scene(rng) for _ in range(1024 if run.cuda else 16)]
    paint = run.compile(world.paint)
    spread = torch.ones(1, 64, 1, 1, device=run.device)

    def encode(pixels):
        with run.autocast():
            mean, logvar = vae.moments(pixels)
        return mean.float(), logvar.float().clamp(-14, 6)

    def decode_loss(latents, pixels):
        with run.autocast():
            made = vae.decoder(vae.post_quant_conv(latents.contiguous(memory_format=torch.channels_last)))
        return reconstruction_loss(made.float(), pixels)

    fast_encode, fast_decode_loss = run.compile(encode), run.compile(decode_loss)

    def batch_at(height, width, count):
        things, backgrounds = random_pictures(count, run.device)
        return render(things, backgrounds, height, width).contiguous(memory_format=torch.channels_last)

    def render(things, backgrounds, height, width):
        return world.render(things, backgrounds, height, width, random_colours(run.device), paint if (height, width) == (256, 256) else world.paint)

    def loss_of(pixels, encode, decode_loss, share, decoder_only):
        """`share` of the phase is over."""
        if decoder_only:
            with torch.no_grad():
                mean, _ = encode(pixels)
            noise = NOISE * torch.rand(len(mean), 1, 1, 1, device=run.device) * (torch.rand(len(mean), 1, 1, 1, device=run.device) < 0.5)
            return decode_loss((mean + noise * spread * torch.randn_like(mean)).requires_grad_(), pixels), mean.new_zeros(())
        mean, logvar = encode(pixels)
        divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        loss = decode_loss(mean + (0.5 * logvar).exp() * torch.randn_like(mean), pixels)
        return loss + kl * min(1.0, share / 0.3) * divergence, divergence.detach()

    def report(event, **values):
        nonlocal begun
        paused = time.time()
        average.swap()
        run.log(event, step=step, **values, **quality(vae, judged, run.device))
        keep()
        average.swap()
        begun += run.agree(time.time() - paused)

    def keep():
        state = {key: value.float() for key, value in vae.state_dict().items()}
        part = lambda *names: {key: value for key, value in state.items() if key.startswith(names)}
        run.save("vae_encoder", part("encoder", "quant_conv"))
        run.save("vae_decoder", part("decoder", "post_quant_conv"))

    for _ in range(3):  # compile before the clock starts
        loss_of(batch_at(256, 256, batch), fast_encode, fast_decode_loss, 0.0, False)[0].backward()
    optimizer.zero_grad()
    run.log("compiled", parameters=sum(p.numel() for p in parameters), decoder=sum(p.numel() for p in decoder))
    begun, step, decoder_only, next_report = time.time(), 0, False, 0.25
    while True:
        if step % run.rhythm == 0:
            share = run.agree((time.time() - begun) / seconds)
        if share >= 1:
            break
        if not decoder_only and share >= together:
            report("encoder_done", share=round(share, 3))
            average.swap()  # go on from the averages
            decoder_only = True
            for p in parameters:
                p.requires_grad_(id(p) not in frozen)
                p.grad = None
            mean, std = latent_statistics(vae, measured, run.device)
            spread = std[None, :, None, None]
            run.save("vae_statistics", {"mean": mean, "std": std})
            optimizer = torch.optim.AdamW(decoder, lr=rate, betas=(0.9, 0.95), weight_decay=1e-4, fused=run.cuda)
            average = MovingAverage(parameters, 0.999)
            phase_step = 0
        phase = (share - together) / (1 - together) if decoder_only else share / together
        warm = min(1.0, (phase_step if decoder_only else step) / 200)
        for group in optimizer.param_groups:
            group["lr"] = rate * (0.5 if decoder_only else 1.0) * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * phase)))
        if step % EVERY_ODD == EVERY_ODD - 1:
            height, width = ODD_SIZES[step // EVERY_ODD % len(ODD_SIZES)]
            pixels = batch_at(height, width, max(2, round(batch * 256 * 256 / (height * width) / 2)))
            loss, divergence = loss_of(pixels, encode, decode_loss, phase, decoder_only)
        else:
            loss, divergence = loss_of(batch_at(256, 256, batch), fast_encode, fast_decode_loss, phase, decoder_only)
        optimizer.zero_grad()
        loss.backward()
        trained = decoder if decoder_only else parameters
        gradient = torch.cat([p.grad.flatten() for p in trained])
        run.average(gradient)
        clip(gradient)
        for p, piece in zip(trained, gradient.split([p.numel() for p in trained])):
            p.grad.copy_(piece.view_as(p))
        optimizer.step()
        average.update()
        step += 1
        if decoder_only:
            phase_step += 1
        if share > next_report:
            report("step", share=round(share, 3), loss=round(loss.item(), 4), divergence=round(divergence.item(), 3), rate=optimizer.param_groups[0]["lr"])
            next_report = max(next_report + 0.25, share)
    average.swap()
    run.log("done", step=step, seconds=round(time.time() - begun), pictures=step * batch * run.size, **quality(vae, judged, run.device))
    keep()
    run.close()
