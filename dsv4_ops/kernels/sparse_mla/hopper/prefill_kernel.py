"""Sparse MLA prefill over paged FP8 caches in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.hopper.epilogue import Output, Partial
from dsv4_ops.kernels.common.hopper.mma import HEADS, KEYS, HeadRows, allocate
from dsv4_ops.kernels.common.paging import MAX_POSITIONS
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.common.triton_compat import Scalar, aggregate
from dsv4_ops.kernels.sparse_mla.hopper.decode_kernel import (
    DEQUANT_REGISTERS,
    MMA_REGISTERS,
    attend_and_finish_left,
    attend_and_finish_right,
)
from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import (
    HALF,
    ROW_LAYOUT,
    LocatedRows,
    dequantise,
)


@aggregate
class Span:
    """Keys of a split of a token. ``length`` is the number of tokens up to this token, of which
    ``swa_len`` are in the token's window. The window has ``window_blocks`` blocks; the split has
    the blocks from ``first_block`` to ``stop``."""

    window_blocks: Scalar
    length: Scalar
    swa_len: Scalar
    first_block: Scalar
    stop: Scalar


@aggregate
class Pages:
    """Pages of a request in one cache: address, stride and number of the cache's pages, and rows
    per page; address, stride and columns of the request's row of the block table."""

    cache: Scalar
    page_stride: Scalar
    blocks: Scalar
    block_size: gl.constexpr
    table_row: Scalar
    step: Scalar
    columns: Scalar


@aggregate
class Selection:
    """Extra rows of a token: the number of extra rows that the token sees; length, address and
    stride of the list of selected rows."""

    num_visible: Scalar
    length: Scalar
    start: Scalar
    step: Scalar


@aggregate
class Sources:
    """Keys of a split. Without ``has_topk`` all visible rows of the extra cache are keys."""

    span: Span
    swa: Pages
    extra: Pages
    selection: Selection
    has_extra: gl.constexpr
    has_topk: gl.constexpr
    row_bytes: gl.constexpr


@gluon.jit
def _columns(span, block, FIRST: gl.constexpr):
    """Return the list columns of half a block, and whether they are columns of the window's list;
    otherwise they are columns of the extra list."""
    block = block + span.first_block
    in_window = block < span.window_blocks
    column = gl.where(in_window, block, block - span.window_blocks) * KEYS + FIRST
    return column + gl.arange(0, HALF, ROW_LAYOUT), in_window


@gluon.jit
def load_entries(sources, block, FIRST: gl.constexpr):
    """Load the selected rows of half a block, from its key FIRST on. Without ``has_topk``, columns
    are rows, so return the columns."""
    column, in_window = _columns(sources.span, block, FIRST)
    if sources.has_topk:
        selection = sources.selection
        mask = (column < selection.length) & (in_window == 0)
        start, step = selection.start, selection.step
        column = gl.load(start + column.to(gl.int64) * step, mask=mask, other=-1)
    return column


