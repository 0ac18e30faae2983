"""Attention of one token over its window and compressed rows, found through block tables."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.paging import find_real
from dsv4_ops.kernels.sparse_mla.triton.mainloop import (
    LINES,
    attend,
    denominator,
    load_keys,
    load_queries,
    log2_sum,
    no_sums,
    prefetch_keys,
    store_heads,
)

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows_of(
    tile, swa_tiles, length, visible, swa, extra, selected, SIZES: tl.constexpr, KEYS: tl.constexpr
):
    """The keys of a block, as ``load_keys`` takes them.

    Unsigned, a block of the cache below 0 is past every other, and divisions are shifts. ``swa``
    and ``extra``: cache, stride of its blocks, their number, the request's row of the block table,
    its stride and its columns, and how many keys count. ``selected``: the token's list and its
    stride. SIZES: SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE, HAS_EXTRA and HAS_TOPK."""
    SWA_BLOCK_SIZE: tl.constexpr = SIZES[0]
    EXTRA_BLOCK_SIZE: tl.constexpr = SIZES[1]
    HAS_EXTRA: tl.constexpr = SIZES[2]
    HAS_TOPK: tl.constexpr = SIZES[3]
    swa_cache, swa_page_stride, swa_blocks, swa_pages, swa_step, max_swa_blocks, swa_len = swa
    extra_cache, extra_page_stride, extra_blocks, extra_pages, extra_step, _, extra_len = extra
    max_extra_blocks = extra[5]
    in_window = tile < swa_tiles
    column = tl.where(in_window, tile, tile - swa_tiles) * KEYS + tl.arange(0, KEYS)
    position = (length - swa_len + column).to(tl.uint32)
    wanted = column < swa_len
    block, row = position // SWA_BLOCK_SIZE, position % SWA_BLOCK_SIZE
    entry, step, columns = swa_pages, swa_step, max_swa_blocks
    cache, page_stride, blocks, block_size = swa_cache, swa_page_stride, swa_blocks, SWA_BLOCK_SIZE
    if HAS_EXTRA:
        picked = column
        seen = column < extra_len
        if HAS_TOPK:
            listed = selected[0] + column.to(tl.int64) * selected[1]
            picked = tl.load(listed, mask=seen & (tile >= swa_tiles), other=-1)
        picked = picked.to(tl.uint32)
        if HAS_TOPK:
            seen = picked < visible
        wanted = tl.where(in_window, wanted, seen)
        block = tl.where(in_window, block, picked // EXTRA_BLOCK_SIZE)
        row = tl.where(in_window, row, picked % EXTRA_BLOCK_SIZE)
        entry = tl.where(in_window, swa_pages, extra_pages)
        step = tl.where(in_window, swa_step, extra_step)
        columns = tl.where(in_window, max_swa_blocks, max_extra_blocks)
        cache = tl.where(in_window, swa_cache, extra_cache)
        page_stride = tl.where(in_window, swa_page_stride, extra_page_stride)
        blocks = tl.where(in_window, swa_blocks, extra_blocks)
        block_size = tl.where(in_window, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE)
    wanted = wanted & (block < columns)
    page = tl.load(entry + block.to(tl.int64) * step, mask=wanted, other=-1).to(tl.uint32)
    exists = page < blocks
    page = tl.where(exists, page, 0).to(tl.int64)
    return cache, page_stride, page, tl.where(exists, row, 0), exists, block_size


@triton.jit
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
    FORMAT: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A token and a tile of heads. The blocks of keys of the window come first, then those of the
    compressed rows: all that the token sees, or with HAS_TOPK the selected ones."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = head < num_heads
    position = tl.load(positions + token * position_stride)
    request = tl.load(req_indices + token * req_stride).to(tl.int64)
    real = find_real(position, request, num_reqs)
    length = tl.where(real, position + 1, 0).to(tl.int32)
    request = tl.where(real, request, 0)

    heads = q + token * q_stride + head[:, None].to(tl.int64) * q_head_stride
    queries = load_queries(heads, there, q_dim_stride)
    sums = no_sums(HEADS)
    asked = tl.zeros((KEYS, LINES), dtype=tl.int32)
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
            # up to the last row that counts: the first tokens of a request see few
            extra_len = length * 0
            first = length * 0
            while first < topk:
                each = first + tl.arange(0, LISTED)
                listed = token * topk_stride + each.to(tl.int64) * topk_column_stride
                chosen = tl.load(topk_indices + listed, mask=each < topk, other=-1)
                counts = (chosen >= 0) & (chosen < visible)
                extra_len = tl.maximum(extra_len, tl.max(tl.where(counts, each + 1, 0), axis=0))
                first += LISTED
        else:
            held = (length * 0).to(tl.int64) + max_extra_blocks  # may be a plain 1
            extra_len = tl.minimum(visible.to(tl.int64), held * EXTRA_BLOCK_SIZE).to(tl.int32)
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
        # one loop over both sources: two would hold the sums in registers twice
        rows = _rows_of(tile, swa_tiles, length, visible, swa, extra, selected, SIZES, KEYS)
        keys = load_keys(rows, FORMAT)
        ahead = _rows_of(tile + 1, swa_tiles, length, visible, swa, extra, selected, SIZES, KEYS)
        asked += prefetch_keys(ahead, tile + 1 < tiles, FORMAT)
        sums = attend(queries, sums, keys, rows[4], scale, tile >= 0)
        tile += 1

    there = there & (tl.sum(tl.sum(asked, axis=1), axis=0) == 0)  # always
    out0, out1, out2, out3, row_max, row_sum = sums
    sink = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    if HAS_SINK:
        sink = tl.load(attn_sink + head, mask=there, other=0.0) * _LOG2_E
    factor = 1.0 / denominator(row_max, row_sum, sink)[:, None]
    target = out + (token * num_heads + head[:, None]) * HEAD_DIM
    store_heads(target, there, out0 * factor, 0)
    store_heads(target, there, out1 * factor, 256)
    store_heads(target, there, out2 * factor, 384)
    store_heads(target, there, out3 * factor, 448)
    tl.store(lse + token * num_heads + head, log2_sum(row_max, row_sum) / _LOG2_E, mask=there)
