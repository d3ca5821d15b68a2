"""Linear layers in FP8: what is rounded, which layers are, that what layers share is quantised once, and LoRA on them."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from unit.devices import DEVICES
from unit.layouts import picture
from unit.lora_files import LAYERS, random_factors

from qwen21 import fp8, kernels
from qwen21.errors import Qwen21Error
from qwen21.fp8 import SENSITIVE, Fp8Linear, quantize_linears
from qwen21.lora import Change, Lora, attach
from qwen21.lora.updates import Difference, LowRank

HALF_ULP = 2**-4


@pytest.fixture
def quantized(transformer):
    model = copy.deepcopy(transformer)
    quantize_linears(model)
    return model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_layer_rounds_its_factors_and_sums_in_float32(device, dtype):
    """Rows and channels of very different size keep their precision."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator) * torch.logspace(-3, 3, 96)[:, None]
    x = (torch.randn(2, 17, 64, generator=generator) * torch.logspace(-2, 2, 17)[:, None]).to(device, dtype)
    layer = Fp8Linear(weight.to(device))
    out = layer(x)
    assert out.shape == (2, 17, 96) and out.dtype == dtype

    def dequantized(rows):
        return rows.values.double() * rows.scales[..., None].double()

    rounded = dequantized(kernels.quantize_rows(x)) @ dequantized(kernels.quantize_rows(weight.to(device))).T
    bound = dequantized(kernels.quantize_rows(x)).norm(dim=-1)[..., None] * weight.to(device).norm(dim=-1)
    assert ((out - rounded).abs() <= (2**-8 if dtype == torch.bfloat16 or device == "cuda" else 1e-5) * bound).all()
    exact = x.double() @ weight.to(device).double().T
    assert ((out - exact).abs() <= 3 * HALF_ULP * bound).all()


def test_a_row_of_zeros_stays_zero():
    assert not Fp8Linear(torch.ones(16, 32))(torch.zeros(3, 32)).any()


def test_the_blocks_are_converted_and_the_rest_is_not(quantized):
    for name, layer in quantized.named_modules():
        if isinstance(layer, nn.Linear | Fp8Linear):
            assert isinstance(layer, nn.Linear) == name.startswith(SENSITIVE), name
            assert isinstance(layer, Fp8Linear) == name.startswith("transformer_blocks."), name


@torch.inference_mode()
def test_velocity_is_near(transformer, quantized):
    noisy, context = picture(4, 4, 0), torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1))
    exact, ours = (model.denoise(noisy, 0.6, model.prefill(context)) for model in (transformer, quantized))
    assert 0 < (ours - exact).norm() / exact.norm() < 0.25  # random weights with sharp attention


@torch.inference_mode()
def test_shared_inputs_are_quantised_once(quantized, monkeypatch):
    calls = []
    quantize = kernels.quantize_rows
    monkeypatch.setattr(kernels, "quantize_rows", lambda x: calls.append(x.shape) or quantize(x))
    prefix = quantized.prefill(torch.ones(1, 3, 64))
    calls.clear()
    quantized.denoise(picture(2, 2, 0), 0.5, prefix)
    assert len(calls) == 4 * len(quantized.transformer_blocks)  # for q, k and v; for out; for gate and proj; for out


@torch.inference_mode()
def test_weights_take_half_the_memory(transformer, quantized):
    def nbytes(model):
        return sum(weight.nbytes for weight in model.transformer_blocks.parameters())

    assert nbytes(quantized) < 0.52 * nbytes(copy.deepcopy(transformer).bfloat16())


def test_a_device_without_fp8_is_refused_before_anything_is_changed(transformer):
    with pytest.raises(Qwen21Error, match="mps does not multiply in FP8.*use bfloat16"):
        quantize_linears(transformer, torch.device("mps"))
    assert not any(isinstance(layer, Fp8Linear) for layer in transformer.modules())


def lora(transformer, kind: str) -> Lora:
    """Of the layers of `unit.lora_files`, and to_k, which shares its input with a layer that has none."""
    factors = random_factors(transformer, (*LAYERS, "transformer_blocks.1.attn.to_k"))
    make = LowRank if kind == "low rank" else lambda up, down: Difference(up @ down)
    changes = tuple(Change(layer, None, make(one.up, one.down)) for layer, one in factors.items())
    return Lora(kind, changes, len(changes), {})


@pytest.mark.parametrize("kind", ["low rank", "difference"])
@torch.inference_mode()
def test_lora_is_as_on_the_dequantised_weights(transformer, quantized, kind):
    """To the rounding of a layer's input, and of nothing else; after it, everything is as before."""
    change = lora(transformer, kind)
    noisy, context = picture(4, 4, 0), torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1))
    dense = copy.deepcopy(transformer)
    for name, layer in quantized.named_modules():
        if isinstance(layer, Fp8Linear):
            dense.get_submodule(name).weight = nn.Parameter(layer.dequantized(), requires_grad=False)

    def velocity(model, *loras):
        with attach(model, loras):
            return model.denoise(noisy, 0.6, model.prefill(context))

    def off(found, expected):
        return (found - expected).norm() / expected.norm()

    plain, before = velocity(quantized), {name: weight.clone() for name, weight in quantized.state_dict().items()}
    expected, found = velocity(dense, (change, 0.8)), velocity(quantized, (change, 0.8))
    assert off(found, expected) < 0.25 and off(found, plain) > 0.5
    assert all(torch.equal(weight.view(torch.uint8), before[name].view(torch.uint8)) for name, weight in quantized.state_dict().items())
    assert torch.equal(velocity(quantized), plain)


@torch.inference_mode()
def test_lora_of_a_layer_sees_the_input_itself(transformer, quantized):
    """A branch adds what it makes of the input before its rounding."""
    name = "transformer_blocks.0.attn.to_q"
    layer, one = quantized.get_submodule(name), random_factors(transformer, (name,))[name]
    x = torch.randn(2, 5, one.down.shape[1], generator=torch.Generator().manual_seed(2))
    plain = layer(x)
    with attach(quantized, [(Lora("one", (Change(name, None, LowRank(one.up, one.down)),), 1, {}), 0.5)]):
        torch.testing.assert_close(layer(x), (plain.double() + x.double() @ one.delta(0.5).T).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (RuntimeError("no such kernel"), False),
        (ValueError("type not supported"), False),
        (torch.OutOfMemoryError("no room"), True),
        (RuntimeError("CUDA error: out of memory"), True),
    ],
)
def test_a_device_whose_trial_product_fails_does_not_multiply_rows(monkeypatch, error, full):
    """But one that is full is asked again."""

    def fails(*_):
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch, "ones", lambda *shape, device, **options: torch.full(shape, 1.0, **options))
    monkeypatch.setattr(fp8, "multiply_rows", fails)
    trial = fp8.multiplies_rows.__wrapped__
    if full:
        with pytest.raises(type(error)):
            trial(torch.device("cuda"))
    else:
        assert not trial(torch.device("cuda"))
