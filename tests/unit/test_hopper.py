"""The kernel for attention on Hopper GPUs, against float32; where it is used, and what happens where it does not work. The last two need no GPU."""

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from qwen21 import kernels

HEAD = 128
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability() != kernels.HOPPER, reason="needs a Hopper GPU"
)


def heads(batch: int, count: int, tokens: int, seed: int, device: str = "cuda") -> torch.Tensor:
    return torch.randn(batch, count, tokens, HEAD, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def error(ours: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    exact = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    return ((ours - exact).norm() / exact.norm()).item()


@on_hopper
@torch.inference_mode()
@pytest.mark.parametrize(
    ("batch", "count", "queries", "keys"),
    [(1, 1, 1, 1), (1, 3, 64, 128), (1, 2, 65, 129), (2, 3, 200, 333), (1, 4, 1000, 1023), (1, 32, 1000, 300), (3, 40, 300, 200), (1, 1, 128, 9000)],
)
def test_it_is_exact_at_any_length_and_for_more_pieces_than_processors(batch, count, queries, keys):
    from qwen21.kernels import hopper

    q, k, v = heads(batch, count, queries, 0), heads(batch, count, keys, 1), heads(batch, count, keys, 2)
    q *= 3  # some weights near one
    ours = hopper.attention(q, k, v)
    assert ours.shape == q.shape
    assert error(ours, q, k, v) <= 1.1 * error(F.scaled_dot_product_attention(q, k, v), q, k, v)


@on_hopper
@torch.inference_mode()
def test_memory_may_lie_in_any_order_and_what_lies_behind_the_keys_is_never_used():
    from qwen21.kernels import hopper

    q, k, v = heads(2, 3, 150, 0), heads(2, 3, 333, 1), heads(2, 3, 333, 2)
    expected = hopper.attention(q, k, v)
    by_tokens = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(hopper.attention(*by_tokens), expected)
    roomy = [x.new_full((2, 3, 400, HEAD), float("nan"))[:, :, : x.shape[2]].copy_(x) for x in (q, k, v)]
    assert torch.equal(hopper.attention(*roomy), expected)


@on_hopper
@torch.inference_mode()
def test_it_is_used_for_long_sequences_in_bfloat16(monkeypatch):
    from qwen21.kernels import hopper

    calls = []
    monkeypatch.setattr(hopper, "attention", lambda q, k, v: calls.append(q.shape) or torch.empty_like(q))
    long = heads(1, 2, 2048, 0), heads(1, 2, 2048, 1), heads(1, 2, 2048, 2)
    kernels.attention(*long)
    assert len(calls) == 1
    kernels.attention(*(x.float() for x in long))
    kernels.attention(*(x[:, :, :100] for x in long))
    kernels.attention(*(x[..., :64].contiguous() for x in long))
    kernels.attention(long[0], long[1][:, :1].expand(-1, 2, -1, -1), long[2])
    assert len(calls) == 1


def test_where_it_does_not_work_pytorch_computes_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "fusible", lambda x: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: kernels.HOPPER)
    monkeypatch.setattr(kernels, "attention_runs_on", kernels.cache(kernels.attention_runs_on.__wrapped__))
    q, k, v = (heads(1, 2, 2048, seed, "cpu") for seed in range(3))
    expected = F.scaled_dot_product_attention(q, k, v)

    def raising(q, k, v):
        raise RuntimeError("no such name in this version")

    for kernel, reason in ((raising, "no such name"), (lambda q, k, v: v[:, :, : q.shape[2]], "off by"), (lambda q, k, v: q * float("nan"), "off by nan")):
        monkeypatch.setattr(kernels, "_hopper", lambda kernel=kernel: SimpleNamespace(attention=kernel))
        kernels.attention_runs_on.cache_clear()
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert torch.equal(kernels.attention(q, k, v), expected) and torch.equal(kernels.attention(q, k, v), expected)
            assert [reason in record.getMessage() for record in caplog.records] == [True]

    def full(q, k, v):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(kernels, "_hopper", lambda: SimpleNamespace(attention=full))
    kernels.attention_runs_on.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        kernels.attention(q, k, v)
    monkeypatch.setattr(kernels, "_hopper", lambda: SimpleNamespace(attention=F.scaled_dot_product_attention))
    assert kernels.attention_runs_on(q.device)  # the full device was not remembered


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16

from qwen21.kernels import hopper

kernel, types, constants = hopper._attention_kernel, {}, {}
rows = {"q_tensor": hopper.QUERIES, "k_tensor": hopper.KEYS, "v_tensor": hopper.KEYS}
for i, name in enumerate(kernel.arg_names):
    if name in rows:
        block = [1, 1, rows[name], hopper.DIM]
        types[name] = f"tensordesc<bf16{block},{NVMMASharedLayout.get_default_for(block, bfloat16)!r}>"
    elif hasattr(hopper, name):
        types[name], constants[(i,)] = "constexpr", getattr(hopper, name)
    else:
        types[name] = {"out": "*bf16", "scale": "fp32"}.get(name, "i32")
compiled = triton.compile(GluonASTSource(kernel, types, constants, {}), GPUTarget("cuda", 90, 32), {"num_warps": 4})
print(compiled.metadata.shared, compiled.asm["ptx"])
"""


def test_it_compiles(tmp_path):
    triton = pytest.importorskip("triton", reason="needs Triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip("needs Triton 3.6 or newer")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-"], input=COMPILE, env=environment, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    shared, _, assembly = done.stdout.partition(" ")
    assert int(shared) <= 227 * 1024
    assert "wgmma.mma_async" in assembly and "cp.async.bulk.tensor.4d" in assembly and ".local" not in assembly
