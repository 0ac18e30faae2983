"""What the two partitions do with their sums: results, or partial results of a split."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4_ops.kernels.hopper_attend import HEADS, LOGIT_ROW, VALUE_ROW, WIDTH

_LOG2_E = gl.constexpr(1.4426950408889634)
_LEAST_PEAK, _MOST_PEAK = gl.constexpr(1e-30), gl.constexpr(1e37)
"""Scales of a partial result are between them: their inverses are ordinary float32 values."""


@gluon.jit
def _store(target, values, rows, there, FIRST: gl.constexpr):
    """float32 ``values`` of all heads from dimension FIRST on, rounded as the target is."""
    LAYOUT: gl.constexpr = values.type.layout
    row = gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT))
    mask = gl.convert_layout(there, gl.SliceLayout(1, LAYOUT))
    dim = FIRST + gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    rounded = values.to(target.dtype.element_ty)
    gl.store(target + (row * (2 * WIDTH))[:, None] + dim[None, :], rounded, mask=mask[:, None])


@gluon.jit
def _halves(values):
    """The left and the right half of the columns: no register moves."""
    COLUMNS: gl.constexpr = values.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(values, [HEADS, 2, COLUMNS]), (0, 2, 1)))


@gluon.jit
def _product(left, right):
    """A product that no compiler contracts into a fused multiply-add."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [left, right], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _turn_back(values, cos_sin_cache, position, num_positions):
    """``values`` [heads, 64], rounded to bf16 and rotated back: in float32, to be rounded again.
    ``kernels/rotation.py`` says how."""
    COLUMNS: gl.constexpr = values.shape[1]
    rounded = values.to(gl.bfloat16).to(gl.float32)
    even, odd = gl.split(gl.reshape(rounded, [HEADS, COLUMNS // 2, 2]))
    pair = gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, even.type.layout))
    known = (position >= 0) & (position < num_positions)
    angle = cos_sin_cache + gl.where(known, position, 0) * COLUMNS + pair
    wanted = known & (pair >= 0)
    cos = gl.load(angle, mask=wanted, other=1.0)[None, :]
    sin = gl.load(angle + COLUMNS // 2, mask=wanted, other=0.0)[None, :]
    left = _product(even, cos) + _product(odd, sin)
    right = _product(odd, cos) - _product(even, sin)
    turned = gl.join(gl.where(known, left, even), gl.where(known, right, odd))
    return gl.reshape(turned, [HEADS, COLUMNS])


@gluon.jit
def _log2_sum(largest, total):
    return gl.where(largest == float("-inf"), 0.0, largest) + gl.log2(total)


@gluon.jit
def _heads_of(first_head, num_heads, LAYOUT: gl.constexpr):
    head = first_head + gl.arange(0, HEADS, LAYOUT)
    return head, head < num_heads


@gluon.jit
def _peak(values):
    """The largest magnitude of every head; NaN is left out."""
    return gl.max(gl.abs(values), axis=1)


@gluon.jit
def _scale_of(peak):
    scale = gl.minimum(gl.maximum(peak, _LEAST_PEAK), _MOST_PEAK)
    return gl.where(peak == float("inf"), 1.0, scale)  # beside infinite ones as they are


@gluon.jit
def finish_left(
    sums, largest, total, blocks, goal, final, exchange, weighed, taken, HAS_SINK: gl.constexpr
):
    """Results of a token whose keys were all here: the left half, and ``lse``."""
    out, lse, attn_sink, row, first_head, num_heads = goal
    factors, _ = exchange
    head, there = _heads_of(first_head, num_heads, LOGIT_ROW)
    there = there & final
    sink = gl.full([HEADS], float("-inf"), gl.float32, LOGIT_ROW)
    if HAS_SINK:
        sink = gl.load(attn_sink + head, mask=there, other=0.0) * _LOG2_E
    origin = gl.where(largest == float("-inf"), 0.0, largest)
    below = gl.where(total == 0.0, 1.0, total + gl.exp2(sink - origin))
    inverse = 1.0 / below
    mbarrier.wait(taken, (blocks & 1) ^ 1)
    factors.store(inverse)
    mbarrier.arrive(weighed)
    gl.store(lse + row + head, _log2_sum(largest, total) / _LOG2_E, mask=there)
    values = sums * gl.convert_layout(inverse, VALUE_ROW)[:, None]
    _store(out, values, row + head, there, 0)


@gluon.jit
def finish_right(
    sums,
    blocks,
    goal,
    rotation,
    final,
    exchange,
    weighed,
    taken,
    TURNED: gl.constexpr,
):
    """The right half of the results, its last 64 values rotated back if TURNED."""
    out, row, first_head, num_heads = goal
    cos_sin_cache, position, num_positions = rotation
    factors, _ = exchange
    head, there = _heads_of(first_head, num_heads, VALUE_ROW)
    there = there & final
    mbarrier.wait(weighed, blocks & 1)
    values = sums * factors.load(VALUE_ROW)[:, None]
    left, right = _halves(values)
    middle, rope = _halves(right)
    if TURNED:
        rope = _turn_back(rope, cos_sin_cache, position, num_positions)
    _store(out, left, row + head, there, WIDTH)
    _store(out, middle, row + head, there, WIDTH + WIDTH // 2)
    _store(out, rope, row + head, there, WIDTH + 3 * WIDTH // 4)


@gluon.jit
def part_left(sums, largest, total, blocks, goal, real, exchange, weighed, taken):
    """Partial results of a split: normalised, as multiples of the largest magnitude of the head."""
    partial, partial_lse, partial_peak, row, first_head, num_heads = goal
    factors, peaks = exchange
    head, there = _heads_of(first_head, num_heads, LOGIT_ROW)
    there = there & real
    inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
    values = sums * gl.convert_layout(inverse, VALUE_ROW)[:, None]
    mbarrier.wait(taken, (blocks & 1) ^ 1)
    factors.store(inverse)
    peaks.index(0).store(_peak(values))
    mbarrier.arrive(weighed)
    mbarrier.wait(taken, blocks & 1)
    scale = peaks.index(1).load(VALUE_ROW)
    gl.store(partial_lse + row + head, _log2_sum(largest, total), mask=there)
    spread = gl.convert_layout(scale, LOGIT_ROW)
    gl.store(partial_peak + row + head, spread, mask=there)
    _store(partial, values * (1.0 / scale)[:, None], row + head, there, 0)


@gluon.jit
def part_right(sums, blocks, goal, real, exchange, weighed, taken):
    """The right half of a partial result."""
    partial, row, first_head, num_heads = goal
    factors, peaks = exchange
    head, there = _heads_of(first_head, num_heads, VALUE_ROW)
    there = there & real
    mbarrier.wait(weighed, blocks & 1)
    values = sums * factors.load(VALUE_ROW)[:, None]
    scale = _scale_of(gl.maximum(_peak(values), peaks.index(0).load(VALUE_ROW)))
    peaks.index(1).store(scale)
    mbarrier.arrive(taken)
    _store(partial, values * (1.0 / scale)[:, None], row + head, there, WIDTH)
