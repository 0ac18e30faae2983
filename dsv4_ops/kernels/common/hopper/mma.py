"""Attention of one token over blocks of keys on Hopper's matrix unit, in two warp partitions. The
left partition computes the logits, the softmax and the left half of the output. The right partition
computes the right half of the output."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4_ops.kernels.common.triton_compat import Scalar, aggregate

KEYS = gl.constexpr(64)
"""Keys of a block."""

HEADS = gl.constexpr(64)
"""Heads of a program: the rows of a matrix product."""

WIDTH = gl.constexpr(256)
"""Output columns that a partition accumulates: half a row."""

LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
LOGIT_ROW = gl.constexpr(gl.SliceLayout(1, LOGITS.value))
"""Layout of one value per head: the layout of the logits, reduced over keys."""
ACC_ROW = gl.constexpr(gl.SliceLayout(1, ACC.value))
P_OPERAND = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))

_Q_COLUMNS = gl.constexpr(128)
_Q_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@aggregate
class Barriers:
    """Barriers between the partitions. ``kv_ready`` and ``kv_free`` have one barrier per buffer."""

    kv_ready: gl.shared_memory_descriptor
    kv_free: gl.shared_memory_descriptor
    p_ready: gl.shared_memory_descriptor
    p_free: gl.shared_memory_descriptor
    q_ready: gl.shared_memory_descriptor


@aggregate
class Smem:
    """Shared memory of a program.

    ``p`` holds P of one block; ``alpha`` holds the factor that rescales the accumulator before that
    block. ``kv_valid`` holds the row of each key, -1 if the key does not exist. ``per_head`` holds
    two values per head for the epilogue: the sink, or the amax and the scale of a partial result.
    """

    q: gl.shared_memory_descriptor
    kv: gl.shared_memory_descriptor
    kv_valid: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    alpha: gl.shared_memory_descriptor
    per_head: gl.shared_memory_descriptor
    barriers: Barriers


@aggregate
class HeadRows:
    """Queries of a program's heads: the address of the first head, and the stride of heads."""

    start: Scalar
    stride: Scalar


@gluon.jit
def allocate():
    """Allocate the shared memory and the barriers of a program."""
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, 2 * WIDTH], ROWS)
    kv_smem = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, 2 * WIDTH], ROWS)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [HEADS, KEYS], ROWS)
    kv_valid_smem = gl.allocate_shared_memory(gl.int32, [2, KEYS], LINE)
    alpha_smem = gl.allocate_shared_memory(gl.float32, [HEADS], LINE)
    kv_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(kv_ready.index(buffer), count=1)
        mbarrier.init(kv_free.index(buffer), count=2)
    mbarrier.init(p_ready, count=1)
    mbarrier.init(p_free, count=1)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=2)
    barriers = Barriers(kv_ready, kv_free, p_ready, p_free, q_ready)
    per_head_smem = gl.allocate_shared_memory(gl.float32, [2, HEADS], LINE)
    return Smem(q_smem, kv_smem, kv_valid_smem, p_smem, alpha_smem, per_head_smem, barriers)


@gluon.jit
def load_half_queries(smem, q, heads, FIRST: gl.constexpr):
    """Copy half of the columns of the queries, from FIRST on, to shared memory; write zeros for
    heads from ``heads`` on. Each partition copies one half and arrives at ``q_ready``."""
    q_smem = smem.q.index(0)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, _Q_LAYOUT))
    dim = gl.arange(0, _Q_COLUMNS, gl.SliceLayout(0, _Q_LAYOUT))
    start = q.start + FIRST + head.to(gl.int64)[:, None] * q.stride + dim[None, :]
    head_valid = (head < heads)[:, None]
    # issue both loads before the first store
    values0 = gl.load(start, mask=head_valid, other=0.0)
    values1 = gl.load(start + _Q_COLUMNS, mask=head_valid, other=0.0)
    q_smem.slice(FIRST, _Q_COLUMNS, dim=1).store(values0)
    q_smem.slice(FIRST + _Q_COLUMNS, _Q_COLUMNS, dim=1).store(values1)
    fence_async_shared()
    mbarrier.arrive(smem.barriers.q_ready)


