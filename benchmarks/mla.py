"""Benchmark MLA, over all rows and over selected ones, against its roofline and FlashMLA."""

from __future__ import annotations

import argparse
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dsv4_ops as ops
from benchmarks.baselines import flash_mla
from benchmarks.harness import report
from benchmarks.harness.measure import FLOP_PER_US
from benchmarks.harness.memory import ColdCache, Copies
from benchmarks.harness.options import chosen_device, sizes
from benchmarks.harness.report import Report
from benchmarks.harness.timing import Call, Capture, alternating_us
from benchmarks.run import BenchError
from dsv4_ops.core.layout import MlaDsFp8Layout, MlaFp8Layout, PlainLayout

CASES = {
    "bf16": PlainLayout.tag,
    "fp8": MlaFp8Layout.tag,
    "ds_fp8": MlaDsFp8Layout.tag,
    "selected_bf16": PlainLayout.tag,
    "selected_ds_fp8": MlaDsFp8Layout.tag,
}
"""Groups of cases, and the layout of their rows; "mla_sparse" if rows are selected."""

TOPK = 2048
"""Selected rows per token."""

RANK, WIDTH, BLOCK = 512, 576, 64
SCALE = 192**-0.5

_ROTATED = 2**28
"""Bytes of the rows of all input sets: several times the L2."""

_MOST_SETS = 64
_CONTEXTS = (4096, 32768, 131072)
_BATCHES = (1, 8, 32, 64, 128)
_HEADS = (128, 16)
_MOST_DIFFERENCE = 1e-2
"""Maximum difference from FlashMLA: outputs are averages of normal values, in bf16."""


@dataclass
class Row:
    """Times in microseconds, medians of replays of CUDA graphs.

    Args:
        layout: Layout of the rows.
        heads, batch, context: Sizes of the case; every request has one token.
        us: Our op.
        topk: Selected rows per token; None for all rows.
        flash_mla_us: FlashMLA on the same rows, planned outside of the timing; if no rows are
            selected, bf16 rows only. For selected bf16 rows it is FlashMLA's prefill. Samples of
            both are taken in turn.
        roofline_us: The longer of the bytes at the rate of this GPU's copies and the FLOP at 790
            TFLOP/s.
        max_diff: Largest difference from FlashMLA's output.
        error: The error, if the case failed.
    """

    layout: str
    heads: int
    batch: int
    context: int
    topk: int | None = None
    us: float | None = None
    flash_mla_us: float | None = None
    roofline_us: float | None = None
    max_diff: float | None = None
    error: str | None = None

    @property
    def keys(self) -> int:
        """Return the number of rows that a token sees."""
        return self.context if self.topk is None else min(self.topk, self.context)


