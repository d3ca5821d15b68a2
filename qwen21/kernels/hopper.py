"""Unmasked attention on Hopper GPUs, in Triton's Gluon. Imported only where Triton is; Gluon has what this needs from Triton 3.6 on.

A program takes 128 queries of a head at a time: a work item. One warp copies queries, keys and values into shared memory; two warpgroups
compute 64 queries each, and while one multiplies the other takes exponentials (FlashAttention-3, arXiv:2407.08608). Keys come last tile
first, so that only the first one computed is masked.
"""

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import HOPPER_HEAD_DIM as DIM

QUERIES, KEYS, STAGES = 64, 128, 2  # of a warpgroup; of a tile; tiles of keys, and of values, in shared memory
REGISTERS = 240, 24  # a thread, of the second warpgroup (the first gets what is left, as many) and of the warp that copies

_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name up to Triton 3.7


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, q, k, v, barriers, work_items, blocks, heads, tiles,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = barriers
    done = 0
    for work_item in range(gl.program_id(0), work_items, gl.num_programs(0)):
        batch, head, row = work_item // blocks // heads, work_item // blocks % heads, work_item % blocks * 2 * QUERIES
        mbarrier.wait(q_empty, (done & 1) ^ 1)
        mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
        _copy(q_desc, [batch, head, row, 0], q_full, q.index(0))
        _copy(q_desc, [batch, head, row + QUERIES, 0], q_full, q.index(1))
        for i in range(tiles):
            key = (tiles - 1 - i) * KEYS
            stage, phase = (done * tiles + i) % STAGES, (done * tiles + i) // STAGES & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            _copy(k_desc, [batch, head, key, 0], k_full.index(stage), k.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            _copy(v_desc, [batch, head, key, 0], v_full.index(stage), v.index(stage))
        done += 1


