"""From noise to latents: Euler steps along the flow, with classifier-free guidance between two prefixes."""

from collections.abc import Callable, Iterable

import torch

Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def initial_noise(seed: int, rows: int, columns: int, channels: int = 64) -> torch.Tensor:
    """(1, channels, rows, columns) float32 on the CPU: the numbers the reference pipeline and ComfyUI's samplers draw for `seed`."""
    return torch.randn(1, channels, rows, columns, generator=torch.Generator().manual_seed(seed))


def guided(positive: Velocity, negative: Velocity | None, scale: float) -> Velocity:
    """v_neg + scale (v_pos - v_neg); without a negative, the positive alone."""
    if negative is None:
        return positive

    def velocity(latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        v = negative(latents, sigma)
        return v + scale * (positive(latents, sigma) - v)

    return velocity


def euler(latents: torch.Tensor, sigmas: torch.Tensor, velocity: Velocity, steps: Callable[[Iterable[int]], Iterable[int]] = iter) -> torch.Tensor:
    """Integrate d latents / d sigma = velocity from sigmas[0] to sigmas[-1], keeping the latents in float32.

    `velocity(latents, sigma)` returns the latents' shape, any float dtype. `steps` wraps the range of steps: a progress bar, a stop.
    """
    latents = latents.float()
    for i in steps(range(len(sigmas) - 1)):
        latents = latents + (sigmas[i + 1] - sigmas[i]) * velocity(latents, sigmas[i]).float()
    return latents
