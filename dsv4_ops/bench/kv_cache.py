"""``bench kv_cache``: inserts, gathers and sparse indices beside their floor and vLLM's kernels."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.bench import BenchError, WrongResult, anchors, report
from dsv4_ops.bench.batches import captured_calls
from dsv4_ops.bench.cache_cases import (
    fused_cases,
    gather_all_cases,
    gather_cases,
    indexer_gather_cases,
    insert_cases,
)
from dsv4_ops.bench.index_cases import combine_cases, mixed_cases
from dsv4_ops.bench.memory import ColdCache, Copies
from dsv4_ops.bench.options import chosen_device, size
from dsv4_ops.bench.plot import cache_panels, try_plot
from dsv4_ops.bench.report import Report, one_line
from dsv4_ops.bench.rows import CACHE_CPU_COLUMNS, CACHE_CUDA_COLUMNS, CacheRow
from dsv4_ops.bench.timing import Call, Capture, Timing, device_activities, host_us, wall_us
from dsv4_ops.bench.work import (
    Case,
    Work,
    Written,
    check,
    checked,
    differing_bytes,
    poison,
    tensors,
)

CASES = (
    "insert",
    "gather",
    "fused",
    "gather_all",
    "combine",
    "mixed",
    "indexer_insert",
    "indexer_gather",
    "plain_insert",
)
"""Groups of cases, in the order in which they are measured."""

_SMOKE_CASES = ("insert", "gather")
_NEEDED_MODULES = ("cache",)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
    add = parser.add_argument
    add("--cases", type=_groups, metavar="A,B,..", help=f"any of {','.join(CASES)}; default: all")
    add("--max-seconds", type=size, metavar="N", help="start no case later than that")


def _groups(text: str) -> tuple[str, ...]:
    named = text.split(",")
    for name in named:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"must be among {','.join(CASES)}, got {name!r}")
    return tuple(name for name in CASES if name in named)


def chosen_cases(groups: Sequence[str], *, smoke: bool) -> list[Case]:
    """The cases of some groups."""
    few = (8, 128)
    shapes = ((1, 128), (4, 128)) if smoke else ((4, 2048), (4, 8192))
    inserts = few if smoke else (1, 8, 32, 128, 512, 2048, 8192, 65536)
    gathers = ((1, 128), (4, 128), (4, 2048), (1, 8192), (4, 8192), (1, 32768), (8, 8192))
    prefills = (
        ((1, 64, 64), (4, 64, 64)) if smoke else ((1, 2048, 512), (4, 2048, 1024), (4, 2048, 512))
    )
    makers: dict[str, Callable[[], list[Case]]] = {
        "insert": lambda: insert_cases("insert", inserts, smoke=smoke),
        "gather": lambda: gather_cases(gathers[:2] if smoke else gathers, smoke=smoke),
        "fused": lambda: fused_cases(few if smoke else (1, 32, 128, 2048, 8192), smoke=smoke),
        "gather_all": lambda: gather_all_cases(shapes, smoke=smoke),
        "combine": lambda: combine_cases(prefills),
        "mixed": lambda: mixed_cases(*((8, 64) if smoke else (128, 2048))),
        "indexer_insert": lambda: insert_cases(
            "indexer_insert", few if smoke else (128, 8192), smoke=smoke
        ),
        "indexer_gather": lambda: indexer_gather_cases(
            ((2, 128),) if smoke else ((4, 2048), (4, 16384)), smoke=smoke
        ),
        "plain_insert": lambda: insert_cases(
            "plain_insert", few if smoke else (128, 8192), smoke=smoke
        ),
    }
    return [case for group in groups for case in makers[group]()]


def run(options: argparse.Namespace) -> None:
    """Check and time the cases of the command line; rows, table and plot go to ``options.out``."""
    device = chosen_device(options)
    groups = options.cases or (_SMOKE_CASES if options.smoke else CASES)
    cases = chosen_cases(groups, smoke=options.smoke)
    output: Report[CacheRow] = Report(
        options.out, "kv_cache", report.stamp(device, options.command)
    )
    start, left_out = time.perf_counter(), []
    # a graph for one token and one request each, and one per configuration of the index matrices
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        bench = Bench(device, options.anchor, budget_s=0.1 if options.smoke else 0.5)
        for case in report.progress(cases, "kv_cache"):
            if options.max_seconds and time.perf_counter() - start > options.max_seconds:
                left_out.append(str(case))
                continue
            row = bench.measure(case)
            if case.timed or row.error:
                output.add(row)
    finish(output, device, left_out, with_plot=not options.no_plot)
    bench.raise_failures()


def compiled_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled for all sizes."""
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=True)
    return compiled


