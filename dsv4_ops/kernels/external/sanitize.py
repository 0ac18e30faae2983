"""What FlashMLA and DeepGEMM do not check, checked before they run, and their results as ours
after: one small kernel each."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.kernels.arguments import listed, rotation, strided
from dsv4_ops.kernels.common.fp8 import round_to_bf16  # by name: Inductor copies kernels
from dsv4_ops.kernels.common.rope import load_angles, rotate_pairs_back
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.reference.sanitize import Listed, Prepared

ROPE = MainLayout.head_dim - MainLayout.code_dim
"""Values of a head that inverse RoPE rotates."""

COLUMNS, WARPS = 256, 2
"""Entries of a list per program."""

FINISHED_HEADS = 16
"""Heads of a token per program that finishes them."""

COMPACTED, COMPACTING_WARPS = 1024, 8
"""Entries of a block table that a program takes at a time, and its warps."""

FILLED = 1024
"""Logits of a token per program."""

_LARGEST_SINK = tl.constexpr(1e30)
"""Instead of inf, which FlashMLA subtracts from the inf that is its lse of no key."""


@triton.jit
def store_finite(sink, sink_out, num_heads, lane):
    """A finite sink for every head, by one program."""
    given = lane < num_heads
    value = tl.load(sink + lane, mask=given, other=0.0)
    value = tl.where(value > _LARGEST_SINK, _LARGEST_SINK, value)
    tl.store(sink_out + lane, value, mask=given)


@triton.jit
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
    """Both lists of a token with -1 for what does not count, and how many entries may; unsigned, a
    slot below 0 is past every block."""
    token = tl.program_id(0).to(tl.int64)
    swa_tiles = (swa_padded + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(1)
    lane = tl.arange(0, COLUMNS)
    if tile < swa_tiles:
        column = tile * COLUMNS + lane
        length = tl.load(swa_lens + token * swa_len_stride)
        length = tl.minimum(tl.maximum(length, 0), swa_width)
        wanted = column < length
        entry = swa_indices + token * swa_stride + column.to(tl.int64) * swa_column_stride
        slot = tl.load(entry, mask=wanted, other=-1)
        exists = wanted & (slot.to(tl.uint32) // SWA_BLOCK_SIZE < swa_blocks)
        slot = tl.where(exists, slot, -1)
        tl.store(swa_out + token * swa_padded + column, slot, mask=column < swa_padded)
        tl.store(swa_lens_out + token, length, mask=tile == 0)
        if HAS_SINK:
            if (tile == 0) & (token == 0):
                store_finite(sink, sink_out, num_heads, lane)
    elif HAS_EXTRA:
        column = (tile - swa_tiles) * COLUMNS + lane
        length = tl.load(extra_lens + token * extra_len_stride)
        length = tl.minimum(tl.maximum(length, 0), extra_width)
        wanted = column < length
        row, offset = token, column
        if PAGED:
            row = tl.load(req_indices + token * req_stride).to(tl.int64)
            real = (row >= 0) & (row < num_reqs)
            row, wanted, offset = tl.where(real, row, 0), wanted & real, column // EXTRA_BLOCK_SIZE
        entry = extra_indices + row * extra_stride + offset.to(tl.int64) * extra_column_stride
        slot = tl.load(entry, mask=wanted, other=-1)
        if PAGED:
            fits = slot.to(tl.uint32) < 2147483648 // EXTRA_BLOCK_SIZE
            exists = wanted & fits & (slot.to(tl.uint32) < extra_blocks)
            slot = tl.where(exists, slot, 0) * EXTRA_BLOCK_SIZE + column % EXTRA_BLOCK_SIZE
        else:
            exists = wanted & (slot.to(tl.uint32) // EXTRA_BLOCK_SIZE < extra_blocks)
        slot = tl.where(exists, slot, -1)
        tl.store(extra_out + token * extra_padded + column, slot, mask=column < extra_padded)
        tl.store(extra_lens_out + token, length, mask=tile == swa_tiles)


@triton.jit
def finish_heads_kernel(
    out, lse,
    positions, position_stride,
    cos_sin_cache, num_positions,
    num_heads,
    INVERSE_ROPE: tl.constexpr, CLEARS: tl.constexpr,
    ROPE: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """An lse of no key is -inf, and with ``CLEARS`` its values are zeros; inverse RoPE of the last
    ROPE values of every head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    given = head < num_heads
    index = token * num_heads + head
    logs = tl.load(lse + index, mask=given, other=0.0)
    absent = given & ((logs == float("inf")) | (logs == float("-inf")))
    tl.store(lse + index, float("-inf"), mask=absent)
    if CLEARS:
        if tl.sum(absent.to(tl.int32)) > 0:
            values = out + index[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
            tl.store(values, 0.0, mask=absent[:, None])
    if INVERSE_ROPE:
        position = tl.load(positions + token * position_stride)
        known, cos, sin = load_angles(cos_sin_cache, position, num_positions, ROPE)
        if known:
            tail = (HEAD_DIM - ROPE) + tl.arange(0, ROPE)
            dst = out + index[:, None] * HEAD_DIM + tail[None, :]
            values = tl.load(dst, mask=given[:, None], other=0.0).to(tl.float32)
            even, odd = tl.split(tl.reshape(values, (HEADS, ROPE // 2, 2)))
            left, right = rotate_pairs_back(even, odd, cos[None, :], sin[None, :])
            values = tl.reshape(tl.join(left, right), (HEADS, ROPE))
            tl.store(dst, round_to_bf16(values), mask=given[:, None])


@triton.jit
def list_pages_kernel(
    block_table, table_stride, column_stride, max_blocks, num_reqs, num_blocks,
    req_indices, request_stride,
    lens, lens_stride,
    most, out, lens_out,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Blocks of a token's request, block 0 for those that do not exist, and its rows."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    request = tl.load(req_indices + token * request_stride).to(tl.int64)
    real = (request >= 0) & (request < num_reqs)
    length = tl.where(real, tl.load(lens + token * lens_stride), 0)
    length = tl.minimum(tl.maximum(length, 0), most)
    inside = real & (column < max_blocks)
    entry = tl.where(real, request, 0) * table_stride + column.to(tl.int64) * column_stride
    page = tl.load(block_table + entry, mask=inside, other=0)
    page = tl.where((page >= 0) & (page < num_blocks), page, 0)
    tl.store(out + token * max_blocks + column, page, mask=column < max_blocks)
    tl.store(lens_out + token, length, mask=tl.program_id(1) == 0)


@triton.jit
def compact_pages_kernel(
    block_table, table_stride, column_stride, max_blocks, num_reqs, num_blocks,
    req_indices, request_stride,
    lens, lens_stride,
    out, out_columns, lens_out,
    BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Blocks of a token's request that exist, one behind the other, with zeros behind them, and how
    many of its rows are on them."""
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(req_indices + token * request_stride).to(tl.int64)
    real = (request >= 0) & (request < num_reqs)
    row = block_table + tl.where(real, request, 0) * table_stride
    length = tl.where(real, tl.load(lens + token * lens_stride), 0).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), tl.cast(max_blocks, tl.int64) * BLOCK_SIZE)
    target = out + token * out_columns
    lane = tl.arange(0, COLUMNS)
    blocks, rows = (token * 0).to(tl.int32), token * 0
    for first in range(0, ((length + BLOCK_SIZE - 1) // BLOCK_SIZE).to(tl.int32), COLUMNS):
        column = first + lane
        held = length - column.to(tl.int64) * BLOCK_SIZE
        held = tl.minimum(tl.maximum(held, 0), BLOCK_SIZE).to(tl.int32)
        page = tl.load(row + column.to(tl.int64) * column_stride, mask=held > 0, other=-1)
        exists = (page >= 0) & (page < num_blocks)
        counts = exists.to(tl.int32)
        tl.store(target + blocks + tl.cumsum(counts, 0) - 1, page, mask=exists)
        rows += tl.sum(tl.where(exists, held, 0), 0)
        blocks += tl.sum(counts, 0)
    for first in range(blocks, out_columns, COLUMNS):
        column = first + lane
        tl.store(target + column, 0, mask=column < out_columns)
    tl.store(lens_out + token, rows.to(tl.int32))


@triton.jit
def fill_absent_kernel(
    block_table, table_stride, column_stride, num_reqs, num_blocks,
    req_indices, request_stride,
    lens,
    logits, logits_stride, num_columns,
    BLOCK_SIZE: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    """-inf for rows past the lengths that the library had, and in blocks that do not exist. Logits
    are not read."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * FILLED + tl.arange(0, FILLED)
    request = tl.load(req_indices + token * request_stride).to(tl.int64)
    real = (request >= 0) & (request < num_reqs)
    count = tl.load(lens + token)
    seen = real & (row < count)
    entry = tl.where(real, request, 0) * table_stride
    entry += (row // BLOCK_SIZE).to(tl.int64) * column_stride
    page = tl.load(block_table + entry, mask=seen, other=-1)
    absent = (page < 0) | (page >= num_blocks)
    dst = logits + token * logits_stride + row
    tl.store(dst, float("-inf"), mask=absent & (row < num_columns))


def list_slots(
    launch: Launcher, window: Listed, extra: Listed | None, sink: torch.Tensor | None, multiple: int
) -> Prepared:
    """``reference.sanitize.list_slots`` as one kernel."""
    indices, lens = window.indices, window.lens
    num_tokens, width = indices.shape
    slots = indices.new_empty((num_tokens, width + -width % multiple))
    swa_lens = lens.new_empty(num_tokens)
    more, more_width, requests = window, 0, lens
    extra_slots, extra_lens, padded = slots, swa_lens, 0
    if extra is not None:
        more, more_width = extra, extra.width()
        # at least a block: of a list of no columns nobody would store the length
        padded = torch.sym_max(more_width + -more_width % multiple, multiple)
        extra_slots = indices.new_empty((num_tokens, padded))
        extra_lens = lens.new_empty(num_tokens)
        requests = lens if extra.req_indices is None else extra.req_indices
    sinks = sinks_of(sink, lens, swa_lens)
    tiles = (slots.shape[1] + COLUMNS - 1) // COLUMNS + (padded + COLUMNS - 1) // COLUMNS
    swa_out, extra_out = (slots, slots.shape[1], swa_lens), (extra_slots, padded, extra_lens)
    launch(list_slots_kernel)[(num_tokens, tiles)](
        *strided(indices, lens), width, window.num_blocks, *swa_out,
        *strided(more.indices, more.lens), more_width, more.num_blocks, *extra_out,
        *strided(requests), more.indices.shape[0],
        *sinks,
        SWA_BLOCK_SIZE=window.block_size, EXTRA_BLOCK_SIZE=more.block_size,
        HAS_EXTRA=extra is not None, PAGED=extra is not None and extra.req_indices is not None,
        HAS_SINK=sink is not None, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    finite = None if sink is None else sinks[1]
    if extra is None:
        return Prepared(slots, swa_lens, None, None, finite)
    return Prepared(slots, swa_lens, extra_slots, extra_lens, finite)


def sinks_of(
    sink: torch.Tensor | None, read: torch.Tensor, written: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Sinks, where their finite values go, and how many there are; stand-ins for none."""
    if sink is None:
        return read, written, 0
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
    """``no_key``, with ``clears`` zeros where there is none, and inverse RoPE as one kernel that
    writes to ``out`` and ``lse``, both dense; of angles of ``ROPE`` columns."""
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
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.sanitize.list_pages`` as one kernel."""
    num_tokens, (num_reqs, max_blocks) = lens.shape[0], block_table.shape
    pages = block_table.new_empty((num_tokens, max_blocks))
    counted = lens.new_empty(num_tokens)
    tiles = torch.sym_max((max_blocks + COLUMNS - 1) // COLUMNS, 1)  # one stores the lengths
    launch(list_pages_kernel)[(num_tokens, tiles)](
        *listed(block_table), num_reqs, num_blocks, *strided(req_indices, lens),
        most, pages, counted,
        COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return pages, counted


def compact_pages(
    launch: Launcher,
    block_table: torch.Tensor,
    req_indices: torch.Tensor,
    lens: torch.Tensor,
    num_blocks: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.sanitize.compact_pages`` as one kernel."""
    num_tokens, (num_reqs, max_blocks) = lens.shape[0], block_table.shape
    columns = torch.sym_max(max_blocks, 1)  # the first is read without any row
    pages = block_table.new_empty((num_tokens, columns))
    counted = lens.new_empty(num_tokens)
    launch(compact_pages_kernel)[(num_tokens,)](
        *listed(block_table), num_reqs, num_blocks, *strided(req_indices, lens),
        pages, columns, counted,
        BLOCK_SIZE=block_size, COLUMNS=COMPACTED, num_warps=COMPACTING_WARPS,
    )  # fmt: skip
    return pages, counted


def fill_absent(
    launch: Launcher,
    logits: torch.Tensor,
    block_table: torch.Tensor,
    req_indices: torch.Tensor,
    counted: torch.Tensor,
    num_blocks: int,
    block_size: int,
) -> torch.Tensor:
    """``reference.sanitize.fill_absent`` as one kernel that writes to ``logits``."""
    num_tokens, num_columns = logits.shape
    launch(fill_absent_kernel)[(num_tokens, (num_columns + FILLED - 1) // FILLED)](
        *strided(block_table), block_table.shape[0], num_blocks, *strided(req_indices), counted,
        logits, logits.stride(0), num_columns,
        BLOCK_SIZE=block_size, FILLED=FILLED, num_warps=WARPS,
    )  # fmt: skip
    return logits
