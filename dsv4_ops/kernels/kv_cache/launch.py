"""Launchers of the FP8 key cache."""

from __future__ import annotations

from functools import partial

import torch

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.kernels.arguments import listed, paged, row_format, strided
from dsv4_ops.kernels.common.dequant_gather import gather_dense_kernel, gather_ragged
from dsv4_ops.kernels.common.quantize_insert import insert
from dsv4_ops.kernels.kv_cache import plain
from dsv4_ops.kernels.launcher import Launcher

INSERT_TOKENS = 4
"""Tokens per program of the insert. Each thread has 8 values of a token."""

quantize_and_insert_k_cache = partial(
    insert, "quantize_and_insert_k_cache", MainLayout, INSERT_TOKENS
)

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
