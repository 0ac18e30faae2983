"""Attention of one token over pairs of blocks of keys on Hopper's matrix unit, by two partitions:
each has the logits and the softmax of one block of a pair, and sums half of the values of both.

P tiles need no barrier of their own: the K/V half that they were multiplied with frees them. Pairs
and tokens (``turn``) are counted through a program, as barriers count them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import KEYS
from dsv4_ops.kernels.sparse_mla.hopper.mma import (
    HEADS,
    LOGIT_ROW,
    LOGITS,
    VALUE_ROW,
    VALUES,
    WEIGHTS,
    WIDTH,
    sums_of_threads,
)

LEFT, RIGHT = gl.constexpr(0), gl.constexpr(1)
"""Halves of a row, and which of both partitions sums them."""


@gluon.jit
def allocate(ARRIVALS: gl.constexpr):
    """Shared memory of a program: the queries; the left and the right half of the keys of a pair
    of blocks and which of them exist; the weights of both blocks, the largest logits so far, and
    totals and sinks of this token and the one before. Barriers, of each block: of each half whether
    its keys are there (so many ARRIVALS say so) and whether they have been used, whether its
    largest logits are known, and whether it is weighed. Of a token: whether its queries are there,
    and whether they have been used."""
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, 2 * WIDTH], ROWS)
    left = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, WIDTH], ROWS)
    right = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, WIDTH], ROWS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, KEYS], ROWS)
    existing = gl.allocate_shared_memory(gl.int32, [2, KEYS], LINE)
    peaks = gl.allocate_shared_memory(gl.float32, [2, HEADS], LINE)
    totals = gl.allocate_shared_memory(gl.float32, [4, HEADS], LINE)
    sinks = gl.allocate_shared_memory(gl.float32, [2, HEADS], LINE)
    full_left = (_barrier(ARRIVALS), _barrier(ARRIVALS))
    full_right = (_barrier(ARRIVALS), _barrier(ARRIVALS))
    used_left = (_barrier(1), _barrier(1))
    used_right = (_barrier(1), _barrier(1))
    peaked = (_barrier(1), _barrier(1))
    weighed = (_barrier(1), _barrier(1))
    asked = _barrier(2 * ARRIVALS)
    answered = _barrier(2)
    barriers = ((full_left, full_right), (used_left, used_right), peaked, weighed, asked, answered)
    return queries, (left, right), existing, weights, (peaks, totals, sinks), barriers


@gluon.jit
def _barrier(ARRIVALS: gl.constexpr):
    """By itself: between those of one allocation the threads would wait for each other."""
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(made, count=ARRIVALS)
    return made


@gluon.jit
def _logits(
    block,
    BLOCK: gl.constexpr,
    phase,
    FIRST: gl.constexpr,
    scale, place, shared, rope,
    HAS_ROPE: gl.constexpr,
):  # fmt: skip
    """The half that comes first is multiplied first. With HAS_ROPE keys have more dimensions than
    values: ``rope`` are those of the queries, and of each row the position behind its last key.
    Those of the keys are where the weights of the block will be, and ``existing`` has positions."""
    queries, full = shared[0].index(place), shared[5][0]
    keys, existing, weights = shared[1], shared[2], shared[3]
    nothing = gl.full([HEADS, KEYS], 0.0, gl.float32, LOGITS)
    SECOND: gl.constexpr = 1 - FIRST
    mbarrier.wait(full[FIRST][BLOCK], phase)
    fence_async_shared()
    product = warpgroup_mma(
        queries.slice(FIRST * WIDTH, WIDTH, dim=1),
        keys[FIRST].index(block).permute((1, 0)),
        nothing,
        use_acc=False,
        is_async=True,
    )
    mbarrier.wait(full[SECOND][BLOCK], phase)
    fence_async_shared()
    product = warpgroup_mma(
        queries.slice(SECOND * WIDTH, WIDTH, dim=1),
        keys[SECOND].index(block).permute((1, 0)),
        product,
        is_async=True,
    )
    if HAS_ROPE:
        dims = weights.index(block).permute((1, 0))
        product = warpgroup_mma(rope[0].index(place), dims, product, is_async=True)
    exists = existing.index(block).load(gl.SliceLayout(0, LOGITS))
    logits = warpgroup_mma_wait(0, deps=(product,))
    if HAS_ROPE:
        return gl.where(exists[None, :] < rope[1][:, None], logits * scale, float("-inf"))
    return gl.where((exists >= 0)[None, :], logits * scale, float("-inf"))


@gluon.jit
def _origin(row_max):
    return gl.where(row_max == float("-inf"), 0.0, row_max)


@gluon.jit
def _times(total, factor):
    return total * gl.convert_layout(factor, gl.SliceLayout(1, total.type.layout))[:, None]


@gluon.jit
def _hand_over(block: gl.constexpr, weights, rounded, weighed):
    weights.index(block).store(rounded)
    fence_async_shared()
    mbarrier.arrive(weighed[block])


@gluon.jit
def attend_even(first, pairs, turn, scale, shared, rope, HAS_ROPE: gl.constexpr):
    """Sums of the left half over as many pairs from the ``first`` on, largest logits, and totals of
    the first blocks of pairs. ``scale`` includes log2(e); ``rope`` is that of ``_logits``."""
    _queries, keys, _existing, weights, both, barriers = shared
    peaks = both[0]
    _full, used, peaked, weighed, _asked, _answered = barriers
    sums = gl.full([HEADS, WIDTH], 0.0, gl.float32, VALUES)
    row_max = gl.full([HEADS], float("-inf"), gl.float32, LOGIT_ROW)
    total = sums_of_threads(gl.full([HEADS, KEYS], 0.0, gl.float32, LOGITS))
    pair = first + pairs * 0
    while pair < first + pairs:
        phase = pair & 1
        logits = _logits(0, 0, phase, LEFT, scale, 0, shared, rope, HAS_ROPE)
        highest = gl.maximum(row_max, gl.max(logits, axis=1))
        peaks.index(0).store(highest)
        mbarrier.arrive(peaked[0])
        share = gl.exp2(logits - _origin(highest)[:, None])
        factor = gl.exp2(row_max - _origin(highest))
        total = _times(total, factor) + sums_of_threads(share)
        sums = sums * gl.convert_layout(factor, VALUE_ROW)[:, None]
        operand = gl.convert_layout(share.to(weights.dtype), WEIGHTS)
        summed = warpgroup_mma(operand, keys[LEFT].index(0), sums, is_async=True)
        mbarrier.wait(peaked[1], (pair + turn) & 1)
        row_max = peaks.index(1).load(LOGIT_ROW)
        factor = gl.exp2(highest - _origin(row_max))
        _hand_over(0, weights, (share * factor[:, None]).to(weights.dtype), weighed)
        total = _times(total, factor)
        sums = warpgroup_mma_wait(0, deps=(summed,))
        mbarrier.arrive(used[LEFT][0])
        sums = sums * gl.convert_layout(factor, VALUE_ROW)[:, None]
        mbarrier.wait(weighed[1], phase)
        summed = warpgroup_mma(weights.index(1), keys[LEFT].index(1), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(summed,))
        mbarrier.arrive(used[LEFT][1])
        pair += 1
    return sums, row_max, gl.convert_layout(gl.sum(total, axis=1), LOGIT_ROW)


@gluon.jit
def attend_odd(first, pairs, turn, scale, shared, rope, HAS_ROPE: gl.constexpr):
    """Sums of the right half over all blocks, largest logits, and totals of the second blocks."""
    _queries, keys, _existing, weights, both, barriers = shared
    peaks = both[0]
    _full, used, peaked, weighed, _asked, _answered = barriers
    sums = gl.full([HEADS, WIDTH], 0.0, gl.float32, VALUES)
    row_max = gl.full([HEADS], float("-inf"), gl.float32, LOGIT_ROW)
    total = sums_of_threads(gl.full([HEADS, KEYS], 0.0, gl.float32, LOGITS))
    pair = first + pairs * 0
    while pair < first + pairs:
        phase = pair & 1
        none = pair >> 28  # 0: of a constant, descriptors would be kept in registers
        logits = _logits(none + 1, 1, phase, RIGHT, scale, none, shared, rope, HAS_ROPE)
        highest = gl.max(logits, axis=1)
        mbarrier.wait(peaked[0], (pair + turn) & 1)
        highest = gl.maximum(highest, peaks.index(0).load(LOGIT_ROW))
        peaks.index(1).store(highest)
        mbarrier.arrive(peaked[1])
        share = gl.exp2(logits - _origin(highest)[:, None])
        rounded = share.to(weights.dtype)
        _hand_over(1, weights, rounded, weighed)
        factor = gl.exp2(row_max - _origin(highest))
        row_max = highest
        total = _times(total, factor) + sums_of_threads(share)
        sums = sums * gl.convert_layout(factor, VALUE_ROW)[:, None]
        operand = gl.convert_layout(rounded, WEIGHTS)
        summed = warpgroup_mma(operand, keys[RIGHT].index(none + 1), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(summed,))
        mbarrier.arrive(used[RIGHT][1])
        mbarrier.wait(weighed[0], phase)
        summed = warpgroup_mma(weights.index(none), keys[RIGHT].index(none), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(summed,))
        mbarrier.arrive(used[RIGHT][0])
        pair += 1
    return sums, row_max, gl.convert_layout(gl.sum(total, axis=1), LOGIT_ROW)


@gluon.jit
def whole_total(block: gl.constexpr, pairs, turn, total, shared):
    """Totals of both partitions, which have the same largest logits at last. ``pairs`` so far."""
    totals, peaked = shared[4][1], shared[5][2]
    first = 2 * (turn & 1)
    totals.index(first + block).store(total)
    mbarrier.arrive(peaked[block])
    mbarrier.wait(peaked[1 - block], (pairs + turn) & 1)
    return total + totals.index(first + (1 - block)).load(LOGIT_ROW)
