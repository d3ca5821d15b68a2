"""Unmasked attention on Hopper GPUs, in Triton's Gluon. Imported only where Triton is; Gluon has what this needs from Triton 3.6 on.

A program takes 128 queries of a head at a time. One warp fetches queries, keys and values into shared memory; two groups of four warps
compute 64 queries each, and while one multiplies the other takes exponentials (FlashAttention-3, arXiv:2407.08608). Keys come last tile
first, so that only the first one computed is masked.
"""

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

DIM = 128  # of a head
QUERIES, KEYS, STAGES = 64, 128, 2  # of a group of warps; of a tile; tiles of keys, and of values, in shared memory
REGISTERS = 240, 24  # a thread, of those who compute and of those who fetch

_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name until Triton 3.7


@gluon.jit
def _produce(
    q_tensor, k_tensor, v_tensor, q, k, v, barriers, pieces, blocks, heads, tiles,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = barriers
    done = 0
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        batch, head, row = piece // blocks // heads, piece // blocks % heads, piece % blocks * 2 * QUERIES
        mbarrier.wait(q_empty, (done & 1) ^ 1)
        mbarrier.expect(q_full, 2 * q_tensor.block_type.nbytes)
        _fetch(q_tensor, [batch, head, row, 0], q_full, q.index(0))
        _fetch(q_tensor, [batch, head, row + QUERIES, 0], q_full, q.index(1))
        for i in range(tiles):
            key = (tiles - 1 - i) * KEYS
            stage, phase = (done * tiles + i) % STAGES, (done * tiles + i) // STAGES & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_tensor.block_type.nbytes)
            _fetch(k_tensor, [batch, head, key, 0], k_full.index(stage), k.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), v_tensor.block_type.nbytes)
            _fetch(v_tensor, [batch, head, key, 0], v_full.index(stage), v.index(stage))
        done += 1


@gluon.jit
def _softmax(scores, highest, total, scale, WEIGHTS: gl.constexpr):
    """Weights of a tile's scores, the highest score and the sum of weights up to now, and the factor on what was summed before."""
    new_highest = gl.maximum(highest, gl.max(scores, 1))
    shift = new_highest * scale
    weights = gl.exp2(scores * scale - shift[:, None])
    before = gl.exp2(highest * scale - shift)
    return gl.convert_layout(weights.to(gl.bfloat16), WEIGHTS), new_highest, total * before + gl.sum(weights, 1), before


