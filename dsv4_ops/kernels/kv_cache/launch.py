"""Launchers of the FP8 key cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.kernels.arguments import listed, paged, row_format, strided
from dsv4_ops.kernels.kv_cache import plain
from dsv4_ops.kernels.kv_cache.dequant_gather import gather_dense_kernel, gather_ragged_kernel
from dsv4_ops.kernels.kv_cache.quantize_insert import insert
from dsv4_ops.kernels.launcher import Launcher

INSERT_TOKENS = 4
"""Tokens per program of the insert. Each thread has 8 values of a token."""

quantize_and_insert_k_cache = partial(
    insert, "quantize_and_insert_k_cache", MainLayout, INSERT_TOKENS
)

WORKSPACE_ROWS, WORKSPACE_WARPS = 8, 2
"""Rows per tile and warps per program of the ragged gather."""

REQUESTS = 32
"""Requests whose lengths a program of the ragged gather loads together."""

PROGRAMS = 16 * 132
"""Maximum programs of the ragged gather: as many as an H200 runs at once."""

DENSE_ROWS, DENSE_WARPS = 4, 2
"""Rows and warps per program of the dense gather."""


def dequantize_and_gather_k_cache(
    launch: Launcher,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    *,
    block_size: int,
    offset: int,
    layout: str,
) -> None:
    main = MainLayout(block_size)
    Checks("dequantize_and_gather_k_cache").page_start("k_cache", k_cache, main)
    num_reqs, num_rows = out.shape[0], out.shape[1]
    if num_reqs == 0 or num_rows <= offset:
        return
    gather_ragged(
        launch, out, out.stride(), num_rows, k_cache, seq_lens, gather_lens, block_table,
        num_reqs=num_reqs, block_size=block_size, offset=offset,
    )  # fmt: skip


def gather_ragged(
    launch: Launcher,
    out: torch.Tensor,
    strides: Sequence[int],
    num_rows: int,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    *,
    num_reqs: int,
    block_size: int,
    offset: int,
) -> None:
    """Gather into a workspace with ``num_rows`` rows per request, from row ``offset`` on.
    ``num_reqs`` and ``num_rows - offset`` are positive."""
    main, capacity = MainLayout(block_size), num_rows - offset
    counts = seq_lens if gather_lens is None else gather_lens
    tiles = num_reqs * ((capacity + WORKSPACE_ROWS - 1) // WORKSPACE_ROWS)
    launch(gather_ragged_kernel)[torch.sym_min(tiles, PROGRAMS),](
        out, *strides, capacity, offset,
        *paged(k_cache), *strided(seq_lens, counts), *listed(block_table), num_reqs,
        FORMAT=row_format(launch, main, k_cache), WHOLE=gather_lens is None, ROWS=WORKSPACE_ROWS,
        REQUESTS=REQUESTS, num_warps=WORKSPACE_WARPS,
    )  # fmt: skip


def gather_k_cache(
    launch: Launcher,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    *,
    block_size: int,
    num_rows: int,
    offset: int,
    layout: str,
) -> torch.Tensor:
    counts = seq_lens if gather_lens is None else gather_lens
    if layout == "plain":
        return plain.gather(
            launch, k_cache, seq_lens, counts, block_table, num_rows=num_rows, offset=offset
        )
    main = MainLayout(block_size)
    Checks("gather_k_cache").page_start("k_cache", k_cache, main)
    num_reqs = seq_lens.shape[0]
    out = k_cache.new_empty((num_reqs, num_rows, main.head_dim), dtype=torch.bfloat16)
    if num_reqs == 0 or num_rows == 0:
        return out
    launch(gather_dense_kernel)[(num_rows + DENSE_ROWS - 1) // DENSE_ROWS, num_reqs](
        out, num_rows, offset,
        *paged(k_cache), *strided(seq_lens, counts), *listed(block_table),
        FORMAT=row_format(launch, main, k_cache), WHOLE=gather_lens is None, ROWS=DENSE_ROWS,
        num_warps=DENSE_WARPS,
    )  # fmt: skip
    return out
