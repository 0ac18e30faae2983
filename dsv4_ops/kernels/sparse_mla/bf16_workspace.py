"""Build the workspace of a prefill over bf16 rows, for Hopper's kernel and FlashMLA: a bf16 copy of
cached FP8 rows, and the list of rows that each token sees."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.kernels.arguments import listed, strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.dequant_gather import gather_ragged
from dsv4_ops.kernels.common.paging import MAX_POSITIONS, locate_positions, valid_tokens
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.external.sanitize import sink_arguments, store_finite_sink
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.reference.bf16_workspace import Prefill, Rows, Source, Spans

TOKENS, SPAN_WARPS = 1024, 8
"""Number of tokens whose requests a program compares with its own request at a time, and warps."""

COLUMNS, WARPS = 1024, 4
"""Number of list entries of a token that are written at a time, and warps. 1024 entries hold a list
of 128 + 512 keys. COLUMNS must be at least the number of heads, because a program copies the sinks
of all heads at once."""


@triton.jit(do_not_specialize=SIZES)
def find_spans_kernel(
    positions, position_stride,
    req_indices, request_stride, num_tokens,
    swa_rows, extra_rows,
    ends, counts, compressed,
    WINDOW_SIZE: tl.constexpr, COMPRESS_RATIO: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute the span of rows that the tokens of one request see, from the positions of these
    tokens."""
    wait_for_previous_kernel()
    request = tl.program_id(0)
    length = tl.zeros((TOKENS,), tl.int64)
    first = tl.full((TOKENS,), MAX_POSITIONS, tl.int64)
    begin = 0
    while begin < num_tokens:
        token = begin + tl.arange(0, TOKENS)
        in_batch, token = token < num_tokens, token.to(tl.int64)
        position = tl.load(positions + token * position_stride, mask=in_batch, other=-1)
        owner = tl.load(req_indices + token * request_stride, mask=in_batch, other=-1)
        is_member = (owner == request) & (position >= 0) & (position < MAX_POSITIONS)
        length = tl.maximum(length, tl.where(is_member, position + 1, 0))
        start = tl.maximum(position - (WINDOW_SIZE - 1), 0)
        first = tl.minimum(first, tl.where(is_member, start, MAX_POSITIONS))
        begin += TOKENS
    longest = tl.max(length, 0)
    end = tl.minimum(longest, swa_rows)
    count = tl.maximum(end - tl.min(first, 0), 0)
    rows = tl.minimum(longest // COMPRESS_RATIO, extra_rows)
    tl.store(ends + request, end.to(tl.int32))
    tl.store(counts + request, count.to(tl.int32))
    tl.store(compressed + request, rows.to(tl.int32))


@triton.jit(do_not_specialize=SIZES)
def list_rows_kernel(
    positions, position_stride,
    req_indices, request_stride, num_reqs,
    ends, counts,
    swa_table, swa_table_stride, swa_column_stride, swa_max_blocks,
    swa_blocks, swa_rows, swa_width,
    extra_table, extra_table_stride, extra_column_stride, extra_max_blocks,
    extra_blocks, extra_rows, extra_width,
    topk_indices, topk_stride, topk_column_stride,
    out, padded, lens_out,
    sink, sink_out, num_heads,
    WINDOW_SIZE: tl.constexpr, COMPRESS_RATIO: tl.constexpr, SWA_BLOCK_SIZE: tl.constexpr,
    EXTRA_BLOCK_SIZE: tl.constexpr, HAS_EXTRA: tl.constexpr, HAS_TOPK: tl.constexpr,
    HAS_SINK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """List the workspace rows that a token sees, with -1 for absent rows, and store the list's
    length up to the last row that exists. Without HAS_TOPK, a list has an entry for every row of
    the block table. The kernel then stops after the token's last row (it writes COLUMNS entries at
    a time); no kernel reads the later entries."""
    wait_for_previous_kernel()
    swa = (swa_table, swa_table_stride, swa_column_stride, swa_max_blocks)
    extra = (extra_table, extra_table_stride, extra_column_stride, extra_max_blocks)
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, COLUMNS)
    position = tl.load(positions + token * position_stride)
    request = tl.load(req_indices + token * request_stride)
    valid = valid_tokens(position, request, num_reqs)
    request = tl.where(valid, request, 0).to(tl.int64)
    position = tl.where(valid, position, 0)
    start = tl.load(ends + request, mask=valid, other=0)
    start = start - tl.load(counts + request, mask=valid, other=0)
    first_row = request * (extra_rows + swa_rows)
    first_offset = tl.minimum(position, swa_rows - 1) - (swa_width - 1)
    visible = (position + 1) // COMPRESS_RATIO
    last = padded
    if HAS_EXTRA and not HAS_TOPK:
        last = tl.minimum(padded, swa_width + visible)
    begin, length = 0, 0
    while begin < last:
        column = begin + lane
        offset = first_offset + column
        mask = valid & (column < swa_width) & (offset >= 0) & (offset > position - WINDOW_SIZE)
        _, _, exists = locate_positions(swa, request, offset, mask, swa_blocks, SWA_BLOCK_SIZE)
        row = tl.where(exists, first_row + extra_rows + offset - start, -1)
        if HAS_EXTRA:
            entry = (column - swa_width).to(tl.int64)
            mask = valid & (entry >= 0) & (entry < extra_width)
            if HAS_TOPK:
                address = topk_indices + token * topk_stride + entry * topk_column_stride
                entry = tl.load(address, mask=mask, other=-1).to(tl.int64)
            mask = mask & (entry >= 0) & (entry < visible)
            _, _, exists = locate_positions(
                extra, request, entry, mask, extra_blocks, EXTRA_BLOCK_SIZE
            )
            row = tl.where(exists, first_row + entry, row)
        tl.store(out + token * padded + column, row.to(tl.int32), mask=column < padded)
        length = tl.maximum(length, tl.max(tl.where(row >= 0, column + 1, 0), 0))
        begin += COLUMNS
    tl.store(lens_out + token, length)
    if HAS_SINK:
        if token == 0:
            store_finite_sink(sink, sink_out, num_heads, lane)


def gather_rows(
    launch: Launcher, call: Prefill, sink: torch.Tensor | None, multiple: int, enabled: int = 1
) -> Rows:
    """Run ``reference.bf16_workspace.gather_rows`` as two kernels and a gather per cache.

    Workspace rows that no token sees are not initialised. ``enabled`` is 1 or 0, or a symbol with
    one of these values. With 0, grids are empty, and so are rows and lists."""
    if not (isinstance(enabled, int) and enabled == 1):
        launch = launch.predicated(enabled)
    spans = find_spans(launch, call)
    swa, extra = call.swa, call.extra
    num_reqs, rows_per_request = swa.block_table.shape[0], call.extra_rows + swa.rows
    kv = swa.cache.new_empty(
        (num_reqs * rows_per_request * enabled, MainLayout.head_dim), dtype=torch.bfloat16
    )
    if extra is not None:
        _gather(launch, kv, rows_per_request, extra, spans.compressed, None, 0)
    _gather(launch, kv, rows_per_request, swa, spans.ends, spans.counts, call.extra_rows)
    return Rows(kv, *list_rows(launch, call, spans, sink, multiple, enabled))


def _gather(
    launch: Launcher,
    kv: torch.Tensor,
    rows_per_request: int,
    source: Source,
    ends: torch.Tensor,
    counts: torch.Tensor | None,
    offset: int,
) -> None:
    """Copy the rows of a cache into each request's ``rows_per_request`` rows, from ``offset``
    on."""
    num_reqs, columns = source.block_table.shape
    if num_reqs == 0 or columns == 0:
        return
    width = MainLayout.head_dim
    gather_ragged(
        launch, kv, (rows_per_request * width, width, 1), offset + source.rows,
        source.cache, ends, counts, source.block_table,
        num_reqs=num_reqs, block_size=source.block_size, offset=offset,
    )  # fmt: skip


def find_spans(launch: Launcher, call: Prefill) -> Spans:
    """Run ``reference.bf16_workspace.find_spans`` as one kernel."""
    num_reqs = call.swa.block_table.shape[0]
    spans = Spans(*(call.req_indices.new_empty(num_reqs) for _ in range(3)))
    if num_reqs == 0:
        return spans
    launch(find_spans_kernel)[(num_reqs,)](
        *strided(call.positions, call.req_indices), call.positions.shape[0],
        call.swa.rows, call.extra_rows, *spans,
        WINDOW_SIZE=call.window_size, COMPRESS_RATIO=call.compress_ratio, TOKENS=TOKENS,
        num_warps=SPAN_WARPS,
    )  # fmt: skip
    return spans


def list_rows(
    launch: Launcher,
    call: Prefill,
    spans: Spans,
    sink: torch.Tensor | None,
    multiple: int,
    enabled: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Run ``reference.bf16_workspace.list_rows``, and copy the sink, in one kernel."""
    num_tokens, padded = call.positions.shape[0], call.padded(multiple)
    slots = call.req_indices.new_empty((num_tokens * enabled, padded))
    lens = call.req_indices.new_empty(num_tokens)
    sinks = sink_arguments(sink, spans.ends, lens)
    swa, (swa_width, extra_width) = call.swa, call.widths
    extra = swa if call.extra is None else call.extra
    topk_indices = extra.block_table if call.topk_indices is None else call.topk_indices
    launch(list_rows_kernel)[(num_tokens,)](
        *strided(call.positions, call.req_indices), swa.block_table.shape[0],
        spans.ends, spans.counts,
        *listed(swa.block_table), swa.cache.shape[0], swa.rows, swa_width,
        *listed(extra.block_table), extra.cache.shape[0], call.extra_rows, extra_width,
        *strided(topk_indices),
        slots, padded, lens, *sinks,
        WINDOW_SIZE=call.window_size, COMPRESS_RATIO=call.compress_ratio,
        SWA_BLOCK_SIZE=swa.block_size, EXTRA_BLOCK_SIZE=extra.block_size,
        HAS_EXTRA=call.extra is not None, HAS_TOPK=call.topk_indices is not None,
        HAS_SINK=sink is not None, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return slots, lens, None if sink is None else sinks[1]
