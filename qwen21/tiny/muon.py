"""Muon (https://kellerjordan.github.io/posts/muon): momentum whose update is made nearly orthogonal, for the matrices inside blocks."""

import torch
from torch import nn


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrices, roughly: five Newton-Schulz steps in bf16 on (batch, rows, columns)."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.mT if tall else x


class Muon:
    """One batched update for all matrices of a shape. Every parameter must have a gradient."""

    def __init__(self, parameters: list[nn.Parameter], rate: float, decay: float = 0.01, momentum: float = 0.95):
        self.rate, self.decay, self.momentum = rate, decay, momentum
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in parameters:
            self.groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self.buffers = {shape: [torch.zeros_like(p) for p in group] for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, factor: torch.Tensor) -> None:
        """`factor` () of the full rate."""
        rate = self.rate * factor
        for shape, group in self.groups.items():
            gradients = [p.grad for p in group]
            torch._foreach_lerp_(self.buffers[shape], gradients, 1 - self.momentum)
            update = torch.stack(torch._foreach_lerp(gradients, self.buffers[shape], self.momentum))
            update = orthogonal(update).to(group[0].dtype) * (rate * max(1.0, shape[0] / shape[1]) ** 0.5)
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_sub_(group, list(update.unbind(0)))

    def reset(self) -> None:
        """Forget the momentum."""
        for group in self.buffers.values():
            torch._foreach_zero_(group)
