"""Attention of each token to listed bf16 rows, for Hopper, with at most one persistent program per
SM. One partition copies, and two partitions attend. An item is a token and a tile of heads. The
keys of the next item are copied while the results of the current item are written."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.hopper.epilogue import inverse_denominator, store_lse
from dsv4_ops.kernels.common.hopper.epilogue_paired import write_half
from dsv4_ops.kernels.common.hopper.mma import HEADS, LOGIT_ROW, WIDTH
from dsv4_ops.kernels.common.hopper.mma_paired import (
    COPY_THREADS,
    LEFT,
    MMA_REGISTERS,
    RIGHT,
    allocate,
    attend_even,
    attend_odd,
    reduce_row_sum,
)
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.common.triton_compat import Scalar, aggregate
from dsv4_ops.kernels.sparse_mla.hopper.copy_producer import (
    Lists,
    Queries,
    Rows,
    copy_half_queries,
    copy_items,
    list_length,
    pairs_of,
)

_LOG2_E = gl.constexpr(1.4426950408889634)


@aggregate
class Output:
    """Addresses for the results of all tokens."""

    out: Scalar
    lse: Scalar
    max_logits: Scalar


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
        # free the queries after the exchange of row sums: no partition may get an item ahead
        mbarrier.arrive(q_free)
        first_head = (item % head_tiles) * HEADS
        heads = num_heads - first_head  # only this many heads are written
        row = (item // head_tiles).to(gl.int64) * num_heads + first_head
        if HALF == RIGHT:  # the right partition has one wait fewer than the left
            store_lse(output.lse, row, row_max, row_sum, heads)
            head = gl.arange(0, HEADS, LOGIT_ROW)
            gl.store(output.max_logits + row + head, row_max / _LOG2_E, mask=head < heads)
        staging = smem.p.index(HALF)
        write_half(output.out, staging, acc, inverse, row, heads, HALF * WIDTH, False)
        iteration += 1
        item = next_item


@gluon.jit(do_not_specialize=SIZES)
def hopper_gathered_keys_kernel(
    q, q_stride, q_head_stride,
    out, lse, max_logits, attn_sink,
    kv, kv_stride, num_rows,
    indices, indices_stride, column_stride,
    lens, len_stride,
    width, num_tokens, num_heads,
    SOFTMAX_SCALE: gl.constexpr, HAS_SINK: gl.constexpr,
):  # fmt: skip
    """Compute the attention of each token over its list of rows. Rows and queries begin at
    multiples of 16 bytes, and their values are contiguous."""
    wait_for_previous_kernel()
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
