"""Sparse MLA prefill over paged FP8 caches in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_ops.kernels.common.paging import MAX_POSITIONS
from dsv4_ops.kernels.sparse_mla.hopper.decode_kernel import (
    DEQUANT_REGISTERS,
    MMA_REGISTERS,
    attend_and_finish_left,
    attend_and_finish_right,
)
from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import HALF, KEYS, ROW_LAYOUT, dequantise
from dsv4_ops.kernels.sparse_mla.hopper.mma import HEADS, allocate, allocate_heads


@gluon.jit
def _columns(sources, block, FIRST: gl.constexpr):
    """Return the columns of half a block in the window's or in the extra list, and whether the list
    is the window's."""
    window_blocks = sources[0][0]
    block = block + sources[0][3]
    in_window = block < window_blocks
    column = gl.where(in_window, block, block - window_blocks) * KEYS + FIRST
    return column + gl.arange(0, HALF, ROW_LAYOUT), in_window


@gluon.jit
def load_entries(sources, block, FIRST: gl.constexpr, SIZES: gl.constexpr):
    """Load the selected rows of half a block, from its key FIRST on; without HAS_TOPK rows are
    columns."""
    HAS_TOPK: gl.constexpr = SIZES[5]
    column, in_window = _columns(sources, block, FIRST)
    if HAS_TOPK:
        _num_visible, extra_len, selected, step = sources[3]
        mask = (column < extra_len) & (in_window == 0)
        column = gl.load(selected + column.to(gl.int64) * step, mask=mask, other=-1)
    return column


