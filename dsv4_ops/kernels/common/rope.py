"""Rotary embedding inside a kernel: ``reference/rotation.py`` on registers."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.fp8 import (
    round_to_bf16,  # by name: Inductor copies kernels, not modules
)
from dsv4_ops.kernels.common.triton_compat import EMULATE


@triton.jit
def rotate_pairs(even, odd, cos, sin):
    """The rotated pairs (even, odd), every product rounded before the sum, for the same bits as
    without a GPU."""
    first = _product(even, cos) - _product(odd, sin)
    second = _product(odd, cos) + _product(even, sin)
    return first, second


@triton.jit
def rotate_pairs_back(even, odd, cos, sin):
    """The same by the opposite angle. Not a rotation by ``-sin``: Triton's minus makes 0 of 0."""
    first = _product(even, cos) + _product(odd, sin)
    second = _product(odd, cos) - _product(even, sin)
    return first, second


@triton.jit
def _product(left, right):
    """A product that no compiler contracts into a fused multiply-add."""
    if EMULATE:
        return left * right
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [left, right], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def load_tail_angles(
    angles, position, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr
):
    """For the DIM / 2 pairs of a row at ``position``, not below 0: whether one is rotated, the last
    ROPE of HEAD_DIM values, and its cosine and sine. ``angles`` is the dense table and its rows."""
    cos_sin_cache, num_positions = angles
    pair = tl.arange(0, DIM // 2) - (HEAD_DIM - ROPE) // 2
    known = (pair >= 0) & (pair < ROPE // 2) & (position < num_positions)
    angle = cos_sin_cache + position.to(tl.int64) * ROPE + pair
    cos = tl.load(angle, mask=known, other=1.0)
    return known, cos, tl.load(angle + ROPE // 2, mask=known, other=0.0)


@triton.jit
def rotate_tail(values, rotation, DIM: tl.constexpr, INVERSE: tl.constexpr = False):
    """Rotate the pairs of fp32 ``values`` [DIM] that ``load_tail_angles`` knows, or rotate back."""
    known, cos, sin = rotation
    even, odd = tl.split(tl.reshape(values, (DIM // 2, 2)))
    if INVERSE:
        left, right = rotate_pairs_back(even, odd, cos, sin)
    else:
        left, right = rotate_pairs(even, odd, cos, sin)
    pairs = tl.join(tl.where(known, left, even), tl.where(known, right, odd))
    return tl.reshape(pairs, (DIM,))


@triton.jit
def load_angles(cos_sin_cache, position, num_positions, ROPE: tl.constexpr):
    """Whether the table has ``position``, and the cosine and sine of each of its pairs."""
    known = (position >= 0) & (position < num_positions)
    pair = tl.arange(0, ROPE // 2)
    angle = cos_sin_cache + tl.where(known, position, 0) * ROPE + pair
    cos = tl.load(angle, mask=known, other=1.0)
    return known, cos, tl.load(angle + ROPE // 2, mask=known, other=0.0)


@triton.jit
def inverse_rope(values, known, cos, sin):
    """Inverse RoPE of fp32 ``values`` [rows, rope dim] of one position, rounded to bf16 before: in
    float32, to be rounded once more."""
    rounded = round_to_bf16(values).to(tl.float32)
    pairs = tl.reshape(rounded, (values.shape[0], values.shape[1] // 2, 2))
    even, odd = tl.split(pairs)
    left, right = rotate_pairs_back(even, odd, cos[None, :], sin[None, :])
    pairs = tl.join(tl.where(known, left, even), tl.where(known, right, odd))
    return tl.reshape(pairs, (values.shape[0], values.shape[1]))
