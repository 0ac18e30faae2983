"""Mainloop of sparse MLA: a tile of heads of one token attends to blocks of keys. A row of a cache
is both key and value.

Triton's tensors have power-of-two sizes, so a row of 512 values is four tiles: codes 0..255,
256..383 and 384..447, and the RoPE values. Each tile is dequantised to bf16 once, for both matrix
products.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies no modules
    convert_once,
    decode_scaled,
    multiply_add,
    round_to_bf16,
)
from dsv4_ops.kernels.common.triton_compat import EMULATE

LINES = tl.constexpr(8)
"""Maximum number of cache lines that are prefetched for a row."""

_MIN_SCALE, _MAX_SCALE = tl.constexpr(1e-30), tl.constexpr(1e37)
"""Bounds of the scales of partial results. Inverses of scales within the bounds are normal float32
values."""


@triton.jit
def _load_codes(
    data, scales, kv_valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, QUANT_BLOCK: tl.constexpr
):
    """Load WIDTH codes from column FIRST on, and their scales; zeros for absent keys."""
    dim = FIRST + tl.arange(0, WIDTH)[None, :]
    codes = tl.load(data[:, None] + dim, mask=kv_valid[:, None], other=0)
    group = FIRST // QUANT_BLOCK + tl.arange(0, WIDTH // QUANT_BLOCK)[None, :]
    return codes, tl.load(scales[:, None] + group, mask=kv_valid[:, None], other=0)


@triton.jit
def _dequantize(codes, scale, QUANT_BLOCK: tl.constexpr, CONVERTS: tl.constexpr):
    """Return the values of codes, bf16 [keys, width]."""
    GROUPS: tl.constexpr = codes.shape[1] // QUANT_BLOCK
    parts = tl.reshape(codes, (codes.shape[0], GROUPS, QUANT_BLOCK))
    factor = (scale.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)[:, :, None]
    # a scale is a power of two: its product with an e4m3 value is exact in bf16
    if CONVERTS:
        values = parts.to(tl.float8e4nv, bitcast=True)
        # a direct conversion from float16 to bf16 would use a slow unit, one value at a time
        scaled = values.to(tl.float16).to(tl.float32).to(tl.bfloat16) * factor
    else:
        scaled = decode_scaled(parts, factor)
    return tl.reshape(scaled, codes.shape)


@triton.jit
def _load_values(row, kv_valid, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Load WIDTH values from column FIRST on, bf16 [keys, WIDTH]; zeros for absent keys."""
    dim = FIRST + tl.arange(0, WIDTH)[None, :]
    return tl.load(row[:, None] + dim, mask=kv_valid[:, None], other=0.0)


@triton.jit
def load_keys(rows, FORMAT: tl.constexpr, MMA_SYNC: tl.constexpr):
    """Load the four tiles of a block of keys.

    Args:
        rows: The cache, the stride of its blocks, the int64 block and row of each key, whether each
            key exists, and the number of rows per block.
        FORMAT: Row stride, bytes of a row, number of coded values, values per scale, bytes of a
            row's scales (0: the cache is plain), and CONVERTS of ``fp8.py``.
        MMA_SYNC: As in ``attend``.
    """
    ROW: tl.constexpr = FORMAT[0]
    CODE_DIM: tl.constexpr = FORMAT[2]
    QUANT_BLOCK: tl.constexpr = FORMAT[3]
    SCALE_BYTES: tl.constexpr = FORMAT[4]
    CONVERTS: tl.constexpr = FORMAT[5]
    cache, page_stride, page, row, kv_valid, block_size = rows
    start = cache + page * page_stride
    data = start + row * ROW
    if SCALE_BYTES > 0:
        scales = start + block_size * ROW + row * SCALE_BYTES
        codes0, scale0 = _load_codes(data, scales, kv_valid, 0, 256, QUANT_BLOCK)
        k0 = convert_once(_dequantize(codes0, scale0, QUANT_BLOCK, CONVERTS), MMA_SYNC)
        codes1, scale1 = _load_codes(data, scales, kv_valid, 256, 128, QUANT_BLOCK)
        k1 = convert_once(_dequantize(codes1, scale1, QUANT_BLOCK, CONVERTS), MMA_SYNC)
        codes2, scale2 = _load_codes(data, scales, kv_valid, 384, 64, QUANT_BLOCK)
        k2 = convert_once(_dequantize(codes2, scale2, QUANT_BLOCK, CONVERTS), MMA_SYNC)
        rope = (data + CODE_DIM).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        k3 = _load_values(rope, kv_valid, 0, 64)
    else:
        k0 = convert_once(_load_values(data, kv_valid, 0, 256), MMA_SYNC)
        k1 = convert_once(_load_values(data, kv_valid, 256, 128), MMA_SYNC)
        k2 = convert_once(_load_values(data, kv_valid, 384, 64), MMA_SYNC)
        k3 = convert_once(_load_values(data, kv_valid, 448, 64), MMA_SYNC)
    return k0, k1, k2, k3