@gluon.jit
def _consume(
    q, k, v, barriers, out, queries, keys, scale, pieces, blocks, heads, tiles,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = barriers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    mine = q.index(GROUP).reshape([QUERIES, DIM])
    none = gl.full([QUERIES, KEYS], 0.0, gl.float32, SCORES)
    done = 0
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        highest = gl.full([QUERIES], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.full([QUERIES], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
        sums = gl.full([QUERIES, DIM], 0.0, gl.float32, OUT)
        first = done * tiles
        stage = first % STAGES
        mbarrier.wait(q_full, done & 1)
        mbarrier.wait(k_full.index(stage), first // STAGES & 1)
        product = warpgroup_mma(mine, k.index(stage).reshape([KEYS, DIM]).permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        inside = (tiles - 1) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES)) < keys
        weights, highest, total, before = _softmax(gl.where(inside[None, :], scores, float("-inf")), highest, total, scale, WEIGHTS)
        final = first + tiles - 1
        after = gl.minimum(first + 1, final)
        mbarrier.wait(k_full.index(after % STAGES), after // STAGES & 1)
        for tile in range(first + 1, final + 1):
            stage, last = tile % STAGES, (tile - 1) % STAGES
            mbarrier.wait(turn.index(GROUP), (tile - done - 1 & 1) ^ (1 - GROUP))
            product = warpgroup_mma(mine, k.index(stage).reshape([KEYS, DIM]).permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(last), (tile - 1) // STAGES & 1)
            new_sums = warpgroup_mma(weights, v.index(last).reshape([KEYS, DIM]), sums, is_async=True)
            mbarrier.arrive(turn.index(1 - GROUP), count=1)
            scores = warpgroup_mma_wait(1, deps=(product,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            new_weights, highest, total, before = _softmax(scores, highest, total, scale, WEIGHTS)
            # The next round's keys. Waiting ends a basic block, without which the assembler puts the softmax behind what follows. After the last
            # round they are those it had: nothing is fetched in their place before q_empty.
            after = gl.minimum(tile + 1, final)
            mbarrier.wait(k_full.index(after % STAGES), after // STAGES & 1)
            sums, weights, new_weights = warpgroup_mma_wait(0, deps=(new_sums, weights, new_weights))
            mbarrier.arrive(v_empty.index(last), count=1)
            sums *= gl.convert_layout(before, ROWS)[:, None]
            weights = new_weights
        mbarrier.arrive(q_empty, count=1)
        last = final % STAGES
        mbarrier.wait(v_full.index(last), final // STAGES & 1)
        new_sums = warpgroup_mma(weights, v.index(last).reshape([KEYS, DIM]), sums, is_async=True)
        sums, weights = warpgroup_mma_wait(0, deps=(new_sums, weights))
        mbarrier.arrive(v_empty.index(last), count=1)
        sums /= gl.convert_layout(total, ROWS)[:, None]
        head, row = piece // blocks, piece % blocks * 2 * QUERIES + GROUP * QUERIES + gl.arange(0, QUERIES, ROWS)
        at = ((head // heads * queries + row).to(gl.int64) * heads + head % heads) * DIM
        gl.store(out + at[:, None] + gl.arange(0, DIM, gl.SliceLayout(0, OUT))[None, :], sums.to(gl.bfloat16), mask=(row < queries)[:, None])
        done += 1


@gluon.jit(do_not_specialize=["queries", "keys", "pieces", "blocks", "heads"])
def _attention_kernel(
    q_tensor, k_tensor, v_tensor, out, queries, keys, pieces, blocks, heads, scale,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, QUERIES, DIM], q_tensor.layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, KEYS, DIM], k_tensor.layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, KEYS, DIM], v_tensor.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full, q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER), gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full, k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER), gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full, v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER), gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    # "full" is what has been fetched, "empty" what both groups have done with, "turn" says of each group that it may multiply; the first one may at once.
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()  # fetching sees them as they are now
    barriers, tiles = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turn), gl.cdiv(keys, KEYS)
    gl.warp_specialize(
        [
            (_consume, (q, k, v, barriers, out, queries, keys, scale, pieces, blocks, heads, tiles, 0, QUERIES, KEYS, DIM, STAGES)),
            (_consume, (q, k, v, barriers, out, queries, keys, scale, pieces, blocks, heads, tiles, 1, QUERIES, KEYS, DIM, STAGES)),
            (_produce, (q_tensor, k_tensor, v_tensor, q, k, v, barriers, pieces, blocks, heads, tiles, QUERIES, KEYS, STAGES)),
        ],
        [4, 1],
        REGISTERS,
    )


def _tiles(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """`x` (batch, heads, tokens, DIM) for fetching so many rows at once, zeros where it ends."""
    block = [1, 1, rows, DIM]
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every query sees every key: bfloat16 (batch, heads, tokens, DIM), at least one key, heads and tokens in any order in memory. In the result, of
    the same shape as `q`, a token's heads lie together."""
    batch, heads, queries, _ = q.shape
    out = q.new_empty(batch, queries, heads, DIM)
    blocks = triton.cdiv(queries, 2 * QUERIES)
    pieces = batch * heads * blocks
    programs = min(pieces, torch.cuda.get_device_properties(q.device).multi_processor_count)
    _attention_kernel[(programs,)](
        _tiles(q, QUERIES), _tiles(k, KEYS), _tiles(v, KEYS), out, queries, k.shape[2], pieces, blocks, heads, DIM**-0.5 * math.log2(math.e),
        QUERIES, KEYS, DIM, STAGES, REGISTERS, num_warps=4,
    )  # fmt: skip
    return out.transpose(1, 2)
