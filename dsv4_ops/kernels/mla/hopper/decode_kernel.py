"""Dense MLA decode in Gluon: a partition brings keys, two attend to pairs of blocks.

A row is three tiles: both halves of the latent, which are values too, and the RoPE dimensions. The
RoPE tile of a block is free when its logits are there, and then holds the block's weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4_ops.kernels.common.triton_compat import async_load, reinterpret
from dsv4_ops.kernels.mla.hopper.copy_producer import (
    COPIED,
    COPIED_ROW,
    NEVER,
    ROPE,
    arrives,
    copy_pairs,
)
from dsv4_ops.kernels.mla.hopper.dequant_producer import CODES, dequantise_pairs
from dsv4_ops.kernels.sparse_mla.hopper.copy_producer import COPYING
from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import KEYS
from dsv4_ops.kernels.sparse_mla.hopper.epilogue import amax_of, log2_sum, scale_of, store_lse
from dsv4_ops.kernels.sparse_mla.hopper.gathered_kernel import ATTENDING, write_half
from dsv4_ops.kernels.sparse_mla.hopper.mma import HEADS, LOGIT_ROW, VALUE_ROW, WIDTH
from dsv4_ops.kernels.sparse_mla.hopper.mma_paired import (
    LEFT,
    RIGHT,
    allocate,
    attend_even,
    attend_odd,
    whole_total,
)
from dsv4_ops.kernels.sparse_mla.hopper.tile_scheduler import schedule_by_lengths, schedule_evenly

_LOG2_E = gl.constexpr(1.4426950408889634)

PAIR = gl.constexpr(128)
"""Keys of a pair of blocks, which splits are multiples of."""

_BESIDE_CODES = gl.constexpr(192)
"""Registers of threads that attend beside ones that dequantise, which get the rest."""

_LEAST_EXPONENT = gl.constexpr(15)
"""Of float32, as its bits have it: largest values of rows of queries count as no smaller."""

_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _query_rows(q, tile, GROUP: gl.constexpr):
    """Where the rows of this program begin, and which are there."""
    first, stride, head_stride = q
    token, first_head, count, num_heads = tile
    row = gl.arange(0, HEADS, COPIED_ROW)
    member, head = row * 0, row
    if GROUP > 1:
        member, head = row // num_heads, row % num_heads
    there = first_head + row < count * num_heads
    return first + (token + member) * stride + (first_head + head).to(gl.int64) * head_stride, there


@gluon.jit
def _copy_queries(q, tile, shared, rope_queries, HALF: gl.constexpr, GROUP: gl.constexpr):
    """A half of the rows of this program, with the left one their RoPE dimensions; zeros for rows
    that are not there."""
    start, there = _query_rows(q, tile, GROUP)
    start, there = start[:, None], there[:, None]
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, COPIED))
    target = shared[0].index(0).slice(HALF * WIDTH, WIDTH, dim=1)
    async_load(target, start + (HALF * WIDTH + dim)[None, :], mask=there)
    if HALF == LEFT:
        dim = gl.arange(0, ROPE, gl.SliceLayout(0, COPIED))
        async_load(rope_queries.index(0), start + (2 * WIDTH + dim)[None, :], mask=there)
    arrives(shared[5][4])
    mbarrier.wait(shared[5][4], 0)
    fence_async_shared()


@gluon.jit
def _scale_queries(q, tile, shared, rope_queries, HALF: gl.constexpr, GROUP: gl.constexpr):
    """The same in float16, each row times a power of two that brings its largest value to 2^14 or
    more: what is not below 2^-31 of that keeps all its bits. Returns what undoes it in the logits.
    The partitions tell each other the largest values of their halves."""
    start, there = _query_rows(q, tile, GROUP)
    start, there = start[:, None], there[:, None]
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, COPIED))
    half = gl.load(start + (HALF * WIDTH + dim)[None, :], mask=there, other=0.0).to(gl.float32)
    highest = gl.max(gl.abs(half), axis=1)
    rope = half
    if HALF == LEFT:
        dim = gl.arange(0, ROPE, gl.SliceLayout(0, COPIED))
        rope = gl.load(start + (2 * WIDTH + dim)[None, :], mask=there, other=0.0).to(gl.float32)
        highest = gl.maximum(highest, gl.max(gl.abs(rope), axis=1))
    totals, asked = shared[4][1], shared[5][4]
    totals.index(HALF).store(highest)
    arrives(asked)
    mbarrier.wait(asked, 0)
    factor = _factors(totals, COPIED_ROW)[0][:, None]
    shared[0].index(0).slice(HALF * WIDTH, WIDTH, dim=1).store((half * factor).to(gl.float16))
    if HALF == LEFT:
        rope_queries.index(0).store((rope * factor).to(gl.float16))
    undone = _factors(totals, LOGIT_ROW)[1]
    fence_async_shared()
    arrives(asked)
    mbarrier.wait(asked, 1)
    return undone


@gluon.jit
def _factors(totals, ROW: gl.constexpr):
    """By what each row is multiplied, and what undoes it: both are normal numbers."""
    highest = gl.maximum(totals.index(LEFT).load(ROW), totals.index(RIGHT).load(ROW))
    exponent = gl.maximum(highest.to(gl.int32, bitcast=True) >> 23, _LEAST_EXPONENT)
    factor = (_LEAST_EXPONENT - 1 + 254 - exponent) << 23
    undone = (exponent - (_LEAST_EXPONENT - 1)) << 23
    return factor.to(gl.float32, bitcast=True), undone.to(gl.float32, bitcast=True)


@gluon.jit
def _limits(lens, tile, GROUP: gl.constexpr):
    """The position behind the last key of every row."""
    seq_lens, len_stride, most = lens
    token, first_head, count, num_heads = tile
    row = gl.arange(0, HEADS, LOGIT_ROW)
    member = row * 0
    if GROUP > 1:
        member = row // num_heads
    there = first_head + row < count * num_heads
    length = gl.load(seq_lens + (token + member) * len_stride, mask=there, other=0)
    return gl.minimum(length, most)


@gluon.jit
def _shared_amax(block: gl.constexpr, pairs, amax, shared):
    """Amax of both halves of every row. By the barriers of weights: of those that ``whole_total``
    has, the other partition could miss a phase."""
    totals, weighed = shared[4][1], shared[5][3]
    totals.index(2 + block).store(amax)
    mbarrier.arrive(weighed[block])
    mbarrier.wait(weighed[1 - block], pairs & 1)
    return gl.maximum(amax, totals.index(2 + (1 - block)).load(VALUE_ROW))


@gluon.jit
def _scaled(scales, SCALE: gl.constexpr, SCALES: gl.constexpr):
    """By what logits are multiplied; a number that is known stays one."""
    if SCALES[0] or SCALES[1]:
        scale = gl.to_tensor(SCALE)
        if SCALES[0]:
            scale *= gl.load(scales[0])
        if SCALES[1]:
            scale *= gl.load(scales[1])
    else:
        scale: gl.constexpr = SCALE
    return scale


@gluon.jit
def _in_float16(shared, rope_queries):
    """The memory of a program for values that are codes: float16 holds those, and P with more bits
    than bf16."""
    queries, keys, existing, weights, both, barriers = shared
    left, right = keys
    ROWS: gl.constexpr = queries.layout
    queries = reinterpret(queries, gl.float16, [1, HEADS, 2 * WIDTH], ROWS)
    left = reinterpret(left, gl.float16, [2, KEYS, WIDTH], ROWS)
    right = reinterpret(right, gl.float16, [2, KEYS, WIDTH], ROWS)
    weights = reinterpret(weights, gl.float16, [2, HEADS, KEYS], ROWS)
    rope_queries = reinterpret(rope_queries, gl.float16, [1, HEADS, ROPE], ROWS)
    return (queries, (left, right), existing, weights, both, barriers), rope_queries


@gluon.jit
def _bring(
    cache, pages, pairs, alike, shared,
    FORMAT: gl.constexpr, ROW: gl.constexpr, BLOCK_SIZE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    if FORMAT == 0:
        copy_pairs(cache, pages, pairs, alike, shared, BLOCK_SIZE, GROUP)
    else:
        dequantise_pairs(cache, pages, pairs, alike, shared, FORMAT, ROW, BLOCK_SIZE, GROUP)


@gluon.jit
def _attend(
    HALF: gl.constexpr,
    work, pairs, dst, shared, scales,
    SCALE: gl.constexpr, SCALES: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    q, tile, part, lens, rope_queries = work
    out, lse, partial, partial_lse, partial_scale = dst
    token, first_head, count, num_heads = tile
    rope = (rope_queries, _limits(lens, tile, GROUP))
    softmax_scale = _scaled(scales, SCALE, SCALES)
    if FORMAT == CODES:
        undone = _scale_queries(q, tile, shared, rope_queries, HALF, GROUP)
        softmax_scale = (softmax_scale * undone)[:, None]
    else:
        _copy_queries(q, tile, shared, rope_queries, HALF, GROUP)
    if HALF == LEFT:
        sums, row_max, total = attend_even(
            pairs * 0, pairs, pairs * 0, softmax_scale, shared, rope, True
        )
    else:
        sums, row_max, total = attend_odd(
            pairs * 0, pairs, pairs * 0, softmax_scale, shared, rope, True
        )
    total = whole_total(HALF, pairs, pairs * 0, total, shared)
    inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
    if SCALES[1]:
        inverse *= gl.load(scales[1])
    rows = count * num_heads - first_head  # no more are written
    stage = shared[3].index(HALF)
    stage = reinterpret(stage, gl.bfloat16, [HEADS, KEYS], stage.layout)
    first, splits, split = part
    if splits == 1:
        row = token * num_heads + first_head
        if HALF == RIGHT:  # has one wait less
            store_lse(lse, row, row_max, total, rows)
        write_half(out, stage, sums, inverse, row, rows, HALF * WIDTH, False)
    else:
        factor = gl.convert_layout(inverse, VALUE_ROW)
        amax = _shared_amax(HALF, pairs, amax_of(sums * factor[:, None]), shared)
        # of rows without a key a scale could be so small that ``inverse`` over it is infinite
        scale = gl.where(amax == 0.0, 1.0, scale_of(amax))
        row = (first + split).to(gl.int64) * num_heads + first_head
        between = (splits - 1) * num_heads  # every token of a group has its own partial results
        if HALF == RIGHT:
            head = gl.arange(0, HEADS, LOGIT_ROW)
            to = row + head
            if GROUP > 1:
                to += (head // num_heads) * between
            gl.store(partial_lse + to, log2_sum(row_max, total), mask=head < rows)
            gl.store(partial_scale + to, gl.convert_layout(scale, LOGIT_ROW), mask=head < rows)
        halves = reinterpret(stage, gl.float16, [HEADS, KEYS], stage.layout)
        factor *= 1.0 / scale
        if GROUP > 1:
            grouped = (row, num_heads, between)
            write_half(partial, halves, sums, factor, grouped, rows, HALF * WIDTH, True)
        else:
            write_half(partial, halves, sums, factor, row, rows, HALF * WIDTH, False)


@gluon.jit
def hopper_mla_decode_kernel(
    q, q_stride, q_head_stride,
    out, lse, partial, partial_lse, partial_scale,
    kv_cache, page_stride, num_blocks,
    seq_lens, len_stride,
    req_indices, req_stride,
    block_table, table_stride, column_stride, max_blocks, num_reqs,
    query_start_loc, start_stride,
    q_scale, kv_scale,
    plan, plan_stride, plan_column_stride,
    capacity, num_tokens, num_heads, splits,
    combine_list, by_lengths, wave,
    SOFTMAX_SCALE: gl.constexpr, BLOCK_SIZE: gl.constexpr, FORMAT: gl.constexpr, ROW: gl.constexpr,
    HAS_PLAN: gl.constexpr, HAS_Q_SCALE: gl.constexpr, HAS_KV_SCALE: gl.constexpr,
    SCHEDULED: gl.constexpr, LANES: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """The arguments are those of ``mla_decode_kernel``; queries have no gaps between their values,
    and they and rows begin at multiples of 16 bytes. Splits are of pairs of blocks. With SCHEDULED,
    LANES are no fewer than the tokens, and GROUP is 1. The TILES of heads of a split run side by
    side, so that the L2 has its keys for all but one."""
    number, head_tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    num_heads = gl.to_tensor(num_heads)
    most = gl.to_tensor(max_blocks) * BLOCK_SIZE
    if HAS_PLAN:
        item = plan + number.to(gl.int64) * plan_stride
        token = gl.load(item).to(gl.int64)
        split = gl.load(item + plan_column_stride)
        splits = gl.load(item + 2 * plan_column_stride)
        first = gl.load(item + 3 * plan_column_stride)
        fits = (splits == 1) | ((first >= 0) & (first <= capacity - splits))
        real = (token >= 0) & (token < num_tokens) & (split >= 0) & (split < splits) & fits
        if not real:
            return
    elif SCHEDULED:
        splits = gl.to_tensor(splits)  # a number that is known is a constant
        place = (number, gl.num_programs(0) // TILES, head_tile == 0)
        if by_lengths > 0:
            lens = (seq_lens, len_stride)
            requests = (req_indices, req_stride)
            widths = (0, most, num_reqs)
            token, split, splits, first = schedule_by_lengths(
                place, lens, lens, requests, widths, num_tokens, wave, combine_list, LANES, PAIR
            )
        else:
            token, split, splits, first = schedule_evenly(place, splits, combine_list)
        if token >= num_tokens:
            return
    else:
        splits = gl.to_tensor(splits)
        token = (number // splits).to(gl.int64)
        split = number % splits
        first = (token * splits).to(gl.int32)
    request = gl.load(req_indices + token * req_stride).to(gl.int64)
    known = (request >= 0) & (request < num_reqs)
    count = gl.to_tensor(1)
    length = gl.load(seq_lens + token * len_stride)
    least = length
    if GROUP > 1:
        start = gl.load(query_start_loc + request * start_stride, mask=known, other=-1)
        inside = known & (start >= 0) & (start <= token)
        behind = gl.where(inside, (token - start) % GROUP, 0).to(gl.int32)
        before = gl.load(req_indices + (token - 1) * req_stride, mask=behind > 0, other=-1)
        if inside & (before == request):
            return
        lane = gl.arange(0, 128, _LINE)
        there = inside & (lane < GROUP - behind) & (token + lane < num_tokens)
        others = gl.load(req_indices + (token + lane) * req_stride, mask=there, other=-1)
        unlike = gl.where((others == request) & inside, 128, lane)
        count = gl.maximum(gl.min(unlike, 0), 1)
        near = lane < count
        lengths = gl.load(seq_lens + (token + lane) * len_stride, mask=near, other=0)
        least = gl.min(gl.where(near, lengths, NEVER), 0)
        length = gl.max(lengths, 0)
    length = gl.where(known, gl.minimum(gl.maximum(length, 0), most), 0)
    tiles = (length // PAIR + gl.where(length % PAIR > 0, 1, 0)).to(gl.int64)
    first_tile = (tiles * split // splits).to(gl.int32)
    stop_tile = (tiles * (split + 1) // splits).to(gl.int32)
    pairs = gl.maximum(stop_tile - first_tile, 1)  # partitions meet in one
    stop = gl.where(stop_tile < tiles, stop_tile * PAIR, length)
    stop = gl.where(stop_tile > first_tile, stop, 0)

    shared = allocate(COPYING + 1)
    rope_queries = gl.allocate_shared_memory(
        gl.bfloat16, [1, HEADS, ROPE], gl.NVMMASharedLayout(128, 16, 2)
    )
    if FORMAT == CODES:
        shared, rope_queries = _in_float16(shared, rope_queries)
    entries = block_table + gl.where(known, request, 0) * table_stride
    pages = (entries, gl.to_tensor(column_stride).to(gl.int64), first_tile * PAIR, stop)
    alike = gl.maximum(least - first_tile * PAIR, 0) // PAIR
    cache = (kv_cache, gl.to_tensor(page_stride).to(gl.int64), gl.to_tensor(num_blocks))
    queries = (q, gl.to_tensor(q_stride).to(gl.int64), gl.to_tensor(q_head_stride).to(gl.int64))
    tile = (token, head_tile * HEADS, count, num_heads)
    part = (first, splits, split)
    limits = (seq_lens, gl.to_tensor(len_stride).to(gl.int64), stop)
    dst = (out, lse, partial, partial_lse, partial_scale)
    SCALE: gl.constexpr = SOFTMAX_SCALE * _LOG2_E
    work = (queries, tile, part, limits, rope_queries)
    scales = (q_scale, kv_scale)
    SCALES: gl.constexpr = (HAS_Q_SCALE, HAS_KV_SCALE)
    REGISTERS: gl.constexpr = ATTENDING if FORMAT == 0 else _BESIDE_CODES
    gl.warp_specialize(
        [
            (_bring, (cache, pages, pairs, alike, shared, FORMAT, ROW, BLOCK_SIZE, GROUP)),
            (_attend, (LEFT, work, pairs, dst, shared, scales, SCALE, SCALES, FORMAT, GROUP)),
            (_attend, (RIGHT, work, pairs, dst, shared, scales, SCALE, SCALES, FORMAT, GROUP)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )
