"""LoRAs on a ComfyUI MODEL: through its own weight patches, which it backs up and takes away; beside the weight where that is quantised.

ComfyUI would dequantise such a weight, patch it and quantise it again. Here low rank is added to what the layer gives, so that it still
computes in 8 bits, and anything else changes the dequantised weight as the layer is called.
"""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import torch
from comfy.patcher_extension import CallbacksMP
from comfy.quant_ops import QuantizedTensor
from comfy.weight_adapter import WeightAdapterBase
from torch import nn

from ..qwen21.lora import Lora
from ..qwen21.lora.attach import Changes, attach_layer, by_weight, changed, is_low_rank
from ..qwen21.lora.updates import Update

KEY = "qwen21_lora"


class UpdateAdapter(WeightAdapterBase):
    """One update as ComfyUI's weight patches know them: `weights` are its tensors, which ComfyUI may move; the rest of it travels in `loaded_keys`."""

    name = "qwen21"

    def __init__(self, loaded_keys: Update, weights: tuple[torch.Tensor, ...]):
        self.loaded_keys, self.weights = loaded_keys, weights

    def calculate_weight(self, weight, key, strength, strength_model, offset, function, intermediate_dtype=torch.float32, original_weight=None):
        """Changes `weight`, which may be some rows of a larger one, in place."""
        update = self.loaded_keys.with_tensors(tensor.to(weight.device, torch.float32) for tensor in self.weights)
        return weight.copy_(update.changed(weight.float(), strength))


class WeightFunction:
    """What ComfyUI calls with a layer's dequantised weight before every use."""

    def __init__(self, changes: Changes):
        self.changes = changes

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return changed(weight.float(), self.changes).to(weight.dtype)

    def move_to(self, device: torch.device) -> int:
        """ComfyUI loads and unloads it with the layer, and counts its bytes."""
        self.changes = [(replace(change, update=change.update.to(device)), strength) for change, strength in self.changes]
        return sum(tensor.nbytes for change, _ in self.changes for tensor in change.update.tensors())


class RunTime:
    """Changes that are on the MODEL's layers from the beginning of a sampling run to its end; clones carry it along."""

    def __init__(self, changes: dict[str, Changes]):
        self.changes = changes
        self.attached = ExitStack()

    def begin(self, denoiser: nn.Module) -> None:
        self.attached.close()
        with ExitStack() as stack:  # all of them, or none
            for name, changes in self.changes.items():
                stack.enter_context(attach_layer(denoiser.get_submodule(name), changes))
            self.attached = stack.pop_all()

    def end(self) -> None:
        self.attached.close()

    def and_then(self, changes: dict[str, Changes]) -> "RunTime":
        """Both, these changes after its own."""
        return RunTime({name: [*self.changes.get(name, []), *changes.get(name, [])] for name in self.changes | changes})


def _begin(patcher) -> None:
    patcher.get_attachment(KEY).begin(patcher.model.diffusion_model)


def _end(patcher) -> None:
    patcher.get_attachment(KEY).end()


def with_lora(model, lora: Lora, strength: float):
    """A clone of the MODEL with `lora`, and how many of its layers are quantised. `strength` is not 0."""
    model = model.clone()
    patched, wrapped, at_run_time, quantized = {}, {}, {}, 0
    for name, changes in by_weight([(lora, strength)]).items():
        layer = model.model.diffusion_model.get_submodule(name)
        packed = _is_quantized(layer)
        quantized += packed
        if not hasattr(layer, "comfy_cast_weights") or (packed and (is_low_rank(changes) or hasattr(layer, "dequantized"))):
            at_run_time[name] = changes  # ComfyUI leaves a layer that is not of its operations unpatched when memory is short
        else:
            (wrapped if packed else patched)[name] = changes
    for patches in _rounds(patched):
        model.add_patches(patches, strength)
    for name, changes in wrapped.items():
        model.add_weight_wrapper(f"diffusion_model.{name}.weight", WeightFunction(changes))
    if at_run_time:
        before = model.get_attachment(KEY)
        if before is None:
            model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, _begin)
            model.add_callback_with_key(CallbacksMP.ON_CLEANUP, KEY, _end)
        model.set_attachments(KEY, (before or RunTime({})).and_then(at_run_time))
        model.patches_uuid = uuid.uuid4()  # by which ComfyUI and the prefix cache tell weights apart
    return model, quantized


def _is_quantized(module: nn.Module) -> bool:
    return isinstance(module.weight, QuantizedTensor) or module.weight.dtype.itemsize == 1 or hasattr(module, "dequantized")


def _rounds(changes: dict[str, Changes]) -> Iterator[dict]:
    """Patches by key, as `add_patches` takes them: one of a kind a round, in order."""
    waiting = {name: list(some) for name, some in changes.items()}
    while waiting:
        patches = {}
        for name, some in waiting.items():
            while some:
                change = some[0][0]
                key = f"diffusion_model.{name}.weight"
                if change.rows is not None:
                    key = key, (0, change.rows.start, change.rows.stop - change.rows.start)
                if key in patches:
                    break
                patches[key] = UpdateAdapter(change.update, tuple(change.update.tensors()))
                del some[0]
        yield patches
        waiting = {name: some for name, some in waiting.items() if some}
