"""The kernel for attention on Hopper GPUs, against float32 on such a GPU; elsewhere, when it is used, what happens where it does not work, and
that it compiles."""

import logging
import re
import sys
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from unit.devices import printed

from qwen21 import kernels

HEAD = kernels.HOPPER_HEAD_DIM
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

    assert kernels.attention_runs_on(torch.device("cuda", torch.cuda.current_device()))
    calls = []
    monkeypatch.setattr(hopper, "attention", lambda q, k, v: calls.append(q.shape) or torch.empty_like(q))
    q, k, v = (heads(1, 2, 2048, seed) for seed in range(3))
    kernels.attention(q, k, v)
    assert calls == [q.shape]
    kernels.attention(q.float(), k.float(), v.float())
    kernels.attention(q[:, :, :100], k[:, :, :100], v[:, :, :100])
    assert calls == [q.shape]


def test_it_takes_what_can_be_fetched_and_broadcasts_nothing():
    q, k = heads(1, 2, 20, 0, "cpu"), heads(1, 2, 30, 1, "cpu")
    by_tokens = k.transpose(1, 2).contiguous().transpose(1, 2)
    assert kernels._attends(q, k, k) and kernels._attends(q, by_tokens, by_tokens) and kernels._attends(q, k[:, :, 1:], k[:, :, 1:])
    one_head = k[:, :1].expand(-1, 2, -1, -1)
    for others in ((k.float(), k), (k[..., ::2], k), (k[:, :1], k[:, :1]), (one_head, one_head), (k, k[:, :, 1:]), (k.expand(2, -1, -1, -1),) * 2):
        assert not kernels._attends(q, *others)
    assert not kernels._attends(q[..., :64].contiguous(), *(k[..., :64].contiguous(),) * 2)
    unaligned = torch.zeros(2 * 20 * HEAD + 4, dtype=torch.bfloat16)[4:].view(1, 2, 20, HEAD)
    assert not kernels._attends(unaligned, k, k)


def broken(kernel):
    """`kernel` with its last 16 rows left out, as one group of threads could."""

    def attention(q, k, v):
        out = kernel(q, k, v)
        out[-1, -1, -16:] = 0
        return out

    return attention


def raising(q, k, v):
    raise RuntimeError("at 24:4: a line of the kernel\n\nno such name in this version")


def failing(q, k, v):
    raise RuntimeError("PTXAS error: no such instruction\n`ptxas` stderr:\nline 3: wrong\n\nRepro command: ptxas -o out\n")


def silent(q, k, v):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("kernel", "version", "reason"),
    [
        (raising, "3.6.0", "does not work: no such name in this version"),
        (failing, "3.6.0", "does not work: line 3: wrong"),
        (silent, "3.6.0", "does not work: NotImplementedError"),
        (broken(F.scaled_dot_product_attention), "3.6.0", "its result is off by 0.0"),
        (lambda q, k, v: q * float("nan"), "3.7.1", "its result is off by nan"),
        (F.scaled_dot_product_attention, "3.5.1", "it takes Triton 3.6 or newer, this is 3.5.1"),
        (F.scaled_dot_product_attention, "3.10.0", None),
    ],
)
def test_where_it_does_not_work_pytorch_computes_and_says_so_once(monkeypatch, caplog, kernel, version, reason):
    pretend(monkeypatch, kernel, version)
    q, k, v = (heads(1, 2, 2048, seed, "cpu") for seed in range(3))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(kernels.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
        kernels.attention(q, k, v)
    assert kernels.attention_runs_on(q.device) == (reason is None)
    assert [reason in record.getMessage() for record in caplog.records] == [True] * (reason is not None)


def test_a_full_device_is_asked_again(monkeypatch):
    def full(q, k, v):
        raise torch.OutOfMemoryError

    pretend(monkeypatch, full)
    with pytest.raises(torch.OutOfMemoryError):
        kernels.attention_runs_on(torch.device("cpu"))
    monkeypatch.setattr(kernels, "_hopper", lambda: SimpleNamespace(attention=F.scaled_dot_product_attention))
    assert kernels.attention_runs_on(torch.device("cpu"))


def pretend(monkeypatch, kernel, version: str = "3.6.0") -> None:
    """The CPU is a Hopper GPU with that version of Triton, which was never asked."""
    monkeypatch.setattr(kernels, "fusible", lambda x: True)
    monkeypatch.setattr(kernels, "_hopper", lambda: SimpleNamespace(attention=kernel))
    monkeypatch.setattr(kernels, "attention_runs_on", cache(kernels.attention_runs_on.__wrapped__))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: kernels.HOPPER)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16

from qwen21 import kernels
from qwen21.kernels import hopper

kernel, types, constants = hopper._attention_kernel, {}, {}
rows = {"q_desc": hopper.QUERIES, "k_desc": hopper.KEYS, "v_desc": hopper.KEYS}
for i, name in enumerate(kernel.arg_names):
    if name in rows:
        block = [1, 1, rows[name], kernels.HOPPER_HEAD_DIM]
        types[name] = f"tensordesc<bf16{block},{NVMMASharedLayout.get_default_for(block, bfloat16)!r}>"
    elif hasattr(hopper, name):
        types[name], constants[(i,)] = "constexpr", getattr(hopper, name)
    else:
        types[name] = {"out": "*bf16", "scale": "fp32"}.get(name, "i32")
compiled = triton.compile(GluonASTSource(kernel, types, constants, {}), GPUTarget("cuda", 90, 32), {"num_warps": 4})
print(compiled.metadata.shared, compiled.asm["ptx"], compiled.asm["sass"])
"""


def test_it_compiles(tmp_path):
    triton = pytest.importorskip("triton", reason="needs Triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip("needs Triton 3.6 or newer")
    shared, _, assembly = printed(COMPILE, TRITON_CACHE_DIR=str(tmp_path)).partition(" ")
    assert int(shared) <= 227 * 1024
    assert "wgmma.mma_async" in assembly and "cp.async.bulk.tensor.4d" in assembly
    assert "HGMMA" in assembly and not re.search(r"\b(STL|LDL)\b", assembly), "registers do not suffice"
