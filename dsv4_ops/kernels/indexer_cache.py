"""Kernels and launchers of the lightning indexer's key cache."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.types import search_steps
from dsv4_ops.kernels.insert import insert
from dsv4_ops.kernels.launch import Launch
from dsv4_ops.kernels.pages import locate_positions

INSERT_TOKENS = 16
"""Tokens per program of the insert."""

ROWS = 64
"""Rows per program of the gather."""

WARPS = 4


def quantize_and_insert_indexer_k(
    launch: Launch,
    k: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    block_size: int,
    layout: str,
) -> None:
    indexer = IndexerLayout(block_size)
    checks = Checks("quantize_and_insert_indexer_k")
    insert(
        launch, checks, k, k_cache, slot_mapping, indexer, tokens=INSERT_TOKENS, float_scales=True
    )


@triton.jit
def gather_indexer_kernel(
    out,
    scales_out,
    num_rows,
    k_cache,
    page_stride,
    num_blocks,
    cu_seq_lens,
    cu_stride,
    num_reqs,
    block_table,
    table_stride,
    column_stride,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # boundaries at or before the row: a branch-free binary search
    count = tl.zeros((ROWS,), tl.int32)
    for step in range(STEPS):  # not unrolled: torch follows every path from a load to an argument
        candidate = count + (1 << (STEPS - 1 - step))
        known = candidate <= num_reqs + 1
        boundary = tl.load(
            cu_seq_lens + (candidate - 1).to(tl.int64) * cu_stride, mask=known, other=0
        )
        count = tl.where(known & (boundary <= index), candidate, count)
    wanted = (count > 0) & (count <= num_reqs) & (index < num_rows)
    request = tl.where(wanted, count - 1, 0).to(tl.int64)
    first = tl.load(cu_seq_lens + request * cu_stride)
    page, row, exists = locate_positions(
        block_table,
        table_stride,
        column_stride,
        request,
        index.to(tl.int64) - first,
        wanted,
        max_blocks,
        num_blocks,
        BLOCK_SIZE,
    )
    start = k_cache + page * page_stride
    lane = tl.arange(0, DATA_BYTES)[None, :]
    codes = tl.load((start + row * DATA_BYTES)[:, None] + lane, mask=exists[:, None], other=0)
    scales = start + BLOCK_SIZE * DATA_BYTES + row * SCALE_BYTES
    scale = tl.load(scales.to(tl.pointer_type(tl.int32), bitcast=True), mask=exists, other=0)
    target = index.to(tl.int64)
    there = index < num_rows
    tl.store(out + target[:, None] * DATA_BYTES + lane, codes, mask=there[:, None])
    tl.store(scales_out.to(tl.pointer_type(tl.int32), bitcast=True) + target, scale, mask=there)


def gather_indexer_k(
    launch: Launch,
    k_cache: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
    num_rows: int,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    indexer = IndexerLayout(block_size)
    Checks("gather_indexer_k").page_start("k_cache", k_cache, indexer)
    codes = k_cache.new_empty((num_rows, indexer.head_dim))
    scales = k_cache.new_empty((num_rows,), dtype=torch.float32)
    if num_rows == 0:
        return codes, scales
    launch(gather_indexer_kernel)[(num_rows + ROWS - 1) // ROWS,](
        codes,
        scales,
        num_rows,
        k_cache,
        k_cache.stride(0),
        k_cache.shape[0],
        cu_seq_lens,
        cu_seq_lens.stride(0),
        block_table.shape[0],
        block_table,
        block_table.stride(0),
        block_table.stride(1),
        block_table.shape[1],
        BLOCK_SIZE=block_size,
        DATA_BYTES=indexer.data_bytes,
        SCALE_BYTES=indexer.scale_bytes,
        STEPS=search_steps(None),
        ROWS=ROWS,
        num_warps=WARPS,
    )
    return codes, scales
