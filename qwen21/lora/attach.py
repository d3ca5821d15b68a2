"""Applying LoRAs to a model at run time, without touching what cannot be given back bit for bit.

Low rank, the common case, stays beside the weight: two thin matrix products more, on quantised weights as well, and nothing is rounded to the
weight's precision. Every other change makes a new weight: once, with the old one kept in host memory, or for a quantised layer at every call.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import Qwen21Error
from .places import Change, Lora
from .updates import LowRank

Changes = Sequence[tuple[Change, float]]  # of one weight, in order, each with its strength


@contextmanager
def attach(model: nn.Module, loras: Sequence[tuple[Lora, float]]) -> Iterator[None]:
    """`model` with `loras`, each at its strength, for as long as the block runs; after it, every weight is bit for bit what it was.

    They act in order. Inside the block the model must not be used for gradients.
    """
    with ExitStack() as attached:
        for name, changes in by_weight(loras).items():
            attached.enter_context(attach_layer(model.get_submodule(name), changes))
        yield


def attach_layer(module: nn.Module, changes: Changes) -> AbstractContextManager[None]:
    """`attach` for one layer."""
    if is_low_rank(changes):
        return _branch(module, changes)
    return _recomputed(module, changes) if hasattr(module, "dequantized") else _replaced(module, changes)


def by_weight(loras: Sequence[tuple[Lora, float]]) -> Mapping[str, Changes]:
    """What happens to each layer. Strength 0 is nothing at all."""
    weights: dict[str, list[tuple[Change, float]]] = {}
    for lora, strength in loras:
        for change in lora.changes if strength else ():
            weights.setdefault(change.weight, []).append((change, strength))
    return weights


def is_low_rank(changes: Changes) -> bool:
    return all(isinstance(change.update, LowRank) for change, _ in changes)


def changed(weight: torch.Tensor, changes: Changes) -> torch.Tensor:
    """`weight` in float32 after `changes`, which are computed on its device."""
    for change, strength in changes:
        update = change.update.to(weight.device, weight.dtype)
        if change.rows is None:
            weight = update.changed(weight, strength)
        else:
            weight = weight.clone()
            weight[change.rows] = update.changed(weight[change.rows], strength)
    return weight


@contextmanager
def _branch(module: nn.Module, changes: Changes) -> Iterator[None]:
    """Add changes of low rank to what a linear layer gives, whatever its weight is made of."""
    handle = module.register_forward_hook(_Branch(changes))
    try:
        yield
    finally:
        handle.remove()


class _Branch:
    """A forward hook. The matrices follow the layer's input to its device and dtype once."""

    def __init__(self, changes: Changes):
        self.factors = [(change.update.down, change.update.up, change.rows or slice(None), strength * change.update.scale) for change, strength in changes]

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        x = inputs[0]
        flat = output.reshape(-1, output.shape[-1])
        for i, (down, up, rows, scale) in enumerate(self.factors):
            if (down.device, down.dtype) != (x.device, x.dtype):
                down, up = down.to(x.device, x.dtype), up.to(x.device, x.dtype)
                self.factors[i] = down, up, rows, scale
            flat[:, rows].addmm_(F.linear(x.reshape(-1, x.shape[-1]), down), up.T, alpha=scale)
        return flat.view(output.shape)


@contextmanager
def _recomputed(module: nn.Module, changes: Changes) -> Iterator[None]:
    """A quantised linear layer computes with its changed weight, made anew at every call: `module.dequantized()` gives it, (out, in)."""
    module.forward = partial(_forward, module, changes)
    try:
        yield
    finally:
        del module.forward


def _forward(module: nn.Module, changes: Changes, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, changed(module.dequantized().to(x.device, torch.float32), changes).to(x.dtype))


@contextmanager
def _replaced(module: nn.Module, changes: Changes) -> Iterator[None]:
    """A layer with another weight; its own waits in host memory."""
    weight = module.weight
    if weight.dtype.itemsize == 1 or not weight.is_floating_point():
        kind = str(weight.dtype).removeprefix("torch.")
        raise Qwen21Error(f"the LoRA changes whole weights, but the model's are stored as {kind}: take the checkpoint in bfloat16, or a LoRA of low rank")
    device = weight.device
    module.weight = nn.Parameter(changed(weight.detach().float(), changes).to(weight.dtype), requires_grad=False)
    weight.data = weight.data.cpu()
    try:
        yield
    finally:
        weight.data = weight.data.to(device)
        module.weight = weight
