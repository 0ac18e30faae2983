"""Dense MLA decode in Gluon: one partition produces keys, and two partitions attend to pairs of
blocks.

A row is three tiles: both halves of the latent, which are also the values, and the RoPE columns.
Once the logits of a block are computed, P of the block replaces the block's RoPE tile in shared
memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.hopper.epilogue import amax_of, log2_sum, scale_of, store_lse
from dsv4_ops.kernels.common.hopper.epilogue_paired import GroupedRows, write_half
from dsv4_ops.kernels.common.hopper.mma import ACC_ROW, HEADS, KEYS, LOGIT_ROW, WIDTH
from dsv4_ops.kernels.common.hopper.mma_paired import (
    COPY_THREADS,
    LEFT,
    MMA_REGISTERS,
    RIGHT,
    PairedSmem,
    Rope,
    allocate,
    attend_even,
    attend_odd,
    reduce_row_sum,
)
from dsv4_ops.kernels.common.hopper.tile_scheduler import (
    Batch,
    Grid,
    PerToken,
    schedule_by_lengths,
    schedule_evenly,
)
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.common.triton_compat import Scalar, aggregate, async_load, reinterpret
from dsv4_ops.kernels.mla.hopper.copy_producer import (
    COPY_LAYOUT,
    COPY_ROW,
    NO_POSITION,
    ROPE,
    Pages,
    arrive_after_copies,
    copy_pairs,
)
from dsv4_ops.kernels.mla.hopper.dequant_producer import CODES, dequantise_pairs

_LOG2_E = gl.constexpr(1.4426950408889634)

PAIR = gl.constexpr(128)
"""Keys of a pair of blocks; a split is a whole number of pairs."""

_CODES_MMA_REGISTERS = gl.constexpr(192)
"""Registers per thread of the MMA partitions over FP8 rows; the dequantising partition gets the
rest."""

_MIN_EXPONENT = gl.constexpr(15)
"""A query row whose amax has a smaller biased exponent is scaled as if the amax had this exponent.
Otherwise the inverse scale would not be a normal number."""

_LANE_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@aggregate
class Queries:
    """Queries of all tokens and their strides."""

    start: Scalar
    stride: Scalar
    head_stride: Scalar


@aggregate
class Tile:
    """Query rows of a program. A group is the ``tokens`` tokens from token ``token`` on. It has a
    row per token and head, and the program's rows begin at row ``first_head`` of the group."""

    token: Scalar
    first_head: Scalar
    tokens: Scalar
    num_heads: Scalar


@aggregate
class Split:
    """The index of the token's first partial result, the token's number of splits, and the index of
    this split."""

    first_partial: Scalar
    splits: Scalar
    split: Scalar


@aggregate
class Lengths:
    """Address and stride of the lengths of all tokens, and the position after the split's last
    key."""

    start: Scalar
    stride: Scalar
    stop: Scalar


@aggregate
class Work:
    """The query rows and the keys of a program."""

    queries: Queries
    tile: Tile
    split: Split
    lengths: Lengths
    q_rope: gl.shared_memory_descriptor


@aggregate
class Output:
    """Addresses for results of tokens with one split, and for partial results of other tokens."""

    out: Scalar
    lse: Scalar
    partial: Scalar
    partial_lse: Scalar
    partial_scale: Scalar


@aggregate
class Scales:
    """Addresses of the scales of queries and keys, and whether they exist."""

    q: Scalar
    kv: Scalar
    has_q: gl.constexpr
    has_kv: gl.constexpr


@gluon.jit
def _query_rows(q, tile, GROUP: gl.constexpr):
    """Return the addresses of this program's query rows, and which of them exist."""
    row = gl.arange(0, HEADS, COPY_ROW)
    member, head = row * 0, row
    if GROUP > 1:
        member, head = row // tile.num_heads, row % tile.num_heads
    valid = tile.first_head + row < tile.tokens * tile.num_heads
    token_start = q.start + (tile.token + member) * q.stride
    return token_start + (tile.first_head + head).to(gl.int64) * q.head_stride, valid


