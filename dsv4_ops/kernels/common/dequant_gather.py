"""Gather rows of FP8 caches as bf16: either into a workspace, of which only the gathered rows are
written, or into a dense result, of which all rows are written."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.kernels.arguments import listed, paged, row_format, strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import dequantize  # by name: Inductor copies no modules
from dsv4_ops.kernels.common.paging import locate_positions, prefetch_column
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

WORKSPACE_ROWS, WORKSPACE_WARPS = 8, 2
"""Rows per tile and warps per program of the ragged gather."""

REQUESTS = 32
"""Number of requests whose lengths a program of the ragged gather loads together."""

PROGRAMS = 16 * 132
"""Maximum number of programs of the ragged gather: the number that an H200 runs at once."""


@triton.jit
def _copy_rows(
    target, dim_stride, mask, cache, page, row, row_valid,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Dequantise cache rows, and store the rows that ``mask`` selects at the int16 pointers
    ``target``. Store zeros for rows that are not valid."""
    BLOCK_SIZE: tl.constexpr = FORMAT[0]
    HEAD_DIM: tl.constexpr = FORMAT[1]
    CODE_DIM: tl.constexpr = FORMAT[2]
    QUANT_BLOCK: tl.constexpr = FORMAT[3]
    DATA_BYTES: tl.constexpr = FORMAT[4]
    SCALE_BYTES: tl.constexpr = FORMAT[5]
    CONVERTS: tl.constexpr = FORMAT[7]
    k_cache, page_stride, _ = cache
    group = tl.arange(0, HEAD_DIM // QUANT_BLOCK)[None, :]
    coded = group < CODE_DIM // QUANT_BLOCK
    dim = group[:, :, None] * QUANT_BLOCK + tl.arange(0, QUANT_BLOCK)[None, None, :]
    start = k_cache + page * page_stride
    data = start + row * DATA_BYTES
    scales = (start + BLOCK_SIZE * DATA_BYTES + row * SCALE_BYTES)[:, None]
    scale = tl.load(scales + group, mask=row_valid[:, None] & coded, other=0)
    code_mask = row_valid[:, None, None] & coded[:, :, None]
    codes = tl.load(data[:, None, None] + dim, mask=code_mask, other=0)
    lane = tl.arange(0, HEAD_DIM - CODE_DIM)[None, :]
    rope = (data + CODE_DIM).to(tl.pointer_type(tl.int16), bitcast=True)
    rope_words = tl.load(rope[:, None] + lane, mask=row_valid[:, None], other=0)
    words = dequantize(codes, scale, CONVERTS)
    dst = target[:, None, None] + dim.to(tl.int64) * dim_stride
    tl.store(dst, words, mask=mask[:, None, None] & coded[:, :, None])
    dst = target[:, None] + (CODE_DIM + lane).to(tl.int64) * dim_stride
    tl.store(dst, rope_words, mask=mask[:, None])


@triton.jit(do_not_specialize=SIZES)
def gather_ragged_kernel(
    out, out_stride, out_row_stride, out_dim_stride,
    capacity, offset,
    k_cache, page_stride, num_blocks,
    seq_lens, seq_stride,
    gather_lens, gather_stride,
    block_table, table_stride, column_stride, max_blocks, num_reqs,
    FORMAT: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Gather the last ``gather_lens`` rows of each request (at most ``capacity`` rows) into the
    request's part of a workspace.

    The tiles of ROWS rows of all requests are numbered, and programs take them round-robin. So
    programs share the work evenly in any batch, and the work depends on the gathered rows, not on
    the capacity. WHOLE: all rows of each request are gathered, so the index of a row is its
    position.
    """
    wait_for_previous_kernel()
    BLOCK_SIZE: tl.constexpr = FORMAT[0]
    cache = (k_cache, page_stride, num_blocks)
    table = (block_table, table_stride, column_stride, max_blocks)
    tile = tl.program_id(0)
    if WHOLE:
        prefetch_column(table, num_reqs, tile * ROWS, BLOCK_SIZE)
    first_tile = 0
    first_request = 0
    while first_request < num_reqs:
        requests = first_request + tl.arange(0, REQUESTS)
        in_batch, requests = requests < num_reqs, requests.to(tl.int64)
        counts = tl.load(gather_lens + requests * gather_stride, mask=in_batch, other=0)
        if not WHOLE:
            lengths = tl.load(seq_lens + requests * seq_stride, mask=in_batch, other=0)
        tiles = (tl.minimum(tl.maximum(counts, 0), capacity) + ROWS - 1) // ROWS
        tile_ends = first_tile + tl.cumsum(tiles, 0)
        stop_tile = first_tile + tl.sum(tiles, 0)
        while tile < stop_tile:
            before = tile_ends <= tile
            request = (first_request + tl.sum(before.to(tl.int32), 0)).to(tl.int64)
            request_tile = tl.max(tl.where(before, tile_ends, first_tile), 0)
            index = (tile - request_tile) * ROWS + tl.arange(0, ROWS)
            count = tl.sum(tl.where(requests == request, counts, 0), 0)
            mask = (index < count) & (index < capacity)
            position = index.to(tl.int64)
            if not WHOLE:
                length = tl.sum(tl.where(requests == request, lengths, 0), 0)
                position += length.to(tl.int64) - count
            page, row, row_valid = locate_positions(
                table, request, position, mask, num_blocks, BLOCK_SIZE
            )
            start = out.to(tl.pointer_type(tl.int16), bitcast=True) + request * out_stride
            target = start + (offset + index.to(tl.int64)) * out_row_stride
            _copy_rows(target, out_dim_stride, mask, cache, page, row, row_valid, FORMAT)
            tile += tl.num_programs(0)
        first_tile = stop_tile
        first_request += REQUESTS


@triton.jit(do_not_specialize=SIZES)
def gather_dense_kernel(
    out, num_rows, offset,
    k_cache, page_stride, num_blocks,
    seq_lens, seq_stride,
    gather_lens, gather_stride,
    block_table, table_stride, column_stride, max_blocks,
    FORMAT: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a tile of ROWS rows of a dense result, zeros included.

    WHOLE: all rows of each request are gathered, so the kernel reads the block table without
    waiting for the length of the request."""
    wait_for_previous_kernel()
    BLOCK_SIZE: tl.constexpr = FORMAT[0]
    HEAD_DIM: tl.constexpr = FORMAT[1]
    request = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    index = rows - offset
    count = tl.load(gather_lens + request * gather_stride)
    mask = (index >= 0) & (rows < num_rows)
    position = index.to(tl.int64)
    if not WHOLE:
        mask = mask & (index < count)
        length = tl.load(seq_lens + request * seq_stride)
        position += length.to(tl.int64) - count
    table = (block_table, table_stride, column_stride, max_blocks)
    page, row, row_valid = locate_positions(table, request, position, mask, num_blocks, BLOCK_SIZE)
    row_valid = row_valid & (index < count)
    start = out.to(tl.pointer_type(tl.int16), bitcast=True)
    target = start + (request * num_rows + rows) * HEAD_DIM
    cache = (k_cache, page_stride, num_blocks)
    _copy_rows(target, 1, rows < num_rows, cache, page, row, row_valid, FORMAT)


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
    """Gather into a workspace with ``num_rows`` rows per request. Row ``offset`` of these rows gets
    the first row that is gathered. ``num_reqs`` and ``num_rows - offset`` are positive."""
    main, capacity = MainLayout(block_size), num_rows - offset
    counts = seq_lens if gather_lens is None else gather_lens
    tiles = num_reqs * ((capacity + WORKSPACE_ROWS - 1) // WORKSPACE_ROWS)
    launch(gather_ragged_kernel)[torch.sym_min(tiles, PROGRAMS),](
        out, *strides, capacity, offset,
        *paged(k_cache), *strided(seq_lens, counts), *listed(block_table), num_reqs,
        FORMAT=row_format(launch, main, k_cache), WHOLE=gather_lens is None, ROWS=WORKSPACE_ROWS,
        REQUESTS=REQUESTS, num_warps=WORKSPACE_WARPS,
    )  # fmt: skip
