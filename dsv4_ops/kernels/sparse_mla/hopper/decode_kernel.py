"""Sparse MLA decode in Gluon: producer, matrix products and epilogue in warp-specialised
partitions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import HALF, KEYS, ROW_LAYOUT, dequantise
from dsv4_ops.kernels.sparse_mla.hopper.epilogue import (
    copy_sinks,
    finish_left,
    finish_partial_left,
    finish_partial_right,
    finish_right,
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
    """Return the blocks of a split and how many of them lie in the window. No block crosses the
    window's end."""
    in_window = gl.maximum(gl.minimum(stop, swa_tiles) - first, 0)
    return in_window + gl.maximum(stop - gl.maximum(first, swa_tiles), 0), in_window


@gluon.jit
def _columns(sources, block, FIRST: gl.constexpr):
    """Return the list columns of half a block of keys, whether the list is the window's, and the
    end of this split in that list."""
    first, stop, swa_tiles, window_blocks = sources[0]
    in_window = block < window_blocks
    extra_block = gl.maximum(first, swa_tiles) + (block - window_blocks)
    list_block = gl.where(in_window, first + block, extra_block)
    first_block = gl.where(in_window, 0, swa_tiles)
    end = gl.where(in_window, gl.minimum(stop, swa_tiles), stop)
    column = (list_block - first_block) * KEYS + FIRST + gl.arange(0, HALF, ROW_LAYOUT)
    return column, in_window, (end - first_block) * KEYS