@gluon.jit
def _copy_queries(q, tile, smem, q_rope_smem, HALF: gl.constexpr, GROUP: gl.constexpr):
    """Copy half of the columns of this program's query rows; with the left half, also copy the RoPE
    columns. Absent rows become zeros."""
    start, valid = _query_rows(q, tile, GROUP)
    start, valid = start[:, None], valid[:, None]
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, COPY_LAYOUT))
    target = smem.q.index(0).slice(HALF * WIDTH, WIDTH, dim=1)
    async_load(target, start + (HALF * WIDTH + dim)[None, :], mask=valid)
    if HALF == LEFT:
        dim = gl.arange(0, ROPE, gl.SliceLayout(0, COPY_LAYOUT))
        async_load(q_rope_smem.index(0), start + (2 * WIDTH + dim)[None, :], mask=valid)
    arrive_after_copies(smem.barriers.q_ready)
    mbarrier.wait(smem.barriers.q_ready, 0)
    fence_async_shared()


@gluon.jit
def _scale_queries(q, tile, smem, q_rope_smem, HALF: gl.constexpr, GROUP: gl.constexpr):
    """Copy the queries as float16. Multiply each row by a power of two, so that the row's amax
    becomes at least 2^14, unless the amax is tiny. Then values down to 2^-31 of the amax keep all
    their bits. Return the inverse scales, by which the caller multiplies the logits. The two
    partitions exchange the amax of their halves."""
    start, valid = _query_rows(q, tile, GROUP)
    start, valid = start[:, None], valid[:, None]
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, COPY_LAYOUT))
    half = gl.load(start + (HALF * WIDTH + dim)[None, :], mask=valid, other=0.0).to(gl.float32)
    amax = gl.max(gl.abs(half), axis=1)
    rope = half
    if HALF == LEFT:
        dim = gl.arange(0, ROPE, gl.SliceLayout(0, COPY_LAYOUT))
        rope = gl.load(start + (2 * WIDTH + dim)[None, :], mask=valid, other=0.0).to(gl.float32)
        amax = gl.maximum(amax, gl.max(gl.abs(rope), axis=1))
    amax_smem, q_ready = smem.row_sum, smem.barriers.q_ready
    amax_smem.index(HALF).store(amax)
    arrive_after_copies(q_ready)
    mbarrier.wait(q_ready, 0)
    scale, _ = _query_scales(amax_smem, COPY_ROW)
    scale = scale[:, None]
    smem.q.index(0).slice(HALF * WIDTH, WIDTH, dim=1).store((half * scale).to(gl.float16))
    if HALF == LEFT:
        q_rope_smem.index(0).store((rope * scale).to(gl.float16))
    _, inverse_scale = _query_scales(amax_smem, LOGIT_ROW)
    fence_async_shared()
    arrive_after_copies(q_ready)
    mbarrier.wait(q_ready, 1)
    return inverse_scale


@gluon.jit
def _query_scales(amax_smem, ROW: gl.constexpr):
    """Return the scale of each query row and its inverse; both are normal numbers."""
    amax = gl.maximum(amax_smem.index(LEFT).load(ROW), amax_smem.index(RIGHT).load(ROW))
    exponent = gl.maximum(amax.to(gl.int32, bitcast=True) >> 23, _MIN_EXPONENT)
    scale = (_MIN_EXPONENT - 1 + 254 - exponent) << 23
    inverse_scale = (exponent - (_MIN_EXPONENT - 1)) << 23
    return scale.to(gl.float32, bitcast=True), inverse_scale.to(gl.float32, bitcast=True)


@gluon.jit
def _row_lengths(lens, tile, GROUP: gl.constexpr):
    """For each query row, return the position after the row's last key in this split."""
    row = gl.arange(0, HEADS, LOGIT_ROW)
    member = row * 0
    if GROUP > 1:
        member = row // tile.num_heads
    valid = tile.first_head + row < tile.tokens * tile.num_heads
    length = gl.load(lens.start + (tile.token + member) * lens.stride, mask=valid, other=0)
    return gl.minimum(length, lens.stop)


