"""Sparse MLA decode in Gluon: producers, matrix products and epilogue in warps of their own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import HALF, KEYS, ROW_LAYOUT, dequantise
from dsv4_ops.kernels.sparse_mla.hopper.epilogue import (
    ask_sinks,
    finish_left,
    finish_right,
    part_left,
    part_right,
)
from dsv4_ops.kernels.sparse_mla.hopper.mma import (
    HEADS,
    WIDTH,
    allocate,
    allocate_heads,
    attend_left,
    attend_right,
    load_half_queries,
)
from dsv4_ops.kernels.sparse_mla.hopper.tile_scheduler import schedule_by_lengths, schedule_evenly


@gluon.jit
def count_blocks(first, stop, swa_tiles):
    """Blocks of a split, and those of them in the window. None goes over the window's end."""
    in_window = gl.maximum(gl.minimum(stop, swa_tiles) - first, 0)
    return in_window + gl.maximum(stop - gl.maximum(first, swa_tiles), 0), in_window


@gluon.jit
def _columns(where, block, FIRST: gl.constexpr):
    """Places in the list of the keys of half a block, whether the list is the window's, and how
    many of its keys are this split's."""
    first, stop, swa_tiles, window_blocks = where[0]
    in_window = block < window_blocks
    behind = gl.maximum(first, swa_tiles) + (block - window_blocks)
    number = gl.where(in_window, first + block, behind)
    before = gl.where(in_window, 0, swa_tiles)
    end = gl.where(in_window, gl.minimum(stop, swa_tiles), stop)
    column = (number - before) * KEYS + FIRST + gl.arange(0, HALF, ROW_LAYOUT)
    return column, in_window, (end - before) * KEYS