@gluon.jit
def load_entries(sources, block, FIRST: gl.constexpr, SIZES: gl.constexpr):
    """Load the list entries of half a block, from its key FIRST on."""
    EXTRA_BLOCK_SIZE: gl.constexpr = SIZES[3]
    HAS_EXTRA: gl.constexpr = SIZES[4]
    PAGED: gl.constexpr = SIZES[5]
    column, in_window, end = _columns(sources, block, FIRST)
    list_start, step, length = sources[1][3], sources[1][4], sources[1][5]
    offset = column
    if HAS_EXTRA:
        list_start = gl.where(in_window, list_start, sources[2][3])
        step = gl.where(in_window, step, sources[2][4])
        length = gl.where(in_window, length, sources[2][5])
        if PAGED:
            offset = gl.where(in_window, column, column // EXTRA_BLOCK_SIZE)
    mask = column < gl.minimum(length, end)
    return gl.load(list_start + offset.to(gl.int64) * step, mask=mask, other=-1)


@gluon.jit
def locate_rows(sources, block, FIRST: gl.constexpr, entries, SIZES: gl.constexpr):
    """Return the address of each entry's page, its row (-1: no row), and the offset of the page's
    scales. As unsigned numbers, negative slots lie past every block, and divisions are shifts."""
    ROW: gl.constexpr = SIZES[0]
    SWA_BLOCK_SIZE: gl.constexpr = SIZES[2]
    EXTRA_BLOCK_SIZE: gl.constexpr = SIZES[3]
    HAS_EXTRA: gl.constexpr = SIZES[4]
    PAGED: gl.constexpr = SIZES[5]
    entries = entries.to(gl.uint32)
    cache, page_stride, blocks = sources[1][0], sources[1][1], sources[1][2]
    page, row = entries // SWA_BLOCK_SIZE, entries % SWA_BLOCK_SIZE
    block_size = gl.to_tensor(SWA_BLOCK_SIZE)
    if HAS_EXTRA:
        column, in_window, _ = _columns(sources, block, FIRST)
        if PAGED:
            page = gl.where(in_window, page, entries)
            row = gl.where(in_window, row, (column % EXTRA_BLOCK_SIZE).to(gl.uint32))
        else:
            page = gl.where(in_window, page, entries // EXTRA_BLOCK_SIZE)
            row = gl.where(in_window, row, entries % EXTRA_BLOCK_SIZE)
        cache = gl.where(in_window, cache, sources[2][0])
        page_stride = gl.where(in_window, page_stride, sources[2][1])
        blocks = gl.where(in_window, blocks, sources[2][2])
        block_size = gl.where(in_window, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE)
    valid = page < blocks
    page = gl.where(valid, page, 0).to(gl.int64)
    row = gl.where(valid, row.to(gl.int32), -1)
    return cache + page * page_stride, row, block_size * ROW


_LOG2_E = gl.constexpr(1.4426950408889634)

MMA_REGISTERS, DEQUANT_REGISTERS = gl.constexpr(160), gl.constexpr(152)
"""Registers per thread of the other partitions; the left MMA partition, which has the logits, gets
the rest."""


@gluon.jit
def attend_and_finish_left(
    q, smem, blocks, attn_sink, dsts, splits, heads, SCALE: gl.constexpr, HAS_SINK: gl.constexpr
):
    """Attend and write the left half: of the result with one split, else of a partial result.
    ``smem`` groups q, kv, kv_valid and p, the exchange between the partitions, and the barriers."""
    q_smem, kv_smem, kv_valid_smem, p_smem, exchange, barriers = smem
    if HAS_SINK:
        if splits == 1:
            copy_sinks(exchange[1].index(0), attn_sink, dsts[0][3], heads)
            async_copy.commit_group()
    load_half_queries(q_smem.index(0), q, heads, 0, barriers[4])
    mbarrier.wait(barriers[4], 0)
    acc, row_max, row_sum = attend_left(
        blocks, SCALE, q_smem, kv_smem, kv_valid_smem, p_smem, exchange[0], barriers
    )
    staging = q_smem.index(0)
    if splits == 1:
        finish_left(
            acc, row_max, row_sum, blocks, dsts[0], heads, staging, exchange, barriers, HAS_SINK
        )
    else:
        finish_partial_left(
            acc, row_max, row_sum, blocks, dsts[1], heads, staging, exchange, barriers
        )


@gluon.jit
def attend_and_finish_right(
    q, smem, blocks, dsts, rotation, splits, heads, INVERSE_ROPE: gl.constexpr
):
    """Attend and write the right half."""
    q_smem, kv_smem, _kv_valid_smem, p_smem, exchange, barriers = smem
    cos_sin_cache, positions, num_positions = rotation
    load_half_queries(q_smem.index(0), q, heads, WIDTH, barriers[4])
    position = gl.to_tensor(0).to(gl.int64)
    if INVERSE_ROPE:
        position = gl.load(positions)  # before the keys, like the sinks
    acc = attend_right(blocks, kv_smem, p_smem, exchange[0], barriers)
    if splits == 1:
        angles = (cos_sin_cache, position, num_positions)
        finish_right(
            acc, blocks, dsts[0], angles, heads, q_smem.index(0), exchange, barriers, INVERSE_ROPE
        )
    else:
        finish_partial_right(acc, blocks, dsts[1], heads, q_smem.index(0), exchange, barriers)


@gluon.jit
def _dequantise_rows(sources, blocks, kv_smem, kv_valid_smem, barriers, SIZES: gl.constexpr):
    kv_ready, kv_free, _p_ready, _p_free, _q_ready = barriers
    dequantise(
        load_entries, locate_rows, SIZES, sources, blocks, kv_smem, kv_valid_smem, kv_ready, kv_free
    )


@gluon.jit
def _tiles(length):
    """Return the key blocks of a list, whose length may be the largest int32."""
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
    """Compute the attention of one token over one split of its keys. Arguments are those of
    ``split_keys_kernel``; ``q_dim_stride`` is 1, and a split is a whole number of blocks. LANES is
    at least the number of tokens that are scheduled by their lengths. A program returns early if
    its row of the plan holds no split."""
    if HAS_PLAN:
        tile = plan + gl.program_id(0).to(gl.int64) * plan_stride
        token = gl.load(tile).to(gl.int64)
        split = gl.load(tile + plan_column_stride)
        splits = gl.load(tile + 2 * plan_column_stride)
        first = gl.load(tile + 3 * plan_column_stride)
        partials_fit = (splits == 1) | ((first >= 0) & (first <= capacity - splits))
        valid = (token >= 0) & (token < num_tokens) & (split >= 0) & (split < splits) & partials_fit
        if not valid:
            return
        partial_index = first + split
    elif SCHEDULED:
        splits = gl.to_tensor(splits)  # a known number is a constant
        grid = (gl.program_id(0), gl.num_programs(0), gl.program_id(1) == 0)
        if by_lengths > 0:
            token, split, splits, first = schedule_by_lengths(
                grid, (swa_lens, swa_len_stride), (extra_lens, extra_len_stride),
                (req_indices, req_stride), (swa_width, extra_width, num_reqs),
                num_tokens, wave, combine_list, LANES, KEYS,
            )  # fmt: skip
        else:
            token, split, splits, first = schedule_evenly(grid, splits, combine_list)
        if token >= num_tokens:
            return
        partial_index = gl.where(splits > 1, first + split, 0)
    else:
        token = (gl.program_id(0) // splits).to(gl.int64)
        split = gl.program_id(0) % splits
        partial_index = gl.program_id(0)
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

    q_smem, kv_smem, kv_valid_smem, p_smem, alpha_smem, barriers = allocate()
    head_smem = allocate_heads(2)  # scales of a partial result, or sinks

    SIZES: gl.constexpr = (ROW, SCALE_BYTES, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE, HAS_EXTRA, PAGED)
    swa_slots = swa_indices + token * swa_stride
    swa = (swa_cache, swa_page_stride, swa_blocks, swa_slots, swa_column_stride, swa_len)
    extra_slots = extra_indices + (request if PAGED else token) * extra_stride
    extra = (
        extra_cache, extra_page_stride, extra_blocks, extra_slots, extra_column_stride, extra_len
    )  # fmt: skip
    sources = ((first_tile, stop, swa_tiles, window_blocks), swa, extra)
    smem = (q_smem, kv_smem, kv_valid_smem, p_smem, (alpha_smem, head_smem), barriers)
    first_head = gl.program_id(1) * HEADS
    row = token * num_heads
    partial_row = partial_index.to(gl.int64) * num_heads
    heads = num_heads - first_head  # heads left: no more are read or written
    q_rows = (q + token * q_stride + first_head.to(gl.int64) * q_head_stride, q_head_stride)
    left_dst = (
        (out, lse, row, first_head),
        (partial, partial_lse, partial_scale, partial_row, first_head),
    )
    right_dst = ((out, row, first_head), (partial, partial_row, first_head))
    rotation = (cos_sin_cache, positions + token * positions_stride, num_positions)
    SCALE: gl.constexpr = SOFTMAX_SCALE * _LOG2_E
    gl.warp_specialize(
        [
            (
                attend_and_finish_left,
                (q_rows, smem, blocks, attn_sink, left_dst, splits, heads, SCALE, HAS_SINK),
            ),
            (
                attend_and_finish_right,
                (q_rows, smem, blocks, right_dst, rotation, splits, heads, INVERSE_ROPE),
            ),
            (_dequantise_rows, (sources, blocks, kv_smem, kv_valid_smem, barriers, SIZES)),
        ],
        [4, 4],
        [MMA_REGISTERS, DEQUANT_REGISTERS],
    )
