"""Scores of the lightning indexer: one query over a tile of FP8 keys, and their order as ints."""

import triton
import triton.language as tl

from dsv4_ops.kernels.pages import locate_positions

ABSENT_KEY = tl.constexpr(-(2**31))
_NAN_KEY = tl.constexpr(-(2**31) + 1)
_SIGN = tl.constexpr(-(2**31))
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def load_query(
    q,
    token_stride,
    head_stride,
    dim_stride,
    weights,
    weight_token_stride,
    weight_head_stride,
    token,
    num_heads,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """e4m3 [DIM, HEADS] and float32 [HEADS] of the int64 ``token``; heads that do not exist count
    nothing."""
    head = tl.arange(0, HEADS)
    there = head < num_heads
    place = token * token_stride + head.to(tl.int64) * head_stride
    lane = tl.arange(0, DIM).to(tl.int64) * dim_stride
    source = q + place[:, None] + lane[None, :]
    if EMULATE:
        codes = decoded(tl.load(source, mask=there[:, None], other=0))
    else:
        source = source.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        codes = tl.load(source, mask=there[:, None], other=0.0)
    at = token * weight_token_stride + head.to(tl.int64) * weight_head_stride
    weight = tl.load(weights + at, mask=there, other=0.0)
    return tl.trans(codes), weight


@triton.jit
def decoded(codes):
    """Triton's interpreter has no FP8 product, and reads the NaN codes as 480."""
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def load_codes(place, byte_stride, exists, DIM: tl.constexpr, EMULATE: tl.constexpr):
    """e4m3 [rows, DIM] keys at the pointers to bytes ``place``; anything where none exists, which
    touches no other row of a product."""
    lane = tl.arange(0, DIM)[None, :] * byte_stride
    if EMULATE:
        codes = tl.load(place[:, None] + lane, mask=exists[:, None], other=0)
        return decoded(codes)
    codes = place.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    return tl.load(codes[:, None] + lane, mask=exists[:, None])  # at once to shared memory


@triton.jit
def score_codes(codes, scale, query, weight):
    """float32 scores of a tile of keys; every row is summed in one order, wherever it is."""
    products = tl.dot(codes, query)
    products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(products * weight[None, :], axis=1) * scale


@triton.jit
def find_rows(
    k_cache,
    page_stride,
    num_blocks,
    block_table,
    table_stride,
    column_stride,
    max_blocks,
    request,
    position,
    wanted,
    BLOCK_SIZE: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    """Pointers to the codes and to the scale of cache rows, and which of them exist."""
    page, row, exists = locate_positions(
        block_table,
        table_stride,
        column_stride,
        request,
        position,
        wanted,
        max_blocks,
        num_blocks,
        BLOCK_SIZE,
    )
    start = k_cache + page * page_stride
    scale = start + BLOCK_SIZE * DATA_BYTES + row * SCALE_BYTES
    return start + row * DATA_BYTES, scale.to(tl.pointer_type(tl.float32), bitcast=True), exists


@triton.jit
def sortable(score):
    """int32 in the order of float32 scores: -0 is 0, and NaN is below every number."""
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ _MAGNITUDE, bits)
    key = tl.where(bits == _SIGN, 0, key)
    return tl.where((bits & _MAGNITUDE) > _INFINITY, _NAN_KEY, key)
