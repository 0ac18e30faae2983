"""Producer of dense MLA rows. It locates rows, and copies bf16 rows to shared memory
asynchronously."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4_ops.kernels.common.hopper.mma import KEYS, WIDTH
from dsv4_ops.kernels.common.hopper.mma_paired import EVEN, LEFT, ODD, RIGHT
from dsv4_ops.kernels.common.triton_compat import Scalar, aggregate, async_load, reinterpret

ROPE = gl.constexpr(64)
"""RoPE columns of a row: as many as a block has keys, so that a RoPE tile fits into a P tile."""

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
"""Layout of a tile's rows as words, which are the same bytes as the 16-bit values."""

_CHUNK_BYTES = gl.constexpr(128)
"""Bytes of a row that are checked at a time."""


@aggregate
class Pages:
    """Keys of a split, at positions ``first`` to ``stop``. ``table_row`` and ``column_stride`` are
    the address and the stride of the request's row of the block table or, if ``slots`` is true, of
    the token's list of slots."""

    cache: Scalar
    page_stride: Scalar
    num_blocks: Scalar
    block_size: gl.constexpr
    row_size: gl.constexpr
    slots: gl.constexpr
    table_row: Scalar
    column_stride: Scalar
    first: Scalar
    stop: Scalar


@aggregate
class Rows:
    """Address and position of each row of a block; NO_POSITION if the row does not exist."""

    start: gl.tensor
    position: gl.tensor


@gluon.jit
def load_entries(pages, block, LAYOUT: gl.constexpr):
    """Load the block-table entries of a block of keys, or the slots of the keys; -1 past the end of
    the split."""
    COLUMN_KEYS: gl.constexpr = 1 if pages.slots else pages.block_size
    position = pages.first + block * KEYS + gl.arange(0, KEYS, LAYOUT)
    column = (position // COLUMN_KEYS).to(gl.int64)
    mask = position < pages.stop
    return gl.load(pages.table_row + column * pages.column_stride, mask=mask, other=-1)


@gluon.jit
def locate_rows(pages, block, entries, LAYOUT: gl.constexpr):
    """Return the ``Rows`` of a block."""
    position = pages.first + block * KEYS + gl.arange(0, KEYS, LAYOUT)
    page, row, valid = entries, position % pages.block_size, entries >= 0
    if pages.slots:
        page, row = entries // pages.block_size, entries % pages.block_size
    valid = valid & (page < pages.num_blocks)
    page_start = pages.cache + gl.where(valid, page, 0).to(gl.int64) * pages.page_stride
    start = page_start + row * pages.row_size
    return Rows(start, gl.where(valid, position, NO_POSITION))


@gluon.jit
def _copy_tile(tile, rows, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Copy COUNT columns of the rows, from FIRST on; rows that do not exist become zeros."""
    dim = FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, COPY_LAYOUT))
    valid = rows.position < NO_POSITION
    async_load(tile, rows.start[:, None] + dim[None, :], mask=valid[:, None])


@gluon.jit
def clear_nonfinite(tile, bad_rows, is_masked, GROUP: gl.constexpr):
    """Replace NaN and infinity in a tile of values by 0 if some tokens do not see all rows
    (``is_masked``). P is 0 where a token does not see a row, and 0 times NaN or infinity would be
    NaN. Return ``bad_rows``: which rows had NaN or infinity in this tile or in an earlier one.
    ``poison_rope`` then makes the results of tokens that see a bad row NaN."""
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
    """Set the RoPE columns of ``bad_rows`` to NaN, which makes the logits of these rows NaN."""
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
def copy_pairs(pages, pairs, full_pairs, smem, GROUP: gl.constexpr):
    """Run as one partition: fill the buffers in the order of their use. All tokens of the group see
    all rows of the first ``full_pairs`` pairs. The RoPE tile of a block is loaded into the block's
    P tile. A P tile is free when the KV half that P multiplies last is free."""
    kv_smem, kv_valid_smem, p_smem = smem.kv, smem.kv_valid, smem.p
    kv_ready, kv_free = smem.barriers.kv_ready, smem.barriers.kv_free
    next_even = load_entries(pages, 0, COPY_ROW)
    next_odd = load_entries(pages, 1, COPY_ROW)
    none_bad = gl.full([KEYS], 0, gl.int32, WORD_ROW)
    pair = pairs * 0
    while pair < pairs:
        phase = (pair & 1) ^ 1
        is_masked = pair >= full_pairs
        even = locate_rows(pages, 2 * pair, next_even, COPY_ROW)
        odd = locate_rows(pages, 2 * pair + 1, next_odd, COPY_ROW)
        next_even = load_entries(pages, 2 * pair + 2, COPY_ROW)
        next_odd = load_entries(pages, 2 * pair + 3, COPY_ROW)
        mbarrier.wait(kv_free[LEFT][EVEN], phase)
        kv_valid_smem.index(EVEN).store(even.position)
        bad_even = _fill(kv_smem[LEFT].index(EVEN), even, none_bad, is_masked, 0, GROUP)
        arrive_after_copies(kv_ready[LEFT][EVEN])
        mbarrier.wait(kv_free[RIGHT][ODD], phase)
        kv_valid_smem.index(ODD).store(odd.position)
        bad_odd = _fill(kv_smem[RIGHT].index(ODD), odd, none_bad, is_masked, WIDTH, GROUP)
        arrive_after_copies(kv_ready[RIGHT][ODD])
        mbarrier.wait(kv_free[RIGHT][EVEN], phase)
        bad_even = _fill(kv_smem[RIGHT].index(EVEN), even, bad_even, is_masked, WIDTH, GROUP)
        _fill_rope(p_smem.index(EVEN), even, bad_even, is_masked, GROUP)
        arrive_after_copies(kv_ready[RIGHT][EVEN])
        mbarrier.wait(kv_free[LEFT][ODD], phase)
        bad_odd = _fill(kv_smem[LEFT].index(ODD), odd, bad_odd, is_masked, 0, GROUP)
        _fill_rope(p_smem.index(ODD), odd, bad_odd, is_masked, GROUP)
        arrive_after_copies(kv_ready[LEFT][ODD])
        pair += 1