@triton.jit
def softmax_step(logits, row_max, row_sum):
    """Return P, alpha, the new row_max and the new row_sum. ``logits`` [heads, keys] are in base 2;
    alpha rescales the accumulator."""
    new_max = tl.maximum(row_max, tl.max(logits, axis=1))
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(logits - finite_max[:, None])
    alpha = tl.exp2(row_max - finite_max)
    return p, alpha, new_max, row_sum * alpha + tl.sum(p, axis=1)


@triton.jit
def unfused(values):
    """Return ``values``, but hide from Triton that they are a matrix product. Otherwise Triton
    would fuse the product with the sum that follows."""
    if EMULATE:
        return values
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [values], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def recompute(values):
    """Return int32 ``values``, but hide from the compiler that they were computed before. The
    compiler then recomputes what depends on the values instead of holding it in registers."""
    if EMULATE:
        return values
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [values], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def prefetch(pointers, mask):
    """Prefetch the cache lines at these pointers into L2. The assembly is declared pure, because
    torch does not analyse kernels with impure assembly. Triton drops pure assembly whose result is
    unused, so the caller must use the result, zeros, in a store."""
    flags = mask.to(tl.int32)
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
def prefetch_keys(rows, enabled, FORMAT: tl.constexpr):
    """If ``enabled``, prefetch what ``load_keys`` will read of these rows. Return the zeros that
    ``prefetch`` returns. A row may begin anywhere in a line, so the prefetch can miss the line with
    the row's last bytes."""
    ROW: tl.constexpr = FORMAT[0]
    ROW_BYTES: tl.constexpr = FORMAT[1]
    SCALE_BYTES: tl.constexpr = FORMAT[4]
    cache, page_stride, page, row, kv_valid, block_size = rows
    kv_valid = kv_valid & enabled
    LINE: tl.constexpr = 128
    start = cache + page * page_stride
    data = (start + row * ROW).to(tl.pointer_type(tl.uint8), bitcast=True)
    line = tl.arange(0, LINES)[None, :]
    ROW_LINES: tl.constexpr = (ROW_BYTES + LINE - 1) // LINE
    address = data[:, None] + line * LINE
    line_mask = line < ROW_LINES
    if SCALE_BYTES > 0:
        scales = start + block_size * ROW + row * SCALE_BYTES
        address = tl.where(line == ROW_LINES, scales[:, None], address)
        line_mask = line <= ROW_LINES
    return prefetch(address, kv_valid[:, None] & line_mask)


@triton.jit
def load_queries(q_heads, head_valid, dim_stride):
    """Load the four tiles of the queries."""
    q0 = load_heads(q_heads, head_valid, dim_stride, 0, 256)
    q1 = load_heads(q_heads, head_valid, dim_stride, 256, 128)
    q2 = load_heads(q_heads, head_valid, dim_stride, 384, 64)
    q3 = load_heads(q_heads, head_valid, dim_stride, 448, 64)
    return q0, q1, q2, q3


@triton.jit
def initial_state(HEADS: tl.constexpr):
    """Return the state before the first block: four tiles of the accumulator, row_max, row_sum."""
    acc0 = tl.zeros((HEADS, 256), dtype=tl.float32)
    acc1 = tl.zeros((HEADS, 128), dtype=tl.float32)
    acc2 = tl.zeros((HEADS, 64), dtype=tl.float32)
    acc3 = tl.zeros((HEADS, 64), dtype=tl.float32)
    row_max = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((HEADS,), dtype=tl.float32)
    return acc0, acc1, acc2, acc3, row_max, row_sum


