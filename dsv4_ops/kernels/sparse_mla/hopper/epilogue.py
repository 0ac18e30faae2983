"""What the two partitions do with their sums: results, or partial results of a split."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4_ops.kernels.common.triton_compat import async_load, reinterpret
from dsv4_ops.kernels.sparse_mla.hopper.mma import HEADS, LOGIT_ROW, VALUE_ROW, WIDTH

_LOG2_E = gl.constexpr(1.4426950408889634)
_MIN_SCALE, _MAX_SCALE = gl.constexpr(1e-30), gl.constexpr(1e37)
"""Scales of a partial result are between them: their inverses are ordinary float32 values."""

_ROWS, _ROPE = gl.constexpr(16), gl.constexpr(64)
"""Heads that are written at a time, and values that are rotated back."""

_OUT = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
_PAIRS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _store(target, stage, sums, factor, row, first_head, heads, FIRST: gl.constexpr):
    """Write ``sums`` times ``factor`` of as many heads from dimension FIRST on, rounded as the
    target is. By way of shared memory: a thread has pairs of values, and writes eight."""
    stage.store((sums * factor[:, None]).to(target.dtype.element_ty))
    for part in gl.static_range(HEADS // _ROWS):
        values = stage.slice(part * _ROWS, _ROWS, dim=0).load(_OUT)
        _store_rows(target, values, row, first_head, heads, part, FIRST)


@gluon.jit
def _store_rows(target, values, row, first_head, heads, part: gl.constexpr, FIRST: gl.constexpr):
    head = part * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, _OUT))
    dim = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, _OUT))
    dst = target + (row + first_head + head)[:, None] * (2 * WIDTH) + dim[None, :]
    gl.store(dst, gl.convert_layout(values, _OUT), mask=(head < heads)[:, None])


@gluon.jit
def _product(left, right):
    """A product that no compiler contracts into a fused multiply-add."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [left, right], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _store_rotated(target, stage, sums, factor, row, first_head, heads, rotation):
    """The right half likewise, with inverse RoPE of its last 64 values after the rounding, as in
    ``kernels/common/rope.py``."""
    cos_sin_cache, position, num_positions = rotation
    stage.store((sums * factor[:, None]).to(target.dtype.element_ty))
    pair = gl.arange(0, WIDTH // 2, gl.SliceLayout(0, _PAIRS)) - (WIDTH - _ROPE) // 2
    known = (pair >= 0) & (position >= 0) & (position < num_positions)
    angle = cos_sin_cache + gl.where(position >= 0, position, 0) * _ROPE + pair
    cos = gl.load(angle, mask=known, other=1.0)[None, :]
    sin = gl.load(angle + _ROPE // 2, mask=known, other=0.0)[None, :]
    for part in gl.static_range(HEADS // _ROWS):
        values = stage.slice(part * _ROWS, _ROWS, dim=0).load(_OUT).to(gl.float32)
        even, odd = gl.split(gl.reshape(values, [_ROWS, WIDTH // 2, 2]))
        even, odd = gl.convert_layout(even, _PAIRS), gl.convert_layout(odd, _PAIRS)
        left = _product(even, cos) + _product(odd, sin)
        right = _product(odd, cos) - _product(even, sin)
        left = gl.where(known[None, :], left, even)
        right = gl.where(known[None, :], right, odd)
        values = gl.reshape(gl.join(left, right), [_ROWS, WIDTH]).to(target.dtype.element_ty)
        _store_rows(target, values, row, first_head, heads, part, WIDTH)


@gluon.jit
def log2_sum(row_max, row_sum):
    return gl.where(row_max == float("-inf"), 0.0, row_max) + gl.log2(row_sum)


@gluon.jit
def amax_of(values):
    """Amax of every head; NaN is left out."""
    return gl.max(gl.abs(values), axis=1)


@gluon.jit
def scale_of(amax):
    scale = gl.minimum(gl.maximum(amax, _MIN_SCALE), _MAX_SCALE)
    return gl.where(amax == float("inf"), 1.0, scale)  # beside infinite ones as they are


@gluon.jit
def ask_sinks(sinks, attn_sink, first_head, heads):
    """Copies of the sinks of as many heads, before the keys: at the end results would wait for
    them, and until then no thread has a register for one."""
    head = gl.arange(0, HEADS, _LINE)
    async_load(sinks, attn_sink + first_head + head, mask=head < heads)


@gluon.jit
def inverse_of(row_max, row_sum, sinks, HAS_SINK: gl.constexpr):
    """By what the sums of heads are multiplied at last."""
    sink = gl.full([HEADS], float("-inf"), gl.float32, LOGIT_ROW)
    if HAS_SINK:
        sink = sinks.load(LOGIT_ROW) * _LOG2_E
    origin = gl.where(row_max == float("-inf"), 0.0, row_max)
    return 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum + gl.exp2(sink - origin))


@gluon.jit
def store_lse(lse, row, row_max, row_sum, heads):
    """Natural logarithms of as many heads from ``row`` on."""
    head = gl.arange(0, HEADS, LOGIT_ROW)
    gl.store(lse + row + head, log2_sum(row_max, row_sum) / _LOG2_E, mask=head < heads)


@gluon.jit
def finish_left(
    sums, row_max, row_sum, blocks, dst, heads, queries, exchange, barriers, HAS_SINK: gl.constexpr
):
    """Results of a token whose keys were all here: the left half, and ``lse``, of as many heads.
    The queries are not needed any more: what is stored goes through their memory."""
    out, lse, row, first_head = dst
    _full, _empty, weighed, taken, _asked = barriers
    if HAS_SINK:
        async_copy.wait_group(0)
    inverse = inverse_of(row_max, row_sum, exchange[1].index(0), HAS_SINK)
    mbarrier.wait(taken, (blocks & 1) ^ 1)
    exchange[0].store(inverse)
    mbarrier.arrive(weighed)
    store_lse(lse, row + first_head, row_max, row_sum, heads)
    stage = queries.slice(0, WIDTH, dim=1)
    factor = gl.convert_layout(inverse, VALUE_ROW)
    _store(out, stage, sums, factor, row, first_head, heads, 0)


@gluon.jit
def finish_right(
    sums, blocks, dst, rotation, heads, queries, exchange, barriers, INVERSE_ROPE: gl.constexpr
):
    """The right half of the results, with inverse RoPE of its last 64 values if INVERSE_ROPE."""
    out, row, first_head = dst
    _full, _empty, weighed, _taken, _asked = barriers
    mbarrier.wait(weighed, blocks & 1)
    stage = queries.slice(WIDTH, WIDTH, dim=1)
    factor = exchange[0].load(VALUE_ROW)
    if INVERSE_ROPE:
        _store_rotated(out, stage, sums, factor, row, first_head, heads, rotation)
    else:
        _store(out, stage, sums, factor, row, first_head, heads, WIDTH)


@gluon.jit
def part_left(sums, row_max, row_sum, blocks, dst, heads, queries, exchange, barriers):
    """Partial results of a split: normalised, as multiples of the head's amax."""
    partial, partial_lse, partial_scale, row, first_head = dst
    _full, _empty, weighed, taken, _asked = barriers
    inverse = 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)
    factor = gl.convert_layout(inverse, VALUE_ROW)
    mbarrier.wait(taken, (blocks & 1) ^ 1)
    exchange[0].store(inverse)
    exchange[1].index(0).store(amax_of(sums * factor[:, None]))
    mbarrier.arrive(weighed)
    head = gl.arange(0, HEADS, LOGIT_ROW)
    start = row + first_head
    gl.store(partial_lse + start + head, log2_sum(row_max, row_sum), mask=head < heads)
    mbarrier.wait(taken, blocks & 1)
    scale = exchange[1].index(1).load(VALUE_ROW)
    gl.store(partial_scale + start + head, gl.convert_layout(scale, LOGIT_ROW), mask=head < heads)
    stage = reinterpret(queries, gl.float16, [HEADS, 2 * WIDTH], queries.layout)
    stage = stage.slice(0, WIDTH, dim=1)
    _store(partial, stage, sums, factor * (1.0 / scale), row, first_head, heads, 0)


@gluon.jit
def part_right(sums, blocks, dst, heads, queries, exchange, barriers):
    """The right half of a partial result."""
    partial, row, first_head = dst
    _full, _empty, weighed, taken, _asked = barriers
    mbarrier.wait(weighed, blocks & 1)
    factor = exchange[0].load(VALUE_ROW)
    amax = gl.maximum(amax_of(sums * factor[:, None]), exchange[1].index(0).load(VALUE_ROW))
    scale = scale_of(amax)
    exchange[1].index(1).store(scale)
    mbarrier.arrive(taken)
    stage = reinterpret(queries, gl.float16, [HEADS, 2 * WIDTH], queries.layout)
    stage = stage.slice(WIDTH, WIDTH, dim=1)
    _store(partial, stage, sums, factor * (1.0 / scale), row, first_head, heads, WIDTH)
