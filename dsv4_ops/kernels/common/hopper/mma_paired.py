"""Attention of one token over pairs of key blocks on Hopper's matrix unit, in two warp partitions.
Each partition computes the logits and the softmax of one block of a pair, and accumulates half of
the output over both blocks.

No barrier says that a P tile is free: it is free when the KV half that it multiplies is free. A
program may process several items; an item is a token and a tile of heads. Pairs and items
(``iteration``) are counted from the start of the program, because barriers keep their phases from
item to item.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4_ops.kernels.common.hopper.mma import (
    ACC,
    ACC_ROW,
    HEADS,
    KEYS,
    LOGIT_ROW,
    LOGITS,
    P_OPERAND,
    WIDTH,
    thread_sums,
)
from dsv4_ops.kernels.common.triton_compat import aggregate

LEFT, RIGHT = gl.constexpr(0), gl.constexpr(1)
"""Halves of a row, and of the output; each partition accumulates one half."""

EVEN, ODD = gl.constexpr(0), gl.constexpr(1)
"""Blocks of a pair. The left partition computes the logits of the even block; the right partition
computes the logits of the odd block."""

COPY_THREADS = gl.constexpr(128)
"""Threads that copy: each arrives at the barrier of half a block when its copies are done."""

MMA_REGISTERS = gl.constexpr(208)
"""Registers per thread of the MMA partitions; the copying partition gets the rest."""


@aggregate
class PairedBarriers:
    """Barriers between the partitions. ``kv_ready`` and ``kv_free`` have one barrier per half and
    block; ``max_ready`` and ``p_ready`` have one per block."""

    kv_ready: gl.tuple
    kv_free: gl.tuple
    max_ready: gl.tuple
    p_ready: gl.tuple
    q_ready: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor


@aggregate
class PairedSmem:
    """Shared memory of a program.

    ``kv`` has two tensors for the rows of a pair of blocks: one holds the left halves, the other
    the right halves. ``kv_valid`` holds the row of each key, -1 if the key does not exist. Row sums
    and sinks have two buffers, for the current and the previous item.
    """

    q: gl.shared_memory_descriptor
    kv: gl.tuple
    kv_valid: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    row_max: gl.shared_memory_descriptor
    row_sum: gl.shared_memory_descriptor
    sink: gl.shared_memory_descriptor
    barriers: PairedBarriers


@aggregate
class Rope:
    """RoPE columns of the queries, and the number of keys that each row of the queries sees."""

    q: gl.shared_memory_descriptor
    length: gl.tensor


@gluon.jit
def allocate(ARRIVALS: gl.constexpr):
    """Allocate the shared memory and the barriers of a program. ARRIVALS is the number of arrivals
    that complete a ``kv_ready`` barrier."""
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, 2 * WIDTH], ROWS)
    kv_left_smem = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, WIDTH], ROWS)
    kv_right_smem = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, WIDTH], ROWS)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, KEYS], ROWS)
    kv_valid_smem = gl.allocate_shared_memory(gl.int32, [2, KEYS], LINE)
    row_max_smem = gl.allocate_shared_memory(gl.float32, [2, HEADS], LINE)
    row_sum_smem = gl.allocate_shared_memory(gl.float32, [4, HEADS], LINE)
    sink_smem = gl.allocate_shared_memory(gl.float32, [2, HEADS], LINE)
    kv_ready_left = (_barrier(ARRIVALS), _barrier(ARRIVALS))
    kv_ready_right = (_barrier(ARRIVALS), _barrier(ARRIVALS))
    kv_free_left = (_barrier(1), _barrier(1))
    kv_free_right = (_barrier(1), _barrier(1))
    max_ready = (_barrier(1), _barrier(1))
    p_ready = (_barrier(1), _barrier(1))
    q_ready = _barrier(2 * ARRIVALS)
    q_free = _barrier(2)
    kv_ready, kv_free = (kv_ready_left, kv_ready_right), (kv_free_left, kv_free_right)
    return PairedSmem(
        q=q_smem,
        kv=(kv_left_smem, kv_right_smem),
        kv_valid=kv_valid_smem,
        p=p_smem,
        row_max=row_max_smem,
        row_sum=row_sum_smem,
        sink=sink_smem,
        barriers=PairedBarriers(kv_ready, kv_free, max_ready, p_ready, q_ready, q_free),
    )


@gluon.jit
def _barrier(ARRIVALS: gl.constexpr):
    """Allocate one barrier in an allocation of its own. Barriers that share an allocation would
    synchronise all threads."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=ARRIVALS)
    return barrier


