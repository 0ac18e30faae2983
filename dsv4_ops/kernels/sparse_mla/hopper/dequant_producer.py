"""Producer of FP8 rows for Hopper's matrix unit. It loads words of codes, and stores bf16.

A thread holds 144 bytes of one row of half a block: four words of codes from each group of 64
values that share a scale byte, and eight words of RoPE values. Codes are loaded as words, because a
loop would need one register per byte of a uint8 tensor.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4_ops.kernels.common.hopper.mma import KEYS
from dsv4_ops.kernels.common.triton_compat import aggregate, reinterpret

HALF = gl.constexpr(32)
"""Keys that are loaded at a time."""


WORDS = gl.constexpr(16)
"""Words of a group: 64 codes."""

_WORD_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0]))
_ROPE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
_GROUP_LAYOUT = gl.constexpr(gl.SliceLayout(2, _WORD_LAYOUT.value))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, _GROUP_LAYOUT.value))
"""Layout of one value per row: four threads hold each value."""

_SMEM_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
"""Layout of a buffer's rows as words, which are the same bytes as the bf16 values."""

_TWICE = gl.constexpr(0x00010001)


@aggregate
class LocatedRows:
    """Rows of half a block. Each row has the address of its page, its index in the page (-1: no
    row), and the offset of the page's scales."""

    page: gl.tensor
    row: gl.tensor
    scales_offset: gl.tensor


@aggregate
class RowWords:
    """Words of half a block of rows: the codes (in three tensors, because sizes are powers of two),
    the RoPE values, and the scale bytes in two words."""

    codes0: gl.tensor
    codes1: gl.tensor
    codes2: gl.tensor
    rope: gl.tensor
    scales0: gl.tensor
    scales1: gl.tensor


@gluon.jit
def widen_codes(words, factor):
    """Return the four e4m3 values of each word times ``factor``, as two words of two bf16 values.
    ``factor`` is two copies of a bf16 power of two, so the products are exact."""
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
def _load_codes(data, valid, FIRST: gl.constexpr, GROUPS: gl.constexpr):
    """Load the words of GROUPS groups from group FIRST on, [row, GROUPS, 16]."""
    group = FIRST + gl.arange(0, GROUPS, gl.SliceLayout(0, _GROUP_LAYOUT))
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(0, _WORD_LAYOUT)))
    start = gl.expand_dims(gl.expand_dims(data, 1), 2) + gl.expand_dims(
        gl.expand_dims(group * WORDS, 0), 2
    )
    mask = gl.expand_dims(gl.expand_dims(valid, 1), 2)
    return gl.load(start + gl.expand_dims(gl.expand_dims(word, 0), 0), mask=mask, other=0)


@gluon.jit
def load_half(rows, ROW: gl.constexpr, SCALE_BYTES: gl.constexpr):
    """Load half a block from ``LocatedRows``. Rows that do not exist are zeros."""
    page, row = rows.page, rows.row
    valid = row >= 0
    words = (page + row * ROW).to(gl.pointer_type(gl.int32), bitcast=True)
    codes0 = _load_codes(words, valid, 0, 4)
    codes1 = _load_codes(words, valid, 4, 2)
    codes2 = _load_codes(words, valid, 6, 1)
    start = gl.convert_layout(words + 7 * WORDS, gl.SliceLayout(1, _ROPE_LAYOUT))
    rope_mask = gl.convert_layout(valid, gl.SliceLayout(1, _ROPE_LAYOUT))
    word = gl.arange(0, 2 * WORDS, gl.SliceLayout(0, _ROPE_LAYOUT))
    rope = gl.load(start[:, None] + word[None, :], mask=rope_mask[:, None], other=0)
    scales = (page + (rows.scales_offset + row * SCALE_BYTES)).to(
        gl.pointer_type(gl.int32), bitcast=True
    )
    scales0 = gl.load(scales, mask=valid, other=0)
    scales1 = gl.load(scales + 1, mask=valid, other=0)
    return RowWords(codes0, codes1, codes2, rope, scales0, scales1)


