"""Producer of dense MLA rows in FP8. It loads words of codes, and stores float16 values, or bf16
values for rows with scales.

The producer loads half of the latents of a block at a time. A thread then holds 64 codes of each of
two rows, and 16 codes of their RoPE columns. The next half is loaded while the current half is
stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4_ops.kernels.common.hopper.mma import KEYS, WIDTH
from dsv4_ops.kernels.common.hopper.mma_paired import EVEN, LEFT, ODD, RIGHT
from dsv4_ops.kernels.common.triton_compat import Scalar, aggregate, async_load, reinterpret
from dsv4_ops.kernels.mla.hopper.copy_producer import (
    NO_POSITION,
    ROPE,
    SMEM_WORDS,
    WORD_LAYOUT,
    WORD_ROW,
    Rows,
    arrive_after_copies,
    clear_nonfinite,
    load_entries,
    locate_rows,
    poison_rope,
    wait_for_copies,
)

CODES, SCALED = gl.constexpr(1), gl.constexpr(2)
"""Formats of rows: codes alone, or codes followed by scales and RoPE values."""

_LINE = gl.constexpr(128)
"""Bytes of a line of the L2."""

_LINE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0]))
_LINE_ROW = gl.constexpr(gl.SliceLayout(1, _LINE_LAYOUT.value))

_GROUP = gl.constexpr(32)
"""Number of words of codes that share a scale."""


@aggregate
class HalfRows:
    """Half of the latents of a block: the codes as words, and the scales of the two groups of each
    row. If rows have no scales, the scales are None."""

    codes: gl.tensor
    left_scale: Scalar
    right_scale: Scalar


@gluon.jit
def codes_to_f16(words):
    """Return the four e4m3 values of each word, exactly, as two words of two float16 values. The
    conversion takes one instruction for two values. A conversion to bf16 takes six instructions,
    which would bound the kernel."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b; mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;
        }""",
        "=r,=r,r",
        [words],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def scale_codes(words, scale):
    """Return the four e4m3 values of each word times ``scale``, rounded once, as two words of two
    bf16 values."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b, c, d; .reg .b32 x, y; .reg .f32 e, f, g, h;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;
        mov.b32 {a, b}, x; mov.b32 {c, d}, y;
        cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, c; cvt.f32.f16 h, d;
        mul.rn.f32 e, e, $3; mul.rn.f32 f, f, $3; mul.rn.f32 g, g, $3; mul.rn.f32 h, h, $3;
        cvt.rn.bf16x2.f32 $0, f, e; cvt.rn.bf16x2.f32 $1, h, g;
        }""",
        "=r,=r,r,f",
        [words, scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def prefetch_l2(address, size):
    """Prefetch ``size`` bytes at ``address`` into the L2. Address and size are multiples of 16.
    Four threads hold the same address and size; only the first of them issues the prefetch."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .b32 lane;
        mov.u32 lane, %laneid; and.b32 lane, lane, 3;
        setp.eq.u32 p, lane, 0; setp.ne.and.u32 p, $2, 0, p;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [address, size],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch_line(address, valid):
    """Prefetch the line of each address into the L2."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [address, valid],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _prefetch(pages, block, entries):
    """Prefetch the pages that begin in a block of keys. If a page has more rows than a block,
    prefetch only the rows of the block, or nothing if a page may end within a block. With
    ``slots``, prefetch rows by lines, because a warp issues bulk prefetches one at a time, but
    prefetches many lines at once."""
    ROWS: gl.constexpr = pages.block_size if pages.block_size < KEYS else KEYS
    if pages.slots:
        rows = locate_rows(pages, block, entries, WORD_ROW)
        offset = gl.arange(0, 1024 // _LINE, gl.SliceLayout(0, _LINE_LAYOUT)) * _LINE
        start = gl.convert_layout(rows.start.to(gl.int64, bitcast=True), _LINE_ROW)
        exists = gl.convert_layout(rows.position, _LINE_ROW) < NO_POSITION
        mask = exists[:, None] & (offset < pages.row_size)[None, :]
        prefetch_line(start[:, None] + offset[None, :], mask.to(gl.int32))
    elif pages.block_size % ROWS == 0:
        rows = locate_rows(pages, block, entries, WORD_ROW)
        is_start = (rows.position < NO_POSITION) & (rows.position % ROWS == 0)
        size = gl.where(is_start, ROWS * pages.row_size, 0)
        prefetch_l2(rows.start.to(gl.int64, bitcast=True), size)


@gluon.jit
def _load_words(rows, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Load COUNT words of the rows from byte FIRST on; rows that do not exist are zeros."""
    words = (rows.start + FIRST).to(gl.pointer_type(gl.int32), bitcast=True)
    word = gl.arange(0, COUNT, gl.SliceLayout(0, WORD_LAYOUT))
    valid = (rows.position < NO_POSITION)[:, None]
    return gl.load(words[:, None] + word[None, :], mask=valid, other=0)


