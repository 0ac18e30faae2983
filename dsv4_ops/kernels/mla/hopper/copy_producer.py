"""Rows of dense MLA on their way to shared memory: where they are, and copies of bf16 rows that no
thread waits for."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4_ops.kernels.common.triton_compat import async_load, reinterpret
from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import KEYS
from dsv4_ops.kernels.sparse_mla.hopper.mma import WIDTH
from dsv4_ops.kernels.sparse_mla.hopper.mma_paired import LEFT, RIGHT

ROPE = gl.constexpr(64)
"""RoPE dimensions of a row: as many as a block has keys."""

_ROW = gl.constexpr(576)
"""Values of a row."""

NEVER = gl.constexpr(2**31 - 1)
"""Position of a key that does not exist."""

_BF16_EXPONENT, _FLOAT16_EXPONENT = gl.constexpr(0x7F80), gl.constexpr(0x7C00)
"""Bits of a value that are all set in NaN and infinity alone."""

COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Eight threads copy a line of a row, 16 bytes each."""

COPIED_ROW = gl.constexpr(gl.SliceLayout(1, COPIED.value))

WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
"""Four threads have 64 bytes of a row, as words."""

WORDS_ROW = gl.constexpr(gl.SliceLayout(1, WORDS.value))

STORED = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
"""The rows of a tile as words: the same bytes as its bf16 values."""

_LINE_BYTES = gl.constexpr(128)
"""Bytes of a row that are cleared at a time."""


@gluon.jit
def find(pages, block, ROWS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Entries of the block table for the keys of a block of this split; -1 behind its end."""
    entries, column_stride, first, stop = pages
    position = first + block * KEYS + gl.arange(0, KEYS, ROWS)
    column = (position // BLOCK_SIZE).to(gl.int64)
    return gl.load(entries + column * column_stride, mask=position < stop, other=-1)


@gluon.jit
def locate(
    cache, pages, block, found, ROWS: gl.constexpr, ROW: gl.constexpr, BLOCK_SIZE: gl.constexpr
):
    """Where the rows of a block begin, and their positions."""
    kv_cache, page_stride, num_blocks = cache
    position = pages[2] + block * KEYS + gl.arange(0, KEYS, ROWS)
    exists = (found >= 0) & (found < num_blocks)
    page = gl.where(exists, found, 0).to(gl.int64)
    start = kv_cache + page * page_stride + (position % BLOCK_SIZE) * ROW
    return start, gl.where(exists, position, NEVER)


@gluon.jit
def _copy_tile(tile, rows, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Values of the rows from dimension FIRST on; zeros of rows that do not exist."""
    start, position = rows
    dim = FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, COPIED))
    there = position < NEVER
    async_load(tile, start[:, None] + dim[None, :], mask=there[:, None])


@gluon.jit
def clear_tile(tile, lost, apart, GROUP: gl.constexpr):
    """Where some tokens do not see all rows (``apart``), P of a row is 0, and a product with what
    is no number would be NaN: zeros for that in a tile of values, and which rows have had such so
    far. ``spoil_rope`` says it to the tokens that see the row."""
    EXPONENT: gl.constexpr = _BF16_EXPONENT if tile.dtype == gl.bfloat16 else _FLOAT16_EXPONENT
    if GROUP > 1:
        if apart:
            words = reinterpret(tile, gl.int32, [KEYS, WIDTH // 2], STORED)
            for part in gl.static_range(2 * WIDTH // _LINE_BYTES):
                some = words.slice(part * (_LINE_BYTES // 4), _LINE_BYTES // 4, dim=1)
                both = some.load(WORDS)
                low = (both & EXPONENT) == EXPONENT
                high = ((both >> 16) & EXPONENT) == EXPONENT
                some.store(gl.where(low, 0, both & 0xFFFF) | gl.where(high, 0, both & -0x10000))
                lost = gl.maximum(lost, gl.max(gl.where(low | high, 1, 0), axis=1))
            fence_async_shared()
    return lost


@gluon.jit
def spoil_rope(tile, lost, apart, GROUP: gl.constexpr):
    """NaN for the RoPE dimensions, which are no values, of rows that are ``lost``."""
    if GROUP > 1:
        if apart:
            words = reinterpret(tile, gl.int32, [KEYS, ROPE // 2], STORED)
            words.store(gl.where((lost > 0)[:, None], -1, words.load(WORDS)))
            fence_async_shared()


@gluon.jit
def _fill(tile, rows, lost, apart, FIRST: gl.constexpr, GROUP: gl.constexpr):
    _copy_tile(tile, rows, FIRST, WIDTH)
    if GROUP > 1:
        if apart:
            await_copies()
    return clear_tile(tile, lost, apart, GROUP)


@gluon.jit
def _fill_rope(tile, rows, lost, apart, GROUP: gl.constexpr):
    _copy_tile(tile, rows, 2 * WIDTH, ROPE)
    if GROUP > 1:
        if apart:
            await_copies()
    spoil_rope(tile, lost, apart, GROUP)


@gluon.jit
def await_copies():
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def arrives(full):
    async_copy.mbarrier_arrive(full, increment_count=False)
    mbarrier.arrive(full)


@gluon.jit
def copy_pairs(cache, pages, pairs, alike, shared, BLOCK_SIZE: gl.constexpr, GROUP: gl.constexpr):
    """The partition that fills the buffers, in the order in which they are used; all tokens of the
    group see the first ``alike`` pairs whole. Who has used the half of a block has used the block's
    weights, whose memory its RoPE tile goes to."""
    keys, existing, weights = shared[1], shared[2], shared[3]
    full, used = shared[5][0], shared[5][1]
    next_even = find(pages, 0, COPIED_ROW, BLOCK_SIZE)
    next_odd = find(pages, 1, COPIED_ROW, BLOCK_SIZE)
    none = gl.full([KEYS], 0, gl.int32, WORDS_ROW)
    pair = pairs * 0
    while pair < pairs:
        phase = (pair & 1) ^ 1
        apart = pair >= alike
        even = locate(cache, pages, 2 * pair, next_even, COPIED_ROW, _ROW, BLOCK_SIZE)
        odd = locate(cache, pages, 2 * pair + 1, next_odd, COPIED_ROW, _ROW, BLOCK_SIZE)
        next_even = find(pages, 2 * pair + 2, COPIED_ROW, BLOCK_SIZE)
        next_odd = find(pages, 2 * pair + 3, COPIED_ROW, BLOCK_SIZE)
        mbarrier.wait(used[LEFT][0], phase)
        existing.index(0).store(even[1])
        lost_even = _fill(keys[LEFT].index(0), even, none, apart, 0, GROUP)
        arrives(full[LEFT][0])
        mbarrier.wait(used[RIGHT][1], phase)
        existing.index(1).store(odd[1])
        lost_odd = _fill(keys[RIGHT].index(1), odd, none, apart, WIDTH, GROUP)
        arrives(full[RIGHT][1])
        mbarrier.wait(used[RIGHT][0], phase)
        lost_even = _fill(keys[RIGHT].index(0), even, lost_even, apart, WIDTH, GROUP)
        _fill_rope(weights.index(0), even, lost_even, apart, GROUP)
        arrives(full[RIGHT][0])
        mbarrier.wait(used[LEFT][1], phase)
        lost_odd = _fill(keys[LEFT].index(1), odd, lost_odd, apart, 0, GROUP)
        _fill_rope(weights.index(1), odd, lost_odd, apart, GROUP)
        arrives(full[LEFT][1])
        pair += 1
