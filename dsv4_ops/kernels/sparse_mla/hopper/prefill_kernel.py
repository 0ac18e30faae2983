"""Sparse MLA prefill over paged FP8 caches in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_ops.kernels.common.paging import MAX_POSITIONS
from dsv4_ops.kernels.sparse_mla.hopper.decode_kernel import (
    ATTENDING,
    DEQUANTISING,
    attend_and_finish_left,
    attend_and_finish_right,
)
from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import HALF, KEYS, ROW_LAYOUT, dequantise
from dsv4_ops.kernels.sparse_mla.hopper.mma import HEADS, allocate, allocate_heads


@gluon.jit
def _columns(where, block, FIRST: gl.constexpr):
    """Offsets of the keys of half a block of a split in the window or behind it, and which of the
    two."""
    window_blocks = where[0][0]
    block = block + where[0][3]
    in_window = block < window_blocks
    column = gl.where(in_window, block, block - window_blocks) * KEYS + FIRST
    return column + gl.arange(0, HALF, ROW_LAYOUT), in_window


@gluon.jit
def find_rows(where, block, FIRST: gl.constexpr, SIZES: gl.constexpr):
    """The selected rows of the half of a block that begins with its key FIRST, or where it is."""
    HAS_TOPK: gl.constexpr = SIZES[5]
    column, in_window = _columns(where, block, FIRST)
    if HAS_TOPK:
        _visible, extra_len, selected, step = where[3]
        wanted = (column < extra_len) & (in_window == 0)
        column = gl.load(selected + column.to(gl.int64) * step, mask=wanted, other=-1)
    return column


@gluon.jit
def locate_rows(where, block, FIRST: gl.constexpr, found, SIZES: gl.constexpr):
    """The rows that ``find_rows`` found, as in ``decode_kernel.py``. Unsigned, a block below 0
    is past every block, and divisions are shifts."""
    ROW: gl.constexpr = SIZES[0]
    SWA_BLOCK_SIZE: gl.constexpr = SIZES[2]
    EXTRA_BLOCK_SIZE: gl.constexpr = SIZES[3]
    HAS_EXTRA: gl.constexpr = SIZES[4]
    HAS_TOPK: gl.constexpr = SIZES[5]
    _window_blocks, length, swa_len, first_block, stop = where[0]
    cache, page_stride, blocks, entry, step, columns = where[1]
    column, in_window = _columns(where, block, FIRST)
    offset = (length - swa_len + column).to(gl.uint32)
    wanted = in_window & (column < swa_len)
    page_column, row = offset // SWA_BLOCK_SIZE, offset % SWA_BLOCK_SIZE
    block_size = gl.to_tensor(SWA_BLOCK_SIZE)
    if HAS_EXTRA:
        extra = where[2]
        picked = found.to(gl.uint32)
        if HAS_TOPK:
            seen = picked < where[3][0].to(gl.uint32)
        else:
            seen = column < where[3][1]
        wanted = gl.where(in_window, wanted, seen)
        page_column = gl.where(in_window, page_column, picked // EXTRA_BLOCK_SIZE)
        row = gl.where(in_window, row, picked % EXTRA_BLOCK_SIZE)
        cache = gl.where(in_window, cache, extra[0])
        page_stride = gl.where(in_window, page_stride, extra[1])
        blocks = gl.where(in_window, blocks, extra[2])
        entry = gl.where(in_window, entry, extra[3])
        step = gl.where(in_window, step, extra[4])
        columns = gl.where(in_window, columns, extra[5])
        block_size = gl.where(in_window, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE)
    wanted = wanted & (page_column < columns.to(gl.uint32)) & (first_block + block < stop)
    page = gl.load(entry + page_column.to(gl.int64) * step, mask=wanted, other=-1).to(gl.uint32)
    exists = page < blocks.to(gl.uint32)
    page = gl.where(exists, page, 0).to(gl.int64)
    row = gl.where(exists, row.to(gl.int32), -1)
    return cache + page * page_stride, row, block_size * ROW


_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _rows(where, blocks, keys, existing, barriers, SIZES: gl.constexpr):
    full, empty, _weighed, _taken, _asked = barriers
    dequantise(find_rows, locate_rows, SIZES, where, blocks, keys, existing, full, empty)


@gluon.jit
def _last_that_counts(chosen, step, topk, visible, LISTED: gl.constexpr):
    """Length of a list up to its last row that counts."""
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    found = visible * 0
    first = visible * 0
    while first < topk:
        each = first + gl.arange(0, LISTED, LINE)
        rows = gl.load(chosen + each.to(gl.int64) * step, mask=each < topk, other=-1)
        counts = (rows >= 0) & (rows < visible)
        found = gl.maximum(found, gl.max(gl.where(counts, each + 1, 0), axis=0))
        first += LISTED
    return found


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
    """The arguments are those of ``prefill_keys_kernel``; ``q_dim_stride`` is 1. Programs are
    ``splits`` times as many as tokens: a partial result each, if there are several."""
    token = (gl.program_id(0) // splits).to(gl.int64)
    split = gl.program_id(0) % splits
    position = gl.load(positions + token * position_stride)
    request = gl.load(req_indices + token * req_stride).to(gl.int64)
    real = (position >= 0) & (position < MAX_POSITIONS)
    real = real & (request >= 0) & (request < num_reqs)
    length = gl.where(real, position + 1, 0).to(gl.int32)
    request = gl.where(real, request, 0)
    swa_len = gl.minimum(length, WINDOW_SIZE)
    window_blocks = (swa_len + KEYS - 1) // KEYS
    visible = length * 0
    extra_len = length * 0
    chosen = topk_indices + token * topk_stride
    if HAS_EXTRA:
        visible = length // COMPRESS_RATIO
        if HAS_TOPK:
            # up to the last row that counts: the first tokens of a request see few
            extra_len = _last_that_counts(chosen, topk_column_stride, topk, visible, LISTED)
        else:
            held = gl.to_tensor(max_extra_blocks).to(gl.int64) * EXTRA_BLOCK_SIZE
            extra_len = gl.minimum(visible.to(gl.int64), held).to(gl.int32)
    blocks = (window_blocks + (extra_len + KEYS - 1) // KEYS).to(gl.int64)
    first_block = (blocks * split // splits).to(gl.int32)
    stop = (blocks * (split + 1) // splits).to(gl.int32)

    queries, keys, existing, weights, factors, barriers = allocate()

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
    where = (span, swa, extra, (visible, extra_len, chosen, topk_column_stride))
    shared = (queries, keys, existing, weights, (factors, allocate_heads(2)), barriers)
    first_head = gl.program_id(1) * HEADS
    row = token * num_heads
    heads = num_heads - first_head  # no more are read and written
    here = (q + token * q_stride + first_head.to(gl.int64) * q_head_stride, q_head_stride)
    part = gl.program_id(0).to(gl.int64) * num_heads
    left = ((out, lse, row, first_head), (partial, partial_lse, partial_scale, part, first_head))
    right = ((out, row, first_head), (partial, part, first_head))
    no_rotation = (lse, positions, position_stride)
    SCALE: gl.constexpr = SOFTMAX_SCALE * _LOG2_E
    count = stop - first_block
    gl.warp_specialize(
        [
            (
                attend_and_finish_left,
                (here, shared, count, attn_sink, left, splits, heads, SCALE, HAS_SINK),
            ),
            (
                attend_and_finish_right,
                (here, shared, count, right, no_rotation, splits, heads, False),
            ),
            (_rows, (where, count, keys, existing, barriers, SIZES)),
        ],
        [4, 4],
        [ATTENDING, DEQUANTISING],
    )
