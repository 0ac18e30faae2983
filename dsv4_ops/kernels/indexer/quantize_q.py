"""Rotate and quantise the queries of the lightning indexer."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import quantize, round_to_bf16  # Inductor copies functions only
from dsv4_ops.kernels.common.rope import rotate_pairs
from dsv4_ops.kernels.common.sizes import SIZES


@triton.jit
def quantize_queries(
    program, q, weights, positions, angles, out,
    SOFTMAX_SCALE: tl.constexpr, ROPE: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Rotate and quantise a tile of heads of a token.

    Args:
        program: Index of the tile, counted through all tokens.
        q: Queries, their token, head and value strides, and the number of heads.
        weights: Weights, their token stride and their head stride.
        positions: Positions and their stride.
        angles: See ``kernels.common``.
        out: Codes and scaled weights, both dense.
        SOFTMAX_SCALE: Factor of the weights.
        ROPE: Number of rotated values of a head; whether these are its first values instead of its
            last; and whether a pair is two adjacent values instead of one value of each half.
        DIM: Values per head.
        HEADS: Heads per tile.
        CONVERTS: See ``common/fp8.py``.
    """
    ROPE_DIM: tl.constexpr = ROPE[0]
    ROPE_FIRST: tl.constexpr = ROPE[1]
    FIRST: tl.constexpr = 0 if ROPE_FIRST else DIM - ROPE_DIM
    INTERLEAVED: tl.constexpr = ROPE[2]
    q, token_stride, head_stride, dim_stride, num_heads = q
    weights, weight_token_stride, weight_head_stride = weights
    positions, position_stride = positions
    cos_sin_cache, table_stride, column_stride, num_positions = angles
    codes_out, weights_out = out
    tiles = (num_heads + HEADS - 1) // HEADS
    token = (program // tiles).to(tl.int64)
    head = program % tiles * HEADS + tl.arange(0, HEADS)
    head_valid = head < num_heads
    dim = tl.arange(0, DIM)[None, :]
    if not INTERLEAVED:  # load the two values of a pair side by side
        place = dim - FIRST
        paired = FIRST + place // 2 + place % 2 * (ROPE_DIM // 2)
        dim = tl.where((place >= 0) & (place < ROPE_DIM), paired, dim)
    source = q + token * token_stride + head.to(tl.int64)[:, None] * head_stride
    source += dim.to(tl.int64) * dim_stride
    values = tl.load(source, mask=head_valid[:, None], other=0.0).to(tl.float32)

    position = tl.load(positions + token * position_stride)
    in_table = (position >= 0) & (position < num_positions)
    pair = tl.arange(0, DIM // 2) - FIRST // 2
    rotates = in_table & (pair >= 0) & (pair < ROPE_DIM // 2)
    angle = cos_sin_cache + tl.where(in_table, position, 0) * table_stride
    column = pair.to(tl.int64) * column_stride
    cos = tl.load(angle + column, mask=rotates, other=1.0)[None, :]
    sin = tl.load(angle + column + ROPE_DIM // 2 * column_stride, mask=rotates, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(values, (HEADS, DIM // 2, 2)))
    first, second = rotate_pairs(even, odd, cos, sin)
    rotates = rotates[None, :]
    pairs = tl.join(tl.where(rotates, first, even), tl.where(rotates, second, odd))
    rotated = round_to_bf16(tl.reshape(pairs, (HEADS, DIM))).to(tl.float32)

    codes, scale = quantize(rotated, CONVERTS)
    row = token * num_heads + head
    tl.store(codes_out + row[:, None] * DIM + dim, codes, mask=head_valid[:, None])
    offset = token * weight_token_stride + head.to(tl.int64) * weight_head_stride
    weight = tl.load(weights + offset, mask=head_valid, other=0.0).to(tl.float32)
    weight = weight * (scale << 23).to(tl.float32, bitcast=True) * SOFTMAX_SCALE
    tl.store(weights_out + row, weight, mask=head_valid)


@triton.jit(do_not_specialize=SIZES)
def quantize_query_kernel(
    q, token_stride, head_stride, dim_stride, num_heads,
    weights, weight_token_stride, weight_head_stride,
    positions, position_stride,
    cos_sin_cache, table_stride, column_stride, num_positions,
    out, weights_out,
    SOFTMAX_SCALE: tl.constexpr, ROPE: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    quantize_queries(
        tl.program_id(0), (q, token_stride, head_stride, dim_stride, num_heads),
        (weights, weight_token_stride, weight_head_stride), (positions, position_stride),
        (cos_sin_cache, table_stride, column_stride, num_positions), (out, weights_out),
        SOFTMAX_SCALE, ROPE, DIM, HEADS, CONVERTS,
    )  # fmt: skip
