"""Launches the merge of ranks that map each other's memory."""

from __future__ import annotations

import triton
from torch import Tensor

from dsv4_ops.kernels.context_parallel.combine_kernel import merge_ranks
from dsv4_ops.kernels.context_parallel.exchange import PROGRAMS, TILE
from dsv4_ops.kernels.launcher import Launcher

TILE_ROWS = (1, 4, 8)
"""Rows of a tile: few where there are few rows, so that many programs send them."""

TILE_ROWS_OF_TWO = (*TILE_ROWS, 16)
"""Those of two ranks, a tenth faster from 4096 rows on; of four they are a third slower."""

FEW_PROGRAMS = 128
"""Who has tiles of fewer rows for them takes these: of two H200s 2048 rows take 11.7 us in as many
programs and 12.4 in twice as many."""


def row_bytes(out: Tensor) -> int:
    """Bytes of the tile that a row takes."""
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
    """Merge what all ranks have of this rank's heads; all ranks make the same calls in one order.

    ``workspace`` is mapped by all ranks, and holds ``workspace_header`` and zeros before the first
    call. A rank that waits longer than ``timeout_ns`` for another traps.
    """
    num_tokens, num_heads, width = out.shape
    own = num_heads // world
    out = out if out.stride(2) == 1 else out.contiguous()
    merged = out.new_empty((num_tokens, own, width))
    merged_lse = lse.new_empty((num_tokens, own))
    num_rows = num_tokens * own
    tiles = TILE_ROWS_OF_TWO if world == 2 else TILE_ROWS
    fitting = [rows for rows in tiles if rows * row_bytes(out) <= TILE]
    wanted = triton.cdiv(num_rows, FEW_PROGRAMS)
    tile_rows = next((rows for rows in fitting if rows >= wanted), fitting[-1])
    launch(merge_ranks)[(min(triton.cdiv(num_rows, tile_rows), int(PROGRAMS)),)](
        out, lse, workspace, merged, merged_lse,
        num_rows, own, timeout_ns,
        *out.stride()[:2], *lse.stride(),
        RANK=rank, WORLD=world, WIDTH=width, BLOCK=triton.next_power_of_2(width),
        TILE_ROWS=tile_rows, NATURAL=lse_base == "e",
        num_warps=4 if tile_rows == 1 else 8,
    )  # fmt: skip
    return merged, merged_lse