@gluon.jit
def _logits(
    block,
    BLOCK: gl.constexpr,
    phase,
    FIRST: gl.constexpr,
    scale, zero, smem, rope,
    HAS_ROPE: gl.constexpr,
):  # fmt: skip
    """Return the logits of a block; the half FIRST is multiplied first. With HAS_ROPE, keys have
    RoPE columns beside their values, and ``rope`` is a ``Rope``. The RoPE columns of the keys lie
    in ``smem.p`` until P replaces them, and ``smem.kv_valid`` holds the positions of the keys."""
    q_smem, kv_smem, kv_ready = smem.q.index(zero), smem.kv, smem.barriers.kv_ready
    zeros = gl.full([HEADS, KEYS], 0.0, gl.float32, LOGITS)
    SECOND: gl.constexpr = 1 - FIRST
    mbarrier.wait(kv_ready[FIRST][BLOCK], phase)
    fence_async_shared()
    qk = warpgroup_mma(
        q_smem.slice(FIRST * WIDTH, WIDTH, dim=1),
        kv_smem[FIRST].index(block).permute((1, 0)),
        zeros,
        use_acc=False,
        is_async=True,
    )
    mbarrier.wait(kv_ready[SECOND][BLOCK], phase)
    fence_async_shared()
    qk = warpgroup_mma(
        q_smem.slice(SECOND * WIDTH, WIDTH, dim=1),
        kv_smem[SECOND].index(block).permute((1, 0)),
        qk,
        is_async=True,
    )
    if HAS_ROPE:
        k_rope = smem.p.index(block).permute((1, 0))
        qk = warpgroup_mma(rope.q.index(zero), k_rope, qk, is_async=True)
    kv_valid = smem.kv_valid.index(block).load(gl.SliceLayout(0, LOGITS))
    logits = warpgroup_mma_wait(0, deps=(qk,))
    if HAS_ROPE:
        return gl.where(kv_valid[None, :] < rope.length[:, None], logits * scale, float("-inf"))
    return gl.where((kv_valid >= 0)[None, :], logits * scale, float("-inf"))


@gluon.jit
def _finite_max(row_max):
    return gl.where(row_max == float("-inf"), 0.0, row_max)


@gluon.jit
def _rescale(row_sum, alpha):
    return row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[:, None]


@gluon.jit
def _store_p(block: gl.constexpr, p_smem, p, p_ready):
    p_smem.index(block).store(p)
    fence_async_shared()
    mbarrier.arrive(p_ready[block])


