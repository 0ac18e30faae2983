"""Epilogue of the two partitions of ``mma_paired.py``. Each partition writes half of a result."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_ops.kernels.common.hopper.mma import ACC_ROW, HEADS, WIDTH
from dsv4_ops.kernels.common.triton_compat import Scalar, aggregate

_STORED_COLUMNS = gl.constexpr(64)
"""Columns of a result per store: as many as P has, because stores are staged in P's memory."""

_STORE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@aggregate
class GroupedRows:
    """Rows of the partial results of a group of tokens: the first row, the number of adjacent rows
    of a token (its heads), and the number of rows to skip between two tokens."""

    first: Scalar
    rows: Scalar
    gap: Scalar


@gluon.jit
def _halves(values):
    """Return the left and the right half of the columns."""
    COLUMNS: gl.constexpr = values.shape[1]
    parts = gl.reshape(values, [HEADS, 2, COLUMNS // 2])
    return gl.split(gl.permute(parts, (0, 2, 1)))


@gluon.jit
def _store_columns(out, staging, values, row, heads, FIRST: gl.constexpr, GROUPED: gl.constexpr):
    staging.store(values)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, _STORE_LAYOUT))
    dim = FIRST + gl.arange(0, _STORED_COLUMNS, gl.SliceLayout(0, _STORE_LAYOUT))
    if GROUPED:
        dst_row = row.first + head + (head // row.rows) * row.gap
    else:
        dst_row = row + head
    dst = out + dst_row[:, None] * (2 * WIDTH) + dim[None, :]
    gl.store(dst, staging.load(_STORE_LAYOUT), mask=(head < heads)[:, None])


@gluon.jit
def write_half(out, staging, acc, inverse, row, heads, FIRST: gl.constexpr, GROUPED: gl.constexpr):
    """Write half of the result, from column FIRST on. The values pass through the shared memory of
    P, because a thread computes pairs of values but writes eight at once. ``row``: the first row;
    with GROUPED, a ``GroupedRows``."""
    scale = gl.convert_layout(inverse, ACC_ROW)
    left, right = _halves((acc * scale[:, None]).to(out.dtype.element_ty))
    first, second = _halves(left)
    third, fourth = _halves(right)
    _store_columns(out, staging, first, row, heads, FIRST, GROUPED)
    _store_columns(out, staging, second, row, heads, FIRST + _STORED_COLUMNS, GROUPED)
    _store_columns(out, staging, third, row, heads, FIRST + 2 * _STORED_COLUMNS, GROUPED)
    _store_columns(out, staging, fourth, row, heads, FIRST + 3 * _STORED_COLUMNS, GROUPED)
