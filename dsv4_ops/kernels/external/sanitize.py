"""Small kernels around the calls of FlashMLA and DeepGEMM. Kernels before a call replace invalid
values, which the libraries do not check. Kernels after a call convert the results to our format."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.kernels.arguments import listed, rotation, strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import round_to_bf16  # by name: Inductor copies no modules
from dsv4_ops.kernels.common.rope import load_angles, rotate_pairs_back
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.reference.sanitize import Listed, Prepared

ROPE = MainLayout.head_dim - MainLayout.code_dim
"""Values of a head that inverse RoPE rotates."""

COLUMNS, WARPS = 256, 2
"""Number of list entries per program, and warps."""

FINISHED_HEADS = 16
"""Heads per program of ``finish_heads_kernel``, all of one token."""

COMPACT_COLUMNS, COMPACT_WARPS = 1024, 8
"""Block-table entries per step, and warps, of ``compact_pages_kernel``."""

FILL_COLUMNS = 1024
"""Logits per program of ``fill_absent_kernel``, all of one token."""

_MAX_SINK = tl.constexpr(1e30)
"""Maximum sink that FlashMLA gets. For a row without keys, FlashMLA subtracts the sink from an lse
of inf. With a sink of inf, the difference would be NaN."""


@triton.jit
def store_finite_sink(sink, sink_out, num_heads, lane):
    """Store every head's sink, but at most _MAX_SINK."""
    mask = lane < num_heads
    value = tl.load(sink + lane, mask=mask, other=0.0)
    value = tl.where(value > _MAX_SINK, _MAX_SINK, value)
    tl.store(sink_out + lane, value, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def list_slots_kernel(
    swa_indices, swa_stride, swa_column_stride,
    swa_lens, swa_len_stride, swa_width, swa_blocks,
    swa_out, swa_padded, swa_lens_out,
    extra_indices, extra_stride, extra_column_stride,
    extra_lens, extra_len_stride, extra_width, extra_blocks,
    extra_out, extra_padded, extra_lens_out,
    req_indices, req_stride, num_reqs,
    sink, sink_out, num_heads,
    SWA_BLOCK_SIZE: tl.constexpr, EXTRA_BLOCK_SIZE: tl.constexpr, HAS_EXTRA: tl.constexpr,
    PAGED: tl.constexpr, HAS_SINK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy both lists of a token, with -1 for absent slots, and the length of each list, clamped to
    the list's width. Slots are unsigned here, so that negative slots lie past every block."""
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    swa_tiles = (swa_padded + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(1)
    lane = tl.arange(0, COLUMNS)
    if tile < swa_tiles:
        column = tile * COLUMNS + lane
        length = tl.load(swa_lens + token * swa_len_stride)
        length = tl.minimum(tl.maximum(length, 0), swa_width)
        mask = column < length
        entry = swa_indices + token * swa_stride + column.to(tl.int64) * swa_column_stride
        slot = tl.load(entry, mask=mask, other=-1)
        valid = mask & (slot.to(tl.uint32) // SWA_BLOCK_SIZE < swa_blocks)
        slot = tl.where(valid, slot, -1)
        tl.store(swa_out + token * swa_padded + column, slot, mask=column < swa_padded)
        tl.store(swa_lens_out + token, length, mask=tile == 0)
        if HAS_SINK:
            if (tile == 0) & (token == 0):
                store_finite_sink(sink, sink_out, num_heads, lane)
    elif HAS_EXTRA:
        column = (tile - swa_tiles) * COLUMNS + lane
        length = tl.load(extra_lens + token * extra_len_stride)
        length = tl.minimum(tl.maximum(length, 0), extra_width)
        mask = column < length
        row, offset = token, column
        if PAGED:
            row = tl.load(req_indices + token * req_stride).to(tl.int64)
            is_request = (row >= 0) & (row < num_reqs)
            row = tl.where(is_request, row, 0)
            mask, offset = mask & is_request, column // EXTRA_BLOCK_SIZE
        entry = extra_indices + row * extra_stride + offset.to(tl.int64) * extra_column_stride
        slot = tl.load(entry, mask=mask, other=-1)
        if PAGED:
            fits_int32 = slot.to(tl.uint32) < 2147483648 // EXTRA_BLOCK_SIZE
            valid = mask & fits_int32 & (slot.to(tl.uint32) < extra_blocks)
            slot = tl.where(valid, slot, 0) * EXTRA_BLOCK_SIZE + column % EXTRA_BLOCK_SIZE
        else:
            valid = mask & (slot.to(tl.uint32) // EXTRA_BLOCK_SIZE < extra_blocks)
        slot = tl.where(valid, slot, -1)
        tl.store(extra_out + token * extra_padded + column, slot, mask=column < extra_padded)
        tl.store(extra_lens_out + token, length, mask=tile == swa_tiles)


@triton.jit(do_not_specialize=SIZES)
def finish_heads_kernel(
    out, lse,
    positions, position_stride,
    cos_sin_cache, num_positions,
    num_heads,
    INVERSE_ROPE: tl.constexpr, CLEARS: tl.constexpr,
    ROPE: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Store -inf as the lse of heads without keys. With CLEARS, also store zeros as the values of
    such heads. With INVERSE_ROPE, apply inverse RoPE to the last ROPE values of every head.

    The kernel does not use dependent launch: FlashMLA's combine starts early, and may end before
    the decode has stored the results of tokens with one split."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = head < num_heads
    index = token * num_heads + head
    row_lse = tl.load(lse + index, mask=mask, other=0.0)
    no_key = mask & ((row_lse == float("inf")) | (row_lse == float("-inf")))
    tl.store(lse + index, float("-inf"), mask=no_key)
    if CLEARS:
        if tl.sum(no_key.to(tl.int32)) > 0:
            dst = out + index[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
            tl.store(dst, 0.0, mask=no_key[:, None])
    if INVERSE_ROPE:
        position = tl.load(positions + token * position_stride)
        in_table, cos, sin = load_angles(cos_sin_cache, position, num_positions, ROPE)
        if in_table:
            tail = (HEAD_DIM - ROPE) + tl.arange(0, ROPE)
            dst = out + index[:, None] * HEAD_DIM + tail[None, :]
            values = tl.load(dst, mask=mask[:, None], other=0.0).to(tl.float32)
            even, odd = tl.split(tl.reshape(values, (HEADS, ROPE // 2, 2)))
            left, right = rotate_pairs_back(even, odd, cos[None, :], sin[None, :])
            values = tl.reshape(tl.join(left, right), (HEADS, ROPE))
            tl.store(dst, round_to_bf16(values), mask=mask[:, None])


@triton.jit(do_not_specialize=SIZES)
def list_pages_kernel(
    block_table, table_stride, column_stride, max_blocks, num_reqs, num_blocks,
    req_indices, request_stride,
    lens, lens_stride,
    max_len, out, lens_out,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy the block-table row of a token's request, with block 0 for absent blocks. Copy the
    token's length, at most ``max_len``."""
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    request = tl.load(req_indices + token * request_stride).to(tl.int64)
    is_request = (request >= 0) & (request < num_reqs)
    length = tl.where(is_request, tl.load(lens + token * lens_stride), 0)
    length = tl.minimum(tl.maximum(length, 0), max_len)
    mask = is_request & (column < max_blocks)
    entry = tl.where(is_request, request, 0) * table_stride + column.to(tl.int64) * column_stride
    page = tl.load(block_table + entry, mask=mask, other=0)
    page = tl.where((page >= 0) & (page < num_blocks), page, 0)
    tl.store(out + token * max_blocks + column, page, mask=column < max_blocks)
    tl.store(lens_out + token, length, mask=tl.program_id(1) == 0)


@triton.jit(do_not_specialize=SIZES)
def compact_pages_kernel(
    block_table, table_stride, column_stride, max_blocks, num_reqs, num_blocks,
    req_indices, request_stride,
    lens, lens_stride,
    out, out_columns, lens_out,
    BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the existing blocks of a token's request without gaps, padded with zeros. Store the
    number of the token's rows in these blocks."""
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(req_indices + token * request_stride).to(tl.int64)
    is_request = (request >= 0) & (request < num_reqs)
    entries = block_table + tl.where(is_request, request, 0) * table_stride
    length = tl.where(is_request, tl.load(lens + token * lens_stride), 0).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), tl.cast(max_blocks, tl.int64) * BLOCK_SIZE)
    dst = out + token * out_columns
    lane = tl.arange(0, COLUMNS)
    blocks, rows = (token * 0).to(tl.int32), token * 0
    for first in range(0, ((length + BLOCK_SIZE - 1) // BLOCK_SIZE).to(tl.int32), COLUMNS):
        column = first + lane
        block_rows = length - column.to(tl.int64) * BLOCK_SIZE
        block_rows = tl.minimum(tl.maximum(block_rows, 0), BLOCK_SIZE).to(tl.int32)
        entry = entries + column.to(tl.int64) * column_stride
        page = tl.load(entry, mask=block_rows > 0, other=-1)
        valid = (page >= 0) & (page < num_blocks)
        ones = valid.to(tl.int32)
        tl.store(dst + blocks + tl.cumsum(ones, 0) - 1, page, mask=valid)
        rows += tl.sum(tl.where(valid, block_rows, 0), 0)
        blocks += tl.sum(ones, 0)
    for first in range(blocks, out_columns, COLUMNS):
        column = first + lane
        tl.store(dst + column, 0, mask=column < out_columns)
    tl.store(lens_out + token, rows.to(tl.int32))


@triton.jit(do_not_specialize=SIZES)
def fill_absent_kernel(
    block_table, table_stride, column_stride, num_reqs, num_blocks,
    req_indices, request_stride,
    lens,
    logits, logits_stride, num_columns,
    BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store -inf as the logit of each row that is in an absent block, or beyond the length that the
    library was given. The kernel reads no logit."""
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    request = tl.load(req_indices + token * request_stride).to(tl.int64)
    is_request = (request >= 0) & (request < num_reqs)
    length = tl.load(lens + token)
    mask = is_request & (row < length)
    entry = tl.where(is_request, request, 0) * table_stride
    entry += (row // BLOCK_SIZE).to(tl.int64) * column_stride
    page = tl.load(block_table + entry, mask=mask, other=-1)
    absent = (page < 0) | (page >= num_blocks)
    dst = logits + token * logits_stride + row
    tl.store(dst, float("-inf"), mask=absent & (row < num_columns))


def list_slots(
    launch: Launcher, window: Listed, extra: Listed | None, sink: torch.Tensor | None, multiple: int
) -> Prepared:
    """Launch ``reference.sanitize.list_slots`` as one kernel."""
    indices, lens = window.indices, window.lens
    num_tokens, width = indices.shape
    slots = indices.new_empty((num_tokens, width + -width % multiple))
    swa_lens = lens.new_empty(num_tokens)
    rows, extra_width, requests = window, 0, lens
    extra_slots, extra_lens, padded = slots, swa_lens, 0
    if extra is not None:
        rows, extra_width = extra, extra.width()
        # at least one column, because the first program of a list stores the list's length
        padded = torch.sym_max(extra_width + -extra_width % multiple, multiple)
        extra_slots = indices.new_empty((num_tokens, padded))
        extra_lens = lens.new_empty(num_tokens)
        requests = lens if extra.req_indices is None else extra.req_indices
    sinks = sink_arguments(sink, lens, swa_lens)
    tiles = (slots.shape[1] + COLUMNS - 1) // COLUMNS + (padded + COLUMNS - 1) // COLUMNS
    swa_out, extra_out = (slots, slots.shape[1], swa_lens), (extra_slots, padded, extra_lens)
    launch(list_slots_kernel)[(num_tokens, tiles)](
        *strided(indices, lens), width, window.num_blocks, *swa_out,
        *strided(rows.indices, rows.lens), extra_width, rows.num_blocks, *extra_out,
        *strided(requests), rows.indices.shape[0],
        *sinks,
        SWA_BLOCK_SIZE=window.block_size, EXTRA_BLOCK_SIZE=rows.block_size,
        HAS_EXTRA=extra is not None, PAGED=extra is not None and extra.req_indices is not None,
        HAS_SINK=sink is not None, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    _, finite_sink, _ = sinks
    finite = None if sink is None else finite_sink
    if extra is None:
        return Prepared(slots, swa_lens, None, None, finite)
    return Prepared(slots, swa_lens, extra_slots, extra_lens, finite)


def sink_arguments(
    sink: torch.Tensor | None, read_stand_in: torch.Tensor, written_stand_in: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the sinks, an empty tensor for the finite sinks, and the number of sinks. If ``sink``
    is None, return the two stand-ins and 0."""
    if sink is None:
        return read_stand_in, written_stand_in, 0
    finite = torch.empty_like(sink, memory_format=torch.contiguous_format)
    return sink.contiguous(), finite, sink.shape[0]


def finish_heads(
    launch: Launcher,
    out: torch.Tensor,
    lse: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    *,
    clears: bool = False,
) -> None:
    """Apply ``no_key`` and inverse RoPE to ``out`` and ``lse`` in place, in one kernel.

    ``out`` and ``lse`` are dense; the angles have ``ROPE`` columns. ``clears``: also store zeros
    for heads without keys."""
    num_tokens, num_heads = lse.shape
    rotates = positions is not None and cos_sin_cache is not None
    launch(finish_heads_kernel)[(num_tokens, triton.cdiv(int(num_heads), FINISHED_HEADS))](
        out, lse, *rotation(lse, positions, cos_sin_cache), num_heads,
        INVERSE_ROPE=rotates, CLEARS=clears, ROPE=ROPE, HEAD_DIM=MainLayout.head_dim,
        HEADS=FINISHED_HEADS, num_warps=WARPS,
    )  # fmt: skip


def list_pages(
    launch: Launcher,
    block_table: torch.Tensor,
    req_indices: torch.Tensor,
    lens: torch.Tensor,
    num_blocks: int,
    max_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch ``reference.sanitize.list_pages`` as one kernel."""
    num_tokens, (num_reqs, max_blocks) = lens.shape[0], block_table.shape
    pages = block_table.new_empty((num_tokens, max_blocks))
    page_lens = lens.new_empty(num_tokens)
    # at least one tile, because the first tile stores the length
    tiles = torch.sym_max((max_blocks + COLUMNS - 1) // COLUMNS, 1)
    launch(list_pages_kernel)[(num_tokens, tiles)](
        *listed(block_table), num_reqs, num_blocks, *strided(req_indices, lens),
        max_len, pages, page_lens,
        COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return pages, page_lens


def compact_pages(
    launch: Launcher,
    block_table: torch.Tensor,
    req_indices: torch.Tensor,
    lens: torch.Tensor,
    num_blocks: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch ``reference.sanitize.compact_pages`` as one kernel."""
    num_tokens, (num_reqs, max_blocks) = lens.shape[0], block_table.shape
    # FlashMLA reads the first block of a token even if the token has no keys
    columns = torch.sym_max(max_blocks, 1)
    pages = block_table.new_empty((num_tokens, columns))
    page_lens = lens.new_empty(num_tokens)
    launch(compact_pages_kernel)[(num_tokens,)](
        *listed(block_table), num_reqs, num_blocks, *strided(req_indices, lens),
        pages, columns, page_lens,
        BLOCK_SIZE=block_size, COLUMNS=COMPACT_COLUMNS, num_warps=COMPACT_WARPS,
    )  # fmt: skip
    return pages, page_lens


def fill_absent(
    launch: Launcher,
    logits: torch.Tensor,
    block_table: torch.Tensor,
    req_indices: torch.Tensor,
    page_lens: torch.Tensor,
    num_blocks: int,
    block_size: int,
) -> torch.Tensor:
    """Launch ``reference.sanitize.fill_absent`` as one kernel; write to ``logits``."""
    num_tokens, num_columns = logits.shape
    launch(fill_absent_kernel)[(num_tokens, (num_columns + FILL_COLUMNS - 1) // FILL_COLUMNS)](
        *strided(block_table), block_table.shape[0], num_blocks, *strided(req_indices), page_lens,
        logits, logits.stride(0), num_columns,
        BLOCK_SIZE=block_size, COLUMNS=FILL_COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return logits
