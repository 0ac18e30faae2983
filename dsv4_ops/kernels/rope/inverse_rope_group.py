"""Apply inverse RoPE to the attention output, in a kernel that reads the output once. For
``inverse_rope_group_quantize``, the same kernel also quantises."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.layout import (
    ACTIVATION_BLOCK,
    ACTIVATION_FLOOR,
    TOKEN_ALIGNMENT,
    round_up,
)
from dsv4_ops.core.types import QuantizedGroups
from dsv4_ops.kernels.arguments import angles, strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies no modules
    quantize,
    round_to_bf16,
    widen,
)
from dsv4_ops.kernels.common.rope import rotate_pairs_back
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

HEADS = 8
"""Heads per program, all of one token. A thread then has 32 values."""

WARPS = 4

PLAIN, ROW, COLUMN_PADDED, PACKED = 0, 1, 2, 3
_SCALES = {"row": ROW, "column_padded": COLUMN_PADDED, "ue8m0_packed": PACKED}
"""Layouts of the scales; PLAIN is a bf16 result without scales."""

_PLAIN, _ROW, _COLUMN = tl.constexpr(PLAIN), tl.constexpr(ROW), tl.constexpr(COLUMN_PADDED)
_BLOCK, _FLOOR = tl.constexpr(ACTIVATION_BLOCK), tl.constexpr(ACTIVATION_FLOOR)


@triton.jit
def _load_rotated(
    src, dim_stride, mask, position, cos_sin_cache, table_stride, column_stride, num_positions,
    DIM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Load bf16 [heads, DIM] from the rows at ``src``, and apply inverse RoPE to the last ROPE
    values."""
    HEADS: tl.constexpr = src.shape[0]
    dim = tl.arange(0, DIM)[None, :].to(tl.int64) * dim_stride
    values = widen(tl.load(src[:, None] + dim, mask=mask[:, None], other=0.0))
    position_valid = (position >= 0) & (position < num_positions)
    pair = tl.arange(0, DIM // 2) - (DIM - ROPE) // 2
    is_rotated = (pair >= 0) & position_valid
    angle = cos_sin_cache + tl.where(position_valid, position, 0) * table_stride
    cos = tl.load(angle + pair.to(tl.int64) * column_stride, mask=is_rotated, other=1.0)
    pair += ROPE // 2
    sin = tl.load(angle + pair.to(tl.int64) * column_stride, mask=is_rotated, other=0.0)
    even, odd = tl.split(tl.reshape(values, (HEADS, DIM // 2, 2)))
    left, right = rotate_pairs_back(even, odd, cos[None, :], sin[None, :])
    is_rotated = is_rotated[None, :]
    pairs = tl.join(tl.where(is_rotated, left, even), tl.where(is_rotated, right, odd))
    return round_to_bf16(tl.reshape(pairs, (HEADS, DIM)))


@triton.jit(do_not_specialize=SIZES)
def inverse_rope_group_kernel(
    o, token_stride, head_stride, dim_stride,
    positions, position_stride,
    cos_sin_cache, table_stride, column_stride, num_positions,
    values, scales, num_tokens, num_heads, group_heads, scale_tokens,
    DIM: tl.constexpr, ROPE: tl.constexpr, SCALES: tl.constexpr, HEADS: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of a token back, and store them. The padding tokens from ``num_tokens`` up
    to ``scale_tokens`` have scale 0."""
    wait_for_previous_kernel()
    head_tiles = (num_heads + HEADS - 1) // HEADS
    token = (tl.program_id(0) // head_tiles).to(tl.int64)
    head = tl.program_id(0) % head_tiles * HEADS + tl.arange(0, HEADS)
    head_valid, token_valid = head < num_heads, token < num_tokens
    mask = head_valid & token_valid
    src = o + token * token_stride + head.to(tl.int64) * head_stride
    position = tl.load(positions + token * position_stride, mask=token_valid, other=-1)
    rotated = _load_rotated(
        src, dim_stride, mask, position, cos_sin_cache, table_stride, column_stride,
        num_positions, DIM, ROPE,
    )  # fmt: skip
    dim = tl.arange(0, DIM)[None, :]
    if SCALES == _PLAIN:
        dst = values + (token * num_heads + head) * DIM
        tl.store(dst[:, None] + dim, rotated, mask=mask[:, None])
    else:
        group, member = (head // group_heads).to(tl.int64), head % group_heads
        BLOCKS: tl.constexpr = DIM // _BLOCK
        blocks = widen(tl.reshape(rotated, (HEADS, BLOCKS, _BLOCK)))
        codes, scale = quantize(blocks, CONVERTS, _FLOOR)
        dst = values + ((group * num_tokens + token) * group_heads + member) * DIM
        tl.store(dst[:, None] + dim, tl.reshape(codes, (HEADS, DIM)), mask=mask[:, None])
        scale = tl.where(token_valid, scale, 0)
        block = tl.arange(0, BLOCKS)[None, :]
        if SCALES == _ROW:
            row = (group * num_tokens + token) * group_heads + member
            offset = row[:, None] * BLOCKS + block
            tl.store(
                scales + offset, (scale << 23).to(tl.float32, bitcast=True), mask=mask[:, None]
            )
        elif SCALES == _COLUMN:
            offset = (group * group_heads + member)[:, None] * BLOCKS + block
            offset = offset * scale_tokens + token
            tl.store(
                scales + offset,
                (scale << 23).to(tl.float32, bitcast=True),
                mask=head_valid[:, None],
            )
        else:
            packed = tl.sum(scale << (8 * block), 1)
            dst = scales + (group * group_heads + member) * scale_tokens + token
            tl.store(dst, packed, mask=head_valid)


def _launch_by_kind(
    launch: Launcher,
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    values: Tensor,
    scales: Tensor,
    num_groups: int,
    scale_layout: int,
) -> None:
    num_tokens, num_heads, dim = o.shape
    padded = scale_layout in (COLUMN_PADDED, PACKED)
    tokens = round_up(num_tokens, TOKEN_ALIGNMENT) if padded else num_tokens
    programs = tokens * ((num_heads + HEADS - 1) // HEADS)
    launch(inverse_rope_group_kernel)[programs,](
        *strided(o), *strided(positions), *angles(cos_sin_cache),
        values, scales, num_tokens, num_heads, num_heads // num_groups, tokens,
        DIM=int(dim), ROPE=int(cos_sin_cache.shape[1]), SCALES=scale_layout, HEADS=HEADS,
        CONVERTS=launch.converts_codes(o.device), num_warps=WARPS,
    )  # fmt: skip


def inverse_rope_group(
    launch: Launcher, o: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, num_groups: int
) -> Tensor:
    num_tokens, num_heads, dim = o.shape
    out = o.new_empty((num_tokens, num_groups, num_heads // num_groups * dim))
    if num_tokens == 0 or num_heads == 0:
        return out
    # the table stands in for the scales, which are not written
    _launch_by_kind(launch, o, positions, cos_sin_cache, out, cos_sin_cache, num_groups, PLAIN)
    return out


def inverse_rope_group_quantize(
    launch: Launcher,
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    num_groups: int,
    scale_layout: str,
) -> QuantizedGroups:
    num_tokens, num_heads, dim = o.shape
    width = num_heads // num_groups * dim
    values = o.new_empty((num_groups, num_tokens, width), dtype=torch.uint8)
    padded = round_up(num_tokens, TOKEN_ALIGNMENT)
    if scale_layout == "row":
        sizes, dtype = (num_groups, num_tokens, width // ACTIVATION_BLOCK), torch.float32
    elif scale_layout == "column_padded":
        sizes, dtype = (num_groups, width // ACTIVATION_BLOCK, padded), torch.float32
    else:
        sizes, dtype = (num_groups, width // (4 * ACTIVATION_BLOCK), padded), torch.int32
    scales = o.new_empty(sizes, dtype=dtype)
    if num_tokens != 0 and num_heads != 0:
        kind = _SCALES[scale_layout]
        _launch_by_kind(launch, o, positions, cos_sin_cache, values, scales, num_groups, kind)
    return QuantizedGroups(values.view(torch.float8_e4m3fn), scales)
