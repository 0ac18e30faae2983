"""Epilogue of the two partitions of ``mma.py``, which write the result of a token, or the partial
result of a split."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4_ops.kernels.common.hopper.mma import ACC_ROW, HEADS, LOGIT_ROW, WIDTH
from dsv4_ops.kernels.common.triton_compat import Scalar, aggregate, async_load, reinterpret

_LOG2_E = gl.constexpr(1.4426950408889634)
_MIN_SCALE, _MAX_SCALE = gl.constexpr(1e-30), gl.constexpr(1e37)
"""Bounds of the scales of partial results. Inverses of scales within the bounds are normal float32
values."""

_CHUNK, _ROPE = gl.constexpr(16), gl.constexpr(64)
"""Number of heads per store, and number of columns that inverse RoPE rotates."""

_OUT_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
_PAIR_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
_HEAD_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@aggregate
class Output:
    """Addresses for the results of a token with one split. ``row`` is the token's first row; the
    program's heads begin at ``first_head``."""

    out: Scalar
    lse: Scalar
    row: Scalar
    first_head: Scalar


@aggregate
class Partial:
    """Addresses for the partial results of a split. ``scale`` has a value per row; the other fields
    are as in ``Output``."""

    out: Scalar
    lse: Scalar
    scale: Scalar
    row: Scalar
    first_head: Scalar


@aggregate
class Rotation:
    """Arguments of inverse RoPE: the table, the address of the token's position, and the number of
    positions in the table."""

    cos_sin_cache: Scalar
    position: Scalar
    num_positions: Scalar


@gluon.jit
def _store(target, staging, acc, scale, row, first_head, heads, FIRST: gl.constexpr):
    """Write ``acc`` times ``scale`` to columns FIRST and up of each head, rounded to the target's
    dtype. The values pass through shared memory, because a thread computes pairs of values but
    writes eight at once."""
    staging.store((acc * scale[:, None]).to(target.dtype.element_ty))
    for chunk in gl.static_range(HEADS // _CHUNK):
        values = staging.slice(chunk * _CHUNK, _CHUNK, dim=0).load(_OUT_LAYOUT)
        _store_rows(target, values, row, first_head, heads, chunk, FIRST)


@gluon.jit
def _store_rows(target, values, row, first_head, heads, chunk: gl.constexpr, FIRST: gl.constexpr):
    head = chunk * _CHUNK + gl.arange(0, _CHUNK, gl.SliceLayout(1, _OUT_LAYOUT))
    dim = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, _OUT_LAYOUT))
    dst = target + (row + first_head + head)[:, None] * (2 * WIDTH) + dim[None, :]
    gl.store(dst, gl.convert_layout(values, _OUT_LAYOUT), mask=(head < heads)[:, None])