@gluon.jit
def locate_rows(sources, block, FIRST: gl.constexpr, entries, SIZES: gl.constexpr):
    """Return what ``locate_rows`` of ``decode_kernel.py`` returns. As unsigned numbers, negative
    blocks lie past every block, and divisions are shifts."""
    ROW: gl.constexpr = SIZES[0]
    SWA_BLOCK_SIZE: gl.constexpr = SIZES[2]
    EXTRA_BLOCK_SIZE: gl.constexpr = SIZES[3]
    HAS_EXTRA: gl.constexpr = SIZES[4]
    HAS_TOPK: gl.constexpr = SIZES[5]
    _window_blocks, length, swa_len, first_block, stop = sources[0]
    cache, page_stride, blocks, pages, step, columns = sources[1]
    column, in_window = _columns(sources, block, FIRST)
    offset = (length - swa_len + column).to(gl.uint32)
    visible = in_window & (column < swa_len)
    page_column, row = offset // SWA_BLOCK_SIZE, offset % SWA_BLOCK_SIZE
    block_size = gl.to_tensor(SWA_BLOCK_SIZE)
    if HAS_EXTRA:
        extra = sources[2]
        extra_entries = entries.to(gl.uint32)
        if HAS_TOPK:
            extra_visible = extra_entries < sources[3][0].to(gl.uint32)
        else:
            extra_visible = column < sources[3][1]
        visible = gl.where(in_window, visible, extra_visible)
        page_column = gl.where(in_window, page_column, extra_entries // EXTRA_BLOCK_SIZE)
        row = gl.where(in_window, row, extra_entries % EXTRA_BLOCK_SIZE)
        cache = gl.where(in_window, cache, extra[0])
        page_stride = gl.where(in_window, page_stride, extra[1])
        blocks = gl.where(in_window, blocks, extra[2])
        pages = gl.where(in_window, pages, extra[3])
        step = gl.where(in_window, step, extra[4])
        columns = gl.where(in_window, columns, extra[5])
        block_size = gl.where(in_window, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE)
    visible = visible & (page_column < columns.to(gl.uint32)) & (first_block + block < stop)
    page = gl.load(pages + page_column.to(gl.int64) * step, mask=visible, other=-1).to(gl.uint32)
    exists = page < blocks.to(gl.uint32)
    page = gl.where(exists, page, 0).to(gl.int64)
    row = gl.where(exists, row.to(gl.int32), -1)
    return cache + page * page_stride, row, block_size * ROW


_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _dequantise_rows(sources, blocks, kv_smem, kv_valid_smem, barriers, SIZES: gl.constexpr):
    kv_ready, kv_free, _p_ready, _p_free, _q_ready = barriers
    dequantise(
        load_entries, locate_rows, SIZES, sources, blocks, kv_smem, kv_valid_smem, kv_ready, kv_free
    )


@gluon.jit
def _visible_length(topk_row, step, topk, visible, LISTED: gl.constexpr):
    """Return the length of a list up to its last visible row."""
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    length = visible * 0
    first = visible * 0
    while first < topk:
        column = first + gl.arange(0, LISTED, LINE)
        rows = gl.load(topk_row + column.to(gl.int64) * step, mask=column < topk, other=-1)
        visible_row = (rows >= 0) & (rows < visible)
        length = gl.maximum(length, gl.max(gl.where(visible_row, column + 1, 0), axis=0))
        first += LISTED
    return length


@gluon.jit
def hopper_prefill_keys_kernel(
    q, q_stride, q_head_stride, q_dim_stride,
    out, lse, attn_sink,
    positions, position_stride,
    req_indices, req_stride,
    swa_cache, swa_page_stride, swa_blocks,
    swa_table, swa_table_stride, swa_column_stride, max_swa_blocks,
    extra_cache, extra_page_stride, extra_blocks,
    extra_table, extra_table_stride, extra_column_stride, max_extra_blocks,
    topk_indices, topk_stride, topk_column_stride,
    topk, num_reqs, num_heads,
    partial, partial_lse, partial_scale, splits,
    SOFTMAX_SCALE: gl.constexpr, WINDOW_SIZE: gl.constexpr, COMPRESS_RATIO: gl.constexpr,
    LISTED: gl.constexpr, SWA_BLOCK_SIZE: gl.constexpr, EXTRA_BLOCK_SIZE: gl.constexpr,
    HAS_EXTRA: gl.constexpr, HAS_TOPK: gl.constexpr, HAS_SINK: gl.constexpr, ROW: gl.constexpr,
    SCALE_BYTES: gl.constexpr,
):  # fmt: skip
    """Compute the attention of one token over one of ``splits`` splits of its keys. Arguments are
    those of ``prefill_keys_kernel``; ``q_dim_stride`` is 1. With several splits a program writes a
    partial result."""
    token = (gl.program_id(0) // splits).to(gl.int64)
    split = gl.program_id(0) % splits
    position = gl.load(positions + token * position_stride)
    request = gl.load(req_indices + token * req_stride).to(gl.int64)
    valid = (position >= 0) & (position < MAX_POSITIONS)
    valid = valid & (request >= 0) & (request < num_reqs)
    length = gl.where(valid, position + 1, 0).to(gl.int32)
    request = gl.where(valid, request, 0)
    swa_len = gl.minimum(length, WINDOW_SIZE)
    window_blocks = (swa_len + KEYS - 1) // KEYS
    visible = length * 0
    extra_len = length * 0
    topk_row = topk_indices + token * topk_stride
    if HAS_EXTRA:
        visible = length // COMPRESS_RATIO
        if HAS_TOPK:
            # the first tokens of a request see few rows
            extra_len = _visible_length(topk_row, topk_column_stride, topk, visible, LISTED)
        else:
            capacity = gl.to_tensor(max_extra_blocks).to(gl.int64) * EXTRA_BLOCK_SIZE
            extra_len = gl.minimum(visible.to(gl.int64), capacity).to(gl.int32)
    blocks = (window_blocks + (extra_len + KEYS - 1) // KEYS).to(gl.int64)
    first_block = (blocks * split // splits).to(gl.int32)
    stop = (blocks * (split + 1) // splits).to(gl.int32)

    q_smem, kv_smem, kv_valid_smem, p_smem, alpha_smem, barriers = allocate()

    SIZES: gl.constexpr = (ROW, SCALE_BYTES, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE, HAS_EXTRA, HAS_TOPK)
    swa_pages = swa_table + request * swa_table_stride
    extra_pages = extra_table + request * extra_table_stride
    columns = gl.to_tensor(max_swa_blocks)
    swa = (swa_cache, swa_page_stride, swa_blocks, swa_pages, swa_column_stride, columns)
    columns = gl.to_tensor(max_extra_blocks)
    extra = (
        extra_cache,
        extra_page_stride,
        extra_blocks,
        extra_pages,
        extra_column_stride,
        columns,
    )
    span = (window_blocks, length, swa_len, first_block, stop)
    sources = (span, swa, extra, (visible, extra_len, topk_row, topk_column_stride))
    smem = (q_smem, kv_smem, kv_valid_smem, p_smem, (alpha_smem, allocate_heads(2)), barriers)
    first_head = gl.program_id(1) * HEADS
    row = token * num_heads
    heads = num_heads - first_head  # heads left: no more are read or written
    q_rows = (q + token * q_stride + first_head.to(gl.int64) * q_head_stride, q_head_stride)
    partial_row = gl.program_id(0).to(gl.int64) * num_heads
    left_dst = (
        (out, lse, row, first_head),
        (partial, partial_lse, partial_scale, partial_row, first_head),
    )
    right_dst = ((out, row, first_head), (partial, partial_row, first_head))
    no_rotation = (lse, positions, position_stride)
    SCALE: gl.constexpr = SOFTMAX_SCALE * _LOG2_E
    num_blocks = stop - first_block
    gl.warp_specialize(
        [
            (
                attend_and_finish_left,
                (q_rows, smem, num_blocks, attn_sink, left_dst, splits, heads, SCALE, HAS_SINK),
            ),
            (
                attend_and_finish_right,
                (q_rows, smem, num_blocks, right_dst, no_rotation, splits, heads, False),
            ),
            (_dequantise_rows, (sources, num_blocks, kv_smem, kv_valid_smem, barriers, SIZES)),
        ],
        [4, 4],
        [MMA_REGISTERS, DEQUANT_REGISTERS],
    )