@triton.jit
def attend(queries, state, keys, kv_valid, scale, block, MMA_SYNC: tl.constexpr):
    """Return the state after one block of keys, whose index is ``block``; ``scale`` includes
    log2(e).

    If a product feeds another product, Triton assigns all warps to rows. With 64 rows, half of the
    warps would then repeat the work of the other half. Triton does not look past the end of a
    branch, so the four products with keys are inside a branch. ``unfused`` keeps Triton from
    turning the sum of the four products into a chain of products. ``block`` is never negative.
    Triton does not know that; if it did, it would remove the branches.

    With MMA_SYNC, warps multiply with ``mma.sync``, from registers. Each product, with keys or with
    P, is then in a branch of its own, so that Triton assigns warps to both dimensions.
    """
    q0, q1, q2, q3 = queries
    acc0, acc1, acc2, acc3, row_max, row_sum = state
    k0, k1, k2, k3 = keys
    zeros = tl.zeros((q0.shape[0], kv_valid.shape[0]), dtype=tl.float32)
    logits = zeros
    if MMA_SYNC:
        qk0, qk1, qk2 = zeros, zeros, zeros
        if (block | 1) != 0:
            qk0 = multiply_add(q0, tl.trans(k0), zeros)
        if (block | 2) != 0:  # Triton would merge branches with the same condition
            qk1 = multiply_add(q1, tl.trans(k1), qk0)
        if (block | 4) != 0:
            qk2 = multiply_add(q2, tl.trans(k2), qk1)
        if (block | 8) != 0:
            logits = multiply_add(q3, tl.trans(k3), qk2)
    elif block >= 0:
        qk0 = unfused(multiply_add(q0, tl.trans(k0), zeros))
        qk1 = unfused(multiply_add(q1, tl.trans(k1), zeros))
        qk2 = unfused(multiply_add(q2, tl.trans(k2), zeros))
        qk3 = unfused(multiply_add(q3, tl.trans(k3), zeros))
        logits = (qk0 + qk1) + (qk2 + qk3)
    logits = tl.where(kv_valid[None, :], logits * scale, float("-inf"))
    p, alpha, row_max, row_sum = softmax_step(logits, row_max, row_sum)
    p_bf16 = round_to_bf16(p)
    first = block if MMA_SYNC else 1
    if (first | 16) != 0:
        acc0 = multiply_add(p_bf16, k0, acc0 * alpha[:, None])
    if (first | 32) != 0:
        acc1 = multiply_add(p_bf16, k1, acc1 * alpha[:, None])
    if (first | 64) != 0:
        acc2 = multiply_add(p_bf16, k2, acc2 * alpha[:, None])
    if (first | 128) != 0:
        acc3 = multiply_add(p_bf16, k3, acc3 * alpha[:, None])
    return acc0, acc1, acc2, acc3, row_max, row_sum


@triton.jit
def log2_sum(row_max, row_sum):
    """Return the log-sum-exp in base 2; -inf without a key."""
    return tl.where(row_max == float("-inf"), 0.0, row_max) + tl.log2(row_sum)


@triton.jit
def denominator(row_max, row_sum, sink):
    """Return the divisor of the accumulator; 1 if there is no key, whatever the sink is."""
    finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    return tl.where(row_sum == 0.0, 1.0, row_sum + tl.exp2(sink - finite_max))


@triton.jit
def load_heads(q_heads, head_valid, dim_stride, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Load WIDTH values of each head from column FIRST on; zeros for absent heads."""
    dim = (FIRST + tl.arange(0, WIDTH))[None, :].to(tl.int64)
    return tl.load(q_heads + dim * dim_stride, mask=head_valid[:, None], other=0.0)


@triton.jit
def store_heads(target, head_valid, values, FIRST: tl.constexpr):
    """Store float32 values of each head from column FIRST on."""
    dim = FIRST + tl.arange(0, values.shape[1])[None, :]
    if target.dtype.element_ty == tl.bfloat16:
        values = round_to_bf16(values)
    tl.store(target + dim, values, mask=head_valid[:, None])


@triton.jit
def amax_of(values):
    """Return the amax of all heads; ignore NaN. For an amax per head, Triton would choose layouts
    with which the loop spills registers."""
    magnitude = tl.abs(values)
    if EMULATE:  # max(x, NaN) is x on the GPU, but NaN in the interpreter
        magnitude = tl.where(magnitude != magnitude, 0.0, magnitude)
    return tl.max(magnitude)


@triton.jit
def scale_of(amax):
    """Return the scale of a partial result whose amax is ``amax``."""
    scale = tl.minimum(tl.maximum(amax, _MIN_SCALE), _MAX_SCALE)
    return tl.where(amax == float("inf"), 1.0, scale)  # a scale of 1 preserves the finite values


@triton.jit
def scale_of_partial(values):
    """Return the scale of a partial result."""
    return scale_of(amax_of(values))