@gluon.jit
def _widen(codes, scales, FIRST: gl.constexpr, GROUPS: gl.constexpr):
    """Return the bf16 values as words, [row, 32 * GROUPS]; FIRST is the byte of the first scale."""
    group = FIRST + gl.arange(0, GROUPS, gl.SliceLayout(0, _GROUP_LAYOUT))
    exponent = (gl.expand_dims(scales, 1) >> (8 * group)[None, :]) & 0xFF
    factor = (exponent << 7) * _TWICE
    factor = gl.expand_dims(factor, 2) + gl.full([HALF, GROUPS, WORDS], 0, gl.int32, _WORD_LAYOUT)
    left, right = widen_codes(codes, factor)
    return gl.reshape(gl.join(left, right), [HALF, 2 * GROUPS * WORDS])


@gluon.jit
def _concatenate(left, right):
    """Concatenate the columns of two tensors. This only renames registers."""
    WIDTH: gl.constexpr = left.shape[1]
    right = gl.convert_layout(right, left.type.layout, assert_trivial=False)
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [HALF, 2 * WIDTH])


@gluon.jit
def store_half(kv_tile, FIRST: gl.constexpr, words):
    """Dequantise half a block into rows FIRST and up of a buffer. Use one store, because the
    compiler would put a barrier between two stores."""
    left = _widen(words.codes0, words.scales0, 0, 4)
    middle = _widen(words.codes1, words.scales1, 0, 2)
    right = _widen(words.codes2, words.scales1, 2, 1)
    row = _concatenate(left, _concatenate(middle, _concatenate(right, words.rope)))
    smem_words = reinterpret(kv_tile, gl.int32, [KEYS, 256], _SMEM_WORDS)
    smem_words.slice(FIRST, HALF, dim=0).store(row)


@gluon.jit
def dequantise(
    LOAD_ENTRIES: gl.constexpr, LOCATE_ROWS: gl.constexpr, SCALE_BYTES: gl.constexpr,
    sources, blocks, smem,
):  # fmt: skip
    """Run as one partition: fill the KV buffers.

    ``LOAD_ENTRIES(sources, block, FIRST)`` loads the list entries of half a block; ``LOCATE_ROWS``
    turns entries into ``LocatedRows``. Rows are located one block after their entries are loaded,
    because the first use of a loaded value waits for the load. ``sources.row_bytes`` is the number
    of bytes of a row; SCALE_BYTES is the number of bytes of a row's scales.

    The first half of a block is loaded after the first half of the previous block is stored; the
    second half is loaded at the start of the block. If both halves were loaded at once, the matrix
    unit could not read shared memory meanwhile.
    """
    ROW: gl.constexpr = sources.row_bytes
    kv_smem, kv_valid_smem = smem.kv, smem.kv_valid
    kv_ready, kv_free = smem.barriers.kv_ready, smem.barriers.kv_free
    first_entries = LOAD_ENTRIES(sources, 0, 0)
    second_entries = LOAD_ENTRIES(sources, 0, HALF)
    next_first_entries = LOAD_ENTRIES(sources, 1, 0)
    next_second_entries = LOAD_ENTRIES(sources, 1, HALF)
    first_rows = LOCATE_ROWS(sources, 0, 0, first_entries)
    first_valid = first_rows.row
    first_words = load_half(first_rows, ROW, SCALE_BYTES)
    block = blocks * 0
    while block < blocks:
        buffer = block % 2
        second_rows = LOCATE_ROWS(sources, block, HALF, second_entries)
        second_words = load_half(second_rows, ROW, SCALE_BYTES)
        later_first_entries = LOAD_ENTRIES(sources, block + 2, 0)
        later_second_entries = LOAD_ENTRIES(sources, block + 2, HALF)
        mbarrier.wait(kv_free.index(buffer), ((block // 2) & 1) ^ 1)
        store_half(kv_smem.index(buffer), 0, first_words)
        kv_valid_smem.index(buffer).slice(0, HALF).store(first_valid)
        next_rows = LOCATE_ROWS(sources, block + 1, 0, next_first_entries)
        first_words = load_half(next_rows, ROW, SCALE_BYTES)
        first_valid = next_rows.row
        store_half(kv_smem.index(buffer), HALF, second_words)
        kv_valid_smem.index(buffer).slice(HALF, HALF).store(second_rows.row)
        fence_async_shared()
        mbarrier.arrive(kv_ready.index(buffer))
        second_entries = next_second_entries
        next_first_entries = later_first_entries
        next_second_entries = later_second_entries
        block += 1
