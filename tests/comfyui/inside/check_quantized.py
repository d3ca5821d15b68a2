"""Checkpoints whose weights ComfyUI's own operations read: 8-bit floats and integers with scales, and plain 8-bit casts."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import comfy.ops
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
    """What happens where kernels run and the device multiplies rows in FP8, computed on the CPU: a scale for each row of the inputs, which layers share."""
    parts = prepared(pictures=1)
    made = call("Qwen21Loader", checkpoint="random", weight_dtype="fp8")[0]
    lora = call("Qwen21Lora", model=made, lora=write_lora("peft")[0], strength=1.0)[0]
    models = {"alone": made, "with a LoRA": lora}
    plain = {name: samples(model, *parts, steps=1) for name, model in models.items()}
    network = made.model.diffusion_model
    with replaced(core("nodes.bridge_operations"), "_runs_on", lambda device: True), counted(core("qwen21.kernels"), "quantize_rows") as quantised:
        equal(samples(made, *parts, steps=1), plain["alone"], "on a device that does not multiply in FP8")
        assert not quantised
        for layer in network.modules():
            if getattr(layer, "quant_format", None):
                layer._full_precision_mm = False
        for name, model in models.items():
            network.cache.tree.clear()
            quantised.clear()
            with counted(core("nodes.bridge_operations"), "multiply_rows") as products:
                found = samples(model, *parts, steps=1)
            blocks = len(network.transformer_blocks)  # all see the target; the prefix goes through all but the last, of which it takes keys and values
            if name == "alone":
                assert len(products) == 7 * blocks + 7 * (blocks - 1) + 2, len(products)
                assert len(quantised) == 4 * blocks + 4 * (blocks - 1) + 1, len(quantised)
            close(found, plain[name], 0.1, name)
            differs(found, plain[name], 1e-4, name)
        layer = network.transformer_blocks[0].attn.to_q
        for dtype in (torch.float32, torch.float16, torch.bfloat16):  # the model's own, and what a node may make of it
            x = torch.randn(2, 5, layer.in_features).to(dtype)
            out = layer(x)
            assert out.dtype == dtype
            close(out.float(), x.float() @ layer.weight.dequantize().float().T, 0.1, str(dtype))
        rows = core("qwen21.kernels").quantize_rows(torch.randn(2, 5, layer.in_features))
        lent_as_it_is(layer, rows)
    differs(plain["with a LoRA"], plain["alone"], 0.2)


def lent_as_it_is(layer, rows) -> None:
    """ComfyUI hands over a weight that lies elsewhere, and gets it back; it is not asked about one that lies where the rows do."""
    weight, expected, raising = layer.weight, layer(rows), rows._replace(values=rows.values[..., 1:])
    with counted(comfy.ops, "uncast_bias_weight") as back, replaced(comfy.ops, "cast_bias_weight", lambda *args, **kwargs: (weight, None, None)):
        equal(layer(rows), expected)
        assert not back
        layer.weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)
        equal(layer(rows), expected)
        try:
            layer(raising)
            raise AssertionError("it did not raise")
        except RuntimeError:
            assert len(back) == 2
        finally:
            layer.weight = weight


def check_rows_are_taken_where_the_input_is():
    """Not where ComfyUI loads to, and not where a gradient is wanted."""
    network = call("Qwen21Loader", checkpoint="random", weight_dtype="fp8")[0].model.diffusion_model
    attention, takes_rows = network.transformer_blocks[0].attn, core("qwen21.fp8").takes_rows
    layers = attention.to_q, attention.to_k
    for layer in layers:
        layer._full_precision_mm = layer.comfy_force_cast_weights = False  # the second as ComfyUI loads a model
    here, elsewhere = torch.zeros(1, layer.in_features), torch.zeros(1, layer.in_features, device="meta")
    assert not takes_rows(here, *layers)
    with replaced(core("nodes.bridge_operations"), "_runs_on", lambda device: device.type == "cpu"):
        assert takes_rows(here, *layers) and not takes_rows(elsewhere, *layers) and not takes_rows(here, layer, network.img_in)
        with torch.inference_mode(False):
            assert not takes_rows(torch.zeros(1, layer.in_features, requires_grad=True), layer)
        for name, value in (
            ("_full_precision_mm", True),
            ("comfy_force_cast_weights", True),
            ("weight_function", [None]),
            ("quant_format", "nvfp4"),
            ("forward", lambda x: x),
        ):
            with replaced(layer, name, value):
                assert not takes_rows(here, *layers), name
        for name in ("bias", "input_scale", "pre_quant_scale"):
            layer.register_parameter(name, torch.nn.Parameter(torch.ones(1), requires_grad=False))
            assert not takes_rows(here, *layers), name
            layer.register_parameter(name, None)
        assert takes_rows(here, *layers)


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