class Bench:
    """The compiled functions of a run and the measurement of one case."""

    def __init__(self, device: torch.device, anchor: Path | None, *, budget_s: float) -> None:
        self.device, self.budget_s = device, budget_s
        self.failures: list[Exception] = []
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self.modules: Any = None
        self.anchor_error: str | None = None
        if anchor is not None:
            try:
                self.modules = anchors.load(anchor, _NEEDED_MODULES)
            except Exception as error:
                self.anchor_error = one_line(error)
        self.cold: ColdCache | None = None
        self.copies: Copies | None = None
        if device.type == "cuda":
            self.cold = ColdCache(device)
            self.copies = Copies(device, self.cold)

    def measure(self, case: Case) -> CacheRow:
        """Check, then time one case. A failure is kept in the row and ends the run with an error
        after the last case."""
        start = time.perf_counter()
        row = CacheRow(
            case=case.case,
            shape=case.shape,
            variant=case.variant,
            requests=case.requests,
            rows=case.rows,
            plotted=case.plotted,
        )
        try:
            self._measure(row, case)
        except Exception as error:
            self.failures.append(error)
            row.error = str(error) if isinstance(error, WrongResult) else one_line(error)
        row.seconds = time.perf_counter() - start
        return row

    def raise_failures(self) -> None:
        """Raise the first wrong result, or an error that names the first failure."""
        for error in self.failures:
            if isinstance(error, WrongResult):
                raise error
        if self.failures:
            raise BenchError(f"{len(self.failures)} cases failed, {one_line(self.failures[0])}")

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled form of an op, one for all cases."""
        if call not in self._compiled:
            self._compiled[call] = compiled_op(call)
        return self._compiled[call]

    def _measure(self, row: CacheRow, case: Case) -> None:
        work = case.build(self.device)
        written, expected, compiled = Written(work), work.expected(), self.compiled(work.call)
        row.moved_bytes, row.input_sets = work.moved_bytes, len(work.sets)
        check("eager", checked(work, written, work.call), expected, case)
        check("compiled", checked(work, written, compiled), expected, case)
        if not case.timed:
            return
        if self.copies is not None:
            self._time_cuda(row, work, written, compiled, case, self.copies)
        else:
            self._time_cpu(row, work, compiled)
        self._time_anchor(row, work, written, expected)

    def _time_cpu(self, row: CacheRow, work: Work, compiled: Callable[..., Any]) -> None:
        args, budget = work.sets[0], self.budget_s
        ours = wall_us(lambda: compiled(*args), self.device, budget_s=budget)
        eager = wall_us(lambda: work.call(*args), self.device, budget_s=budget)
        row.compiled_us, row.compiled_us_range = ours.median, [ours.low, ours.high]
        row.eager_us, row.eager_us_range = eager.median, [eager.low, eager.high]
        row.speedup = eager.median / ours.median

    def _time_cuda(
        self,
        row: CacheRow,
        work: Work,
        written: Written,
        compiled: Callable[..., Any],
        case: Case,
        copies: Copies,
    ) -> None:
        first = work.sets[0]
        written.reset()
        wanted = [work.results(compiled, args) for args in work.sets]
        if written.tensors:  # what all calls leave together
            wanted = [[tensor.clone()] for tensor in written.tensors]
        ours = self._device_us("compiled", compiled, work, written, wanted, case)
        row.compiled_us, row.compiled_us_range = ours.median, [ours.low, ours.high]
        single = Capture([functools.partial(compiled, *first)])
        activities = device_activities(single.graph.replay)
        row.kernels, row.activities = len(activities), [list(item) for item in activities]
        if work.eager:
            eager = self._device_us("eager", work.call, work, written, wanted, case)
            row.eager_us, row.eager_us_range = eager.median, [eager.low, eager.high]
            row.host_us = host_us(functools.partial(work.call, *first)).median
        row.copy_us = copies.us(work.moved_bytes)
        row.floor_us = work.moved_bytes / copies.bytes_per_us
        row.pct_of_copy = 100 * row.copy_us / ours.median
        row.pct_of_bandwidth = 100 * row.floor_us / ours.median
        row.bandwidth_gbs = copies.bytes_per_us / 1e3

    def _device_us(
        self,
        name: str,
        call: Call,
        work: Work,
        written: Written,
        wanted: Sequence[Sequence[Tensor]],
        case: Case,
    ) -> Timing:
        """Check a graph of calls over all input sets, then time it."""
        capture = Capture(_captured(call, work))
        written.reset()
        for output in capture.outputs:
            poison(tensors(output))
        capture.graph.replay()
        if written.tensors:
            left = [[tensor] for tensor in written.tensors]
        else:
            left = [tensors(output) for output in capture.outputs]
        for place, results in enumerate(left):
            check(f"CUDA graph replay, {name}", results, wanted[place % len(wanted)], case)
        return capture.device_us(self.cold)

    def _time_anchor(
        self, row: CacheRow, work: Work, written: Written, expected: Sequence[Tensor]
    ) -> None:
        if work.anchor is None:
            return
        row.anchor_error = self.anchor_error
        if self.modules is None:
            return
        try:
            call = work.anchor(self.modules)
            wrong = differing_bytes(checked(work, written, call), expected)
            row.anchor_exact = wrong == 0
            if wrong:
                row.anchor_note = f"{wrong} of {sum(item.nbytes for item in expected)} bytes differ"
            if self.cold is None:
                return
            device = Capture(_captured(call, work)).device_us(self.cold)
            row.anchor_us, row.anchor_us_range = device.median, [device.low, device.high]
            row.anchor_host_us = host_us(functools.partial(call, *work.sets[0])).median
        except Exception as error:  # a broken peer is a row, not the end of the run
            row.anchor_error = one_line(error)
        if row.anchor_us and row.compiled_us:
            row.times_faster = row.anchor_us / row.compiled_us


def _captured(call: Call, work: Work) -> list[Call]:
    """Calls of a CUDA graph: every input set in turn."""
    calls: list[Call] = [functools.partial(call, *args) for args in work.sets]
    return calls * (captured_calls(len(calls)) // len(calls))


def finish(
    output: Report[CacheRow], device: torch.device, left_out: Sequence[str], *, with_plot: bool
) -> None:
    """Table and plot of all rows."""
    cuda = device.type == "cuda"
    stamped = " ".join(f"{key}={value}" for key, value in output.stamp.items())
    measured = [row for row in output.rows if row.error is None]
    columns = CACHE_CUDA_COLUMNS if cuda else CACHE_CPU_COLUMNS
    parts = [
        "Cache ops, microseconds; every result was checked byte for byte before timing",
        stamped,
        report.table(measured, columns),
        *_notes(output.rows, left_out),
    ]
    output.write_text("\n\n".join(parts))
    if with_plot:
        title = f"Cache ops · {output.stamp['device']}"
        panels = cache_panels(measured, cuda=cuda)
        try_plot(panels, output.path(".png"), title=title, ylabel="microseconds per call")


def _notes(rows: Sequence[CacheRow], left_out: Sequence[str]) -> list[str]:
    notes = []
    bandwidth = next((row.bandwidth_gbs for row in rows if row.bandwidth_gbs), None)
    if bandwidth is not None:
        notes.append(
            "Device time per call in a CUDA graph over rotating inputs, L2 emptied before each "
            "replay.\n"
            f"floor: bytes that must move / {bandwidth:.0f} GB/s, a copy of 256 MiB here. copy: "
            "the faster of a memcpy and a kernel that moves as many bytes.\n"
            f"anchor: {anchors.VERSION}'s kernel on the same inputs; times_faster = anchor_us / "
            "compiled_us.\n"
            "host: Python time of a call outside of a graph. kernels: what a compiled call runs."
        )
    for field in ("error", "anchor_error", "anchor_note"):
        by_text: dict[str, list[str]] = {}
        for row in rows:
            if text := getattr(row, field):
                where = " ".join(part for part in (row.case, row.shape, row.variant) if part)
                by_text.setdefault(text, []).append(where)
        notes += [f"{field}: {text} ({'; '.join(where)})" for text, where in by_text.items()]
    if left_out:
        notes.append(f"left out, --max-seconds: {'; '.join(left_out)}")
    return notes
