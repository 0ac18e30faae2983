"""Attention of one token over blocks of keys, for a tile of heads; keys are values.

A row of 512 values is four tiles, because Triton wants powers of two: codes 0..255, 256..383 and
384..447, and the RoPE values. Each is dequantised to bf16 once and serves both matrix products.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies kernels, not modules
    multiply_add,
    round_to_bf16,
)
from dsv4_ops.kernels.common.triton_compat import EMULATE

LINES = tl.constexpr(8)
"""Cache lines of a row that are asked for, at most."""


@triton.jit
def _load_codes(
    data, scales, exists,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, QUANT_BLOCK: tl.constexpr,
):  # fmt: skip
    """bf16 [keys, WIDTH] dequantised values from dimension FIRST on; zeros for keys that do not
    exist."""
    GROUPS: tl.constexpr = WIDTH // QUANT_BLOCK
    dim = FIRST + tl.arange(0, WIDTH)[None, :]
    codes = tl.load(data[:, None] + dim, mask=exists[:, None], other=0)
    group = FIRST // QUANT_BLOCK + tl.arange(0, GROUPS)[None, :]
    scale = tl.load(scales[:, None] + group, mask=exists[:, None], other=0)
    codes = tl.reshape(codes, (codes.shape[0], GROUPS, QUANT_BLOCK))
    values = codes.to(tl.float8e4nv, bitcast=True)
    # a power of two: its product with an e4m3 value is exact in bf16
    if EMULATE:  # Triton's interpreter reads the NaN codes as 480, and has no bf16 arithmetic
        numbers = tl.where((codes & 0x7F) == 0x7F, float("nan"), values.to(tl.float32))
        factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        scaled = (numbers * factor[:, :, None]).to(tl.bfloat16)
    else:
        factor = (scale.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
        # by way of float32: the direct conversion from float16 takes a slow unit, value by value
        numbers = values.to(tl.float16).to(tl.float32).to(tl.bfloat16)
        scaled = numbers * factor[:, :, None]
    return tl.reshape(scaled, (codes.shape[0], WIDTH))


@triton.jit
def _load_values(row, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """bf16 [keys, WIDTH] stored values from dimension FIRST on; zeros where there is no key."""
    dim = FIRST + tl.arange(0, WIDTH)[None, :]
    return tl.load(row[:, None] + dim, mask=exists[:, None], other=0.0)


@triton.jit
def load_keys(rows, FORMAT: tl.constexpr):
    """The four tiles of a block of keys.

    Args:
        rows: The cache, the stride of its blocks, int64 blocks and rows, which of them exist, and
            the rows of a block.
        FORMAT: Step from row to row, bytes of a row, coded values, values of a scale, and bytes of
            a row's scales; without scales the cache is plain.
    """
    ROW: tl.constexpr = FORMAT[0]
    CODE_DIM: tl.constexpr = FORMAT[2]
    QUANT_BLOCK: tl.constexpr = FORMAT[3]
    SCALE_BYTES: tl.constexpr = FORMAT[4]
    cache, page_stride, page, row, exists, block_size = rows
    start = cache + page * page_stride
    data = start + row * ROW
    if SCALE_BYTES > 0:
        scales = start + block_size * ROW + row * SCALE_BYTES
        k0 = _load_codes(data, scales, exists, 0, 256, QUANT_BLOCK)
        k1 = _load_codes(data, scales, exists, 256, 128, QUANT_BLOCK)
        k2 = _load_codes(data, scales, exists, 384, 64, QUANT_BLOCK)
        rope = (data + CODE_DIM).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        k3 = _load_values(rope, exists, 0, 64)
    else:
        k0 = _load_values(data, exists, 0, 256)
        k1 = _load_values(data, exists, 256, 128)
        k2 = _load_values(data, exists, 384, 64)
        k3 = _load_values(data, exists, 448, 64)
    return k0, k1, k2, k3


@triton.jit
def softmax_step(logits, row_max, row_sum):
    """Weights of the logits [heads, keys], in powers of two, against the row_max so far; the factor
    of what was summed before, and the new maximum and row_sum."""
    highest = tl.maximum(row_max, tl.max(logits, axis=1))
    origin = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(logits - origin[:, None])
    factor = tl.exp2(row_max - origin)
    return weights, factor, highest, row_sum * factor + tl.sum(weights, axis=1)


@triton.jit
def apart(values):
    """``values``, opaque to Triton, which would contract a product and what is added to it."""
    if EMULATE:
        return values
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [values], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def again(values):
    """The int32 ``values``, as if unknown: what is computed from them is computed here, and not
    held in registers since it was computed before."""
    if EMULATE:
        return values
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [values], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def prefetch(pointers, wanted):
    """Have the cache lines of the wanted pointers brought to L2. Zeros, which must reach a store:
    torch analyses no kernel with assembly that is more than a function of its operands, and Triton
    drops the function whose value nobody needs."""
    flags = wanted.to(tl.int32)
    if EMULATE:
        return flags * 0
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers, flags],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def prefetch_keys(rows, wanted, FORMAT: tl.constexpr):
    """What ``load_keys`` of these rows will read, if wanted: the zeros of ``prefetch``. Rows begin
    anywhere in a line, so the last bytes of one may be in a line that is not asked for."""
    ROW: tl.constexpr = FORMAT[0]
    ROW_BYTES: tl.constexpr = FORMAT[1]
    SCALE_BYTES: tl.constexpr = FORMAT[4]
    cache, page_stride, page, row, exists, block_size = rows
    exists = exists & wanted
    LINE: tl.constexpr = 128
    start = cache + page * page_stride
    data = (start + row * ROW).to(tl.pointer_type(tl.uint8), bitcast=True)
    line = tl.arange(0, LINES)[None, :]
    USED: tl.constexpr = (ROW_BYTES + LINE - 1) // LINE
    target = data[:, None] + line * LINE
    asked = line < USED
    if SCALE_BYTES > 0:
        scales = start + block_size * ROW + row * SCALE_BYTES
        target = tl.where(line == USED, scales[:, None], target)
        asked = line <= USED
    return prefetch(target, exists[:, None] & asked)


@triton.jit
def load_queries(heads, there, dim_stride):
    """The four tiles of the queries."""
    q0 = load_heads(heads, there, dim_stride, 0, 256)
    q1 = load_heads(heads, there, dim_stride, 256, 128)
    q2 = load_heads(heads, there, dim_stride, 384, 64)
    q3 = load_heads(heads, there, dim_stride, 448, 64)
    return q0, q1, q2, q3


@triton.jit
def no_sums(HEADS: tl.constexpr):
    """Before the first block: four tiles of sums, the largest logits, and the sums of P."""
    out0 = tl.zeros((HEADS, 256), dtype=tl.float32)
    out1 = tl.zeros((HEADS, 128), dtype=tl.float32)
    out2 = tl.zeros((HEADS, 64), dtype=tl.float32)
    out3 = tl.zeros((HEADS, 64), dtype=tl.float32)
    row_max = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((HEADS,), dtype=tl.float32)
    return out0, out1, out2, out3, row_max, row_sum


@triton.jit
def attend(queries, sums, keys, exists, scale, always):
    """The running sums after one block of keys; ``scale`` includes log2(e), and ``always`` is true,
    which Triton must not see.

    Triton gives all warps to the rows of a product that leads to another product, and with 64 rows
    both warp groups would compute the same. It does not look behind the end of a branch, nor,
    through ``apart``, for the sum of the four.
    """
    q0, q1, q2, q3 = queries
    out0, out1, out2, out3, row_max, row_sum = sums
    k0, k1, k2, k3 = keys
    logits = tl.zeros((q0.shape[0], exists.shape[0]), dtype=tl.float32)
    if always:
        part0 = apart(multiply_add(q0, tl.trans(k0), logits))
        part1 = apart(multiply_add(q1, tl.trans(k1), logits))
        part2 = apart(multiply_add(q2, tl.trans(k2), logits))
        part3 = apart(multiply_add(q3, tl.trans(k3), logits))
        logits = (part0 + part1) + (part2 + part3)
    logits = tl.where(exists[None, :], logits * scale, float("-inf"))
    weights, factor, row_max, row_sum = softmax_step(logits, row_max, row_sum)
    rounded = round_to_bf16(weights)
    out0 = multiply_add(rounded, k0, out0 * factor[:, None])
    out1 = multiply_add(rounded, k1, out1 * factor[:, None])
    out2 = multiply_add(rounded, k2, out2 * factor[:, None])
    out3 = multiply_add(rounded, k3, out3 * factor[:, None])
    return out0, out1, out2, out3, row_max, row_sum


@triton.jit
def log2_sum(row_max, row_sum):
    """Binary logarithm of the sum of P; -inf where there was no key."""
    return tl.where(row_max == float("-inf"), 0.0, row_max) + tl.log2(row_sum)


@triton.jit
def denominator(row_max, row_sum, sink):
    """What the summed values are divided by; 1 where there was no key, whatever the sink."""
    origin = tl.where(row_max == float("-inf"), 0.0, row_max)
    return tl.where(row_sum == 0.0, 1.0, row_sum + tl.exp2(sink - origin))


@triton.jit
def load_heads(heads, there, dim_stride, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Values of every head from dimension FIRST on; zeros for heads that are not there."""
    dim = (FIRST + tl.arange(0, WIDTH))[None, :].to(tl.int64)
    return tl.load(heads + dim * dim_stride, mask=there[:, None], other=0.0)


@triton.jit
def store_heads(target, there, values, FIRST: tl.constexpr):
    """Write the float32 values of every head from dimension FIRST on."""
    dim = FIRST + tl.arange(0, values.shape[1])[None, :]
    if target.dtype.element_ty == tl.bfloat16:
        values = round_to_bf16(values)
    tl.store(target + dim, values, mask=there[:, None])
