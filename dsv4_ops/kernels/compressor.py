"""Launcher of the compressor: a finished window becomes a cache row, read once."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout, MainLayout, QuantizedLayout, StateLayout
from dsv4_ops.kernels.launch import EMULATE, Launch
from dsv4_ops.kernels.long_windows import insert_pooled_kernel, pool_windows_kernel
from dsv4_ops.kernels.short_windows import compress_and_insert_kernel

VALUES = 4
"""Consecutive channels of a thread: 16 bytes."""

DEPTH = 8
"""Most rows of a short window that a thread reads at a time: all of C4's."""

LONG_DEPTH = 8
"""Rows of a long window that a thread reads at a time."""

CHANNELS = 64
"""Channels of a long window that a program reads."""

MAX_WARPS, LONG_WARPS = 16, 4

SHORT_WINDOW = 32
"""Most rows of a window that is short: it takes less than a look at a token does."""

SHORT_TOKENS, LONG_TOKENS = 4, 64
"""Tokens that a program looks at together."""

SHORT_PROGRAMS, LONG_PROGRAMS = 8 * 132 + 1, 132 + 1
"""Programs below which each gets fewer tokens; odd."""


def compress_and_insert(
    launch: Launch,
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    state_block_table: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
    overlap: bool,
    eps: float,
    state_block_size: int,
    block_size: int,
    layout: str,
) -> None:
    width, head_dim = int(ape.shape[1]), int(norm_weight.shape[0])
    checks = Checks("compress_and_insert")
    checks.page_start("states", states, StateLayout(state_block_size, max(2 * width, 1)))
    quantized = _quantized(layout, block_size)
    if quantized is not None:
        checks.page_start("k_cache", k_cache, quantized)
    num_tokens, num_reqs = positions.shape[0], state_block_table.shape[0]
    if num_tokens == 0 or num_reqs == 0 or k_cache.shape[0] == 0 or head_dim == 0:
        return
    if kv_score.stride(1) != 1:
        kv_score = kv_score.contiguous()
    rows = (
        kv_score,
        kv_score.stride(0),
        ape.contiguous(),
        states,
        states.stride(0),
        states.shape[0],
        state_block_table,
        state_block_table.stride(0),
        state_block_table.stride(1),
        num_reqs,
        state_block_table.shape[1],
    )
    tokens = (positions, positions.stride(0), req_indices, req_indices.stride(0))
    rotation = (norm_weight.contiguous(), cos_sin_cache.contiguous(), cos_sin_cache.shape[0])
    pages = (k_cache, k_cache.stride(0), k_cache.shape[0])
    slots = (slot_mapping, slot_mapping.stride(0), num_tokens)
    num_rows = compress_ratio * (2 if overlap else 1)
    window: dict[str, Any] = {
        "RATIO": compress_ratio,
        "NUM_ROWS": num_rows,
        "WIDTH": width,
        "HEAD_DIM": head_dim,
        "STATE_BLOCK": state_block_size,
        "BLOCK_SIZE": block_size,
    }
    finish: dict[str, Any] = {
        "DIM": triton.next_power_of_2(head_dim),
        "ROPE": int(cos_sin_cache.shape[1]),
        "EPS": float(eps),
        "ROW_STRIDE": 0 if quantized else int(k_cache.stride(1)),
        "CODE_DIM": quantized.code_dim if quantized else 0,
        "QUANT_BLOCK": quantized.quant_block if quantized else 0,
        "DATA_BYTES": quantized.data_bytes if quantized else 0,
        "SCALE_BYTES": quantized.scale_bytes if quantized else 0,
        "FLOAT_SCALES": layout == IndexerLayout.tag,
        "EMULATE": EMULATE,
    }
    if num_rows <= SHORT_WINDOW:
        shape = _shape_of_program(num_rows, head_dim)
        programs = _programs(num_tokens, num_rows, SHORT_TOKENS)
        launch(compress_and_insert_kernel)[programs,](
            *rows,
            *tokens,
            *rotation,
            *pages,
            *slots,
            TOKENS=SHORT_TOKENS,
            **window,
            **finish,
            **shape,
        )
        return
    programs = _programs(num_tokens, num_rows, LONG_TOKENS)
    pooled = kv_score.new_empty((num_tokens, head_dim))
    channels = min(CHANNELS, finish["DIM"])
    launch(pool_windows_kernel)[programs, (head_dim + channels - 1) // channels](
        *rows,
        *tokens,
        pages[2],
        *slots,
        pooled,
        CHANNELS=channels,
        TOKENS=LONG_TOKENS,
        **window,
        **_shape_of_part(num_rows, channels),
    )
    for name in ("NUM_ROWS", "WIDTH", "STATE_BLOCK"):
        del window[name]
    launch(insert_pooled_kernel)[programs,](
        pooled,
        num_reqs,
        *tokens,
        *rotation,
        *pages,
        *slots,
        TOKENS=LONG_TOKENS,
        **window,
        **finish,
        num_warps=LONG_WARPS,
    )


def _quantized(layout: str, block_size: int) -> QuantizedLayout | None:
    if layout == MainLayout.tag:
        return MainLayout(block_size)
    return IndexerLayout(block_size) if layout == IndexerLayout.tag else None


def _shape_of_program(num_rows: int, head_dim: int) -> dict[str, int]:
    """How the rows of a short window lie in the threads of a program."""
    dim, rows = triton.next_power_of_2(head_dim), triton.next_power_of_2(num_rows)
    depth = min(rows, DEPTH)
    row_warps = max(dim // (32 * VALUES), 1)
    groups = min(rows // depth, max(MAX_WARPS // row_warps, 1))
    return {
        "DEPTH": depth,
        "GROUPS": groups,
        "CHUNKS": rows // (depth * groups),
        "num_warps": min(row_warps * groups, MAX_WARPS),
    }


def _shape_of_part(num_rows: int, channels: int) -> dict[str, int]:
    """How the rows of some channels of a long window lie in the threads of a program."""
    rows = triton.next_power_of_2(num_rows)
    depth = min(rows, LONG_DEPTH)
    groups = min(rows // depth, max(32 * LONG_WARPS * VALUES // channels, 1))
    return {
        "DEPTH": depth,
        "GROUPS": groups,
        "CHUNKS": rows // (depth * groups),
        "num_warps": LONG_WARPS,
    }


def _programs(num_tokens: int, num_rows: int, tokens: int) -> int:
    """Programs, an odd number where there are fewer than tokens: those that finish a window, an
    even number of tokens apart, then are of different programs."""
    least = SHORT_PROGRAMS if num_rows <= SHORT_WINDOW else LONG_PROGRAMS
    odd = (num_tokens + tokens - 1) // tokens // 2 * 2 + 1
    return torch.sym_min(num_tokens, torch.sym_max(odd, least))