@gluon.jit
def _reduce_amax(block: gl.constexpr, pairs, amax, smem):
    """Return the amax over both halves of each row. The partitions meet at the barriers of P. At
    the barriers of ``reduce_row_sum``, a partition could miss a phase."""
    amax_smem, p_ready = smem.row_sum, smem.barriers.p_ready
    amax_smem.index(2 + block).store(amax)
    mbarrier.arrive(p_ready[block])
    mbarrier.wait(p_ready[1 - block], pairs & 1)
    return gl.maximum(amax, amax_smem.index(2 + (1 - block)).load(ACC_ROW))


@gluon.jit
def _logit_scale(scales, SCALE: gl.constexpr):
    """Return the factor of the logits: a constant if there are no scales."""
    if scales.has_q or scales.has_kv:
        scale = gl.to_tensor(SCALE)
        if scales.has_q:
            scale *= gl.load(scales.q)
        if scales.has_kv:
            scale *= gl.load(scales.kv)
    else:
        scale: gl.constexpr = SCALE
    return scale


@gluon.jit
def _as_float16(smem, q_rope_smem):
    """Reinterpret the shared memory as float16, for rows of codes. float16 represents every code
    exactly, and keeps more bits of P than bf16 does."""
    kv_left_smem, kv_right_smem = smem.kv
    ROWS: gl.constexpr = smem.q.layout
    q_smem = reinterpret(smem.q, gl.float16, [1, HEADS, 2 * WIDTH], ROWS)
    kv_left_smem = reinterpret(kv_left_smem, gl.float16, [2, KEYS, WIDTH], ROWS)
    kv_right_smem = reinterpret(kv_right_smem, gl.float16, [2, KEYS, WIDTH], ROWS)
    p_smem = reinterpret(smem.p, gl.float16, [2, HEADS, KEYS], ROWS)
    q_rope_smem = reinterpret(q_rope_smem, gl.float16, [1, HEADS, ROPE], ROWS)
    smem = PairedSmem(
        q=q_smem,
        kv=(kv_left_smem, kv_right_smem),
        kv_valid=smem.kv_valid,
        p=p_smem,
        row_max=smem.row_max,
        row_sum=smem.row_sum,
        sink=smem.sink,
        barriers=smem.barriers,
    )
    return smem, q_rope_smem


@gluon.jit
def _produce(pages, pairs, full_pairs, smem, FORMAT: gl.constexpr, GROUP: gl.constexpr):
    if FORMAT == 0:
        copy_pairs(pages, pairs, full_pairs, smem, GROUP)
    else:
        dequantise_pairs(pages, pairs, full_pairs, smem, FORMAT, GROUP)


