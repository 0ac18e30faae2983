"""Where the keys of a split of sparse attention are: ``split_rows.py``, for half a block and the
threads that load it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_ops.kernels.hopper_rows import HALF, KEYS, ROW_LAYOUT


@gluon.jit
def count_blocks(first, stop, swa_tiles):
    """Blocks of a split, and those of them in the window. None goes over the window's end."""
    in_window = gl.maximum(gl.minimum(stop, swa_tiles) - first, 0)
    return in_window + gl.maximum(stop - gl.maximum(first, swa_tiles), 0), in_window


@gluon.jit
def _columns(place, block, FIRST: gl.constexpr):
    """Places in the list of the keys of half a block, whether the list is the window's, and how
    many of its keys are this split's."""
    first, stop, swa_tiles, window_blocks = place[0]
    in_window = block < window_blocks
    behind = gl.maximum(first, swa_tiles) + (block - window_blocks)
    number = gl.where(in_window, first + block, behind)
    before = gl.where(in_window, 0, swa_tiles)
    end = gl.where(in_window, gl.minimum(stop, swa_tiles), stop)
    column = (number - before) * KEYS + FIRST + gl.arange(0, HALF, ROW_LAYOUT)
    return column, in_window, (end - before) * KEYS


@gluon.jit
def find_rows(place, block, FIRST: gl.constexpr, SIZES: gl.constexpr):
    """What the lists say of the half of a block that begins with its key FIRST."""
    EXTRA_BLOCK_SIZE: gl.constexpr = SIZES[3]
    HAS_EXTRA: gl.constexpr = SIZES[4]
    PAGED: gl.constexpr = SIZES[5]
    column, in_window, end = _columns(place, block, FIRST)
    entry, step, length = place[1][3], place[1][4], place[1][5]
    spot = column
    if HAS_EXTRA:
        entry = gl.where(in_window, entry, place[2][3])
        step = gl.where(in_window, step, place[2][4])
        length = gl.where(in_window, length, place[2][5])
        if PAGED:
            spot = gl.where(in_window, column, column // EXTRA_BLOCK_SIZE)
    wanted = column < gl.minimum(length, end)
    return gl.load(entry + spot.to(gl.int64) * step, mask=wanted, other=-1)


@gluon.jit
def place_rows(place, block, FIRST: gl.constexpr, found, SIZES: gl.constexpr):
    """The rows that ``find_rows`` found: their pages, their places in them, -1 if they do not
    exist, and how far behind the first row of a page its scales begin. Unsigned, a slot below 0 is
    past every page, and divisions are shifts."""
    ROW: gl.constexpr = SIZES[0]
    SWA_BLOCK_SIZE: gl.constexpr = SIZES[2]
    EXTRA_BLOCK_SIZE: gl.constexpr = SIZES[3]
    HAS_EXTRA: gl.constexpr = SIZES[4]
    PAGED: gl.constexpr = SIZES[5]
    found = found.to(gl.uint32)
    cache, page_stride, blocks = place[1][0], place[1][1], place[1][2]
    page, row = found // SWA_BLOCK_SIZE, found % SWA_BLOCK_SIZE
    block_size = gl.to_tensor(SWA_BLOCK_SIZE)
    if HAS_EXTRA:
        column, in_window, _ = _columns(place, block, FIRST)
        if PAGED:
            page = gl.where(in_window, page, found)
            row = gl.where(in_window, row, (column % EXTRA_BLOCK_SIZE).to(gl.uint32))
        else:
            page = gl.where(in_window, page, found // EXTRA_BLOCK_SIZE)
            row = gl.where(in_window, row, found % EXTRA_BLOCK_SIZE)
        cache = gl.where(in_window, cache, place[2][0])
        page_stride = gl.where(in_window, page_stride, place[2][1])
        blocks = gl.where(in_window, blocks, place[2][2])
        block_size = gl.where(in_window, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE)
    exists = page < blocks
    page = gl.where(exists, page, 0).to(gl.int64)
    row = gl.where(exists, row.to(gl.int32), -1)
    return cache + page * page_stride, row, block_size * ROW
