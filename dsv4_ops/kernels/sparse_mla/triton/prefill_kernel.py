"""Sparse MLA prefill in Triton: a token attends to its window and compressed rows through block
tables."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.attention.mainloop import (
    LINES,
    attend,
    denominator,
    initial_state,
    load_keys,
    load_queries,
    log2_sum,
    prefetch_keys,
    store_heads,
)
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.paging import valid_tokens
from dsv4_ops.kernels.common.sizes import SIZES

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _locate_rows(
    tile, swa_tiles, length, visible, swa, extra, selected, SIZES: tl.constexpr, KEYS: tl.constexpr
):
    """Return the rows of a block of keys, as ``load_keys`` takes them.

    Block numbers and rows are unsigned here, so that negative numbers lie past every block of the
    cache, and divisions are shifts.

    Args:
        tile, swa_tiles: Index of the block of keys, and number of blocks of the window.
        length, visible: Number of tokens up to this token, and number of compressed rows that this
            token sees.
        swa, extra: The cache, the stride and the number of its blocks; the request's row of the
            block table, its stride and its columns; and the number of keys.
        selected: The token's list of selected rows, and the list's stride.
        SIZES: SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE, HAS_EXTRA, HAS_TOPK.
        KEYS: Keys of a block.
    """
    SWA_BLOCK_SIZE: tl.constexpr = SIZES[0]
    EXTRA_BLOCK_SIZE: tl.constexpr = SIZES[1]
    HAS_EXTRA: tl.constexpr = SIZES[2]
    HAS_TOPK: tl.constexpr = SIZES[3]
    swa_cache, swa_page_stride, swa_blocks, swa_pages, swa_step, max_swa_blocks, swa_len = swa
    extra_cache, extra_page_stride, extra_blocks, extra_pages, extra_step, _, extra_len = extra
    max_extra_blocks = extra[5]
    topk_indices, topk_stride = selected
    in_window = tile < swa_tiles
    column = tl.where(in_window, tile, tile - swa_tiles) * KEYS + tl.arange(0, KEYS)
    position = (length - swa_len + column).to(tl.uint32)
    mask = column < swa_len
    block, row = position // SWA_BLOCK_SIZE, position % SWA_BLOCK_SIZE
    pages, step, columns = swa_pages, swa_step, max_swa_blocks
    cache, page_stride, blocks, block_size = swa_cache, swa_page_stride, swa_blocks, SWA_BLOCK_SIZE
    if HAS_EXTRA:
        extra_index = column
        extra_mask = column < extra_len
        if HAS_TOPK:
            address = topk_indices + column.to(tl.int64) * topk_stride
            extra_index = tl.load(address, mask=extra_mask & (tile >= swa_tiles), other=-1)
        extra_index = extra_index.to(tl.uint32)
        if HAS_TOPK:
            extra_mask = extra_index < visible
        mask = tl.where(in_window, mask, extra_mask)
        block = tl.where(in_window, block, extra_index // EXTRA_BLOCK_SIZE)
        row = tl.where(in_window, row, extra_index % EXTRA_BLOCK_SIZE)
        pages = tl.where(in_window, swa_pages, extra_pages)
        step = tl.where(in_window, swa_step, extra_step)
        columns = tl.where(in_window, max_swa_blocks, max_extra_blocks)
        cache = tl.where(in_window, swa_cache, extra_cache)
        page_stride = tl.where(in_window, swa_page_stride, extra_page_stride)
        blocks = tl.where(in_window, swa_blocks, extra_blocks)
        block_size = tl.where(in_window, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE)
    mask = mask & (block < columns)
    page = tl.load(pages + block.to(tl.int64) * step, mask=mask, other=-1).to(tl.uint32)
    kv_valid = page < blocks
    page = tl.where(kv_valid, page, 0).to(tl.int64)
    return cache, page_stride, page, tl.where(kv_valid, row, 0), kv_valid, block_size


@triton.jit(do_not_specialize=SIZES)
def prefill_keys_kernel(
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
    SOFTMAX_SCALE: tl.constexpr, WINDOW_SIZE: tl.constexpr, COMPRESS_RATIO: tl.constexpr,
    LISTED: tl.constexpr, SWA_BLOCK_SIZE: tl.constexpr, EXTRA_BLOCK_SIZE: tl.constexpr,
    HAS_EXTRA: tl.constexpr, HAS_TOPK: tl.constexpr, HAS_SINK: tl.constexpr, HEAD_DIM: tl.constexpr,
    FORMAT: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, MMA_SYNC: tl.constexpr,
):  # fmt: skip
    """Compute the attention of one token over its keys, for a tile of heads. The window's blocks
    come first, then blocks of compressed rows: all rows that the token sees or, with HAS_TOPK, the
    selected rows among them."""
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head_valid = head < num_heads
    position = tl.load(positions + token * position_stride)
    request = tl.load(req_indices + token * req_stride).to(tl.int64)
    valid = valid_tokens(position, request, num_reqs)
    length = tl.where(valid, position + 1, 0).to(tl.int32)
    request = tl.where(valid, request, 0)

    q_heads = q + token * q_stride + head[:, None].to(tl.int64) * q_head_stride
    queries = load_queries(q_heads, head_valid, q_dim_stride)
    state = initial_state(HEADS)
    prefetch_zeros = tl.zeros((KEYS, LINES), dtype=tl.int32)
    scale = SOFTMAX_SCALE * _LOG2_E

    swa_len = tl.minimum(length, WINDOW_SIZE)
    swa_tiles = (swa_len + KEYS - 1) // KEYS
    tiles = swa_tiles
    visible = length * 0
    extra_len = length * 0
    if HAS_EXTRA:
        visible = length // COMPRESS_RATIO
        extra_len = visible
        if HAS_TOPK:
            # end at the last visible row: the first tokens of a request see few rows
            extra_len = length * 0
            first = length * 0
            while first < topk:
                column = first + tl.arange(0, LISTED)
                offset = token * topk_stride + column.to(tl.int64) * topk_column_stride
                entries = tl.load(topk_indices + offset, mask=column < topk, other=-1)
                seen = (entries >= 0) & (entries < visible)
                end = tl.max(tl.where(seen, column + 1, 0), axis=0)
                extra_len = tl.maximum(extra_len, end)
                first += LISTED
        else:
            max_blocks = (length * 0).to(tl.int64) + max_extra_blocks  # may be a constant
            extra_len = tl.minimum(visible.to(tl.int64), max_blocks * EXTRA_BLOCK_SIZE)
            extra_len = extra_len.to(tl.int32)
        tiles += (extra_len + KEYS - 1) // KEYS
    swa_pages = swa_table + request * swa_table_stride
    extra_pages = extra_table + request * extra_table_stride
    swa = (
        swa_cache, swa_page_stride, swa_blocks, swa_pages, swa_column_stride, max_swa_blocks,
        swa_len,
    )  # fmt: skip
    extra = (
        extra_cache, extra_page_stride, extra_blocks, extra_pages, extra_column_stride,
        max_extra_blocks, extra_len,
    )  # fmt: skip
    selected = (topk_indices + token * topk_stride, topk_column_stride)
    SIZES: tl.constexpr = (SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE, HAS_EXTRA, HAS_TOPK)
    tile = tiles * 0
    while tile < tiles:
        # one loop over both lists: two loops would hold the accumulator in registers twice
        rows = _locate_rows(tile, swa_tiles, length, visible, swa, extra, selected, SIZES, KEYS)
        keys = load_keys(rows, FORMAT, MMA_SYNC)
        next_rows = _locate_rows(
            tile + 1, swa_tiles, length, visible, swa, extra, selected, SIZES, KEYS
        )
        prefetch_zeros += prefetch_keys(next_rows, tile + 1 < tiles, FORMAT)
        _, _, _, _, kv_valid, _ = rows
        state = attend(queries, state, keys, kv_valid, scale, tile, MMA_SYNC)
        tile += 1

    head_valid &= tl.sum(tl.sum(prefetch_zeros, axis=1), axis=0) == 0  # always true
    acc0, acc1, acc2, acc3, row_max, row_sum = state
    sink = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    if HAS_SINK:
        sink = tl.load(attn_sink + head, mask=head_valid, other=0.0) * _LOG2_E
    inverse_sum = 1.0 / denominator(row_max, row_sum, sink)[:, None]
    target = out + (token * num_heads + head[:, None]) * HEAD_DIM
    store_heads(target, head_valid, acc0 * inverse_sum, 0)
    store_heads(target, head_valid, acc1 * inverse_sum, 256)
    store_heads(target, head_valid, acc2 * inverse_sum, 384)
    store_heads(target, head_valid, acc3 * inverse_sum, 448)
    tl.store(lse + token * num_heads + head, log2_sum(row_max, row_sum) / _LOG2_E, mask=head_valid)
