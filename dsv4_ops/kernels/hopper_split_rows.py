"""Where the keys of a split of sparse attention are: ``split_rows.py``, for half a block and the
threads that load it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_ops.kernels.hopper_rows import HALF, KEYS, ROW_LAYOUT


@gluon.jit
def count_blocks(unit, stop, swa_units, UNIT: gl.constexpr):
    """Blocks of a split, and those of them in the window. None goes over the window's end."""
    UNITS: gl.constexpr = KEYS // UNIT
    in_window = gl.maximum(gl.minimum(stop, swa_units) - unit, 0)
    behind = gl.maximum(stop - gl.maximum(unit, swa_units), 0)
    in_window = (in_window + UNITS - 1) // UNITS
    return in_window + (behind + UNITS - 1) // UNITS, in_window


@gluon.jit
def find_rows(place, block, FIRST: gl.constexpr, SIZES: gl.constexpr):
    """The rows of the half of a block that begins with its key FIRST: their pages, their places in
    them, -1 if they do not exist, and how far behind the first row of a page its scales begin.
    Unsigned, a slot below 0 is past every page, and divisions are shifts."""
    ROW: gl.constexpr = SIZES[0]
    SWA_BLOCK_SIZE: gl.constexpr = SIZES[2]
    EXTRA_BLOCK_SIZE: gl.constexpr = SIZES[3]
    HAS_EXTRA: gl.constexpr = SIZES[4]
    PAGED: gl.constexpr = SIZES[5]
    UNIT: gl.constexpr = SIZES[6]
    unit, stop, swa_units, window_blocks = place[0]
    cache, page_stride, blocks, entry, step, length = place[1]
    extra = place[2]
    in_window = block < window_blocks
    behind = gl.maximum(unit, swa_units) + (block - window_blocks) * (KEYS // UNIT)
    first = gl.where(in_window, unit + block * (KEYS // UNIT), behind)
    before = gl.where(in_window, 0, swa_units)
    end = gl.where(in_window, gl.minimum(stop, swa_units), stop)
    column = (first - before) * UNIT + FIRST + gl.arange(0, HALF, ROW_LAYOUT)
    where = column
    if HAS_EXTRA:
        entry = gl.where(in_window, entry, extra[3])
        step = gl.where(in_window, step, extra[4])
        length = gl.where(in_window, length, extra[5])
        if PAGED:
            where = gl.where(in_window, column, column // EXTRA_BLOCK_SIZE)
    wanted = column < gl.minimum(length, (end - before) * UNIT)
    found = gl.load(entry + where.to(gl.int64) * step, mask=wanted, other=-1).to(gl.uint32)
    page, row = found // SWA_BLOCK_SIZE, found % SWA_BLOCK_SIZE
    block_size = gl.to_tensor(SWA_BLOCK_SIZE)
    if HAS_EXTRA:
        if PAGED:
            page = gl.where(in_window, page, found)
            row = gl.where(in_window, row, (column % EXTRA_BLOCK_SIZE).to(gl.uint32))
        else:
            page = gl.where(in_window, page, found // EXTRA_BLOCK_SIZE)
            row = gl.where(in_window, row, found % EXTRA_BLOCK_SIZE)
        cache = gl.where(in_window, cache, extra[0])
        page_stride = gl.where(in_window, page_stride, extra[1])
        blocks = gl.where(in_window, blocks, extra[2])
        block_size = gl.where(in_window, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE)
    exists = page < blocks
    page = gl.where(exists, page, 0).to(gl.int64)
    row = gl.where(exists, row.to(gl.int32), -1)
    return cache + page * page_stride, row, block_size * ROW
