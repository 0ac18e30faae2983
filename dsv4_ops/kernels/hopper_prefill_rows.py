"""Where the keys of a token of a prefill are, in the window and behind: ``prefill_keys.py``, for
half a block and the threads that load it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_ops.kernels.hopper_rows import HALF, KEYS, ROW_LAYOUT


@gluon.jit
def find_rows(place, block, FIRST: gl.constexpr, SIZES: gl.constexpr):
    """The rows of the half of a block that begins with its key FIRST, as in
    ``hopper_split_rows.py``. Unsigned, a page below 0 is past every page, and divisions are
    shifts."""
    ROW: gl.constexpr = SIZES[0]
    SWA_BLOCK_SIZE: gl.constexpr = SIZES[2]
    EXTRA_BLOCK_SIZE: gl.constexpr = SIZES[3]
    HAS_EXTRA: gl.constexpr = SIZES[4]
    HAS_TOPK: gl.constexpr = SIZES[5]
    window_blocks, length, swa_len = place[0]
    cache, page_stride, blocks, entry, step, columns = place[1]
    in_window = block < window_blocks
    column = gl.where(in_window, block, block - window_blocks) * KEYS + FIRST
    column = column + gl.arange(0, HALF, ROW_LAYOUT)
    spot = (length - swa_len + column).to(gl.uint32)
    wanted = column < swa_len
    page_column, row = spot // SWA_BLOCK_SIZE, spot % SWA_BLOCK_SIZE
    block_size = gl.to_tensor(SWA_BLOCK_SIZE)
    if HAS_EXTRA:
        extra = place[2]
        visible, extra_len, selected, selected_step = place[3]
        picked = column
        seen = column < extra_len
        if HAS_TOPK:
            listed = selected + column.to(gl.int64) * selected_step
            picked = gl.load(listed, mask=seen & (block >= window_blocks), other=-1)
        picked = picked.to(gl.uint32)
        if HAS_TOPK:
            seen = picked < visible.to(gl.uint32)
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
    wanted = wanted & (page_column < columns.to(gl.uint32))
    page = gl.load(entry + page_column.to(gl.int64) * step, mask=wanted, other=-1).to(gl.uint32)
    exists = page < blocks.to(gl.uint32)
    page = gl.where(exists, page, 0).to(gl.int64)
    row = gl.where(exists, row.to(gl.int32), -1)
    return cache + page * page_stride, row, block_size * ROW
