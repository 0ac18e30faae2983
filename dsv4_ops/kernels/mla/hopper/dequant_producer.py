"""FP8 rows of dense MLA on their way to Hopper's matrix unit: loaded as words, stored as float16,
or with scales as bf16.

Half the latents of a block at a time: a thread has 64 codes of each of two rows, and eight of the
RoPE dimensions. The codes of the next half are on their way while those of one are stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4_ops.kernels.common.triton_compat import async_load, reinterpret
from dsv4_ops.kernels.mla.hopper.copy_producer import (
    NEVER,
    ROPE,
    STORED,
    WORDS,
    WORDS_ROW,
    arrives,
    await_copies,
    clear_tile,
    find,
    locate,
    spoil_rope,
)
from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import KEYS
from dsv4_ops.kernels.sparse_mla.hopper.mma import WIDTH
from dsv4_ops.kernels.sparse_mla.hopper.mma_paired import LEFT, RIGHT

CODES, SCALED = gl.constexpr(1), gl.constexpr(2)
"""Formats of rows: codes alone, and codes with scales and RoPE values behind them."""

_GROUP = gl.constexpr(32)
"""Words of codes that share a scale."""


@gluon.jit
def halve_codes(words):
    """The values of the four e4m3 codes of each word, all of which are float16, as two words of two
    values. One instruction for two: bf16 takes six, which would bound the kernel."""
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
    """The values of the four e4m3 codes of each word times ``scale``, rounded once, as two words of
    two bf16 values."""
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
    """Have so many bytes from an address on, both multiples of 16, brought to the L2: one of the
    four threads that have them asks."""
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
def _prefetch(cache, pages, block, found, ROW: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Ask for the pages that begin in a block, of larger ones for the rows of the block. Larger
    ones that end within a block are left to the loads."""
    AT_ONCE: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < KEYS else KEYS
    if BLOCK_SIZE % AT_ONCE == 0:
        start, position = locate(cache, pages, block, found, WORDS_ROW, ROW, BLOCK_SIZE)
        begins = (position < NEVER) & (position % AT_ONCE == 0)
        size = gl.where(begins, AT_ONCE * ROW, 0)
        prefetch_l2(start.to(gl.int64, bitcast=True), size)