@gluon.jit
def _load_half(rows, HALF: gl.constexpr, FORMAT: gl.constexpr):
    """Load the codes of half of the latents, and their scales if rows have scales."""
    codes = _load_words(rows, HALF * WIDTH, WIDTH // 4)
    if FORMAT == SCALED:
        scales = (rows.start + 2 * WIDTH).to(gl.pointer_type(gl.float32), bitcast=True) + 2 * HALF
        valid = rows.position < NO_POSITION
        left = gl.load(scales, mask=valid, other=0.0)
        right = gl.load(scales + 1, mask=valid, other=0.0)
        half = HalfRows(codes, left, right)
    else:
        half = HalfRows(codes, None, None)
    return half


@gluon.jit
def _load_next_half(rows, HALF: gl.constexpr, loaded, zero, FORMAT: gl.constexpr):
    """Load half of the latents; if rows have scales, only after the previous half, ``loaded``, has
    arrived. The hardware has one counter for all loads, so a wait for earlier loads would also wait
    for later loads. ``zero`` is 0, but the compiler does not know that."""
    if FORMAT == SCALED:
        nothing = loaded.right_scale.to(gl.int32, bitcast=True) & zero
        rows = Rows(rows.start + nothing * 16, rows.position)
    return _load_half(rows, HALF, FORMAT)


@gluon.jit
def _load_rope(rows, FORMAT: gl.constexpr):
    """Load the codes of the RoPE columns. Rows with scales have RoPE values instead of codes;
    ``_store_rope`` copies the values when the tile is free."""
    if FORMAT == SCALED:
        rope = rows
    else:
        rope = _load_words(rows, 2 * WIDTH, ROPE // 4)
    return rope


@gluon.jit
def _halves(words):
    COLUMNS: gl.constexpr = words.shape[1]
    left, right = codes_to_f16(words)
    return gl.reshape(gl.join(left, right), [KEYS, 2 * COLUMNS])


@gluon.jit
def _values(half, FORMAT: gl.constexpr):
    """Dequantise half of the latents of a block into words of two values."""
    if FORMAT == SCALED:
        word = gl.arange(0, WIDTH // 4, gl.SliceLayout(0, WORD_LAYOUT))
        scale = gl.where(
            (word < _GROUP)[None, :], half.left_scale[:, None], half.right_scale[:, None]
        )
        left, right = scale_codes(half.codes, scale)
        words = gl.reshape(gl.join(left, right), [KEYS, WIDTH // 2])
    else:
        words = _halves(half.codes)
    return words


@gluon.jit
def _store(tile, words):
    COLUMNS: gl.constexpr = words.shape[1]
    reinterpret(tile, gl.int32, [KEYS, COLUMNS], SMEM_WORDS).store(words)


@gluon.jit
def _store_half(tile, half, bad_rows, is_masked, FORMAT: gl.constexpr, GROUP: gl.constexpr):
    """Dequantise and store half of the latents of a block."""
    _store(tile, _values(half, FORMAT))
    return clear_nonfinite(tile, bad_rows, is_masked, GROUP)


@gluon.jit
def _store_rope(tile, rope, bad_rows, is_masked, FORMAT: gl.constexpr, GROUP: gl.constexpr):
    """Store the RoPE columns. ``rope``: the result of ``_load_rope``."""
    if FORMAT == SCALED:
        words = (rope.start + (2 * WIDTH + 16)).to(gl.pointer_type(gl.int32), bitcast=True)
        word = gl.arange(0, ROPE // 2, gl.SliceLayout(0, WORD_LAYOUT))
        smem_words = reinterpret(tile, gl.int32, [KEYS, ROPE // 2], SMEM_WORDS)
        valid = (rope.position < NO_POSITION)[:, None]
        async_load(smem_words, words[:, None] + word[None, :], mask=valid)
        if GROUP > 1:
            if is_masked:
                wait_for_copies()
    else:
        _store(tile, _halves(rope))
    poison_rope(tile, bad_rows, is_masked, GROUP)


@gluon.jit
def dequantise_pairs(pages, pairs, full_pairs, smem, FORMAT: gl.constexpr, GROUP: gl.constexpr):
    """Fill the buffers as ``copy_pairs`` does, from FP8 rows."""
    kv_smem, kv_valid_smem, p_smem = smem.kv, smem.kv_valid, smem.p
    kv_ready, kv_free = smem.barriers.kv_ready, smem.barriers.kv_free
    even = locate_rows(pages, 0, load_entries(pages, 0, WORD_ROW), WORD_ROW)
    next_odd = load_entries(pages, 1, WORD_ROW)
    next_even = load_entries(pages, 2, WORD_ROW)
    none_bad = gl.full([KEYS], 0, gl.int32, WORD_ROW)
    even_codes = _load_half(even, LEFT, FORMAT)
    pair = pairs * 0
    while pair < pairs:
        zero = pair >> 28
        phase = (pair & 1) ^ 1
        is_masked = pair >= full_pairs
        odd = locate_rows(pages, 2 * pair + 1, next_odd, WORD_ROW)
        next_odd = load_entries(pages, 2 * pair + 3, WORD_ROW)
        odd_codes = _load_next_half(odd, RIGHT, even_codes, zero, FORMAT)
        mbarrier.wait(kv_free[LEFT][EVEN], phase)
        kv_valid_smem.index(EVEN).store(even.position)
        bad_even = _store_half(
            kv_smem[LEFT].index(EVEN), even_codes, none_bad, is_masked, FORMAT, GROUP
        )
        arrive_after_copies(kv_ready[LEFT][EVEN])
        even_codes = _load_next_half(even, RIGHT, odd_codes, zero, FORMAT)
        rope = _load_rope(even, FORMAT)
        mbarrier.wait(kv_free[RIGHT][ODD], phase)
        kv_valid_smem.index(ODD).store(odd.position)
        bad_odd = _store_half(
            kv_smem[RIGHT].index(ODD), odd_codes, none_bad, is_masked, FORMAT, GROUP
        )
        arrive_after_copies(kv_ready[RIGHT][ODD])
        odd_codes = _load_next_half(odd, LEFT, even_codes, zero, FORMAT)
        mbarrier.wait(kv_free[RIGHT][EVEN], phase)
        bad_even = _store_half(
            kv_smem[RIGHT].index(EVEN), even_codes, bad_even, is_masked, FORMAT, GROUP
        )
        _store_rope(p_smem.index(EVEN), rope, bad_even, is_masked, FORMAT, GROUP)
        arrive_after_copies(kv_ready[RIGHT][EVEN])
        rope = _load_rope(odd, FORMAT)
        even = locate_rows(pages, 2 * pair + 2, next_even, WORD_ROW)
        next_even = load_entries(pages, 2 * pair + 4, WORD_ROW)
        even_codes = _load_next_half(even, LEFT, odd_codes, zero, FORMAT)
        mbarrier.wait(kv_free[LEFT][ODD], phase)
        bad_odd = _store_half(
            kv_smem[LEFT].index(ODD), odd_codes, bad_odd, is_masked, FORMAT, GROUP
        )
        _store_rope(p_smem.index(ODD), rope, bad_odd, is_masked, FORMAT, GROUP)
        arrive_after_copies(kv_ready[LEFT][ODD])
        _prefetch(pages, 2 * pair + 3, next_odd)
        _prefetch(pages, 2 * pair + 4, next_even)
        pair += 1
