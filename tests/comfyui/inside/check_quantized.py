"""Checkpoints whose weights ComfyUI's own operations read: 8-bit floats and integers with scales, and plain 8-bit casts."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import torch
from check_weights import write_lora
from graph import call, close, core, counted, differs, encode, equal, folder, loaded, opened, picture, prepared, replaced, samples
from safetensors.torch import load_file, save_file

PARTS = {"transformer": ("transformer_blocks.", ".weight"), "text_encoder": ("model.language_model.layers.", "proj.weight")}


def fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale, "comfy_quant": marker("float8_e4m3fn")}


def int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale, "comfy_quant": marker("int8_tensorwise")}


def cast(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": weight.to(torch.float8_e4m3fn)}


def marker(name: str) -> torch.Tensor:
    return torch.tensor(list(json.dumps({"format": name}).encode()), dtype=torch.uint8)


@contextmanager
def checkpoint_with(part: str, quantize):
    """Name of a copy of the random checkpoint in which the matrices of `part` went through `quantize`."""
    made = Path(folder("quantised"))
    shutil.copytree(folder(), made)
    try:
        file = next((made / part).glob("*.safetensors"))
        beginning, ending = PARTS[part]
        state = {}
        for name, weight in load_file(file).items():
            if name.startswith(beginning) and name.endswith(ending) and weight.ndim == 2:
                state |= {f"{name.removesuffix('weight')}{key}": value for key, value in quantize(weight).items()}
            else:
                state[name] = weight
        save_file(state, file)
        yield "quantised"
    finally:
        shutil.rmtree(made)


def check_quantised_denoiser():
    parts = prepared(pictures=1)
    exact = samples(loaded()[0], *parts, steps=1)
    for quantize in (fp8, int8):
        with checkpoint_with("transformer", quantize) as name:
            model = call("Qwen21Loader", checkpoint=name)[0]
            weight = model.model.diffusion_model.transformer_blocks[0].attn.to_q.weight
            assert type(weight.data).__name__ == "QuantizedTensor" or type(weight).__name__ == "QuantizedTensor", type(weight)
            found = samples(model, *parts, steps=1)
        close(found, exact, 0.4, quantize.__name__)
        differs(found, exact, 1e-4, quantize.__name__)


def check_denoiser_quantised_while_loading():
    """As the same weights in a file, but for the layers outside the blocks."""
    parts = prepared(pictures=1)
    with counted(core("nodes.loader"), "say") as said:
        model = call("Qwen21Loader", checkpoint="random", weight_dtype="fp8")[0]
    assert not said
    found, exact = samples(model, *parts, steps=1), samples(loaded()[0], *parts, steps=1)
    close(found, exact, 0.4)
    differs(found, exact, 1e-4)
    weights = {name: weight for name, weight in model.model.diffusion_model.named_parameters() if weight.ndim == 2}
    quantised = {name for name, weight in weights.items() if "QuantizedTensor" in (type(weight).__name__, type(weight.data).__name__)}
    assert quantised == {name for name in weights if name.startswith("transformer_blocks.")}


def check_rows_in_8_bits_are_multiplied_as_they_are():
    """What happens where kernels run and the device multiplies in FP8, computed on the CPU: a scale for each row of the inputs, which layers share."""
    parts = prepared(pictures=1)
    model = call("Qwen21Loader", checkpoint="random", weight_dtype="fp8")[0]
    own = [layer for layer in model.model.diffusion_model.modules() if getattr(layer, "quant_format", None)]
    plain = samples(model, *parts, steps=1)
    with replaced(core("qwen21.kernels"), "run_on", lambda device: True), counted(core("qwen21.kernels"), "quantize_rows") as quantised:
        equal(samples(model, *parts, steps=1), plain, "on a device that does not multiply in FP8")
        assert not quantised
        for layer in own:
            layer._full_precision_mm = False
        model.model.diffusion_model.cache.tree.clear()
        with counted(core("nodes.bridge_operations"), "multiply") as products:
            found = samples(model, *parts, steps=1)
        layers = 4  # all see the target; three see the prefix, of which the last has keys and values alone
        assert len(products) == 7 * layers + 7 * (layers - 1) + 2, len(products)
        assert len(quantised) == 4 * layers + 4 * (layers - 1) + 1, len(quantised)
        close(found, plain, 0.1)
        differs(found, plain, 1e-4)
        with_lora, report = call("Qwen21Lora", model=model, lora=write_lora("peft")[0], strength=1.0)
        changed = samples(with_lora, *parts, steps=1)
        equal(samples(model, *parts, steps=1), found, "after the LoRA")
    exact = samples(call("Qwen21Lora", model=loaded()[0], lora=write_lora("peft")[0], strength=1.0)[0], *parts, steps=1)
    close(changed, exact, 0.4, "with a LoRA")
    differs(changed, found, 1e-2, "with a LoRA")


def check_a_quantised_denoiser_stays_as_it_is():
    parts = prepared(pictures=1)
    for quantize in (fp8, int8, cast):
        with checkpoint_with("transformer", quantize) as name:
            expected = samples(call("Qwen21Loader", checkpoint=name)[0], *parts, steps=1)
            with counted(core("nodes.loader"), "say") as said:
                model = call("Qwen21Loader", checkpoint=name, weight_dtype="fp8")[0]
            assert len(said) == 1 and "is quantised already and stays as it is" in said[0][0][0], said
            equal(samples(model, *parts, steps=1), expected, quantize.__name__)


def check_quantised_text_encoder():
    images = {"image_1": picture()}
    exact, _ = encode("a red star", "", images)
    for quantize in (fp8, int8, cast):
        with checkpoint_with("text_encoder", quantize) as name:
            clip = core("nodes.bridge_clip").load_clip(opened(name))
            found, _ = encode("a red star", "", images, clip=clip)
        close(found[0][0], exact[0][0], 0.3, quantize.__name__)
        differs(found[0][0], exact[0][0], 1e-4, quantize.__name__)


def check_the_core_alone_says_that_it_cannot_read_them():
    with checkpoint_with("transformer", int8) as name:
        made = opened(name)
        try:
            made.transformer(torch.device("cpu"), torch.float32)
            raise AssertionError("quantised weights were taken for plain ones")
        except core("qwen21.errors").Qwen21Error as error:
            assert "quantised for ComfyUI" in str(error)
