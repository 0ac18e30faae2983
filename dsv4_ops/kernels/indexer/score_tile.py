"""Scores of the lightning indexer: one query over a tile of FP8 keys, and their order as ints."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.triton_compat import EMULATE

ABSENT_KEY = tl.constexpr(-(2**31))
_NAN_KEY = tl.constexpr(-(2**31) + 1)
_SIGN = tl.constexpr(-(2**31))
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def load_query(q, token, HEADS: tl.constexpr, DIM: tl.constexpr):
    """e4m3 [DIM, HEADS] of the int64 ``token``. ``q``: codes, the strides of tokens, heads and
    values, and the number of heads."""
    q, token_stride, head_stride, dim_stride, num_heads = q
    head = tl.arange(0, HEADS)
    there = head < num_heads
    row = token * token_stride + head.to(tl.int64) * head_stride
    lane = tl.arange(0, DIM).to(tl.int64) * dim_stride
    source = q + row[:, None] + lane[None, :]
    if EMULATE:
        codes = decoded(tl.load(source, mask=there[:, None], other=0))
    else:
        source = source.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        codes = tl.load(source, mask=there[:, None], other=0.0)
    return tl.trans(codes)


@triton.jit
def load_weights(weights, token, num_heads, HEADS: tl.constexpr):
    """float32 [HEADS] of the int64 ``token``; heads that do not exist count nothing. ``weights``
    with the strides of tokens and heads."""
    weights, token_stride, head_stride = weights
    head = tl.arange(0, HEADS)
    at = token * token_stride + head.to(tl.int64) * head_stride
    return tl.load(weights + at, mask=head < num_heads, other=0.0)


@triton.jit
def decoded(codes):
    """Triton's interpreter has no FP8 product, and reads the NaN codes as 480."""
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def load_codes(start, byte_stride, exists, DIM: tl.constexpr):
    """e4m3 [rows, DIM] keys at the pointers to bytes ``start``; anything where none exists, which
    touches no other row of a product."""
    lane = tl.arange(0, DIM)[None, :] * byte_stride
    if EMULATE:
        codes = tl.load(start[:, None] + lane, mask=exists[:, None], other=0)
        return decoded(codes)
    codes = start.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    return tl.load(codes[:, None] + lane, mask=exists[:, None])  # at once to shared memory


@triton.jit
def score_codes(codes, scale, query, weight):
    """float32 scores of a tile of keys; every row is summed in one order, wherever it is."""
    products = tl.dot(codes, query)
    products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(products * weight[None, :], axis=1) * scale


@triton.jit
def find_pages(
    entries, start, stop, BLOCK_SIZE: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr
):
    """``entries`` (a row of a block table, and its stride) of at least ROWS rows of a cache from
    ``start`` on, a multiple of STEP: one for each tile of STEP, or one for each block of tiles of
    two; -1 from ``stop`` on. Loaded together and ahead: a load that waits for another in the loop
    over the tiles would have the keys wait too."""
    if BLOCK_SIZE % STEP == 0 or STEP == 2 * BLOCK_SIZE:
        SPAN: tl.constexpr = min(BLOCK_SIZE, STEP)
        row = start + tl.arange(0, max(ROWS // SPAN, 32)) * SPAN
        return _load_page(entries, row, stop, BLOCK_SIZE)
    else:
        return start  # every tile loads its own


@triton.jit
def _load_page(entries, row, stop, BLOCK_SIZE: tl.constexpr):
    column = (row // BLOCK_SIZE).to(tl.int64)
    return tl.load(entries[0] + column * entries[1], mask=row < stop, other=-1)


@triton.jit
def _existing(page, num_blocks):
    return tl.where((page >= 0) & (page < num_blocks), page, -1)


@triton.jit
def _pick(values, number):
    lane = tl.arange(0, values.shape[0])
    return tl.sum(tl.where(lane == number, values, 0), axis=0)


@triton.jit
def score_tile(
    cache, entries, pages, start, tile, stop, query, weight,
    FORMAT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of the rows of ``find_pages``, and which of them are in pages that exist.
    Addresses in 64 bits for every row would cost as much as the products; small blocks have them.
    FORMAT: rows of a block, bytes of a row's codes and scale."""
    BLOCK_SIZE: tl.constexpr = FORMAT[0]
    k_cache, page_stride, num_blocks = cache
    lane = tl.arange(0, STEP)
    first = start + tile * STEP
    if BLOCK_SIZE % STEP == 0:
        page = _existing(_pick(pages, tile), num_blocks)
        exists = (page >= 0) & (lane >= 0)  # a value per lane
        row = first % BLOCK_SIZE + lane
        base = page.to(tl.int64) * page_stride
    elif STEP == 2 * BLOCK_SIZE:
        near = _existing(_pick(pages, 2 * tile), num_blocks)
        far = _existing(_pick(pages, 2 * tile + 1), num_blocks)
        exists = tl.where(lane < BLOCK_SIZE, near, far) >= 0
        near, far = near.to(tl.int64) * page_stride, far.to(tl.int64) * page_stride
        base = tl.where(lane < BLOCK_SIZE, near, far)
        row = lane % BLOCK_SIZE
    else:
        page = _load_page(entries, first + lane, stop, BLOCK_SIZE)
        page = _existing(page, num_blocks)
        exists = page >= 0
        base = page.to(tl.int64) * page_stride
        row = (first + lane) % BLOCK_SIZE
    base = k_cache + base
    scale_at = base + BLOCK_SIZE * FORMAT[1] + row * FORMAT[2]
    scale_at = scale_at.to(tl.pointer_type(tl.float32), bitcast=True)
    codes = load_codes(base + row * FORMAT[1], 1, exists, FORMAT[1])
    scale = tl.load(scale_at, mask=exists, other=0.0)
    return score_codes(codes, scale, query, weight), exists


@triton.jit
def sortable(score):
    """int32 in the order of float32 scores: -0 is 0, and NaN is below every number."""
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ _MAGNITUDE, bits)
    key = tl.where(bits == _SIGN, 0, key)
    return tl.where((bits & _MAGNITUDE) > _INFINITY, _NAN_KEY, key)
