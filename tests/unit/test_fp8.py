"""Linear layers in FP8: what is rounded, which layers are, and that what layers share is quantised once."""

import copy

import pytest
import torch
from torch import nn
from unit.layouts import picture

from qwen21 import kernels
from qwen21.fp8 import SENSITIVE, Fp8Linear, quantize_linears

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))]
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
