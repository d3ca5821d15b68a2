"""The Triton kernels against plain PyTorch in float32: on a GPU if there is one, else in Triton's interpreter."""

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="needs Triton")

from unit.layouts import picture

from qwen21 import kernels
from qwen21.kernels import fused
from qwen21.prefix import StoredTensor
from qwen21.rope import rotary_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ULPS = 0.5 if DEVICE == "cuda" else 1  # a kernel rounds once; the interpreter cuts off
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: ULPS * 2**-7}  # of the largest value


@pytest.fixture(params=ROUNDING, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def fusible(monkeypatch):
    """Kernels run wherever the test's tensors are."""
    monkeypatch.setattr(kernels, "fusible", lambda x: True)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    return ours.shape == exact.shape and ours.dtype == dtype and ((ours.float() - exact).abs().max() <= ROUNDING[dtype] * exact.abs().max()).item()


@pytest.mark.parametrize("width", [64, 144])
@pytest.mark.parametrize("batch", [1, 3])
def test_residuals_and_norms(fusible, dtype, width, batch):
    x, branch = (random(batch, 5, width, seed=seed, dtype=dtype) for seed in (0, 1))
    gate, scale = (random(batch, 1, width, seed=seed, dtype=dtype) for seed in (2, 3))
    norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
    sums = x.float() + gate.float() * branch.float()
    assert close(kernels.residual(x, branch, gate), sums, dtype)
    assert close(kernels.norm_scale(x, norm, scale), norm(x.float()) * scale.float(), dtype)
    total, normed = kernels.residual_norm_scale(x, branch, gate, norm, scale)
    assert close(total, sums, dtype)
    assert close(normed, norm(total.float()) * scale.float(), dtype)


def test_one_modulation_for_every_row_of_a_batch(fusible, dtype):
    x, scale = random(3, 5, 64, dtype=dtype), random(1, 1, 64, seed=1, dtype=dtype)
    norm = nn.LayerNorm(64, eps=1e-6, elementwise_affine=False)
    assert close(kernels.norm_scale(x, norm, scale), norm(x.float()) * scale.float(), dtype)


def test_swiglu(fusible, dtype):
    gate, up = random(2, 5, 96, dtype=dtype), random(2, 5, 96, seed=1, dtype=dtype)
    assert close(kernels.swiglu(gate, up), nn.functional.silu(gate.float()) * up.float(), dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("heads", [4, 3])
def test_place(fusible, monkeypatch, dtype, normed, rotated, heads):
    """Behind a prefix, out of a wider projection."""
    x = random(2, 7, heads, 64, dtype=dtype)[..., :32]
    norm = nn.RMSNorm(32, eps=1e-6, device=DEVICE).to(dtype) if normed else None
    if normed:
        norm.weight.data.copy_(random(32, seed=1))
    table = rotary_table(torch.arange(21).view(7, 3).to(DEVICE), (8, 12, 12)) if rotated else None
    room = torch.zeros(2, heads, 10, 32, device=DEVICE, dtype=dtype)
    with torch.no_grad():
        assert kernels.place(x, norm, table, room[:, :, 3:]).data_ptr() == room[:, :, 3:].data_ptr()
        alone = kernels.place(x, norm, table)
        monkeypatch.setattr(kernels, "fusible", lambda x: False)
        exact = kernels.place(x.float(), norm.float() if normed else None, table)
    assert close(room[:, :, 3:], exact, dtype) and torch.equal(alone, room[:, :, 3:])
    assert not room[:, :, :3].any()


def test_a_host_norm_is_called_unless_its_weight_is_ready(fusible):
    class HostNorm(nn.RMSNorm):
        def forward(self, x):
            return 3 * x

    x, norm = random(1, 5, 4, 32), HostNorm(32, eps=1e-6, device=DEVICE)
    with torch.no_grad():
        assert torch.equal(kernels.place(x, norm, None), 3 * x.transpose(1, 2))
        HostNorm.weight_is_ready = True
        assert close(kernels.place(x, norm, None), nn.RMSNorm(32, eps=1e-6, device=DEVICE)(x.transpose(1, 2)), torch.float32)
        norm.weight.data = norm.weight.data.to(torch.float8_e4m3fn)  # which not every device reads
        assert torch.equal(kernels.place(x, norm, None), 3 * x.transpose(1, 2))
        assert torch.equal(kernels.place(x, norm.float().to("meta"), None), 3 * x.transpose(1, 2))
        bare = nn.RMSNorm(32, eps=1e-6, elementwise_affine=False)
        assert torch.equal(kernels.place(x, bare, None), bare(x).transpose(1, 2))


def test_a_module_is_untouched_once_its_own_forward_is_back():
    module = nn.RMSNorm(4)
    assert kernels.untouched(module)
    own, module.forward = module.forward, lambda x: x
    assert not kernels.untouched(module)
    module.forward = nn.RMSNorm(4).forward
    assert not kernels.untouched(module), "another module's"
    module.forward = own
    assert kernels.untouched(module)
    hook = module.register_forward_pre_hook(lambda module, inputs: None)
    assert not kernels.untouched(module)
    hook.remove()
    assert kernels.untouched(module)


def test_rows_lie_one_after_another(monkeypatch):
    x = random(2, 6, 32).transpose(1, 2)
    plain = kernels.quantize_rows(x)
    assert plain.values.is_contiguous()
    monkeypatch.setattr(kernels, "fusible", lambda x: True)
    assert kernels.quantize_rows(x).values.is_contiguous()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
def test_gather(fusible, monkeypatch, dtype, fp8, heads_first):
    """What attention gives, whichever way it lies in memory."""
    x = random(2, 3, 7, 32, dtype=dtype) if heads_first else random(2, 7, 3, 32, dtype=dtype).transpose(1, 2)
    ours = kernels.gather(x, fp8)
    apart = kernels.quantize_rows(x.transpose(1, 2).flatten(2))
    monkeypatch.setattr(kernels, "fusible", lambda x: False)
    if fp8:
        assert torch.equal(ours.scales, apart.scales) and torch.equal(ours.values.float(), apart.values.float()) and ours.dtype == dtype
    else:
        assert torch.equal(ours, kernels.gather(x)) and ours.is_contiguous()


def test_kernels_are_tried_on_the_device_asked_for(monkeypatch):
    """Not on the current one, which cannot read the other's memory."""
    current, launched = ["cuda:0"], []

    @contextmanager
    def switched(device):
        current.append(str(device))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", switched)
    monkeypatch.setattr(torch, "ones", lambda *shape, **_: None)
    monkeypatch.setattr(kernels, "_fused", lambda: SimpleNamespace(swiglu=lambda *_, fp8: launched.append(current[-1])))
    assert kernels.run_on.__wrapped__(torch.device("cuda:1")) and launched == ["cuda:1"]


def test_widen(fusible, dtype):
    stored = StoredTensor.quantized(random(1, 3, 11, 32))
    out = torch.zeros(2, 3, 15, 32, device=DEVICE, dtype=dtype)
    kernels.widen(stored.values, stored.scale, out[:, :, 2:13])
    assert close(out[:, :, 2:13], (stored.values.float() * stored.scale).expand(2, -1, -1, -1), dtype)
    assert not out[:, :, :2].any() and not out[:, :, 13:].any()


@torch.inference_mode()
def test_the_whole_model(fusible, monkeypatch, transformer):
    model = copy.deepcopy(transformer).to(DEVICE)
    context, reference, noisy = random(1, 5, 64), picture(3, 4, 0).to(DEVICE), picture(2, 3, 1, batch=2).to(DEVICE)
    fused_velocity = model.denoise(noisy, 0.7, model.prefill(context, [2], [reference]))
    monkeypatch.setattr(kernels, "fusible", lambda x: False)
    plain = model.denoise(noisy, 0.7, model.prefill(context, [2], [reference]))
    assert not torch.equal(fused_velocity, plain)  # they were used
    assert (fused_velocity - plain).abs().max() <= 1e-5 * plain.abs().max()


def test_rows_in_fp8():
    x = random(6, 80)
    values, scales = fused.quantize_rows(x)
    exact = StoredTensor.quantized(x[None, None])
    assert torch.allclose(scales, exact.scale.flatten())
    good = (values.float() * scales[:, None] - x).abs() <= ULPS * (x.abs() * 2**-3 + 2**-9 * scales[:, None])
    assert good.all() if DEVICE == "cuda" else good.float().mean() > 0.9  # the interpreter loses carries
