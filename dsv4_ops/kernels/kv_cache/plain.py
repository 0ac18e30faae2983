"""Kernels and launchers that copy unquantised rows into and out of a cache, bit for bit."""

import torch
import triton
import triton.language as tl

from dsv4_ops.kernels.arguments import listed, strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.paging import locate_positions, locate_slots, word_pointer
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

ROWS = 4
"""Rows per program."""

WIDTH = 512
"""Values of a row per program."""

WARPS = 4


@triton.jit(do_not_specialize=SIZES)
def insert_rows_kernel(
    k, row_stride, dim_stride,
    k_cache, page_stride, cache_row_stride,
    slot_mapping, slot_stride, num_tokens,
    num_blocks, block_size, width,
    WORD_BYTES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    source = k.to(word_pointer(WORD_BYTES), bitcast=True)
    source += token.to(tl.int64)[:, None] * row_stride + dim.to(tl.int64) * dim_stride
    in_batch = token < num_tokens
    words = tl.load(source, mask=in_batch[:, None] & (dim < width), other=0)
    slot = tl.load(slot_mapping + token.to(tl.int64) * slot_stride, mask=in_batch, other=-1)
    page, row, slot_valid = locate_slots(slot, num_blocks, block_size)
    target = k_cache.to(word_pointer(WORD_BYTES), bitcast=True)
    target += (page * page_stride + row * cache_row_stride)[:, None] + dim
    tl.store(target, words, mask=slot_valid[:, None] & (dim < width))


@triton.jit(do_not_specialize=SIZES)
def gather_rows_kernel(
    out, num_rows, offset,
    k_cache, page_stride, cache_row_stride, num_blocks,
    seq_lens, seq_stride,
    gather_lens, gather_stride,
    block_table, table_stride, column_stride, max_blocks,
    block_size, width,
    WORD_BYTES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write every row of a dense result, zeros included."""
    wait_for_previous_kernel()
    request = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = (tl.program_id(2) * WIDTH + tl.arange(0, WIDTH))[None, :]
    index = rows - offset
    count = tl.load(gather_lens + request * gather_stride).to(tl.int64)
    length = tl.load(seq_lens + request * seq_stride).to(tl.int64)
    position = length - count + index
    mask = (index >= 0) & (index < count) & (rows < num_rows)
    table = (block_table, table_stride, column_stride, max_blocks)
    page, row, row_valid = locate_positions(table, request, position, mask, num_blocks, block_size)
    source = k_cache.to(word_pointer(WORD_BYTES), bitcast=True)
    source += (page * page_stride + row * cache_row_stride)[:, None] + dim
    words = tl.load(source, mask=row_valid[:, None] & (dim < width), other=0)
    target = out.to(word_pointer(WORD_BYTES), bitcast=True)
    target += (request * num_rows + rows.to(tl.int64))[:, None] * width + dim
    tl.store(target, words, mask=(rows < num_rows)[:, None] & (dim < width))


def insert_k_cache(
    launch: Launcher, k: torch.Tensor, k_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    # the sizes of pages and rows never change: pass ints, from which Triton infers alignment
    num_tokens, width = slot_mapping.shape[0], int(k_cache.shape[2])
    if num_tokens == 0 or k_cache.numel() == 0:
        return
    grid = ((num_tokens + ROWS - 1) // ROWS, (width + WIDTH - 1) // WIDTH)
    launch(insert_rows_kernel)[grid](
        *strided(k), k_cache, k_cache.stride(0), k_cache.stride(1),
        *strided(slot_mapping), num_tokens, k_cache.shape[0], int(k_cache.shape[1]), width,
        WORD_BYTES=k.element_size(), ROWS=ROWS, WIDTH=WIDTH, num_warps=WARPS,
    )  # fmt: skip


def gather(
    launch: Launcher,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    num_rows: int,
    offset: int,
) -> torch.Tensor:
    """Run ``gather_k_cache`` for a plain cache."""
    num_reqs, width = seq_lens.shape[0], int(k_cache.shape[2])
    out = k_cache.new_empty((num_reqs, num_rows, width))
    if num_reqs == 0 or num_rows == 0 or width == 0:
        return out
    grid = ((num_rows + ROWS - 1) // ROWS, num_reqs, (width + WIDTH - 1) // WIDTH)
    launch(gather_rows_kernel)[grid](
        out, num_rows, offset,
        k_cache, k_cache.stride(0), k_cache.stride(1), k_cache.shape[0],
        *strided(seq_lens, gather_lens), *listed(block_table), int(k_cache.shape[1]), width,
        WORD_BYTES=k_cache.element_size(), ROWS=ROWS, WIDTH=WIDTH, num_warps=WARPS,
    )  # fmt: skip
    return out