@gluon.jit
def _softmax(scores, row_max, row_sum, scale, WEIGHTS: gl.constexpr):
    """(weights of a tile's scores, maximum and sum of a row up to now, factor on what was summed before)."""
    new_row_max = gl.maximum(row_max, gl.max(scores, 1))
    weights = gl.exp2(scores * scale - (new_row_max * scale)[:, None])
    rescale = gl.exp2((row_max - new_row_max) * scale)
    return gl.convert_layout(weights.to(gl.bfloat16), WEIGHTS), new_row_max, row_sum * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def _attend(
    q, k, v, barriers, out, queries, keys, scale, work_items, blocks, heads, tiles,
    WARPGROUP: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = barriers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    q_tile = q.index(WARPGROUP).reshape([QUERIES, DIM])
    zeros = gl.full([QUERIES, KEYS], 0.0, gl.float32, SCORES)
    done = 0
    for work_item in range(gl.program_id(0), work_items, gl.num_programs(0)):
        row_max = gl.full([QUERIES], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        row_sum = gl.full([QUERIES], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.full([QUERIES, DIM], 0.0, gl.float32, OUT)
        first = done * tiles
        stage = first % STAGES
        mbarrier.wait(q_full, done & 1)
        mbarrier.wait(k_full.index(stage), first // STAGES & 1)
        qk = warpgroup_mma(q_tile, k.index(stage).reshape([KEYS, DIM]).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(qk,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        inside = (tiles - 1) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES)) < keys
        weights, row_max, row_sum, rescale = _softmax(gl.where(inside[None, :], scores, float("-inf")), row_max, row_sum, scale, WEIGHTS)
        mbarrier.wait(v_full.index(stage), first // STAGES & 1)
        for tile in range(first + 1, first + tiles):
            stage, last = tile % STAGES, (tile - 1) % STAGES
            mbarrier.wait(k_full.index(stage), tile // STAGES & 1)
            mbarrier.wait(turn.index(WARPGROUP), (tile - done - 1 & 1) ^ (1 - WARPGROUP))
            qk = warpgroup_mma(q_tile, k.index(stage).reshape([KEYS, DIM]).permute((1, 0)), zeros, use_acc=False, is_async=True)
            new_acc = warpgroup_mma(weights, v.index(last).reshape([KEYS, DIM]), acc, is_async=True)
            mbarrier.arrive(turn.index(1 - WARPGROUP), count=1)
            scores = warpgroup_mma_wait(1, deps=(qk,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            new_weights, row_max, row_sum, rescale = _softmax(scores, row_max, row_sum, scale, WEIGHTS)
            # Needed in the next round only. But waiting ends a basic block; without that, ptxas puts the softmax behind what follows.
            mbarrier.wait(v_full.index(stage), tile // STAGES & 1)
            acc, weights, new_weights = warpgroup_mma_wait(0, deps=(new_acc, weights, new_weights))
            mbarrier.arrive(v_empty.index(last), count=1)
            acc *= gl.convert_layout(rescale, ROWS)[:, None]
            weights = new_weights
        mbarrier.arrive(q_empty, count=1)
        last = (first + tiles - 1) % STAGES
        new_acc = warpgroup_mma(weights, v.index(last).reshape([KEYS, DIM]), acc, is_async=True)
        acc, weights = warpgroup_mma_wait(0, deps=(new_acc, weights))
        mbarrier.arrive(v_empty.index(last), count=1)
        acc /= gl.convert_layout(row_sum, ROWS)[:, None]
        head, row = work_item // blocks, work_item % blocks * 2 * QUERIES + WARPGROUP * QUERIES + gl.arange(0, QUERIES, ROWS)
        at = ((head // heads * queries + row).to(gl.int64) * heads + head % heads) * DIM
        gl.store(out + at[:, None] + gl.arange(0, DIM, gl.SliceLayout(0, OUT))[None, :], acc.to(gl.bfloat16), mask=(row < queries)[:, None])
        done += 1


@gluon.jit(do_not_specialize=["queries", "keys", "work_items", "blocks", "heads"])
def _attention_kernel(
    q_desc, k_desc, v_desc, out, queries, keys, work_items, blocks, heads, scale,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, QUERIES, DIM], q_desc.layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, KEYS, DIM], k_desc.layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, KEYS, DIM], v_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full, q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER), gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full, k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER), gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full, v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER), gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    # "full": has been copied; "empty": both warpgroups are done with it; "turn": this warpgroup may multiply, which the first may at once.
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    barriers, tiles = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turn), gl.cdiv(keys, KEYS)
    gl.warp_specialize(
        [
            (_attend, (q, k, v, barriers, out, queries, keys, scale, work_items, blocks, heads, tiles, 0, QUERIES, KEYS, DIM, STAGES)),
            (_attend, (q, k, v, barriers, out, queries, keys, scale, work_items, blocks, heads, tiles, 1, QUERIES, KEYS, DIM, STAGES)),
            (_load, (q_desc, k_desc, v_desc, q, k, v, barriers, work_items, blocks, heads, tiles, QUERIES, KEYS, STAGES)),
        ],
        [4, 1],
        REGISTERS,
    )


def _descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """`x` (batch, heads, tokens, DIM) to be copied so many rows at a time, zeros where it ends."""
    block = [1, 1, rows, DIM]
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every query sees every key: bfloat16 (batch, heads, tokens, DIM), at least one key, heads and tokens in any order in memory. In the result, of
    the same shape as `q`, a token's heads lie together."""
    batch, heads, queries, _ = q.shape
    out = q.new_empty(batch, queries, heads, DIM)
    blocks = triton.cdiv(queries, 2 * QUERIES)
    work_items = batch * heads * blocks
    programs = min(work_items, torch.cuda.get_device_properties(q.device).multi_processor_count)
    _attention_kernel[(programs,)](
        _descriptor(q, QUERIES), _descriptor(k, KEYS), _descriptor(v, KEYS), out, queries, k.shape[2], work_items, blocks, heads, DIM**-0.5 * math.log2(math.e),
        QUERIES, KEYS, DIM, STAGES, REGISTERS, num_warps=4,
    )  # fmt: skip
    return out.transpose(1, 2)
