"""Launcher of attention over the expanded keys and values of ragged requests."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.kernels.mla_context.prefill_kernel import mla_prefill_kernel

_LARGE_TILE, _SMALL_TILE = (128, 64, 2, 8), (64, 32, 2, 4)
"""Queries, keys, stages and warps of a tile. With V3's sizes, the tiles need 128 and 64 KiB of
shared memory."""


def mla_prefill(
    launch: Launcher,
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    cu_seq_lens: Tensor,
    softmax_scale: float,
    causal: bool,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, value_dim = q.shape[0], int(q.shape[1]), int(v.shape[2])
    nope_dim, rope_dim = int(k_nope.shape[2]), int(k_pe.shape[1])
    num_reqs = query_start_loc.shape[0] - 1
    out = q.new_empty((num_tokens, num_heads, value_dim))
    lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
    target = launch.target(q.device)
    queries, keys, stages, warps = _LARGE_TILE if target.large_tiles else _SMALL_TILE
    # two more spans than requests: tokens before the first request, tokens after the last one
    tiles = num_tokens // queries + num_reqs + 2
    launch(mla_prefill_kernel)[tiles, num_heads](
        *strided(q, k_nope, k_pe, v, query_start_loc, cu_seq_lens),
        out, lse, num_tokens, v.shape[0], num_reqs,
        SOFTMAX_SCALE=softmax_scale, CAUSAL=causal, NOPE_DIM=nope_dim, ROPE_DIM=rope_dim,
        VALUE_DIM=value_dim,
        NOPE=_tile_width(nope_dim), ROPE=_tile_width(rope_dim), VALUE=_tile_width(value_dim),
        QUERIES=queries, KEYS=keys, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out, lse


def _tile_width(size: int) -> int:
    """Return the columns of a tile for ``size`` values: a power of two, at least 16 for tl.dot."""
    width: int = max(16, triton.next_power_of_2(size))
    return width
