"""Producer of dense MLA rows: it locates them, and copies bf16 rows to shared memory
asynchronously."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4_ops.kernels.common.triton_compat import async_load, reinterpret
from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import KEYS
from dsv4_ops.kernels.sparse_mla.hopper.mma import WIDTH
from dsv4_ops.kernels.sparse_mla.hopper.mma_paired import LEFT, RIGHT

ROPE = gl.constexpr(64)
"""RoPE columns of a row: as many as a block has keys."""

_ROW = gl.constexpr(576)
"""Values of a row."""

NO_POSITION = gl.constexpr(2**31 - 1)
"""Position of a key that does not exist."""

_BF16_EXPONENT, _FLOAT16_EXPONENT = gl.constexpr(0x7F80), gl.constexpr(0x7C00)
"""Exponent bits: only NaN and infinity have all of them set."""

COPY_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Eight threads copy one line of a row, 16 bytes each."""

COPY_ROW = gl.constexpr(gl.SliceLayout(1, COPY_LAYOUT.value))

WORD_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
"""Four threads hold 64 bytes of a row as words."""

WORD_ROW = gl.constexpr(gl.SliceLayout(1, WORD_LAYOUT.value))

SMEM_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
"""The rows of a tile as words: the same bytes as its bf16 values."""

_CHUNK_BYTES = gl.constexpr(128)
"""Bytes of a row that are checked at a time."""