@gluon.jit
def _multiply(left, right):
    """Multiply with ``mul.rn``, which no compiler contracts into a fused multiply-add."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [left, right], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _store_rotated(output, staging, acc, scale, heads, rotation, position):
    """Round the right half, apply inverse RoPE to its last 64 columns as ``kernels/common/rope.py``
    does, and write the result."""
    target = output.out
    staging.store((acc * scale[:, None]).to(target.dtype.element_ty))
    pair = gl.arange(0, WIDTH // 2, gl.SliceLayout(0, _PAIR_LAYOUT)) - (WIDTH - _ROPE) // 2
    in_table = (pair >= 0) & (position >= 0) & (position < rotation.num_positions)
    angle = rotation.cos_sin_cache + gl.where(position >= 0, position, 0) * _ROPE + pair
    cos = gl.load(angle, mask=in_table, other=1.0)[None, :]
    sin = gl.load(angle + _ROPE // 2, mask=in_table, other=0.0)[None, :]
    for chunk in gl.static_range(HEADS // _CHUNK):
        values = staging.slice(chunk * _CHUNK, _CHUNK, dim=0).load(_OUT_LAYOUT).to(gl.float32)
        even, odd = gl.split(gl.reshape(values, [_CHUNK, WIDTH // 2, 2]))
        even, odd = gl.convert_layout(even, _PAIR_LAYOUT), gl.convert_layout(odd, _PAIR_LAYOUT)
        first = _multiply(even, cos) + _multiply(odd, sin)
        second = _multiply(odd, cos) - _multiply(even, sin)
        first = gl.where(in_table[None, :], first, even)
        second = gl.where(in_table[None, :], second, odd)
        values = gl.reshape(gl.join(first, second), [_CHUNK, WIDTH]).to(target.dtype.element_ty)
        _store_rows(target, values, output.row, output.first_head, heads, chunk, WIDTH)


@gluon.jit
def log2_sum(row_max, row_sum):
    """Return the log-sum-exp in base 2; -inf without a key."""
    return gl.where(row_max == float("-inf"), 0.0, row_max) + gl.log2(row_sum)


@gluon.jit
def amax_of(values):
    """Return the amax of each head; ignore NaN."""
    return gl.max(gl.abs(values), axis=1)


@gluon.jit
def scale_of(amax):
    """Return the scale of a partial result whose amax is ``amax``."""
    scale = gl.minimum(gl.maximum(amax, _MIN_SCALE), _MAX_SCALE)
    return gl.where(amax == float("inf"), 1.0, scale)  # a scale of 1 preserves the finite values


@gluon.jit
def copy_sinks(sink_smem, attn_sink, first_head, heads):
    """Start to copy the sinks to shared memory, before the keys are copied. A load at the end would
    delay the results; a load into registers here would occupy registers until the end."""
    head = gl.arange(0, HEADS, _HEAD_LAYOUT)
    async_load(sink_smem, attn_sink + first_head + head, mask=head < heads)


@gluon.jit
def inverse_denominator(row_max, row_sum, sink_smem, HAS_SINK: gl.constexpr):
    """Return the factor that normalises the accumulator; 1 for heads without a key."""
    sink = gl.full([HEADS], float("-inf"), gl.float32, LOGIT_ROW)
    if HAS_SINK:
        sink = sink_smem.load(LOGIT_ROW) * _LOG2_E
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    return 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum + gl.exp2(sink - finite_max))


@gluon.jit
def store_lse(lse, row, row_max, row_sum, heads):
    """Write the natural log-sum-exp of ``heads`` heads from ``row`` on."""
    head = gl.arange(0, HEADS, LOGIT_ROW)
    gl.store(lse + row + head, log2_sum(row_max, row_sum) / _LOG2_E, mask=head < heads)


@gluon.jit
def finish_left(acc, row_max, row_sum, blocks, output, heads, smem, HAS_SINK: gl.constexpr):
    """Write ``lse`` and the left half of the result of a token with one split. The stores are
    staged in the shared memory of the queries, which are no longer needed."""
    if HAS_SINK:
        async_copy.wait_group(0)
    inverse_sum = inverse_denominator(row_max, row_sum, smem.per_head.index(0), HAS_SINK)
    mbarrier.wait(smem.barriers.p_free, (blocks & 1) ^ 1)
    smem.alpha.store(inverse_sum)
    mbarrier.arrive(smem.barriers.p_ready)
    row, first_head = output.row, output.first_head
    store_lse(output.lse, row + first_head, row_max, row_sum, heads)
    staging = smem.q.index(0).slice(0, WIDTH, dim=1)
    scale = gl.convert_layout(inverse_sum, ACC_ROW)
    _store(output.out, staging, acc, scale, row, first_head, heads, 0)


@gluon.jit
def finish_right(
    acc, blocks, output, rotation, position, heads, smem, INVERSE_ROPE: gl.constexpr
):  # fmt: skip
    """Write the right half of the result; INVERSE_ROPE rotates its last 64 columns back."""
    mbarrier.wait(smem.barriers.p_ready, blocks & 1)
    staging = smem.q.index(0).slice(WIDTH, WIDTH, dim=1)
    scale = smem.alpha.load(ACC_ROW)
    if INVERSE_ROPE:
        _store_rotated(output, staging, acc, scale, heads, rotation, position)
    else:
        _store(output.out, staging, acc, scale, output.row, output.first_head, heads, WIDTH)


@gluon.jit
def finish_partial_left(acc, row_max, row_sum, blocks, partial, heads, smem):
    """Write the left half of a split's partial result, normalised and divided by the scale of the
    partial result; also write the scale and the log-sum-exp."""
    p_free, q_smem = smem.barriers.p_free, smem.q.index(0)
    inverse_sum = 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)
    factor = gl.convert_layout(inverse_sum, ACC_ROW)
    mbarrier.wait(p_free, (blocks & 1) ^ 1)
    smem.alpha.store(inverse_sum)
    smem.per_head.index(0).store(amax_of(acc * factor[:, None]))
    mbarrier.arrive(smem.barriers.p_ready)
    head = gl.arange(0, HEADS, LOGIT_ROW)
    row, first_head = partial.row, partial.first_head
    start = row + first_head
    gl.store(partial.lse + start + head, log2_sum(row_max, row_sum), mask=head < heads)
    mbarrier.wait(p_free, blocks & 1)
    scale = smem.per_head.index(1).load(ACC_ROW)
    gl.store(partial.scale + start + head, gl.convert_layout(scale, LOGIT_ROW), mask=head < heads)
    staging = reinterpret(q_smem, gl.float16, [HEADS, 2 * WIDTH], q_smem.layout)
    staging = staging.slice(0, WIDTH, dim=1)
    _store(partial.out, staging, acc, factor * (1.0 / scale), row, first_head, heads, 0)


@gluon.jit
def finish_partial_right(acc, blocks, partial, heads, smem):
    """Write the right half of a split's partial result."""
    q_smem = smem.q.index(0)
    mbarrier.wait(smem.barriers.p_ready, blocks & 1)
    factor = smem.alpha.load(ACC_ROW)
    amax = gl.maximum(amax_of(acc * factor[:, None]), smem.per_head.index(0).load(ACC_ROW))
    scale = scale_of(amax)
    smem.per_head.index(1).store(scale)
    mbarrier.arrive(smem.barriers.p_free)
    staging = reinterpret(q_smem, gl.float16, [HEADS, 2 * WIDTH], q_smem.layout)
    staging = staging.slice(WIDTH, WIDTH, dim=1)
    row, first_head = partial.row, partial.first_head
    _store(partial.out, staging, acc, factor * (1.0 / scale), row, first_head, heads, WIDTH)