@gluon.jit
def _attend(
    HALF: gl.constexpr,
    work, pairs, output, smem, scales,
    SCALE: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    q, tile, q_rope_smem = work.queries, work.tile, work.q_rope
    first_head, num_heads = tile.first_head, tile.num_heads
    rope = Rope(q_rope_smem, _row_lengths(work.lengths, tile, GROUP))
    softmax_scale = _logit_scale(scales, SCALE)
    if FORMAT == CODES:
        inverse_scale = _scale_queries(q, tile, smem, q_rope_smem, HALF, GROUP)
        softmax_scale = (softmax_scale * inverse_scale)[:, None]
    else:
        _copy_queries(q, tile, smem, q_rope_smem, HALF, GROUP)
    if HALF == LEFT:
        acc, row_max, row_sum = attend_even(
            pairs * 0, pairs, pairs * 0, softmax_scale, smem, rope, True
        )
    else:
        acc, row_max, row_sum = attend_odd(
            pairs * 0, pairs, pairs * 0, softmax_scale, smem, rope, True
        )
    row_sum = reduce_row_sum(HALF, pairs, pairs * 0, row_sum, smem)
    inverse = 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)
    if scales.has_kv:
        inverse *= gl.load(scales.kv)
    rows = tile.tokens * num_heads - first_head  # only this many rows are written
    staging = smem.p.index(HALF)
    staging = reinterpret(staging, gl.bfloat16, [HEADS, KEYS], staging.layout)
    splits = work.split.splits
    if splits == 1:
        row = tile.token * num_heads + first_head
        if HALF == RIGHT:  # the right partition has one wait fewer than the left
            store_lse(output.lse, row, row_max, row_sum, rows)
        write_half(output.out, staging, acc, inverse, row, rows, HALF * WIDTH, False)
    else:
        factor = gl.convert_layout(inverse, ACC_ROW)
        amax = _reduce_amax(HALF, pairs, amax_of(acc * factor[:, None]), smem)
        # without a key the scale could be so small that ``inverse / scale`` is infinite
        scale = gl.where(amax == 0.0, 1.0, scale_of(amax))
        partial_index = work.split.first_partial + work.split.split
        row = partial_index.to(gl.int64) * num_heads + first_head
        gap = (splits - 1) * num_heads  # each token of a group has its own partial results
        if HALF == RIGHT:
            head = gl.arange(0, HEADS, LOGIT_ROW)
            dst_row = row + head
            if GROUP > 1:
                dst_row += (head // num_heads) * gap
            partial_lse, partial_scale = output.partial_lse, output.partial_scale
            gl.store(partial_lse + dst_row, log2_sum(row_max, row_sum), mask=head < rows)
            gl.store(partial_scale + dst_row, gl.convert_layout(scale, LOGIT_ROW), mask=head < rows)
        staging_f16 = reinterpret(staging, gl.float16, [HEADS, KEYS], staging.layout)
        factor *= 1.0 / scale
        if GROUP > 1:
            grouped = GroupedRows(row, num_heads, gap)
            write_half(output.partial, staging_f16, acc, factor, grouped, rows, HALF * WIDTH, True)
        else:
            write_half(output.partial, staging_f16, acc, factor, row, rows, HALF * WIDTH, False)


@gluon.jit(do_not_specialize=SIZES)
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
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Compute the attention of one token, or of a group of tokens of one request, over one split of
    the keys. The arguments are as in ``mla_decode_kernel``. The values of a query are contiguous,
    and queries and rows begin at multiples of 16 bytes. A split is a whole number of block pairs.
    With SCHEDULED, LANES is at least the number of tokens, and GROUP is 1. The TILES head tiles of
    a split run at the same time, so that all but one of them read the keys from the L2."""
    wait_for_previous_kernel()
    program, head_tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    num_heads = gl.to_tensor(num_heads)
    max_length = gl.to_tensor(max_blocks) * (1 if SLOTS else BLOCK_SIZE)
    if HAS_PLAN:
        plan_row = plan + program.to(gl.int64) * plan_stride
        token = gl.load(plan_row).to(gl.int64)
        split = gl.load(plan_row + plan_column_stride)
        splits = gl.load(plan_row + 2 * plan_column_stride)
        first = gl.load(plan_row + 3 * plan_column_stride)
        partials_fit = (splits == 1) | ((first >= 0) & (first <= capacity - splits))
        valid = (token >= 0) & (token < num_tokens) & (split >= 0) & (split < splits) & partials_fit
        if not valid:
            return
    elif SCHEDULED:
        splits = gl.to_tensor(splits)  # ``splits`` may be a constant
        grid = Grid(program, gl.num_programs(0) // TILES, head_tile == 0)
        if by_lengths > 0:
            lens, requests = PerToken(seq_lens, len_stride), PerToken(req_indices, req_stride)
            if SLOTS:  # a list needs no request
                batch = Batch(lens, lens, requests, max_length, 0, num_reqs, num_tokens)
            else:
                batch = Batch(lens, lens, requests, 0, max_length, num_reqs, num_tokens)
            token, split, splits, first = schedule_by_lengths(
                grid, batch, wave, combine_list, LANES, PAIR
            )
        else:
            token, split, splits, first = schedule_evenly(grid, splits, combine_list)
        if token >= num_tokens:
            return
    else:
        splits = gl.to_tensor(splits)
        token = (program // splits).to(gl.int64)
        split = program % splits
        first = (token * splits).to(gl.int32)
    request = token
    if not SLOTS:
        request = gl.load(req_indices + token * req_stride).to(gl.int64)
    request_valid = (request >= 0) & (request < num_reqs)
    group_tokens = gl.to_tensor(1)
    length = gl.load(seq_lens + token * len_stride)
    min_length = length
    if GROUP > 1:
        start = gl.load(query_start_loc + request * start_stride, mask=request_valid, other=-1)
        start_valid = request_valid & (start >= 0) & (start <= token)
        group_offset = gl.where(start_valid, (token - start) % GROUP, 0).to(gl.int32)
        previous_request = gl.load(
            req_indices + (token - 1) * req_stride, mask=group_offset > 0, other=-1
        )
        if start_valid & (previous_request == request):
            return
        lane = gl.arange(0, 128, _LANE_LAYOUT)
        mask = start_valid & (lane < GROUP - group_offset) & (token + lane < num_tokens)
        group_requests = gl.load(req_indices + (token + lane) * req_stride, mask=mask, other=-1)
        first_other = gl.where((group_requests == request) & start_valid, 128, lane)
        group_tokens = gl.maximum(gl.min(first_other, 0), 1)
        in_group = lane < group_tokens
        lengths = gl.load(seq_lens + (token + lane) * len_stride, mask=in_group, other=0)
        min_length = gl.min(gl.where(in_group, lengths, NO_POSITION), 0)
        length = gl.max(lengths, 0)
    length = gl.where(request_valid, gl.minimum(gl.maximum(length, 0), max_length), 0)
    tiles = (length // PAIR + gl.where(length % PAIR > 0, 1, 0)).to(gl.int64)
    first_tile = (tiles * split // splits).to(gl.int32)
    stop_tile = (tiles * (split + 1) // splits).to(gl.int32)
    pairs = gl.maximum(stop_tile - first_tile, 1)  # the partitions synchronise within a pair
    stop = gl.where(stop_tile < tiles, stop_tile * PAIR, length)
    stop = gl.where(stop_tile > first_tile, stop, 0)

    smem = allocate(COPY_THREADS + 1)
    q_rope_smem = gl.allocate_shared_memory(
        gl.bfloat16, [1, HEADS, ROPE], gl.NVMMASharedLayout(128, 16, 2)
    )
    if FORMAT == CODES:
        smem, q_rope_smem = _as_float16(smem, q_rope_smem)
    entries = block_table + gl.where(request_valid, request, 0) * table_stride
    first_key = first_tile * PAIR
    column_stride = gl.to_tensor(column_stride).to(gl.int64)
    full_pairs = gl.maximum(min_length - first_key, 0) // PAIR
    pages = Pages(
        kv_cache, gl.to_tensor(page_stride).to(gl.int64), gl.to_tensor(num_blocks), BLOCK_SIZE, ROW,
        SLOTS, entries, column_stride, first_key, stop,
    )  # fmt: skip
    work = Work(
        Queries(q, gl.to_tensor(q_stride).to(gl.int64), gl.to_tensor(q_head_stride).to(gl.int64)),
        Tile(token, head_tile * HEADS, group_tokens, num_heads),
        Split(first, splits, split),
        Lengths(seq_lens, gl.to_tensor(len_stride).to(gl.int64), stop),
        q_rope_smem,
    )
    output = Output(out, lse, partial, partial_lse, partial_scale)
    scales = Scales(q_scale, kv_scale, HAS_Q_SCALE, HAS_KV_SCALE)
    SCALE: gl.constexpr = SOFTMAX_SCALE * _LOG2_E
    REGISTERS: gl.constexpr = MMA_REGISTERS if FORMAT == 0 else _CODES_MMA_REGISTERS
    gl.warp_specialize(
        [
            (_produce, (pages, pairs, full_pairs, smem, FORMAT, GROUP)),
            (_attend, (LEFT, work, pairs, output, smem, scales, SCALE, FORMAT, GROUP)),
            (_attend, (RIGHT, work, pairs, output, smem, scales, SCALE, FORMAT, GROUP)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )
