"""Device functions for rotary embeddings, as in ``reference/rotation.py``."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.fp8 import (
    round_to_bf16,  # by name: Inductor copies no modules
)
from dsv4_ops.kernels.common.triton_compat import EMULATE


@triton.jit
def rotate_pairs(even, odd, cos, sin):
    """Rotate the pairs (even, odd). Each product is rounded before the sum, so that a CPU computes
    the same bits."""
    first = _multiply(even, cos) - _multiply(odd, sin)
    second = _multiply(odd, cos) + _multiply(even, sin)
    return first, second


@triton.jit
def rotate_pairs_back(even, odd, cos, sin):
    """Rotate by the opposite angle. ``rotate_pairs`` with ``-sin`` would differ, because Triton
    negates 0 to 0, not to -0."""
    first = _multiply(even, cos) + _multiply(odd, sin)
    second = _multiply(odd, cos) - _multiply(even, sin)
    return first, second


@triton.jit
def _multiply(left, right):
    """Multiply with ``mul.rn``, which no compiler contracts into a fused multiply-add."""
    if EMULATE:
        return left * right
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [left, right], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def load_tail_angles(
    angles, position, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr
):
    """Load the angles of a row at ``position``, which is at least 0. For each of the row's DIM / 2
    pairs, return whether the pair is rotated, the cosine and the sine. The last ROPE of HEAD_DIM
    values are rotated. ``angles``: the dense table and its number of rows."""
    cos_sin_cache, num_positions = angles
    pair = tl.arange(0, DIM // 2) - (HEAD_DIM - ROPE) // 2
    in_table = (pair >= 0) & (pair < ROPE // 2) & (position < num_positions)
    angle = cos_sin_cache + position.to(tl.int64) * ROPE + pair
    cos = tl.load(angle, mask=in_table, other=1.0)
    return in_table, cos, tl.load(angle + ROPE // 2, mask=in_table, other=0.0)


@triton.jit
def rotate_tail(values, rotation, DIM: tl.constexpr, INVERSE: tl.constexpr = False):
    """Rotate fp32 ``values`` [DIM] by ``rotation``, the result of ``load_tail_angles``; INVERSE
    applies inverse RoPE."""
    in_table, cos, sin = rotation
    even, odd = tl.split(tl.reshape(values, (DIM // 2, 2)))
    if INVERSE:
        left, right = rotate_pairs_back(even, odd, cos, sin)
    else:
        left, right = rotate_pairs(even, odd, cos, sin)
    pairs = tl.join(tl.where(in_table, left, even), tl.where(in_table, right, odd))
    return tl.reshape(pairs, (DIM,))


@triton.jit
def load_angles(cos_sin_cache, position, num_positions, ROPE: tl.constexpr):
    """Return whether ``position`` is in the table, and the cosine and sine of each pair."""
    in_table = (position >= 0) & (position < num_positions)
    pair = tl.arange(0, ROPE // 2)
    angle = cos_sin_cache + tl.where(in_table, position, 0) * ROPE + pair
    cos = tl.load(angle, mask=in_table, other=1.0)
    return in_table, cos, tl.load(angle + ROPE // 2, mask=in_table, other=0.0)


@triton.jit
def inverse_rope(values, in_table, cos, sin):
    """Round fp32 ``values`` [rows, rope dim] of one position to bf16 and apply inverse RoPE. The
    result is fp32; the caller rounds it again."""
    rounded = round_to_bf16(values).to(tl.float32)
    pairs = tl.reshape(rounded, (values.shape[0], values.shape[1] // 2, 2))
    even, odd = tl.split(pairs)
    left, right = rotate_pairs_back(even, odd, cos[None, :], sin[None, :])
    pairs = tl.join(tl.where(in_table, left, even), tl.where(in_table, right, odd))
    return tl.reshape(pairs, (values.shape[0], values.shape[1]))
