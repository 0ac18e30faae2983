"""Rows of an FP8 cache on their way to Hopper's matrix unit: loaded as words, stored as bf16.

Half a block at a time, a thread has 144 bytes of one row: of each group of 64 values that share a
scale byte four words of codes, and of the RoPE values eight words. Words, because a loop carries a
uint8 tensor in a register per byte.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4_ops.kernels.common.triton_compat import reinterpret

HALF = gl.constexpr(32)
"""Keys that are on their way at a time."""

KEYS = gl.constexpr(64)
"""Keys of a block."""

WORDS = gl.constexpr(16)
"""Words of a group: 64 codes."""

_WORD_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0]))
_ROPE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
_GROUP_LAYOUT = gl.constexpr(gl.SliceLayout(2, _WORD_LAYOUT.value))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, _GROUP_LAYOUT.value))
"""Of a tensor with a value per row: four threads have each."""

_STORED = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
"""The rows of a buffer as words: the same bytes as its bf16 values."""

_FACTOR = gl.constexpr(0x00010001)


@gluon.jit
def widen_codes(words, factor):
    """The values of the four e4m3 codes of each word times ``factor``, a bf16 twice, as two words
    of two bf16 values. The product with a power of two is exact."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b, c, d; .reg .b32 x, y; .reg .f32 e, f, g, h;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;
        mov.b32 {a, b}, x; mov.b32 {c, d}, y;
        cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, c; cvt.f32.f16 h, d;
        cvt.rn.bf16x2.f32 x, f, e; cvt.rn.bf16x2.f32 y, h, g;
        mul.rn.bf16x2 $0, x, $3; mul.rn.bf16x2 $1, y, $3;
        }""",
        "=r,=r,r,r",
        [words, factor],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _load_codes(data, exists, FIRST: gl.constexpr, GROUPS: gl.constexpr):
    """Words [row, GROUPS, 16] from group FIRST on."""
    group = FIRST + gl.arange(0, GROUPS, gl.SliceLayout(0, _GROUP_LAYOUT))
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(0, _WORD_LAYOUT)))
    start = gl.expand_dims(gl.expand_dims(data, 1), 2) + gl.expand_dims(
        gl.expand_dims(group * WORDS, 0), 2
    )
    wanted = gl.expand_dims(gl.expand_dims(exists, 1), 2)
    return gl.load(start + gl.expand_dims(gl.expand_dims(word, 0), 0), mask=wanted, other=0)


@gluon.jit
def load_half(rows, ROW: gl.constexpr, SCALE_BYTES: gl.constexpr):
    """What a half of a block has: the codes in three parts, because tensors are powers of two, the
    RoPE values, and the scale bytes. Zeros for rows that do not exist. ``rows`` are their blocks,
    their rows in them, -1 if they do not exist, and how far behind the first row the scales
    begin."""
    page, row, tail = rows
    exists = row >= 0
    words = (page + row * ROW).to(gl.pointer_type(gl.int32), bitcast=True)
    codes0 = _load_codes(words, exists, 0, 4)
    codes1 = _load_codes(words, exists, 4, 2)
    codes2 = _load_codes(words, exists, 6, 1)
    start = gl.convert_layout(words + 7 * WORDS, gl.SliceLayout(1, _ROPE_LAYOUT))
    wanted = gl.convert_layout(exists, gl.SliceLayout(1, _ROPE_LAYOUT))
    word = gl.arange(0, 2 * WORDS, gl.SliceLayout(0, _ROPE_LAYOUT))
    rope = gl.load(start[:, None] + word[None, :], mask=wanted[:, None], other=0)
    scales = (page + (tail + row * SCALE_BYTES)).to(gl.pointer_type(gl.int32), bitcast=True)
    scales0 = gl.load(scales, mask=exists, other=0)
    scales1 = gl.load(scales + 1, mask=exists, other=0)
    return codes0, codes1, codes2, rope, scales0, scales1


@gluon.jit
def _widen(codes, scales, FIRST: gl.constexpr, GROUPS: gl.constexpr):
    """Words [row, 32 * GROUPS] of the bf16 values; FIRST is the byte of the first scale."""
    group = FIRST + gl.arange(0, GROUPS, gl.SliceLayout(0, _GROUP_LAYOUT))
    exponent = (gl.expand_dims(scales, 1) >> (8 * group)[None, :]) & 0xFF
    factor = (exponent << 7) * _FACTOR
    factor = gl.expand_dims(factor, 2) + gl.full([HALF, GROUPS, WORDS], 0, gl.int32, _WORD_LAYOUT)
    left, right = widen_codes(codes, factor)
    return gl.reshape(gl.join(left, right), [HALF, 2 * GROUPS * WORDS])


@gluon.jit
def _beside(left, right):
    """The rows of both, one behind the other: registers, put in another order."""
    WIDTH: gl.constexpr = left.shape[1]
    right = gl.convert_layout(right, left.type.layout, assert_trivial=False)
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [HALF, 2 * WIDTH])


@gluon.jit
def store_half(buffer, FIRST: gl.constexpr, half):
    """Dequantise a half to the rows of a buffer from FIRST on. One store: between two there would
    be a barrier."""
    codes0, codes1, codes2, rope, scales0, scales1 = half
    left = _widen(codes0, scales0, 0, 4)
    middle = _widen(codes1, scales1, 0, 2)
    right = _widen(codes2, scales1, 2, 1)
    row = _beside(left, _beside(middle, _beside(right, rope)))
    stored = reinterpret(buffer, gl.int32, [KEYS, 256], _STORED)
    stored.slice(FIRST, HALF, dim=0).store(row)


@gluon.jit
def dequantise(
    FIND: gl.constexpr, LOCATE: gl.constexpr, SIZES: gl.constexpr,
    where, blocks, keys, existing, full, empty,
):  # fmt: skip
    """The partition that fills the buffers. ``FIND(where, block, FIRST, SIZES)`` loads what says
    where the rows of a half of a block are, and ``LOCATE`` makes of it the rows as ``load_half``
    takes them: a block later, because whoever uses a loaded value waits for it. SIZES begins with
    ROW and SCALE_BYTES. Rows of a first half are loaded when that of the block before is stored,
    those of a second with the block: at once they would keep the matrix unit from shared memory."""
    ROW: gl.constexpr = SIZES[0]
    SCALE_BYTES: gl.constexpr = SIZES[1]
    near = FIND(where, 0, 0, SIZES)
    far = FIND(where, 0, HALF, SIZES)
    next_near = FIND(where, 1, 0, SIZES)
    next_far = FIND(where, 1, HALF, SIZES)
    rows = LOCATE(where, 0, 0, near, SIZES)
    half = load_half(rows, ROW, SCALE_BYTES)
    there = rows[1]
    block = blocks * 0
    while block < blocks:
        buffer = block % 2
        rows = LOCATE(where, block, HALF, far, SIZES)
        other = load_half(rows, ROW, SCALE_BYTES)
        other_there = rows[1]
        later_near = FIND(where, block + 2, 0, SIZES)
        later_far = FIND(where, block + 2, HALF, SIZES)
        mbarrier.wait(empty.index(buffer), ((block // 2) & 1) ^ 1)
        store_half(keys.index(buffer), 0, half)
        existing.index(buffer).slice(0, HALF).store(there)
        rows = LOCATE(where, block + 1, 0, next_near, SIZES)
        half = load_half(rows, ROW, SCALE_BYTES)
        there = rows[1]
        store_half(keys.index(buffer), HALF, other)
        existing.index(buffer).slice(HALF, HALF).store(other_there)
        fence_async_shared()
        mbarrier.arrive(full.index(buffer))
        far = next_far
        next_near = later_near
        next_far = later_far
        block += 1