class Inputs:
    """Make the input sets of a case over one pool of rows, each with its own blocks and queries."""

    def __init__(self, row: Row, pool: Tensor, device: torch.device) -> None:
        self.row, self.device = row, device
        columns = -(-row.context // BLOCK)
        pages = row.batch * columns
        ranges = pool.shape[0] // pages
        size = row.batch * row.keys * pool.shape[2] * pool.element_size()
        # sets with selections share blocks, and read a few rows of each
        most = _MOST_SETS if row.topk is not None else min(_MOST_SETS, ranges)
        count = max(1, min(most, -(-_ROTATED // size)))
        made = torch.Generator(device).manual_seed(0)
        self.cache = pool
        self.lens = torch.full((row.batch,), row.context, dtype=torch.int32, device=device)
        self.requests = torch.arange(row.batch, dtype=torch.int32, device=device)
        self.sets: list[tuple[Tensor, Tensor]] = []
        for number in range(count):
            first = number % ranges * pages
            order = torch.randperm(pages, generator=made, device=device) + first
            q = torch.randn(row.batch, row.heads, WIDTH, generator=made, device=device)
            table = order.view(row.batch, columns)
            if row.topk is not None:
                table = self._selected(table, made)
            self.sets.append((q.bfloat16(), table.int()))

    def _selected(self, table: Tensor, made: torch.Generator) -> Tensor:
        """Sample slots of some rows of every request, in the order of positions, as an indexer
        returns them."""
        scores = torch.rand(self.row.batch, self.row.context, generator=made, device=self.device)
        rows = scores.topk(self.row.keys).indices.sort().values
        return table.gather(1, rows // BLOCK) * BLOCK + rows % BLOCK

    def ours(self) -> list[Call]:
        """Make calls of ``mla_decode``, or of ``mla_sparse``."""
        if self.row.topk is not None:
            call = functools.partial(
                ops.mla_sparse, softmax_scale=SCALE, block_size=BLOCK, layout=self.row.layout
            )
            return [
                functools.partial(call, q, self.cache, rows, self.lens) for q, rows in self.sets
            ]
        scale = None
        if self.row.layout == MlaFp8Layout.tag:
            scale = torch.full((1,), 0.5, device=self.device)
        call = functools.partial(
            ops.mla_decode, kv_scale=scale, softmax_scale=SCALE, block_size=BLOCK,
            layout=self.row.layout,
        )  # fmt: skip
        where = (self.cache, self.lens, self.requests)
        return [functools.partial(call, q, *where, table) for q, table in self.sets]

    def of_flash_mla(self, library: Any) -> list[Call]:
        """Make calls of FlashMLA's dense decode, planned here."""
        if self.row.topk is not None:
            return self._selected_of_flash_mla(library)
        op = library.ops.dense_decode_fwd
        rows = self.cache[:, :, None]

        def attend(q: Tensor, table: Tensor, *plan: Any) -> Any:
            return op(q[:, None], rows, RANK, self.lens, table, SCALE, False, *plan, None)

        plan = attend(*self.sets[0], None, None)[2:]
        return [functools.partial(attend, q, table, *plan) for q, table in self.sets]

    def _selected_of_flash_mla(self, library: Any) -> list[Call]:
        """Make calls of FlashMLA's sparse decode, planned here; for plain rows, of its sparse
        prefill."""
        if self.row.layout == PlainLayout.tag:
            op, rows = library.ops.sparse_prefill_fwd, self.cache.view(-1, 1, WIDTH)
            return [
                functools.partial(op, q, rows, lists[:, None], SCALE, RANK, None, None, None)
                for q, lists in self.sets
            ]
        op, rows = library.ops.sparse_decode_fwd, self.cache[:, :, None]

        def attend(q: Tensor, lists: Tensor, *plan: Any) -> Any:
            rest = (None, None, None, RANK, SCALE, None)
            return op(q[:, None], rows, lists[:, None], None, None, *plan, *rest)

        plan = attend(*self.sets[0], None, None)[2:]
        return [functools.partial(attend, q, lists, *plan) for q, lists in self.sets]


def roofline_us(row: Row, bytes_per_us: float) -> float:
    """Return the longer of the times that bytes and products take."""
    row_bytes = {PlainLayout.tag: 2 * WIDTH, MlaFp8Layout.tag: WIDTH, MlaDsFp8Layout.tag: 656}
    moved = row.batch * row.keys * row_bytes[row.layout]
    moved += row.batch * row.heads * (WIDTH + RANK) * 2
    flop = 2 * row.batch * row.heads * row.keys * (WIDTH + RANK)
    return max(moved / bytes_per_us, flop / FLOP_PER_US)


def measure(row: Row, pool: Tensor, library: Any, copy_rate: float, device: torch.device) -> None:
    """Fill in a row."""
    inputs = Inputs(row, pool, device)
    calls = inputs.ours()
    out = calls[0]()[0]
    library_calls: list[Call] = []
    # FlashMLA's sparse kernels take 64 or 128 heads
    comparable = row.layout == PlainLayout.tag if row.topk is None else row.heads >= 64
    if library is not None and comparable:
        library_calls = inputs.of_flash_mla(library)
        row.max_diff = float((library_calls[0]()[0].squeeze(1).float() - out.float()).abs().max())
        if not row.max_diff < _MOST_DIFFERENCE:
            row.error = f"differs from FlashMLA by {row.max_diff:.3g}"
    forms = [calls, library_calls] if library_calls else [calls]
    row.us, *others = (time.median for time in alternating_us([Capture(form) for form in forms]))
    row.roofline_us = roofline_us(row, copy_rate)
    row.flash_mla_us = others[0] if others else None


def pool_of(layout: str, blocks: int, device: torch.device) -> Tensor:
    """Sample rows of normal values, or of codes without NaN."""
    if layout == PlainLayout.tag:
        pool = torch.empty(blocks, BLOCK, WIDTH, dtype=torch.bfloat16, device=device)
        return pool.normal_()
    row_bytes = WIDTH if layout == MlaFp8Layout.tag else 656
    pool = torch.randint(0x20, 0x48, (blocks, BLOCK, row_bytes), dtype=torch.uint8, device=device)
    if layout == MlaDsFp8Layout.tag:
        scales = torch.full((4,), 0.5, device=device).view(torch.uint8)
        pool[..., RANK : RANK + 16] = scales
        pool[..., RANK + 16 :] = torch.ones(64, device=device).bfloat16().view(torch.uint8)
    return pool


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
    for name, default in (("batches", _BATCHES), ("contexts", _CONTEXTS)):
        shown = ", ".join(map(str, default))
        parser.add_argument(
            f"--{name}", type=sizes, default=default, metavar="A,B,..", help=f"default: {shown}"
        )


def run(options: argparse.Namespace) -> None:
    """Time the cases of the command line; rows and table go to ``options.out``."""
    device = chosen_device(options)
    if device.type != "cuda":
        raise BenchError("mla: it times kernels, which run on CUDA only")
    library = None if options.baseline is None else flash_mla.load(options.baseline)
    contexts = options.contexts[:1] if options.smoke else options.contexts
    copies = Copies(device, ColdCache(device)).bytes_per_us
    output, failed = Report(options, device, copy_tbs=copies / 1e6), []
    for group in options.cases or CASES:
        layout = CASES[group]
        pool = pool_of(layout, max(options.batches) * max(contexts) // BLOCK, device)
        cases = list(itertools.product(_HEADS, contexts, options.batches))
        for heads, context, batch in report.progress(cases, f"mla, {group}"):
            row = Row(layout, heads, batch, context, TOPK if "selected" in group else None)
            try:
                measure(row, pool, library, copies, device)
            except Exception as error:  # a case that fails has its error in the row
                row.error = report.one_line(error)
            output.add(row)
            failed += [row.error] if row.error else []
        del pool
    output.finish("mla, microseconds")
    if failed:
        raise BenchError(f"{len(failed)} cases failed, {failed[0]}")