@gluon.jit
def _load_words(rows, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Words of the rows from byte FIRST on; zeros of rows that do not exist."""
    start, position = rows
    words = (start + FIRST).to(gl.pointer_type(gl.int32), bitcast=True)
    word = gl.arange(0, COUNT, gl.SliceLayout(0, WORDS))
    return gl.load(words[:, None] + word[None, :], mask=(position < NEVER)[:, None], other=0)


@gluon.jit
def _load_half(rows, HALF: gl.constexpr, FORMAT: gl.constexpr):
    """Codes of a half of the latents, and their scales if rows have such."""
    codes = _load_words(rows, HALF * WIDTH, WIDTH // 4)
    if FORMAT == SCALED:
        start, position = rows
        scales = (start + 2 * WIDTH).to(gl.pointer_type(gl.float32), bitcast=True) + 2 * HALF
        there = position < NEVER
        left = gl.load(scales, mask=there, other=0.0)
        right = gl.load(scales + 1, mask=there, other=0.0)
        half = (codes, left, right)
    else:
        half = (codes, codes, codes)
    return half


@gluon.jit
def _load_rope(rows, FORMAT: gl.constexpr):
    """Codes of the RoPE dimensions. Values are copied when their tile is free."""
    if FORMAT == SCALED:
        rope = rows
    else:
        rope = _load_words(rows, 2 * WIDTH, ROPE // 4)
    return rope


@gluon.jit
def _halves(words):
    left, right = halve_codes(words)
    return gl.reshape(gl.join(left, right), [KEYS, 2 * words.shape[1]])


@gluon.jit
def _values(half, FORMAT: gl.constexpr):
    """Words of two values of half the latents of a block."""
    if FORMAT == SCALED:
        word = gl.arange(0, WIDTH // 4, gl.SliceLayout(0, WORDS))
        scale = gl.where((word < _GROUP)[None, :], half[1][:, None], half[2][:, None])
        left, right = scale_codes(half[0], scale)
        words = gl.reshape(gl.join(left, right), [KEYS, WIDTH // 2])
    else:
        words = _halves(half[0])
    return words


@gluon.jit
def _store(tile, words):
    stored = reinterpret(tile, gl.int32, [KEYS, words.shape[1]], STORED)
    stored.store(words)


@gluon.jit
def _store_half(tile, half, lost, apart, FORMAT: gl.constexpr, GROUP: gl.constexpr):
    """Dequantise half the latents of a block."""
    _store(tile, _values(half, FORMAT))
    return clear_tile(tile, lost, apart, GROUP)


@gluon.jit
def _store_rope(tile, rope, lost, apart, FORMAT: gl.constexpr, GROUP: gl.constexpr):
    """The RoPE dimensions: what ``_load_rope`` gave."""
    if FORMAT == SCALED:
        start, position = rope
        words = (start + (2 * WIDTH + 16)).to(gl.pointer_type(gl.int32), bitcast=True)
        word = gl.arange(0, ROPE // 2, gl.SliceLayout(0, WORDS))
        stored = reinterpret(tile, gl.int32, [KEYS, ROPE // 2], STORED)
        there = (position < NEVER)[:, None]
        async_load(stored, words[:, None] + word[None, :], mask=there)
        if GROUP > 1:
            if apart:
                await_copies()
    else:
        _store(tile, _halves(rope))
    spoil_rope(tile, lost, apart, GROUP)


@gluon.jit
def dequantise_pairs(
    cache, pages, pairs, alike, shared,
    FORMAT: gl.constexpr, ROW: gl.constexpr, BLOCK_SIZE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """As ``copy_pairs``, which says what is stored when, of rows of ROW bytes."""
    keys, existing, weights = shared[1], shared[2], shared[3]
    full, used = shared[5][0], shared[5][1]
    even = locate(
        cache, pages, 0, find(pages, 0, WORDS_ROW, BLOCK_SIZE), WORDS_ROW, ROW, BLOCK_SIZE
    )
    next_odd = find(pages, 1, WORDS_ROW, BLOCK_SIZE)
    next_even = find(pages, 2, WORDS_ROW, BLOCK_SIZE)
    none = gl.full([KEYS], 0, gl.int32, WORDS_ROW)
    half = _load_half(even, LEFT, FORMAT)
    pair = pairs * 0
    while pair < pairs:
        phase = (pair & 1) ^ 1
        apart = pair >= alike
        odd = locate(cache, pages, 2 * pair + 1, next_odd, WORDS_ROW, ROW, BLOCK_SIZE)
        next_odd = find(pages, 2 * pair + 3, WORDS_ROW, BLOCK_SIZE)
        other = _load_half(odd, RIGHT, FORMAT)
        mbarrier.wait(used[LEFT][0], phase)
        existing.index(0).store(even[1])
        lost_even = _store_half(keys[LEFT].index(0), half, none, apart, FORMAT, GROUP)
        arrives(full[LEFT][0])
        half = _load_half(even, RIGHT, FORMAT)
        rope = _load_rope(even, FORMAT)
        mbarrier.wait(used[RIGHT][1], phase)
        existing.index(1).store(odd[1])
        lost_odd = _store_half(keys[RIGHT].index(1), other, none, apart, FORMAT, GROUP)
        arrives(full[RIGHT][1])
        other = _load_half(odd, LEFT, FORMAT)
        mbarrier.wait(used[RIGHT][0], phase)
        lost_even = _store_half(keys[RIGHT].index(0), half, lost_even, apart, FORMAT, GROUP)
        _store_rope(weights.index(0), rope, lost_even, apart, FORMAT, GROUP)
        arrives(full[RIGHT][0])
        rope = _load_rope(odd, FORMAT)
        even = locate(cache, pages, 2 * pair + 2, next_even, WORDS_ROW, ROW, BLOCK_SIZE)
        next_even = find(pages, 2 * pair + 4, WORDS_ROW, BLOCK_SIZE)
        half = _load_half(even, LEFT, FORMAT)
        mbarrier.wait(used[LEFT][1], phase)
        lost_odd = _store_half(keys[LEFT].index(1), other, lost_odd, apart, FORMAT, GROUP)
        _store_rope(weights.index(1), rope, lost_odd, apart, FORMAT, GROUP)
        arrives(full[LEFT][1])
        _prefetch(cache, pages, 2 * pair + 3, next_odd, ROW, BLOCK_SIZE)
        _prefetch(cache, pages, 2 * pair + 4, next_even, ROW, BLOCK_SIZE)
        pair += 1
