"""comfy-kitchen's kernels in place of Triton's: its CUDA ones on a GPU, else its own plain PyTorch, which shows that they are called rightly."""

from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("comfy_kitchen", reason="needs comfy-kitchen")

from qwen21 import kernels
from qwen21.kernels import kitchen
from qwen21.rope import rotary_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of the largest value; norm and rotation round one after the other


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("normed", [None, "plain", "host"])
def test_place(monkeypatch, dtype, normed):
    """Behind a prefix, out of a wider projection."""

    class HostNorm(nn.RMSNorm):
        def forward(self, x):
            return 3 * super().forward(x)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, 3, 64, generator=generator).to(DEVICE, dtype)[..., :32]
    norm = normed and {"plain": nn.RMSNorm, "host": HostNorm}[normed](32, eps=1e-6, device=DEVICE, dtype=dtype)
    if normed:
        norm.weight.data.copy_(torch.randn(32, generator=generator))
    table = rotary_table(torch.arange(21).view(7, 3).to(DEVICE), (8, 12, 12))
    room = torch.zeros(2, 3, 10, 32, device=DEVICE, dtype=dtype)
    with torch.no_grad(), mock.patch.object(kitchen, "rotate_", wraps=kitchen.rotate_) as rotate:
        monkeypatch.setattr(kernels, "fusible", lambda x: False)
        monkeypatch.setattr(kernels, "kitchen_fits", lambda x: x.dtype == dtype)
        assert kernels.place(x, norm, table, room[:, :, 3:]).data_ptr() == room[:, :, 3:].data_ptr()
        alone = kernels.place(x, norm, table)
        assert rotate.call_count == 2
        exact = kernels.place(x.float(), norm and norm.float(), table)
    assert torch.equal(alone, room[:, :, 3:]) and alone.is_contiguous() and alone.dtype == dtype and not room[:, :, :3].any()
    assert (alone.float() - exact).abs().max() <= ROUNDING[dtype] * exact.abs().max()


def test_only_on_a_gpu_in_half_precision_and_without_gradients():
    half = torch.ones(2, device=DEVICE, dtype=torch.float16)
    assert not kernels.kitchen_fits(half)
    with torch.no_grad():
        assert kernels.kitchen_fits(half) == (DEVICE == "cuda")
        assert not kernels.kitchen_fits(half.float())
        assert not kernels.kitchen_fits(half.cpu())


def test_only_where_it_has_kernels(monkeypatch):
    assert kitchen.works() == (DEVICE == "cuda")
    for backend, good in (("cuda", True), ("hip", True), ("triton", False), ("eager", False)):
        monkeypatch.setattr(kitchen.registry, "get_capable_backend", lambda name, backend=backend: backend)
        assert kitchen.works() == good


@pytest.mark.parametrize("error", [ImportError("none here"), RuntimeError("no such function")])
def test_none_or_an_older_one_is_left_out(monkeypatch, caplog, error):
    monkeypatch.setattr(kernels, "_kitchen", mock.Mock(side_effect=error))
    assert not kernels._kitchen_works.__wrapped__()
    assert ("left out: no such function" in caplog.text) == isinstance(error, RuntimeError)
