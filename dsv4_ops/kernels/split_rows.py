"""The keys of a split of sparse attention: where they are, and their values."""

import triton
import triton.language as tl

from dsv4_ops.kernels.attend import load_keys  # by name: Inductor copies kernels, not modules


@triton.jit
def rows_of(
    unit,
    swa_units,
    stop,
    swa_cache,
    swa_page_stride,
    swa_blocks,
    swa_slots,
    swa_step,
    swa_len,
    extra_cache,
    extra_page_stride,
    extra_blocks,
    extra_slots,
    extra_step,
    extra_len,
    SWA_BLOCK_SIZE: tl.constexpr,
    EXTRA_BLOCK_SIZE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    PAGED: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Cache and stride of its pages, page and row of the keys of a block that begins with ``unit``,
    whether they exist, and the size of the pages. A block ends where its split does, or the window.
    Unsigned, a slot below 0 is past every page, and divisions are shifts."""
    in_window = unit < swa_units
    before = tl.where(in_window, 0, swa_units)
    column = (unit - before) * UNIT + tl.arange(0, KEYS)
    length, entry, step, place = swa_len, swa_slots, swa_step, column
    if HAS_EXTRA:
        length = tl.where(in_window, swa_len, extra_len)
        entry = tl.where(in_window, swa_slots, extra_slots)
        step = tl.where(in_window, swa_step, extra_step)
        if PAGED:
            place = tl.where(in_window, column, column // EXTRA_BLOCK_SIZE)
    if UNIT < KEYS:
        end = tl.where(in_window, tl.minimum(stop, swa_units), stop)
        length = tl.minimum(length, (end - before) * UNIT)
    wanted = column < length
    found = tl.load(entry + place.to(tl.int64) * step, mask=wanted, other=-1).to(tl.uint32)
    page, row = found // SWA_BLOCK_SIZE, found % SWA_BLOCK_SIZE
    cache, page_stride, blocks, block_size = swa_cache, swa_page_stride, swa_blocks, SWA_BLOCK_SIZE
    if HAS_EXTRA:
        if PAGED:
            page = tl.where(in_window, page, found)
            row = tl.where(in_window, row, (column % EXTRA_BLOCK_SIZE).to(tl.uint32))
        else:
            page = tl.where(in_window, page, found // EXTRA_BLOCK_SIZE)
            row = tl.where(in_window, row, found % EXTRA_BLOCK_SIZE)
        cache = tl.where(in_window, swa_cache, extra_cache)
        page_stride = tl.where(in_window, swa_page_stride, extra_page_stride)
        blocks = tl.where(in_window, swa_blocks, extra_blocks)
        block_size = tl.where(in_window, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE)
    exists = page < blocks
    page = tl.where(exists, page, 0).to(tl.int64)
    return cache, page_stride, page, tl.where(exists, row, 0), exists, block_size


@triton.jit
def load_block(
    unit,
    swa_units,
    stop,
    swa_cache,
    swa_page_stride,
    swa_blocks,
    swa_slots,
    swa_step,
    swa_len,
    extra_cache,
    extra_page_stride,
    extra_blocks,
    extra_slots,
    extra_step,
    extra_len,
    SWA_BLOCK_SIZE: tl.constexpr,
    EXTRA_BLOCK_SIZE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    PAGED: tl.constexpr,
    ROW: tl.constexpr,
    CODE_DIM: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """The four tiles of the keys of a block, and whether each exists."""
    cache, page_stride, page, row, exists, block_size = rows_of(
        unit,
        swa_units,
        stop,
        swa_cache,
        swa_page_stride,
        swa_blocks,
        swa_slots,
        swa_step,
        swa_len,
        extra_cache,
        extra_page_stride,
        extra_blocks,
        extra_slots,
        extra_step,
        extra_len,
        SWA_BLOCK_SIZE,
        EXTRA_BLOCK_SIZE,
        HAS_EXTRA,
        PAGED,
        KEYS,
        UNIT,
    )
    k0, k1, k2, k3 = load_keys(
        cache,
        page_stride,
        page,
        row,
        exists,
        block_size,
        ROW,
        CODE_DIM,
        QUANT_BLOCK,
        SCALE_BYTES,
        EMULATE,
    )
    return k0, k1, k2, k3, exists
