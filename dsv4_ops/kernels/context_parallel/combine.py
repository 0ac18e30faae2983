"""Launch the merge of attention results between ranks that map each other's memory."""

from __future__ import annotations

import triton
from torch import Tensor

from dsv4_ops.kernels.context_parallel.combine_kernel import merge_ranks
from dsv4_ops.kernels.context_parallel.exchange import PROGRAMS, TILE
from dsv4_ops.kernels.launcher import Launcher

TILE_ROWS = (1, 4, 8)
"""Rows per tile. A call with few rows has small tiles, so that many programs share the rows."""

TWO_RANK_TILE_ROWS = (*TILE_ROWS, 16)
"""Rows per tile with two ranks. For two ranks and at least 4096 rows, tiles of 16 rows are a tenth
faster than tiles of 8; for four ranks, they are a third slower."""

FEW_PROGRAMS = 128
"""A call has the smallest tiles that need at most this many programs. On two H200s, 2048 rows take
11.7 us, and 12.4 us with twice as many programs."""


def row_bytes(out: Tensor) -> int:
    """Return the bytes that a row occupies in a tile."""
    return int(triton.next_power_of_2(out.shape[2]) * out.element_size())


def combine_ranks(
    launch: Launcher,
    out: Tensor,
    lse: Tensor,
    workspace: Tensor,
    rank: int,
    world: int,
    lse_base: str,
    timeout_ns: int,
) -> tuple[Tensor, Tensor]:
    """Merge the results of all ranks for this rank's heads. All ranks make the same calls in the
    same order.

    All ranks map ``workspace``. Before the first call, it holds ``workspace_header``, then zeros. A
    rank that waits longer than ``timeout_ns`` for another rank traps.
    """
    num_tokens, num_heads, width = out.shape
    own_heads = num_heads // world
    out = out if out.stride(2) == 1 else out.contiguous()
    merged = out.new_empty((num_tokens, own_heads, width))
    merged_lse = lse.new_empty((num_tokens, own_heads))
    num_rows = num_tokens * own_heads
    sizes = TWO_RANK_TILE_ROWS if world == 2 else TILE_ROWS
    sizes = [rows for rows in sizes if rows * row_bytes(out) <= TILE]
    min_rows = triton.cdiv(num_rows, FEW_PROGRAMS)
    tile_rows = next((rows for rows in sizes if rows >= min_rows), sizes[-1])
    launch(merge_ranks)[(min(triton.cdiv(num_rows, tile_rows), int(PROGRAMS)),)](
        out, lse, workspace, merged, merged_lse,
        num_rows, own_heads, timeout_ns,
        *out.stride()[:2], *lse.stride(),
        RANK=rank, WORLD=world, WIDTH=width, BLOCK=triton.next_power_of_2(width),
        TILE_ROWS=tile_rows, NATURAL=lse_base == "e",
        num_warps=4 if tile_rows == 1 else 8,
    )  # fmt: skip
    return merged, merged_lse