@gluon.jit
def load_entries(pages, block, ROWS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Load the block-table entries of a block of this split's keys; -1 past its end."""
    table_row, column_stride, first, stop = pages
    position = first + block * KEYS + gl.arange(0, KEYS, ROWS)
    column = (position // BLOCK_SIZE).to(gl.int64)
    return gl.load(table_row + column * column_stride, mask=position < stop, other=-1)


@gluon.jit
def locate_rows(
    cache, pages, block, entries, ROWS: gl.constexpr, ROW: gl.constexpr, BLOCK_SIZE: gl.constexpr
):
    """Return the addresses and the positions of a block's rows."""
    kv_cache, page_stride, num_blocks = cache
    position = pages[2] + block * KEYS + gl.arange(0, KEYS, ROWS)
    valid = (entries >= 0) & (entries < num_blocks)
    page = gl.where(valid, entries, 0).to(gl.int64)
    start = kv_cache + page * page_stride + (position % BLOCK_SIZE) * ROW
    return start, gl.where(valid, position, NO_POSITION)


@gluon.jit
def _copy_tile(tile, rows, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Copy COUNT columns of the rows, from FIRST on; rows that do not exist become zeros."""
    start, position = rows
    dim = FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, COPY_LAYOUT))
    valid = position < NO_POSITION
    async_load(tile, start[:, None] + dim[None, :], mask=valid[:, None])


@gluon.jit
def clear_nonfinite(tile, bad_rows, is_masked, GROUP: gl.constexpr):
    """Clear NaN and infinity in a tile of values if some tokens do not see all rows
    (``is_masked``): P is 0 there, and its product with them would be NaN. Return which rows have
    had such values so far; ``poison_rope`` tells the tokens that do see the row."""
    EXPONENT: gl.constexpr = _BF16_EXPONENT if tile.dtype == gl.bfloat16 else _FLOAT16_EXPONENT
    if GROUP > 1:
        if is_masked:
            words = reinterpret(tile, gl.int32, [KEYS, WIDTH // 2], SMEM_WORDS)
            for number in gl.static_range(2 * WIDTH // _CHUNK_BYTES):
                chunk = words.slice(number * (_CHUNK_BYTES // 4), _CHUNK_BYTES // 4, dim=1)
                pair_bits = chunk.load(WORD_LAYOUT)
                low = (pair_bits & EXPONENT) == EXPONENT
                high = ((pair_bits >> 16) & EXPONENT) == EXPONENT
                chunk.store(
                    gl.where(low, 0, pair_bits & 0xFFFF) | gl.where(high, 0, pair_bits & -0x10000)
                )
                bad_rows = gl.maximum(bad_rows, gl.max(gl.where(low | high, 1, 0), axis=1))
            fence_async_shared()
    return bad_rows


@gluon.jit
def poison_rope(tile, bad_rows, is_masked, GROUP: gl.constexpr):
    """Set the RoPE columns, which are no values, of ``bad_rows`` to NaN."""
    if GROUP > 1:
        if is_masked:
            words = reinterpret(tile, gl.int32, [KEYS, ROPE // 2], SMEM_WORDS)
            words.store(gl.where((bad_rows > 0)[:, None], -1, words.load(WORD_LAYOUT)))
            fence_async_shared()


@gluon.jit
def _fill(tile, rows, bad_rows, is_masked, FIRST: gl.constexpr, GROUP: gl.constexpr):
    _copy_tile(tile, rows, FIRST, WIDTH)
    if GROUP > 1:
        if is_masked:
            wait_for_copies()
    return clear_nonfinite(tile, bad_rows, is_masked, GROUP)


@gluon.jit
def _fill_rope(tile, rows, bad_rows, is_masked, GROUP: gl.constexpr):
    _copy_tile(tile, rows, 2 * WIDTH, ROPE)
    if GROUP > 1:
        if is_masked:
            wait_for_copies()
    poison_rope(tile, bad_rows, is_masked, GROUP)


@gluon.jit
def wait_for_copies():
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def arrive_after_copies(barrier):
    async_copy.mbarrier_arrive(barrier, increment_count=False)
    mbarrier.arrive(barrier)


@gluon.jit
def copy_pairs(
    cache, pages, pairs, full_pairs, smem, BLOCK_SIZE: gl.constexpr, GROUP: gl.constexpr
):
    """Fill the buffers in the order of their use, as one partition; all tokens of the group see the
    first ``full_pairs`` pairs whole. The RoPE tile of a block lies in ``p_smem``: once its KV half
    is free, so is its P."""
    kv_smem, kv_valid_smem, p_smem = smem[1], smem[2], smem[3]
    kv_ready, kv_free = smem[5][0], smem[5][1]
    next_even = load_entries(pages, 0, COPY_ROW, BLOCK_SIZE)
    next_odd = load_entries(pages, 1, COPY_ROW, BLOCK_SIZE)
    none_bad = gl.full([KEYS], 0, gl.int32, WORD_ROW)
    pair = pairs * 0
    while pair < pairs:
        phase = (pair & 1) ^ 1
        is_masked = pair >= full_pairs
        even = locate_rows(cache, pages, 2 * pair, next_even, COPY_ROW, _ROW, BLOCK_SIZE)
        odd = locate_rows(cache, pages, 2 * pair + 1, next_odd, COPY_ROW, _ROW, BLOCK_SIZE)
        next_even = load_entries(pages, 2 * pair + 2, COPY_ROW, BLOCK_SIZE)
        next_odd = load_entries(pages, 2 * pair + 3, COPY_ROW, BLOCK_SIZE)
        mbarrier.wait(kv_free[LEFT][0], phase)
        kv_valid_smem.index(0).store(even[1])
        bad_even = _fill(kv_smem[LEFT].index(0), even, none_bad, is_masked, 0, GROUP)
        arrive_after_copies(kv_ready[LEFT][0])
        mbarrier.wait(kv_free[RIGHT][1], phase)
        kv_valid_smem.index(1).store(odd[1])
        bad_odd = _fill(kv_smem[RIGHT].index(1), odd, none_bad, is_masked, WIDTH, GROUP)
        arrive_after_copies(kv_ready[RIGHT][1])
        mbarrier.wait(kv_free[RIGHT][0], phase)
        bad_even = _fill(kv_smem[RIGHT].index(0), even, bad_even, is_masked, WIDTH, GROUP)
        _fill_rope(p_smem.index(0), even, bad_even, is_masked, GROUP)
        arrive_after_copies(kv_ready[RIGHT][0])
        mbarrier.wait(kv_free[LEFT][1], phase)
        bad_odd = _fill(kv_smem[LEFT].index(1), odd, bad_odd, is_masked, 0, GROUP)
        _fill_rope(p_smem.index(1), odd, bad_odd, is_masked, GROUP)
        arrive_after_copies(kv_ready[LEFT][1])
        pair += 1
