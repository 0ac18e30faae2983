"""Attention of one token over blocks of keys on Hopper's matrix unit, by two partitions: one has
the logits, the softmax and the left half of the values, the other the right half."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import KEYS

HEADS = gl.constexpr(64)
"""Heads of a program: the rows of a product."""

WIDTH = gl.constexpr(256)
"""Values that a partition sums: half a row."""

LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
LOGIT_ROW = gl.constexpr(gl.SliceLayout(1, LOGITS.value))
"""Of a tensor with a value per head, as the logits have it."""
VALUE_ROW = gl.constexpr(gl.SliceLayout(1, VALUES.value))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, VALUES.value, 2))

_PIECE = gl.constexpr(128)
_LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def allocate():
    """Shared memory of a program: the queries, two buffers of keys and which of them exist, the
    weights of a block and the factors of what was summed before; and barriers that say when a
    buffer is full, when both partitions have done with it, when a block is weighed, when its
    weights have been used, and when the queries are there."""
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, 2 * WIDTH], ROWS)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, 2 * WIDTH], ROWS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [HEADS, KEYS], ROWS)
    existing = gl.allocate_shared_memory(gl.int32, [2, KEYS], LINE)
    factors = gl.allocate_shared_memory(gl.float32, [HEADS], LINE)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(full.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=2)
    mbarrier.init(weighed, count=1)
    mbarrier.init(taken, count=1)
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(asked, count=2)
    return queries, keys, existing, weights, factors, (full, empty, weighed, taken, asked)


@gluon.jit
def allocate_heads(COUNT: gl.constexpr):
    """Shared memory for so many values of every head."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.float32, [COUNT, HEADS], LINE)


@gluon.jit
def load_half_queries(queries, q, heads, FIRST: gl.constexpr, asked):
    """Bring the half of the queries from dimension FIRST on to shared memory, of as many heads;
    zeros for the others. Each partition that attends brings one, and both are ``asked``."""
    first, head_stride = q
    head = gl.arange(0, HEADS, gl.SliceLayout(1, _LOADED))
    dim = gl.arange(0, _PIECE, gl.SliceLayout(0, _LOADED))
    start = first + FIRST + head.to(gl.int64)[:, None] * head_stride + dim[None, :]
    there = (head < heads)[:, None]
    # all on their way before the first is stored
    values0 = gl.load(start, mask=there, other=0.0)
    values1 = gl.load(start + _PIECE, mask=there, other=0.0)
    queries.slice(FIRST, _PIECE, dim=1).store(values0)
    queries.slice(FIRST + _PIECE, _PIECE, dim=1).store(values1)
    fence_async_shared()
    mbarrier.arrive(asked)


@gluon.jit
def sums_of_threads(values):
    """[heads, 4] sums over the columns that a thread has; the four are summed once, at the end."""
    columns = gl.reshape(values, [HEADS, KEYS // 8, 4, 2])
    return gl.sum(gl.sum(columns, axis=3), axis=1)


@gluon.jit
def _softmax(logits, row_max, total):
    """Weights of the logits [heads, keys], in powers of two, against the largest so far; the factor
    of what was summed before, and the new maximum and total."""
    highest = gl.maximum(row_max, gl.max(logits, axis=1))
    origin = gl.where(highest == float("-inf"), 0.0, highest)
    weights = gl.exp2(logits - origin[:, None])
    factor = gl.exp2(row_max - origin)
    spread = gl.convert_layout(factor, gl.SliceLayout(1, total.type.layout))
    return weights, factor, highest, total * spread[:, None] + sums_of_threads(weights)


@gluon.jit
def attend_left(blocks, scale, queries, keys, existing, weights, factors, barriers):
    """Sums of the left half over all blocks, largest logits and totals. ``scale`` includes
    log2(e)."""
    full, empty, weighed, taken, _asked = barriers
    sums = gl.full([HEADS, WIDTH], 0.0, gl.float32, VALUES)
    row_max = gl.full([HEADS], float("-inf"), gl.float32, LOGIT_ROW)
    nothing = gl.full([HEADS, KEYS], 0.0, gl.float32, LOGITS)
    total = sums_of_threads(nothing)
    block = blocks * 0
    while block < blocks:
        buffer = block % 2
        mbarrier.wait(full.index(buffer), (block // 2) & 1)
        rows = keys.index(buffer)
        # with a constant index, descriptors would be kept in registers
        asked = queries.index(block >> 28)
        product = warpgroup_mma(asked, rows.permute((1, 0)), nothing, use_acc=False, is_async=True)
        exists = existing.index(buffer).load(gl.SliceLayout(0, LOGITS))
        logits = warpgroup_mma_wait(0, deps=(product,))
        logits = gl.where((exists >= 0)[None, :], logits * scale, float("-inf"))
        share, factor, row_max, total = _softmax(logits, row_max, total)
        rounded = share.to(gl.bfloat16)
        mbarrier.wait(taken, (block & 1) ^ 1)
        weights.store(rounded)
        factors.store(factor)
        fence_async_shared()
        mbarrier.arrive(weighed)
        sums = sums * gl.convert_layout(factor, VALUE_ROW)[:, None]
        operand = gl.convert_layout(rounded, WEIGHTS)
        summed = warpgroup_mma(operand, rows.slice(0, WIDTH, dim=1), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(summed,))
        mbarrier.arrive(empty.index(buffer))
        block += 1
    return sums, row_max, gl.convert_layout(gl.sum(total, axis=1), LOGIT_ROW)


@gluon.jit
def attend_right(blocks, keys, weights, factors, barriers):
    """Sums of the right half over all blocks, by the weights of the other partition."""
    full, empty, weighed, taken, _asked = barriers
    sums = gl.full([HEADS, WIDTH], 0.0, gl.float32, VALUES)
    block = blocks * 0
    while block < blocks:
        buffer = block % 2
        mbarrier.wait(full.index(buffer), (block // 2) & 1)
        mbarrier.wait(weighed, block & 1)
        sums = sums * factors.load(VALUE_ROW)[:, None]
        right = keys.index(buffer).slice(WIDTH, WIDTH, dim=1)
        summed = warpgroup_mma(weights, right, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(summed,))
        mbarrier.arrive(taken)
        mbarrier.arrive(empty.index(buffer))
        block += 1
    return sums