@gluon.jit
def attend_even(first, pairs, iteration, scale, smem, rope, HAS_ROPE: gl.constexpr):
    """Attend to ``pairs`` pairs from pair ``first`` on. Return the left half of the accumulator,
    row_max, and the row_sum over the first block of each pair. ``scale`` includes log2(e);
    ``rope`` is as in ``_logits``."""
    kv_smem, p_smem, row_max_smem = smem.kv, smem.p, smem.row_max
    barriers = smem.barriers
    kv_free, max_ready, p_ready = barriers.kv_free, barriers.max_ready, barriers.p_ready
    acc = gl.full([HEADS, WIDTH], 0.0, gl.float32, ACC)
    row_max = gl.full([HEADS], float("-inf"), gl.float32, LOGIT_ROW)
    row_sum = thread_sums(gl.full([HEADS, KEYS], 0.0, gl.float32, LOGITS))
    pair = first + pairs * 0
    while pair < first + pairs:
        phase = pair & 1
        logits = _logits(0, EVEN, phase, LEFT, scale, 0, smem, rope, HAS_ROPE)
        new_max = gl.maximum(row_max, gl.max(logits, axis=1))
        row_max_smem.index(0).store(new_max)
        mbarrier.arrive(max_ready[EVEN])
        p = gl.exp2(logits - _finite_max(new_max)[:, None])
        alpha = gl.exp2(row_max - _finite_max(new_max))
        row_sum = _rescale(row_sum, alpha) + thread_sums(p)
        acc = acc * gl.convert_layout(alpha, ACC_ROW)[:, None]
        p_operand = gl.convert_layout(p.to(p_smem.dtype), P_OPERAND)
        pv = warpgroup_mma(p_operand, kv_smem[LEFT].index(0), acc, is_async=True)
        mbarrier.wait(max_ready[ODD], (pair + iteration) & 1)
        row_max = row_max_smem.index(1).load(LOGIT_ROW)
        alpha = gl.exp2(new_max - _finite_max(row_max))
        _store_p(EVEN, p_smem, (p * alpha[:, None]).to(p_smem.dtype), p_ready)
        row_sum = _rescale(row_sum, alpha)
        acc = warpgroup_mma_wait(0, deps=(pv,))
        mbarrier.arrive(kv_free[LEFT][EVEN])
        acc = acc * gl.convert_layout(alpha, ACC_ROW)[:, None]
        mbarrier.wait(p_ready[ODD], phase)
        pv = warpgroup_mma(p_smem.index(1), kv_smem[LEFT].index(1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(pv,))
        mbarrier.arrive(kv_free[LEFT][ODD])
        pair += 1
    return acc, row_max, gl.convert_layout(gl.sum(row_sum, axis=1), LOGIT_ROW)


@gluon.jit
def attend_odd(first, pairs, iteration, scale, smem, rope, HAS_ROPE: gl.constexpr):
    """Attend to the same pairs as ``attend_even``. Return the right half of the accumulator,
    row_max, and the row_sum over the second block of each pair."""
    kv_smem, p_smem, row_max_smem = smem.kv, smem.p, smem.row_max
    barriers = smem.barriers
    kv_free, max_ready, p_ready = barriers.kv_free, barriers.max_ready, barriers.p_ready
    acc = gl.full([HEADS, WIDTH], 0.0, gl.float32, ACC)
    row_max = gl.full([HEADS], float("-inf"), gl.float32, LOGIT_ROW)
    row_sum = thread_sums(gl.full([HEADS, KEYS], 0.0, gl.float32, LOGITS))
    pair = first + pairs * 0
    while pair < first + pairs:
        phase = pair & 1
        zero = pair >> 28  # a constant 0 would keep descriptors in registers
        logits = _logits(zero + 1, ODD, phase, RIGHT, scale, zero, smem, rope, HAS_ROPE)
        new_max = gl.max(logits, axis=1)
        mbarrier.wait(max_ready[EVEN], (pair + iteration) & 1)
        new_max = gl.maximum(new_max, row_max_smem.index(0).load(LOGIT_ROW))
        row_max_smem.index(1).store(new_max)
        mbarrier.arrive(max_ready[ODD])
        p = gl.exp2(logits - _finite_max(new_max)[:, None])
        p_rounded = p.to(p_smem.dtype)
        _store_p(ODD, p_smem, p_rounded, p_ready)
        alpha = gl.exp2(row_max - _finite_max(new_max))
        row_max = new_max
        row_sum = _rescale(row_sum, alpha) + thread_sums(p)
        acc = acc * gl.convert_layout(alpha, ACC_ROW)[:, None]
        p_operand = gl.convert_layout(p_rounded, P_OPERAND)
        pv = warpgroup_mma(p_operand, kv_smem[RIGHT].index(zero + 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(pv,))
        mbarrier.arrive(kv_free[RIGHT][ODD])
        mbarrier.wait(p_ready[EVEN], phase)
        pv = warpgroup_mma(p_smem.index(zero), kv_smem[RIGHT].index(zero), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(pv,))
        mbarrier.arrive(kv_free[RIGHT][EVEN])
        pair += 1
    return acc, row_max, gl.convert_layout(gl.sum(row_sum, axis=1), LOGIT_ROW)


@gluon.jit
def reduce_row_sum(block: gl.constexpr, pairs, iteration, row_sum, smem):
    """Return the sum of the row sums of both partitions, which have the same row_max after the last
    pair. ``pairs`` is the number of pairs since the start of the program."""
    row_sum_smem, max_ready = smem.row_sum, smem.barriers.max_ready
    first = 2 * (iteration & 1)
    row_sum_smem.index(first + block).store(row_sum)
    mbarrier.arrive(max_ready[block])
    mbarrier.wait(max_ready[1 - block], (pairs + iteration) & 1)
    return row_sum + row_sum_smem.index(first + (1 - block)).load(LOGIT_ROW)
