"""Score a tile of the lightning indexer's FP8 keys with one query."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.fp8 import (  # Inductor copies functions only
    convert_once,
    decode_to_bf16,
    multiply_add,
)


@triton.jit
def load_query(q, token, HEADS: tl.constexpr, DIM: tl.constexpr, CONVERTS: tl.constexpr):
    """Return the query of the int64 ``token``: with CONVERTS as one e4m3 tile [DIM, HEADS], else as
    two bf16 tiles [DIM / 2, HEADS]. ``q``: codes, their token, head and value strides, and the
    number of heads."""
    q, token_stride, head_stride, dim_stride, num_heads = q
    head = tl.arange(0, HEADS)
    head_valid = head < num_heads
    row = token * token_stride + head.to(tl.int64) * head_stride
    if CONVERTS:
        lane = tl.arange(0, DIM).to(tl.int64) * dim_stride
        source = (q + row[:, None] + lane[None, :]).to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        codes = tl.load(source, mask=head_valid[:, None], other=0.0)
        return tl.trans(codes)
    else:
        HALF: tl.constexpr = DIM // 2
        lane = tl.arange(0, HALF).to(tl.int64) * dim_stride
        source = q + row[:, None] + lane[None, :]
        first = decode_to_bf16(tl.load(source, mask=head_valid[:, None], other=0))
        source += tl.cast(dim_stride, tl.int64) * HALF
        second = decode_to_bf16(tl.load(source, mask=head_valid[:, None], other=0))
        return tl.trans(convert_once(first, True)), tl.trans(convert_once(second, True))


@triton.jit
def load_weights(weights, token, num_heads, HEADS: tl.constexpr):
    """Load the weights of the heads of the int64 ``token``, float32 [HEADS], 0 past ``num_heads``.
    ``weights``: weights, their token stride and their head stride."""
    weights, token_stride, head_stride = weights
    head = tl.arange(0, HEADS)
    offset = token * token_stride + head.to(tl.int64) * head_stride
    return tl.load(weights + offset, mask=head < num_heads, other=0.0)


@triton.jit
def load_codes(start, byte_stride, mask, DIM: tl.constexpr, CONVERTS: tl.constexpr):
    """Load keys from the byte pointers ``start``: with CONVERTS as e4m3 [rows, DIM], else as two
    bf16 tiles [rows, DIM / 2]. Masked rows are undefined, but do not affect the scores of other
    rows."""
    # without ``other`` the load goes directly to shared memory
    if CONVERTS:
        lane = tl.arange(0, DIM)[None, :] * byte_stride
        codes = start.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        return tl.load(codes[:, None] + lane, mask=mask[:, None])
    else:
        HALF: tl.constexpr = DIM // 2
        source = start[:, None] + tl.arange(0, HALF)[None, :] * byte_stride
        first = decode_to_bf16(tl.load(source, mask=mask[:, None]))
        second = decode_to_bf16(tl.load(source + HALF * byte_stride, mask=mask[:, None]))
        return first, second


@triton.jit
def score_codes(codes, scale, query, weight, CONVERTS: tl.constexpr):
    """Return float32 scores of a tile of keys. Every row is summed in the same order, so the score
    of a key does not depend on its row in the tile."""
    if CONVERTS:
        products = tl.dot(codes, query)
    else:
        codes0, codes1 = codes
        query0, query1 = query
        # Triton assigns all warps to rows, because one product follows the other; so no warp
        # converts the rows of another warp
        products = tl.zeros((scale.shape[0], weight.shape[0]), tl.float32)
        products = multiply_add(codes0, query0, products)
        products = multiply_add(codes1, query1, products)
    products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(products * weight[None, :], axis=1) * scale


@triton.jit
def load_tile_pages(
    table_row, start, stop, BLOCK_SIZE: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr
):
    """Load the pages of at least ROWS rows from ``start`` on (a multiple of STEP): one page per
    tile of STEP rows, or one per block if a tile has two blocks; -1 from ``stop`` on. For other
    block sizes, load nothing. ``table_row``: the request's row of the block table and its stride.

    The pages are loaded before the loop over the tiles, because in the loop the loads of keys would
    wait for the loads of pages."""
    if BLOCK_SIZE % STEP == 0 or STEP == 2 * BLOCK_SIZE:
        SPAN: tl.constexpr = min(BLOCK_SIZE, STEP)
        row = start + tl.arange(0, max(ROWS // SPAN, 32)) * SPAN
        return _load_page(table_row, row, stop, BLOCK_SIZE)
    else:
        return start  # unused: every tile loads its own pages


@triton.jit
def _load_page(table_row, row, stop, BLOCK_SIZE: tl.constexpr):
    block_table, column_stride = table_row
    column = (row // BLOCK_SIZE).to(tl.int64)
    return tl.load(block_table + column * column_stride, mask=row < stop, other=-1)


@triton.jit
def _mask_page(page, num_blocks):
    """Replace pages that do not exist by -1."""
    return tl.where((page >= 0) & (page < num_blocks), page, -1)


@triton.jit
def _extract(values, index):
    """Return the value at ``index``; the values lie in different threads."""
    lane = tl.arange(0, values.shape[0])
    return tl.sum(tl.where(lane == index, values, 0), axis=0)


@triton.jit
def score_tile(
    cache, table_row, pages, start, tile, stop, query, weight,
    FORMAT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Score a tile of the rows whose pages ``load_tile_pages`` loaded. Return the scores, and which
    rows are in pages that exist.

    A 64-bit address per row costs as much as the product. Only blocks of less than half a tile need
    such addresses. FORMAT: rows per block, bytes of a row's codes and of its scale, and CONVERTS of
    ``common/fp8.py``."""
    BLOCK_SIZE: tl.constexpr = FORMAT[0]
    DATA_BYTES: tl.constexpr = FORMAT[1]
    SCALE_BYTES: tl.constexpr = FORMAT[2]
    CONVERTS: tl.constexpr = FORMAT[3]
    k_cache, page_stride, num_blocks = cache
    lane = tl.arange(0, STEP)
    first = start + tile * STEP
    if BLOCK_SIZE % STEP == 0:
        page = _mask_page(_extract(pages, tile), num_blocks)
        kv_valid = (page >= 0) & (lane >= 0)  # one value per row
        row = first % BLOCK_SIZE + lane
        base = page.to(tl.int64) * page_stride
    elif STEP == 2 * BLOCK_SIZE:
        page0 = _mask_page(_extract(pages, 2 * tile), num_blocks)
        page1 = _mask_page(_extract(pages, 2 * tile + 1), num_blocks)
        page = tl.where(lane < BLOCK_SIZE, page0, page1)
        kv_valid = page >= 0
        # choose the page before the product: Triton 3.9 treats the result of ``tl.where`` as
        # unaligned, so it would load single bytes if the chosen value were an offset
        base = page.to(tl.int64) * page_stride
        row = lane % BLOCK_SIZE
    else:
        page = _load_page(table_row, first + lane, stop, BLOCK_SIZE)
        page = _mask_page(page, num_blocks)
        kv_valid = page >= 0
        base = page.to(tl.int64) * page_stride
        row = (first + lane) % BLOCK_SIZE
    base = k_cache + base
    scales = base + BLOCK_SIZE * DATA_BYTES + row * SCALE_BYTES
    scales = scales.to(tl.pointer_type(tl.float32), bitcast=True)
    codes = load_codes(base + row * DATA_BYTES, 1, kv_valid, DATA_BYTES, CONVERTS)
    scale = tl.load(scales, mask=kv_valid, other=0.0)
    return score_codes(codes, scale, query, weight, CONVERTS), kv_valid
