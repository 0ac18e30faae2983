"""Where the keys of a token of a prefill are, in the window and behind: ``prefill_keys.py``, for
half a block and the threads that load it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_ops.kernels.hopper_rows import HALF, KEYS, ROW_LAYOUT


@gluon.jit
def _columns(place, block, FIRST: gl.constexpr):
    """Places of the keys of half a block of a split in the window or behind it, and which of the
    two."""
    window_blocks = place[0][0]
    block = block + place[0][3]
    in_window = block < window_blocks
    column = gl.where(in_window, block, block - window_blocks) * KEYS + FIRST
    return column + gl.arange(0, HALF, ROW_LAYOUT), in_window


@gluon.jit
def find_rows(place, block, FIRST: gl.constexpr, SIZES: gl.constexpr):
    """The selected rows of the half of a block that begins with its key FIRST, or where it is."""
    HAS_TOPK: gl.constexpr = SIZES[5]
    column, in_window = _columns(place, block, FIRST)
    if HAS_TOPK:
        _visible, extra_len, selected, step = place[3]
        wanted = (column < extra_len) & (in_window == 0)
        column = gl.load(selected + column.to(gl.int64) * step, mask=wanted, other=-1)
    return column


@gluon.jit
def place_rows(place, block, FIRST: gl.constexpr, found, SIZES: gl.constexpr):
    """The rows that ``find_rows`` found, as in ``hopper_split_rows.py``. Unsigned, a page below 0
    is past every page, and divisions are shifts."""
    ROW: gl.constexpr = SIZES[0]
    SWA_BLOCK_SIZE: gl.constexpr = SIZES[2]
    EXTRA_BLOCK_SIZE: gl.constexpr = SIZES[3]
    HAS_EXTRA: gl.constexpr = SIZES[4]
    HAS_TOPK: gl.constexpr = SIZES[5]
    _window_blocks, length, swa_len, first_block, stop = place[0]
    cache, page_stride, blocks, entry, step, columns = place[1]
    column, in_window = _columns(place, block, FIRST)
    spot = (length - swa_len + column).to(gl.uint32)
    wanted = in_window & (column < swa_len)
    page_column, row = spot // SWA_BLOCK_SIZE, spot % SWA_BLOCK_SIZE
    block_size = gl.to_tensor(SWA_BLOCK_SIZE)
    if HAS_EXTRA:
        extra = place[2]
        picked = found.to(gl.uint32)
        if HAS_TOPK:
            seen = picked < place[3][0].to(gl.uint32)
        else:
            seen = column < place[3][1]
        wanted = gl.where(in_window, wanted, seen)
        page_column = gl.where(in_window, page_column, picked // EXTRA_BLOCK_SIZE)
        row = gl.where(in_window, row, picked % EXTRA_BLOCK_SIZE)
        cache = gl.where(in_window, cache, extra[0])
        page_stride = gl.where(in_window, page_stride, extra[1])
        blocks = gl.where(in_window, blocks, extra[2])
        entry = gl.where(in_window, entry, extra[3])
        step = gl.where(in_window, step, extra[4])
        columns = gl.where(in_window, columns, extra[5])
        block_size = gl.where(in_window, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE)
    wanted = wanted & (page_column < columns.to(gl.uint32)) & (first_block + block < stop)
    page = gl.load(entry + page_column.to(gl.int64) * step, mask=wanted, other=-1).to(gl.uint32)
    exists = page < blocks.to(gl.uint32)
    page = gl.where(exists, page, 0).to(gl.int64)
    row = gl.where(exists, row.to(gl.int32), -1)
    return cache + page * page_stride, row, block_size * ROW
