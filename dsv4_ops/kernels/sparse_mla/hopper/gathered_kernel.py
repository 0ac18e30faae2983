"""Attention of every token over listed bf16 rows, for Hopper, by one program per SM, which takes
one token and tile of heads after the other: a partition copies, two attend. The keys of the next
item are on their way while the results of this one are written."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4_ops.kernels.sparse_mla.hopper.copy_producer import (
    COPYING,
    copy_half_queries,
    copy_items,
    list_length,
    pairs_of,
)
from dsv4_ops.kernels.sparse_mla.hopper.epilogue import inverse_of, store_lse
from dsv4_ops.kernels.sparse_mla.hopper.mma import HEADS, LOGIT_ROW, VALUE_ROW, WIDTH
from dsv4_ops.kernels.sparse_mla.hopper.mma_paired import (
    LEFT,
    RIGHT,
    allocate,
    attend_even,
    attend_odd,
    whole_total,
)

_LOG2_E = gl.constexpr(1.4426950408889634)

ATTENDING = gl.constexpr(208)
"""Registers of the threads that attend; those that copy get the rest."""

_PIECE = gl.constexpr(64)
"""Dimensions of a result that are written at a time: as many as a block has weights."""

_WRITTEN = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _halves(values):
    """The left and the right columns of what a thread has of its rows."""
    parts = gl.reshape(values, [HEADS, 2, values.shape[1] // 2])
    return gl.split(gl.permute(parts, (0, 2, 1)))


@gluon.jit
def _write_piece(out, stage, values, row, heads, FIRST: gl.constexpr, GROUPED: gl.constexpr):
    stage.store(values)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, _WRITTEN))
    dim = FIRST + gl.arange(0, _PIECE, gl.SliceLayout(0, _WRITTEN))
    if GROUPED:
        to = row[0] + head + (head // row[1]) * row[2]
    else:
        to = row + head
    dst = out + to[:, None] * (2 * WIDTH) + dim[None, :]
    gl.store(dst, stage.load(_WRITTEN), mask=(head < heads)[:, None])


@gluon.jit
def write_half(out, stage, sums, inverse, row, heads, FIRST: gl.constexpr, GROUPED: gl.constexpr):
    """Half of the results of as many heads, from dimension FIRST on. By way of the memory of a
    block's weights: a thread has pairs of values, and writes eight. With GROUPED, ``row`` is the
    first row, after how many rows others are left out, and how many."""
    factor = gl.convert_layout(inverse, VALUE_ROW)
    left, right = _halves((sums * factor[:, None]).to(out.dtype.element_ty))
    first, second = _halves(left)
    third, fourth = _halves(right)
    _write_piece(out, stage, first, row, heads, FIRST, GROUPED)
    _write_piece(out, stage, second, row, heads, FIRST + _PIECE, GROUPED)
    _write_piece(out, stage, third, row, heads, FIRST + 2 * _PIECE, GROUPED)
    _write_piece(out, stage, fourth, row, heads, FIRST + 3 * _PIECE, GROUPED)


@gluon.jit
def _attend(
    HALF: gl.constexpr,
    queries, lists, items, num_heads, dst, shared,
    SCALE: gl.constexpr, HAS_SINK: gl.constexpr,
):  # fmt: skip
    out, lse, max_logits = dst
    asked, answered = shared[5][4], shared[5][5]
    sinks = shared[4][2]
    tiles = lists[3][2]
    item = gl.program_id(0)
    turn = item * 0
    first = item * 0
    copy_half_queries(queries, item, turn, HALF, lists, shared, HAS_SINK)
    next_length = list_length(lists, item)
    while item < items:
        pairs = pairs_of(next_length)
        after = item + gl.num_programs(0)
        next_length = list_length(lists, gl.minimum(after, items - 1))
        mbarrier.wait(asked, turn & 1)
        fence_async_shared()
        if HALF == LEFT:
            sums, row_max, total = attend_even(first, pairs, turn, SCALE, shared, shared[0], False)
        else:
            sums, row_max, total = attend_odd(first, pairs, turn, SCALE, shared, shared[0], False)
        first += pairs
        total = whole_total(HALF, first, turn, total, shared)
        inverse = inverse_of(row_max, total, sinks.index(turn & 1), HAS_SINK)
        mbarrier.arrive(answered)  # behind the totals: the other cannot hand over another before
        first_head = (item % tiles) * HEADS
        heads = num_heads - first_head  # no more are written
        row = (item // tiles).to(gl.int64) * num_heads + first_head
        if HALF == RIGHT:  # has one wait less
            store_lse(lse, row, row_max, total, heads)
            head = gl.arange(0, HEADS, LOGIT_ROW)
            gl.store(max_logits + row + head, row_max / _LOG2_E, mask=head < heads)
        write_half(out, shared[3].index(HALF), sums, inverse, row, heads, HALF * WIDTH, False)
        turn += 1
        item = after


@gluon.jit
def hopper_gathered_keys_kernel(
    q, q_stride, q_head_stride,
    out, lse, max_logits, attn_sink,
    kv, kv_stride, num_rows,
    indices, indices_stride, column_stride,
    lens, len_stride,
    width, num_tokens, num_heads,
    SOFTMAX_SCALE: gl.constexpr, HAS_SINK: gl.constexpr,
):  # fmt: skip
    """Rows and queries begin at multiples of 16 bytes, and have no gaps between their values."""
    shared = allocate(COPYING + 1)
    num_heads = gl.to_tensor(num_heads)
    tiles = (num_heads + HEADS - 1) // HEADS
    items = num_tokens * tiles
    queries = (q, q_stride, q_head_stride, num_heads, attn_sink)
    rows = (kv, gl.to_tensor(kv_stride).to(gl.int64), gl.to_tensor(num_rows))
    strides = (gl.to_tensor(indices_stride), gl.to_tensor(column_stride))
    counts = (lens, gl.to_tensor(len_stride), tiles)
    lists = (indices, strides, gl.to_tensor(width), counts)
    dst = (out, lse, max_logits)
    SCALE: gl.constexpr = SOFTMAX_SCALE * _LOG2_E
    gl.warp_specialize(
        [
            (copy_items, (queries, rows, lists, items, shared, HAS_SINK)),
            (_attend, (LEFT, queries, lists, items, num_heads, dst, shared, SCALE, HAS_SINK)),
            (_attend, (RIGHT, queries, lists, items, num_heads, dst, shared, SCALE, HAS_SINK)),
        ],
        [4, 4],
        [ATTENDING, ATTENDING],
    )
