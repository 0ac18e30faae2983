"""Gathers of FP8 rows: of the wanted rows into a workspace, and of a dense result."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.fp8 import dequantize  # by name: Inductor copies kernels, not modules
from dsv4_ops.kernels.common.paging import locate_positions, prefetch_column


@triton.jit
def _copy_rows(
    target, dim_stride, wanted, cache, page, row, exists,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Dequantise cache rows into the wanted rows at ``target``, pointers to int16; zeros for rows
    that do not exist."""
    HEAD_DIM: tl.constexpr = FORMAT[1]
    CODE_DIM: tl.constexpr = FORMAT[2]
    QUANT_BLOCK: tl.constexpr = FORMAT[3]
    DATA_BYTES: tl.constexpr = FORMAT[4]
    k_cache, page_stride, _ = cache
    group = tl.arange(0, HEAD_DIM // QUANT_BLOCK)[None, :]
    coded = group < CODE_DIM // QUANT_BLOCK
    dim = group[:, :, None] * QUANT_BLOCK + tl.arange(0, QUANT_BLOCK)[None, None, :]
    start = k_cache + page * page_stride
    data = start + row * DATA_BYTES
    scales = (start + FORMAT[0] * DATA_BYTES + row * FORMAT[5])[:, None]
    scale = tl.load(scales + group, mask=exists[:, None] & coded, other=0)
    there = exists[:, None, None] & coded[:, :, None]
    codes = tl.load(data[:, None, None] + dim, mask=there, other=0)
    lane = tl.arange(0, HEAD_DIM - CODE_DIM)[None, :]
    rope = (data + CODE_DIM).to(tl.pointer_type(tl.int16), bitcast=True)
    rope_words = tl.load(rope[:, None] + lane, mask=exists[:, None], other=0)
    words = dequantize(codes, scale)
    dst = target[:, None, None] + dim.to(tl.int64) * dim_stride
    tl.store(dst, words, mask=wanted[:, None, None] & coded[:, :, None])
    dst = target[:, None] + (CODE_DIM + lane).to(tl.int64) * dim_stride
    tl.store(dst, rope_words, mask=wanted[:, None])


@triton.jit
def gather_wanted_kernel(
    out, out_stride, out_row_stride, out_dim_stride,
    capacity, offset,
    k_cache, page_stride, num_blocks,
    seq_lens, seq_stride,
    gather_lens, gather_stride,
    block_table, table_stride, column_stride, max_blocks, num_reqs,
    FORMAT: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS wanted rows, numbered through all requests, dealt to the programs in turn: the
    work is even however ragged the batch, and grows with the wanted rows, not with the capacity.

    ``WHOLE``: all rows of a request are wanted, so that a row is a position."""
    cache = (k_cache, page_stride, num_blocks)
    table = (block_table, table_stride, column_stride, max_blocks)
    tile = tl.program_id(0)
    if WHOLE:
        prefetch_column(table, num_reqs, tile * ROWS, FORMAT[0])
    first = 0
    begin = 0
    while begin < num_reqs:
        requests = begin + tl.arange(0, REQUESTS)
        known, requests = requests < num_reqs, requests.to(tl.int64)
        wanted = tl.load(gather_lens + requests * gather_stride, mask=known, other=0)
        if not WHOLE:
            lengths = tl.load(seq_lens + requests * seq_stride, mask=known, other=0)
        tiles = (tl.minimum(tl.maximum(wanted, 0), capacity) + ROWS - 1) // ROWS
        ends = first + tl.cumsum(tiles, 0)
        last = first + tl.sum(tiles, 0)
        while tile < last:
            done = ends <= tile
            request = (begin + tl.sum(done.to(tl.int32), 0)).to(tl.int64)
            index = (tile - tl.max(tl.where(done, ends, first), 0)) * ROWS + tl.arange(0, ROWS)
            count = tl.sum(tl.where(requests == request, wanted, 0), 0)
            inside = (index < count) & (index < capacity)
            position = index.to(tl.int64)
            if not WHOLE:
                length = tl.sum(tl.where(requests == request, lengths, 0), 0)
                position += length.to(tl.int64) - count
            page, row, exists = locate_positions(
                table, request, position, inside, num_blocks, FORMAT[0]
            )
            start = out.to(tl.pointer_type(tl.int16), bitcast=True) + request * out_stride
            target = start + (offset + index.to(tl.int64)) * out_row_stride
            _copy_rows(target, out_dim_stride, inside, cache, page, row, exists, FORMAT)
            tile += tl.num_programs(0)
        first = last
        begin += REQUESTS


@triton.jit
def gather_all_kernel(
    out, num_rows, offset,
    k_cache, page_stride, num_blocks,
    seq_lens, seq_stride,
    gather_lens, gather_stride,
    block_table, table_stride, column_stride, max_blocks,
    FORMAT: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Every row of a dense result, zeros included: one tile per program.

    ``WHOLE``: all rows of a request are wanted, so that blocks are looked up without its length."""
    request = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    index = rows - offset
    count = tl.load(gather_lens + request * gather_stride)
    wanted = (index >= 0) & (rows < num_rows)
    position = index.to(tl.int64)
    if not WHOLE:
        wanted = wanted & (index < count)
        length = tl.load(seq_lens + request * seq_stride)
        position += length.to(tl.int64) - count
    table = (block_table, table_stride, column_stride, max_blocks)
    page, row, exists = locate_positions(table, request, position, wanted, num_blocks, FORMAT[0])
    exists = exists & (index < count)
    start = out.to(tl.pointer_type(tl.int16), bitcast=True)
    target = start + (request * num_rows + rows) * FORMAT[1]
    cache = (k_cache, page_stride, num_blocks)
    _copy_rows(target, 1, rows < num_rows, cache, page, row, exists, FORMAT)
