"""Kernels and launchers of the lightning indexer's key cache."""

from functools import partial

import torch
import triton
import triton.language as tl

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.types import INT32_MAX
from dsv4_ops.kernels.arguments import listed, paged, strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.paging import locate_positions, prefetch_column
from dsv4_ops.kernels.common.quantize_insert import insert
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

INSERT_TOKENS = 16
"""Tokens per program of the insert."""

quantize_and_insert_indexer_k = partial(
    insert, "quantize_and_insert_indexer_k", IndexerLayout, INSERT_TOKENS
)

ROWS, WARPS = 32, 1
"""Rows and warps per program of the gather. With one warp, reductions stay within the warp."""

PROBES = 32
"""Number of request boundaries that a program of the gather loads together."""

_MIN_INT32 = tl.constexpr(-INT32_MAX - 1)


@triton.jit
def _count_boundaries(cu_seq_lens, cu_stride, index, low, high):
    """For each row, count the request boundaries at or before the row. Every count is between
    ``low`` and ``high``."""
    half = 1
    while half * 2 <= high - low:
        half *= 2
    count = tl.zeros_like(index) + low
    while half > 0:
        candidate = count + half
        in_range = candidate <= high
        boundary = tl.load(
            cu_seq_lens + (candidate - 1).to(tl.int64) * cu_stride, mask=in_range, other=0
        )
        count = tl.where(in_range & (boundary <= index), candidate, count)
        half //= 2
    return count


@triton.jit(do_not_specialize=SIZES)
def gather_indexer_kernel(
    out, scales_out, num_rows,
    k_cache, page_stride, num_blocks,
    cu_seq_lens, cu_stride, num_reqs,
    block_table, table_stride, column_stride, max_blocks,
    BLOCK_SIZE: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROWS: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """Gather a tile of ROWS rows. To find the requests of these rows, the program loads PROBES
    request boundaries at once: all of them or, if there are more, evenly spaced ones. Each row
    searches for its request only if a boundary may lie inside the tile."""
    wait_for_previous_kernel()
    begin = tl.program_id(0) * ROWS
    index = begin + tl.arange(0, ROWS)
    boundaries = num_reqs + 1
    step = (boundaries + PROBES - 1) // PROBES
    probe = (tl.arange(0, PROBES) + 1) * step
    in_range = probe <= boundaries
    boundary = tl.load(cu_seq_lens + (probe - 1).to(tl.int64) * cu_stride, mask=in_range, other=0)
    table = (block_table, table_stride, column_stride, max_blocks)
    prefetch_column(table, num_reqs, begin, BLOCK_SIZE)
    before = in_range & (boundary <= begin)
    low = tl.sum(before.to(tl.int32), 0) * step
    high = tl.sum((in_range & (boundary <= begin + ROWS - 1)).to(tl.int32), 0) * step + step - 1
    high = tl.minimum(high, boundaries)
    count = tl.zeros_like(index) + low
    first = tl.zeros_like(index) + tl.max(tl.where(before, boundary, _MIN_INT32), 0)
    if low < high:
        count = _count_boundaries(cu_seq_lens, cu_stride, index, low, high)
        first = tl.load(cu_seq_lens + (tl.maximum(count, 1) - 1).to(tl.int64) * cu_stride)
    in_out = index < num_rows
    has_request = (count > 0) & (count <= num_reqs) & in_out
    request = tl.where(has_request, count - 1, 0).to(tl.int64)
    position = index.to(tl.int64) - first
    page, row, row_valid = locate_positions(
        table, request, position, has_request, num_blocks, BLOCK_SIZE
    )
    start = k_cache + page * page_stride
    lane = tl.arange(0, DATA_BYTES)[None, :]
    codes = tl.load(
        (start + row * DATA_BYTES)[:, None] + lane,
        mask=row_valid[:, None],
        other=0,
        eviction_policy="evict_first",
    )
    scales = (start + BLOCK_SIZE * DATA_BYTES + row * SCALE_BYTES).to(
        tl.pointer_type(tl.int32), bitcast=True
    )
    scale = tl.load(scales, mask=row_valid, other=0, eviction_policy="evict_first")
    dst = index.to(tl.int64)
    tl.store(out + dst[:, None] * DATA_BYTES + lane, codes, mask=in_out[:, None])
    tl.store(scales_out.to(tl.pointer_type(tl.int32), bitcast=True) + dst, scale, mask=in_out)


def gather_indexer_k(
    launch: Launcher,
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
        codes, scales, num_rows,
        *paged(k_cache),
        *strided(cu_seq_lens), block_table.shape[0], *listed(block_table),
        BLOCK_SIZE=block_size, DATA_BYTES=indexer.data_bytes, SCALE_BYTES=indexer.scale_bytes,
        ROWS=ROWS, PROBES=PROBES, num_warps=WARPS,
    )  # fmt: skip
    return codes, scales
