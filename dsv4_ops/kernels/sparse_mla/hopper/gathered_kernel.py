"""Attention of every token to listed bf16 rows, for Hopper, with one persistent program per SM. One
partition copies and two attend; the keys of the next item are copied while the results of this one
are written."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4_ops.kernels.common.triton_compat import Scalar, aggregate
from dsv4_ops.kernels.sparse_mla.hopper.copy_producer import (
    COPY_THREADS,
    Lists,
    Queries,
    Rows,
    copy_half_queries,
    copy_items,
    list_length,
    pairs_of,
)
from dsv4_ops.kernels.sparse_mla.hopper.epilogue import inverse_denominator, store_lse
from dsv4_ops.kernels.sparse_mla.hopper.mma import ACC_ROW, HEADS, LOGIT_ROW, WIDTH
from dsv4_ops.kernels.sparse_mla.hopper.mma_paired import (
    LEFT,
    RIGHT,
    allocate,
    attend_even,
    attend_odd,
    reduce_row_sum,
)

_LOG2_E = gl.constexpr(1.4426950408889634)

MMA_REGISTERS = gl.constexpr(208)
"""Registers per thread of the MMA partitions; the copying one gets the rest."""

_COLUMNS = gl.constexpr(64)
"""Columns of a result that are stored at a time: as many as P has."""

_STORE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@aggregate
class Output:
    """Results of all tokens."""

    out: Scalar
    lse: Scalar
    max_logits: Scalar


@aggregate
class GroupedRows:
    """Rows of a group of tokens: the first row, the rows before each gap, and the size of a gap."""

    first: Scalar
    rows: Scalar
    gap: Scalar


@gluon.jit
def _halves(values):
    """Split the columns of a thread's rows into left and right."""
    COLUMNS: gl.constexpr = values.shape[1]
    parts = gl.reshape(values, [HEADS, 2, COLUMNS // 2])
    return gl.split(gl.permute(parts, (0, 2, 1)))


@gluon.jit
def _store_columns(out, staging, values, row, heads, FIRST: gl.constexpr, GROUPED: gl.constexpr):
    staging.store(values)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, _STORE_LAYOUT))
    dim = FIRST + gl.arange(0, _COLUMNS, gl.SliceLayout(0, _STORE_LAYOUT))
    if GROUPED:
        dst_row = row.first + head + (head // row.rows) * row.gap
    else:
        dst_row = row + head
    dst = out + dst_row[:, None] * (2 * WIDTH) + dim[None, :]
    gl.store(dst, staging.load(_STORE_LAYOUT), mask=(head < heads)[:, None])


@gluon.jit
def write_half(out, staging, acc, inverse, row, heads, FIRST: gl.constexpr, GROUPED: gl.constexpr):
    """Write half of the result, from column FIRST on. The values pass through the shared memory of
    P: a thread computes pairs of values and writes eight. ``row`` is the first row; with GROUPED it
    is ``GroupedRows``."""
    scale = gl.convert_layout(inverse, ACC_ROW)
    left, right = _halves((acc * scale[:, None]).to(out.dtype.element_ty))
    first, second = _halves(left)
    third, fourth = _halves(right)
    _store_columns(out, staging, first, row, heads, FIRST, GROUPED)
    _store_columns(out, staging, second, row, heads, FIRST + _COLUMNS, GROUPED)
    _store_columns(out, staging, third, row, heads, FIRST + 2 * _COLUMNS, GROUPED)
    _store_columns(out, staging, fourth, row, heads, FIRST + 3 * _COLUMNS, GROUPED)


@gluon.jit
def _attend(
    HALF: gl.constexpr,
    q, lists, items, num_heads, output, smem,
    SCALE: gl.constexpr, HAS_SINK: gl.constexpr,
):  # fmt: skip
    q_ready, q_free = smem.barriers.q_ready, smem.barriers.q_free
    head_tiles = lists.head_tiles
    item = gl.program_id(0)
    iteration = item * 0
    first = item * 0
    copy_half_queries(q, item, iteration, HALF, lists, smem, HAS_SINK)
    next_length = list_length(lists, item)
    while item < items:
        pairs = pairs_of(next_length)
        next_item = item + gl.num_programs(0)
        next_length = list_length(lists, gl.minimum(next_item, items - 1))
        mbarrier.wait(q_ready, iteration & 1)
        fence_async_shared()
        if HALF == LEFT:
            acc, row_max, row_sum = attend_even(first, pairs, iteration, SCALE, smem, None, False)
        else:
            acc, row_max, row_sum = attend_odd(first, pairs, iteration, SCALE, smem, None, False)
        first += pairs
        row_sum = reduce_row_sum(HALF, first, iteration, row_sum, smem)
        inverse = inverse_denominator(row_max, row_sum, smem.sink.index(iteration & 1), HAS_SINK)
        # after the exchange of row sums, so that no partition is an item ahead
        mbarrier.arrive(q_free)
        first_head = (item % head_tiles) * HEADS
        heads = num_heads - first_head  # heads left: no more are written
        row = (item // head_tiles).to(gl.int64) * num_heads + first_head
        if HALF == RIGHT:  # this partition waits once less
            store_lse(output.lse, row, row_max, row_sum, heads)
            head = gl.arange(0, HEADS, LOGIT_ROW)
            gl.store(output.max_logits + row + head, row_max / _LOG2_E, mask=head < heads)
        staging = smem.p.index(HALF)
        write_half(output.out, staging, acc, inverse, row, heads, HALF * WIDTH, False)
        iteration += 1
        item = next_item


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
    """Compute the attention of every token over its list of rows. Rows and queries begin at
    multiples of 16 bytes; their values are contiguous."""
    smem = allocate(COPY_THREADS + 1)
    num_heads = gl.to_tensor(num_heads)
    head_tiles = (num_heads + HEADS - 1) // HEADS
    items = num_tokens * head_tiles
    queries = Queries(q, q_stride, q_head_stride, num_heads, attn_sink)
    rows = Rows(kv, gl.to_tensor(kv_stride).to(gl.int64), gl.to_tensor(num_rows))
    lists = Lists(
        indices, gl.to_tensor(indices_stride), gl.to_tensor(column_stride), gl.to_tensor(width),
        lens, gl.to_tensor(len_stride), head_tiles,
    )  # fmt: skip
    output = Output(out, lse, max_logits)
    SCALE: gl.constexpr = SOFTMAX_SCALE * _LOG2_E
    gl.warp_specialize(
        [
            (copy_items, (queries, rows, lists, items, smem, HAS_SINK)),
            (_attend, (LEFT, queries, lists, items, num_heads, output, smem, SCALE, HAS_SINK)),
            (_attend, (RIGHT, queries, lists, items, num_heads, output, smem, SCALE, HAS_SINK)),
        ],
        [4, 4],
        [MMA_REGISTERS, MMA_REGISTERS],
    )