@gluon.jit
def thread_sums(values):
    """Return the sum of each thread's columns, [heads, 4]. The caller adds the four sums of a head
    after the last block."""
    parts = gl.reshape(values, [HEADS, KEYS // 8, 4, 2])
    return gl.sum(gl.sum(parts, axis=3), axis=1)


@gluon.jit
def _softmax(logits, row_max, row_sum):
    """Return P, alpha, the new row_max and the new row_sum. ``logits`` [heads, keys] are in base 2;
    alpha rescales the accumulator."""
    new_max = gl.maximum(row_max, gl.max(logits, axis=1))
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(logits - finite_max[:, None])
    alpha = gl.exp2(row_max - finite_max)
    alpha_rows = gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))
    return p, alpha, new_max, row_sum * alpha_rows[:, None] + thread_sums(p)


@gluon.jit
def attend_left(blocks, scale, smem):
    """Return the left half of the accumulator over all blocks, row_max and row_sum. ``scale``
    includes log2(e)."""
    barriers = smem.barriers
    acc = gl.full([HEADS, WIDTH], 0.0, gl.float32, ACC)
    row_max = gl.full([HEADS], float("-inf"), gl.float32, LOGIT_ROW)
    zeros = gl.full([HEADS, KEYS], 0.0, gl.float32, LOGITS)
    row_sum = thread_sums(zeros)
    block = blocks * 0
    while block < blocks:
        buffer = block % 2
        mbarrier.wait(barriers.kv_ready.index(buffer), (block // 2) & 1)
        kv_tile = smem.kv.index(buffer)
        # a constant index would keep descriptors in registers
        q_tile = smem.q.index(block >> 28)
        qk = warpgroup_mma(q_tile, kv_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        kv_valid = smem.kv_valid.index(buffer).load(gl.SliceLayout(0, LOGITS))
        logits = warpgroup_mma_wait(0, deps=(qk,))
        logits = gl.where((kv_valid >= 0)[None, :], logits * scale, float("-inf"))
        p, alpha, row_max, row_sum = _softmax(logits, row_max, row_sum)
        p_bf16 = p.to(gl.bfloat16)
        mbarrier.wait(barriers.p_free, (block & 1) ^ 1)
        smem.p.store(p_bf16)
        smem.alpha.store(alpha)
        fence_async_shared()
        mbarrier.arrive(barriers.p_ready)
        acc = acc * gl.convert_layout(alpha, ACC_ROW)[:, None]
        p_operand = gl.convert_layout(p_bf16, P_OPERAND)
        pv = warpgroup_mma(p_operand, kv_tile.slice(0, WIDTH, dim=1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(pv,))
        mbarrier.arrive(barriers.kv_free.index(buffer))
        block += 1
    return acc, row_max, gl.convert_layout(gl.sum(row_sum, axis=1), LOGIT_ROW)


@gluon.jit
def attend_right(blocks, smem):
    """Return the right half of the accumulator over all blocks, with P and alpha of the left
    partition."""
    barriers = smem.barriers
    acc = gl.full([HEADS, WIDTH], 0.0, gl.float32, ACC)
    block = blocks * 0
    while block < blocks:
        buffer = block % 2
        mbarrier.wait(barriers.kv_ready.index(buffer), (block // 2) & 1)
        mbarrier.wait(barriers.p_ready, block & 1)
        acc = acc * smem.alpha.load(ACC_ROW)[:, None]
        kv_right = smem.kv.index(buffer).slice(WIDTH, WIDTH, dim=1)
        pv = warpgroup_mma(smem.p, kv_right, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(pv,))
        mbarrier.arrive(barriers.p_free)
        mbarrier.arrive(barriers.kv_free.index(buffer))
        block += 1
    return acc
