"""RoPE of dense rows as one launch, for callers that cannot fuse it: TensorRT's plugins."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.fp8 import round_to_bf16
from dsv4_ops.kernels.common.rope import load_tail_angles, rotate_tail


@triton.jit
def apply_rope_kernel(
    x,
    positions,
    cos_sin_cache,
    rows_per_token,
    num_positions,
    out,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    INVERSE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """One program per row of x [tokens, rows_per_token, DIM]; rows at positions that the table does
    not have stay as they are."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row // rows_per_token)
    position = tl.where(position < 0, num_positions, position)
    column = row * DIM + tl.arange(0, DIM)
    values = tl.load(x + column).to(tl.float32)
    rotation = load_tail_angles((cos_sin_cache, num_positions), position, DIM, DIM, ROPE)
    rotated = rotate_tail(values, rotation, DIM, EMULATE, INVERSE)
    if out.dtype.element_ty == tl.bfloat16:
        rotated = round_to_bf16(rotated, EMULATE)
    tl.store(out + column, rotated.to(out.dtype.element_ty))
