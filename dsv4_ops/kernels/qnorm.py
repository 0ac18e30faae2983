"""Kernel and launcher of norm, rotation and insert: queries and keys in one launch."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.kernels.launch import EMULATE, Launch
from dsv4_ops.kernels.qnorm_rows import normalise_and_insert  # by name: Inductor copies kernels

HEADS = 4
"""Heads of a token that a program normalises: 16 values per thread."""

KEYS = 4
"""Keys per program, as in the insert."""

WARPS = 4


@triton.jit
def qnorm_rope_kv_insert_kernel(
    q,
    token_stride,
    head_stride,
    q_dim_stride,
    out,
    num_heads,
    kv,
    row_stride,
    kv_dim_stride,
    k_cache,
    page_stride,
    cache_row_stride,
    num_blocks,
    slot_mapping,
    slot_stride,
    num_slots,
    positions,
    position_stride,
    cos_sin_cache,
    table_stride,
    column_stride,
    num_positions,
    EPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODE_DIM: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    normalise_and_insert(
        tl.program_id(0),
        q,
        token_stride,
        head_stride,
        q_dim_stride,
        out,
        num_heads,
        kv,
        row_stride,
        kv_dim_stride,
        k_cache,
        page_stride,
        cache_row_stride,
        num_blocks,
        slot_mapping,
        slot_stride,
        num_slots,
        positions,
        position_stride,
        cos_sin_cache,
        table_stride,
        column_stride,
        num_positions,
        EPS,
        BLOCK_SIZE,
        HEAD_DIM,
        CODE_DIM,
        QUANT_BLOCK,
        DATA_BYTES,
        SCALE_BYTES,
        HEADS,
        KEYS,
        EMULATE,
    )


def qnorm_rope_kv_insert(
    launch: Launch,
    q: torch.Tensor,
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    eps: float,
    block_size: int,
    layout: str,
) -> torch.Tensor:
    main = MainLayout(block_size)
    plain = layout != main.tag
    if not plain:
        Checks("qnorm_rope_kv_insert").page_start("k_cache", k_cache, main)
    num_tokens, num_heads, num_slots = q.shape[0], q.shape[1], slot_mapping.shape[0]
    out = q.new_empty((num_tokens, num_heads, main.head_dim))
    programs = num_tokens * ((num_heads + HEADS - 1) // HEADS) + (num_slots + KEYS - 1) // KEYS
    if num_tokens == 0:
        return out
    launch(qnorm_rope_kv_insert_kernel)[programs,](
        q,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        out,
        num_heads,
        kv,
        kv.stride(0),
        kv.stride(1),
        k_cache,
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.shape[0],
        slot_mapping,
        slot_mapping.stride(0),
        num_slots,
        positions,
        positions.stride(0),
        cos_sin_cache,
        cos_sin_cache.stride(0),
        cos_sin_cache.stride(1),
        cos_sin_cache.shape[0],
        EPS=float(eps),
        BLOCK_SIZE=block_size,
        HEAD_DIM=main.head_dim,
        CODE_DIM=main.code_dim,
        QUANT_BLOCK=main.quant_block,
        DATA_BYTES=main.data_bytes,
        SCALE_BYTES=0 if plain else main.scale_bytes,
        HEADS=HEADS,
        KEYS=KEYS,
        EMULATE=EMULATE,
        num_warps=WARPS,
    )
    return out