@gluon.jit
def find_rows(where, block, FIRST: gl.constexpr, SIZES: gl.constexpr):
    """What the lists say of the half of a block that begins with its key FIRST."""
    EXTRA_BLOCK_SIZE: gl.constexpr = SIZES[3]
    HAS_EXTRA: gl.constexpr = SIZES[4]
    PAGED: gl.constexpr = SIZES[5]
    column, in_window, end = _columns(where, block, FIRST)
    entry, step, length = where[1][3], where[1][4], where[1][5]
    offset = column
    if HAS_EXTRA:
        entry = gl.where(in_window, entry, where[2][3])
        step = gl.where(in_window, step, where[2][4])
        length = gl.where(in_window, length, where[2][5])
        if PAGED:
            offset = gl.where(in_window, column, column // EXTRA_BLOCK_SIZE)
    wanted = column < gl.minimum(length, end)
    return gl.load(entry + offset.to(gl.int64) * step, mask=wanted, other=-1)


@gluon.jit
def locate_rows(where, block, FIRST: gl.constexpr, found, SIZES: gl.constexpr):
    """The rows that ``find_rows`` found: their blocks, their rows in them, -1 if they do not
    exist, and how far behind the first row of a block its scales begin. Unsigned, a slot below 0 is
    past every block, and divisions are shifts."""
    ROW: gl.constexpr = SIZES[0]
    SWA_BLOCK_SIZE: gl.constexpr = SIZES[2]
    EXTRA_BLOCK_SIZE: gl.constexpr = SIZES[3]
    HAS_EXTRA: gl.constexpr = SIZES[4]
    PAGED: gl.constexpr = SIZES[5]
    found = found.to(gl.uint32)
    cache, page_stride, blocks = where[1][0], where[1][1], where[1][2]
    page, row = found // SWA_BLOCK_SIZE, found % SWA_BLOCK_SIZE
    block_size = gl.to_tensor(SWA_BLOCK_SIZE)
    if HAS_EXTRA:
        column, in_window, _ = _columns(where, block, FIRST)
        if PAGED:
            page = gl.where(in_window, page, found)
            row = gl.where(in_window, row, (column % EXTRA_BLOCK_SIZE).to(gl.uint32))
        else:
            page = gl.where(in_window, page, found // EXTRA_BLOCK_SIZE)
            row = gl.where(in_window, row, found % EXTRA_BLOCK_SIZE)
        cache = gl.where(in_window, cache, where[2][0])
        page_stride = gl.where(in_window, page_stride, where[2][1])
        blocks = gl.where(in_window, blocks, where[2][2])
        block_size = gl.where(in_window, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE)
    exists = page < blocks
    page = gl.where(exists, page, 0).to(gl.int64)
    row = gl.where(exists, row.to(gl.int32), -1)
    return cache + page * page_stride, row, block_size * ROW


_LOG2_E = gl.constexpr(1.4426950408889634)

ATTENDING, DEQUANTISING = gl.constexpr(160), gl.constexpr(152)
"""Registers of the partitions' threads; the one that has the logits gets the rest."""


@gluon.jit
def attend_and_finish_left(
    q, shared, blocks, attn_sink, dsts, splits, heads, SCALE: gl.constexpr, HAS_SINK: gl.constexpr
):
    """The partition that has the logits, and writes the left half: of results where there is one
    split, else of a partial result. ``shared``: queries, keys, which of them exist, P, what the
    partitions exchange, and barriers."""
    queries, keys, existing, weights, exchange, barriers = shared
    if HAS_SINK:
        if splits == 1:
            ask_sinks(exchange[1].index(0), attn_sink, dsts[0][3], heads)
            async_copy.commit_group()
    load_half_queries(queries.index(0), q, heads, 0, barriers[4])
    mbarrier.wait(barriers[4], 0)
    sums, row_max, row_sum = attend_left(
        blocks, SCALE, queries, keys, existing, weights, exchange[0], barriers
    )
    stage = queries.index(0)
    if splits == 1:
        finish_left(
            sums, row_max, row_sum, blocks, dsts[0], heads, stage, exchange, barriers, HAS_SINK
        )
    else:
        part_left(sums, row_max, row_sum, blocks, dsts[1], heads, stage, exchange, barriers)


@gluon.jit
def attend_and_finish_right(
    q, shared, blocks, dsts, rotation, splits, heads, INVERSE_ROPE: gl.constexpr
):
    """The partition that writes the right half likewise."""
    queries, keys, _existing, weights, exchange, barriers = shared
    cos_sin_cache, positions, num_positions = rotation
    load_half_queries(queries.index(0), q, heads, WIDTH, barriers[4])
    position = gl.to_tensor(0).to(gl.int64)
    if INVERSE_ROPE:
        position = gl.load(positions)  # before the keys, as the sinks
    sums = attend_right(blocks, keys, weights, exchange[0], barriers)
    if splits == 1:
        angles = (cos_sin_cache, position, num_positions)
        finish_right(
            sums, blocks, dsts[0], angles, heads, queries.index(0), exchange, barriers, INVERSE_ROPE
        )
    else:
        part_right(sums, blocks, dsts[1], heads, queries.index(0), exchange, barriers)


@gluon.jit
def _rows(where, blocks, keys, existing, barriers, SIZES: gl.constexpr):
    full, empty, _weighed, _taken, _asked = barriers
    dequantise(find_rows, locate_rows, SIZES, where, blocks, keys, existing, full, empty)


@gluon.jit
def _tiles(length):
    """Blocks of so many keys, which may be the most that an int32 holds."""
    return length // KEYS + gl.where(length % KEYS > 0, 1, 0)


@gluon.jit
def hopper_split_keys_kernel(
    q, q_stride, q_head_stride, q_dim_stride,
    out, lse, partial, partial_lse, partial_scale, attn_sink,
    swa_cache, swa_page_stride, swa_blocks,
    swa_indices, swa_stride, swa_column_stride,
    swa_lens, swa_len_stride, swa_width,
    extra_cache, extra_page_stride, extra_blocks,
    extra_indices, extra_stride, extra_column_stride,
    extra_lens, extra_len_stride, extra_width,
    req_indices, req_stride, num_reqs,
    plan, plan_stride, plan_column_stride,
    positions, positions_stride,
    cos_sin_cache, num_positions,
    capacity, num_tokens, num_heads, splits,
    combine_list, by_lengths, wave,
    SOFTMAX_SCALE: gl.constexpr, SWA_BLOCK_SIZE: gl.constexpr, EXTRA_BLOCK_SIZE: gl.constexpr,
    HAS_EXTRA: gl.constexpr, PAGED: gl.constexpr, HAS_SINK: gl.constexpr, HAS_PLAN: gl.constexpr,
    SCHEDULED: gl.constexpr, LANES: gl.constexpr, INVERSE_ROPE: gl.constexpr, ROW: gl.constexpr,
    SCALE_BYTES: gl.constexpr,
):  # fmt: skip
    """The arguments are those of ``split_keys_kernel``; ``q_dim_stride`` is 1, and splits are of
    whole blocks. LANES are no fewer than tokens that are scheduled by their lengths. A program ends
    at once if its row of a plan is no split."""
    if HAS_PLAN:
        tile = plan + gl.program_id(0).to(gl.int64) * plan_stride
        token = gl.load(tile).to(gl.int64)
        split = gl.load(tile + plan_column_stride)
        splits = gl.load(tile + 2 * plan_column_stride)
        first = gl.load(tile + 3 * plan_column_stride)
        fits = (splits == 1) | ((first >= 0) & (first <= capacity - splits))
        real = (token >= 0) & (token < num_tokens) & (split >= 0) & (split < splits) & fits
        if not real:
            return
        offset = first + split
    elif SCHEDULED:
        splits = gl.to_tensor(splits)  # a number that is known is a constant
        place = (gl.program_id(0), gl.num_programs(0), gl.program_id(1) == 0)
        if by_lengths > 0:
            token, split, splits, first = schedule_by_lengths(
                place, (swa_lens, swa_len_stride), (extra_lens, extra_len_stride),
                (req_indices, req_stride), (swa_width, extra_width, num_reqs),
                num_tokens, wave, combine_list, LANES, KEYS,
            )  # fmt: skip
        else:
            token, split, splits, first = schedule_evenly(place, splits, combine_list)
        if token >= num_tokens:
            return
        offset = gl.where(splits > 1, first + split, 0)
    else:
        token = (gl.program_id(0) // splits).to(gl.int64)
        split = gl.program_id(0) % splits
        offset = gl.program_id(0)
    swa_len = gl.load(swa_lens + token * swa_len_stride)
    swa_len = gl.minimum(gl.maximum(swa_len, 0), swa_width)
    extra_len = swa_len * 0
    request = token
    if HAS_EXTRA:
        extra_len = gl.load(extra_lens + token * extra_len_stride)
        extra_len = gl.minimum(gl.maximum(extra_len, 0), extra_width)
        if PAGED:
            request = gl.load(req_indices + token * req_stride).to(gl.int64)
            extra_len = gl.where((request >= 0) & (request < num_reqs), extra_len, 0)
            request = gl.where(extra_len > 0, request, 0)
    swa_tiles = _tiles(swa_len)
    tiles = (swa_tiles + _tiles(extra_len)).to(gl.int64)
    first_tile = (tiles * split // splits).to(gl.int32)
    stop = (tiles * (split + 1) // splits).to(gl.int32)
    blocks, window_blocks = count_blocks(first_tile, stop, swa_tiles)

    queries, keys, existing, weights, factors, barriers = allocate()
    scales = allocate_heads(2)  # of a partial result, or sinks

    SIZES: gl.constexpr = (ROW, SCALE_BYTES, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE, HAS_EXTRA, PAGED)
    swa_slots = swa_indices + token * swa_stride
    swa = (swa_cache, swa_page_stride, swa_blocks, swa_slots, swa_column_stride, swa_len)
    extra_slots = extra_indices + (request if PAGED else token) * extra_stride
    extra = (
        extra_cache, extra_page_stride, extra_blocks, extra_slots, extra_column_stride, extra_len
    )  # fmt: skip
    where = ((first_tile, stop, swa_tiles, window_blocks), swa, extra)
    shared = (queries, keys, existing, weights, (factors, scales), barriers)
    first_head = gl.program_id(1) * HEADS
    row = token * num_heads
    part = offset.to(gl.int64) * num_heads
    heads = num_heads - first_head  # no more are read and written
    here = (q + token * q_stride + first_head.to(gl.int64) * q_head_stride, q_head_stride)
    left = ((out, lse, row, first_head), (partial, partial_lse, partial_scale, part, first_head))
    right = ((out, row, first_head), (partial, part, first_head))
    rotation = (cos_sin_cache, positions + token * positions_stride, num_positions)
    SCALE: gl.constexpr = SOFTMAX_SCALE * _LOG2_E
    gl.warp_specialize(
        [
            (
                attend_and_finish_left,
                (here, shared, blocks, attn_sink, left, splits, heads, SCALE, HAS_SINK),
            ),
            (
                attend_and_finish_right,
                (here, shared, blocks, right, rotation, splits, heads, INVERSE_ROPE),
            ),
            (_rows, (where, blocks, keys, existing, barriers, SIZES)),
        ],
        [4, 4],
        [ATTENDING, DEQUANTISING],
    )