@gluon.jit
def locate_rows(sources, block, FIRST: gl.constexpr, entries):
    """Return the ``LocatedRows`` of the entries. Block numbers and rows are unsigned here, so that
    negative numbers lie past every block, and divisions are shifts."""
    span, swa, extra = sources.span, sources.swa, sources.extra
    cache, page_stride, blocks = swa.cache, swa.page_stride, swa.blocks
    pages, step, columns = swa.table_row, swa.step, swa.columns
    column, in_window = _columns(span, block, FIRST)
    offset = (span.length - span.swa_len + column).to(gl.uint32)
    visible = in_window & (column < span.swa_len)
    page_column, row = offset // swa.block_size, offset % swa.block_size
    block_size = gl.to_tensor(swa.block_size)
    if sources.has_extra:
        extra_entries = entries.to(gl.uint32)
        if sources.has_topk:
            extra_visible = extra_entries < sources.selection.num_visible.to(gl.uint32)
        else:
            extra_visible = column < sources.selection.length
        visible = gl.where(in_window, visible, extra_visible)
        page_column = gl.where(in_window, page_column, extra_entries // extra.block_size)
        row = gl.where(in_window, row, extra_entries % extra.block_size)
        cache = gl.where(in_window, cache, extra.cache)
        page_stride = gl.where(in_window, page_stride, extra.page_stride)
        blocks = gl.where(in_window, blocks, extra.blocks)
        pages = gl.where(in_window, pages, extra.table_row)
        step = gl.where(in_window, step, extra.step)
        columns = gl.where(in_window, columns, extra.columns)
        block_size = gl.where(in_window, swa.block_size, extra.block_size)
    visible = visible & (page_column < columns.to(gl.uint32))
    visible = visible & (span.first_block + block < span.stop)
    page = gl.load(pages + page_column.to(gl.int64) * step, mask=visible, other=-1).to(gl.uint32)
    exists = page < blocks.to(gl.uint32)
    page = gl.where(exists, page, 0).to(gl.int64)
    row = gl.where(exists, row.to(gl.int32), -1)
    return LocatedRows(cache + page * page_stride, row, block_size * sources.row_bytes)


_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _dequantise_rows(sources, blocks, smem, SCALE_BYTES: gl.constexpr):
    dequantise(load_entries, locate_rows, SCALE_BYTES, sources, blocks, smem)


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


@gluon.jit(do_not_specialize=SIZES)
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
    """Compute the attention of one token over one of ``splits`` splits of its keys. The arguments
    are as in ``prefill_keys_kernel``; ``q_dim_stride`` is 1. With several splits, a program writes
    a partial result."""
    wait_for_previous_kernel()
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
            # end at the last visible row: the first tokens of a request see few rows
            extra_len = _visible_length(topk_row, topk_column_stride, topk, visible, LISTED)
        else:
            capacity = gl.to_tensor(max_extra_blocks).to(gl.int64) * EXTRA_BLOCK_SIZE
            extra_len = gl.minimum(visible.to(gl.int64), capacity).to(gl.int32)
    blocks = (window_blocks + (extra_len + KEYS - 1) // KEYS).to(gl.int64)
    first_block = (blocks * split // splits).to(gl.int32)
    stop = (blocks * (split + 1) // splits).to(gl.int32)

    smem = allocate()
    swa = Pages(
        swa_cache, swa_page_stride, swa_blocks, SWA_BLOCK_SIZE,
        swa_table + request * swa_table_stride, swa_column_stride, gl.to_tensor(max_swa_blocks),
    )  # fmt: skip
    extra = Pages(
        extra_cache, extra_page_stride, extra_blocks, EXTRA_BLOCK_SIZE,
        extra_table + request * extra_table_stride, extra_column_stride,
        gl.to_tensor(max_extra_blocks),
    )  # fmt: skip
    span = Span(window_blocks, length, swa_len, first_block, stop)
    selection = Selection(visible, extra_len, topk_row, topk_column_stride)
    sources = Sources(span, swa, extra, selection, HAS_EXTRA, HAS_TOPK, ROW)
    first_head = gl.program_id(1) * HEADS
    row = token * num_heads
    heads = num_heads - first_head  # only this many heads are read and written
    queries = HeadRows(
        q + token * q_stride + first_head.to(gl.int64) * q_head_stride, q_head_stride
    )
    output = Output(out, lse, row, first_head)
    partial_row = gl.program_id(0).to(gl.int64) * num_heads
    partial_output = Partial(partial, partial_lse, partial_scale, partial_row, first_head)
    SCALE: gl.constexpr = SOFTMAX_SCALE * _LOG2_E
    num_blocks = stop - first_block
    gl.warp_specialize(
        [
            (
                attend_and_finish_left,
                (
                    queries, smem, num_blocks, attn_sink, output, partial_output, splits, heads,
                    SCALE, HAS_SINK,
                ),
            ),
            (
                attend_and_finish_right,
                (queries, smem, num_blocks, output, partial_output, None, splits, heads, False),
            ),
            (_dequantise_rows, (sources, num_blocks, smem, SCALE_BYTES)),
        ],
        [4, 4],
        [MMA_REGISTERS, DEQUANT_REGISTERS],
    )  # fmt: skip
