"""Measure an op case by case: check it, then time it, its roofline and a baseline."""

from __future__ import annotations

import argparse
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from benchmarks.harness import report
from benchmarks.harness.batches import captured_calls
from benchmarks.harness.memory import ColdCache, Copies
from benchmarks.harness.options import chosen_device, matching
from benchmarks.harness.report import Report, one_line
from benchmarks.harness.rows import ComputeRow, OpRow
from benchmarks.harness.timing import Call, Capture, Timing, device_activities, host_us, wall_us
from benchmarks.harness.work import (
    Case,
    Work,
    Written,
    check,
    checked,
    differing_bytes,
    poison,
    tensors,
)
from benchmarks.run import BenchError, WrongResult

Row = TypeVar("Row", bound=OpRow)
Computed = TypeVar("Computed", bound=ComputeRow)

FLOP_PER_US = 790e6
"""What an H200 does in bf16: the best that was measured of its matrix products; twice that in
FP8."""


def compiled_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled for all sizes."""
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=True)
    return compiled


class OpBench(ABC, Generic[Row]):
    """The compiled functions of a run and the measurement of one case.

    A benchmark says what its rows are, what limits an op, and what its baseline is.
    """

    row_type: ClassVar[type[Any]]

    def __init__(self, device: torch.device, baseline: Path | None, *, budget_s: float) -> None:
        self.device, self.budget_s = device, budget_s
        self.failures: list[Exception] = []
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self.modules: Any = None
        self.baseline_error: str | None = None
        if baseline is not None:
            try:
                self.modules = self.load(baseline)
            except Exception as error:
                self.baseline_error = one_line(error)
        self.cold: ColdCache | None = None
        self.copies: Copies | None = None
        if device.type == "cuda":
            self.cold = ColdCache(device)
            self.copies = Copies(device, self.cold)

    @abstractmethod
    def load(self, folder: Path) -> Any:
        """Load what ``Work.baseline`` is called with from a bundle; raise if that fails."""

    @abstractmethod
    def set_limits(self, row: Row, work: Work, copies: Copies, us: float) -> None:
        """Fill in the roofline of a case that took ``us``."""

    @abstractmethod
    def compare_baseline(
        self,
        row: Row,
        baseline: Sequence[Tensor],
        ours: Sequence[Tensor],
        expected: Sequence[Tensor],
    ) -> None:
        """Keep in the row how the baseline's results differ."""

    def check_more(
        self, row: Row, work: Work, written: Written, expected: Sequence[Tensor], case: Case
    ) -> Mapping[str, Callable[..., Any]]:
        """Check other calls of ours that leave the same, before anything is timed; those that run
        here, by the field of their time."""
        return {}

    def time_more(
        self,
        row: Row,
        work: Work,
        written: Written,
        calls: Mapping[str, Callable[..., Any]],
        case: Case,
    ) -> None:
        """Time what ``check_more`` found."""

    def measure(self, case: Case) -> Row:
        """Check, then time one case. A failure is kept in the row and ends the run with an error
        after the last case."""
        start = time.perf_counter()
        row: Row = self.row_type(
            case=case.case,
            shape=case.shape,
            variant=case.variant,
            requests=case.requests,
            rows=case.rows,
            plotted=case.plotted,
            **case.labels,
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

    def graph_us(self, calls: Sequence[Call], *, repeated: bool = True) -> float:
        """Device time of one call in a graph of all of them. Where one reads little, the next
        repeat finds it in the L2: then a graph of each once is truer, although its launch counts.
        """
        repeats = captured_calls(len(calls)) // len(calls) if repeated else 1
        return float(Capture(list(calls) * repeats).device_us(self.cold).median)

    def _measure(self, row: Row, case: Case) -> None:
        work = case.build(self.device)
        written, expected, compiled = Written(work), work.expected(), self.compiled(work.call)
        row.moved_bytes, row.input_sets = work.moved_bytes, len(work.sets)
        check("eager", work, checked(work, written, work.call), expected, case)
        ours = checked(work, written, compiled)
        check("compiled", work, ours, expected, case)
        more = self.check_more(row, work, written, expected, case)
        if not case.timed:
            return
        if self.copies is not None:
            self._time_cuda(row, work, written, compiled, case, self.copies)
        else:
            self._time_cpu(row, work, compiled)
        self.time_more(row, work, written, more, case)
        self._time_baseline(row, work, written, ours, expected)

    def _time_cpu(self, row: Row, work: Work, compiled: Callable[..., Any]) -> None:
        args, budget = work.sets[0], self.budget_s
        ours = wall_us(lambda: compiled(*args), self.device, budget_s=budget)
        eager = wall_us(lambda: work.call(*args), self.device, budget_s=budget)
        row.compiled_us, row.compiled_us_range = ours.median, [ours.low, ours.high]
        row.eager_us, row.eager_us_range = eager.median, [eager.low, eager.high]
        row.speedup = eager.median / ours.median

    def _time_cuda(
        self,
        row: Row,
        work: Work,
        written: Written,
        compiled: Callable[..., Any],
        case: Case,
        copies: Copies,
    ) -> None:
        first = work.sets[0]
        written.reset()
        wanted = [work.results(compiled, args) for args in work.sets]
        if written.groups:  # what all calls leave together
            wanted = written.copies()
        ours = self._device_us("compiled", compiled, work, written, wanted, case)
        row.compiled_us, row.compiled_us_range = ours.median, [ours.low, ours.high]
        single = Capture([functools.partial(compiled, *first)])
        activities = device_activities(single.graph.replay)
        row.kernels, row.activities = len(activities), [list(item) for item in activities]
        if work.eager:
            eager = self._device_us("eager", work.call, work, written, wanted, case)
            row.eager_us, row.eager_us_range = eager.median, [eager.low, eager.high]
            row.host_us = host_us(functools.partial(work.call, *first)).median
        row.bandwidth_gbs = copies.bytes_per_us / 1e3
        self.set_limits(row, work, copies, ours.median)

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
        left = written.groups or [tensors(output) for output in capture.outputs]
        for number, results in enumerate(left):
            expected, place = wanted[number % len(wanted)], number % len(work.sets)
            if work.reference is not None and differing_bytes(results, expected):
                expected = work.expected(place)
            check(f"CUDA graph replay, {name}", work, results, expected, case, place)
        return capture.device_us(self.cold)

    def _time_baseline(
        self,
        row: Row,
        work: Work,
        written: Written,
        ours: Sequence[Tensor],
        expected: Sequence[Tensor],
    ) -> None:
        if work.baseline is None:
            return
        row.baseline_error = self.baseline_error
        if self.modules is None:
            return
        row.baseline_note, of_baseline = work.baseline_note, work.of_baseline()
        try:
            call = work.baseline(self.modules)
            self.compare_baseline(row, checked(of_baseline, written, call), ours, expected)
            if self.cold is None:
                return
            device = Capture(_captured(call, of_baseline)).device_us(self.cold)
            row.baseline_us, row.baseline_us_range = device.median, [device.low, device.high]
            row.baseline_host_us = host_us(functools.partial(call, *of_baseline.sets[0])).median
        except Exception as error:  # a broken baseline is a row, not the end of the run
            row.baseline_error = one_line(error)
        if row.baseline_us and row.compiled_us:
            row.times_faster = row.baseline_us / row.compiled_us


def _captured(call: Call, work: Work) -> list[Call]:
    """Calls of a CUDA graph: every input set in turn."""
    calls: list[Call] = [functools.partial(call, *args) for args in work.sets]
    return calls * (captured_calls(len(calls)) // len(calls))


class ComputeBench(OpBench[Computed]):
    """The limit is memory or the matrix units."""

    flop_per_us: ClassVar[float] = FLOP_PER_US

    def set_limits(self, row: Computed, work: Work, copies: Copies, us: float) -> None:
        row.flop = work.flop
        row.roofline_us = max(work.moved_bytes / copies.bytes_per_us, work.flop / self.flop_per_us)
        row.pct_of_roofline = 100 * row.roofline_us / us


Finish = Callable[[Report[Row], torch.device, Sequence[str], bool], None]
"""(report, device, cases left out, with a plot) -> None: table and plot of all rows."""


def run_cases(
    options: argparse.Namespace,
    cases: Sequence[Case],
    bench_type: type[OpBench[Row]],
    finish: Finish[Row],
) -> None:
    """Check and time the cases of the command line; rows, table and plot go to ``options.out``."""
    device, name = chosen_device(options), options.bench
    output: Report[Row] = Report(options.out, name, report.stamp(device, options.command))
    start, left_out = time.perf_counter(), []
    # a graph for one token and one request each, and one per configuration
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        bench = bench_type(device, options.baseline, budget_s=0.1 if options.smoke else 0.5)
        for case in report.progress(matching(options, cases), name):
            if options.max_seconds and time.perf_counter() - start > options.max_seconds:
                left_out.append(str(case))
                continue
            row = bench.measure(case)
            if case.timed or row.error:
                output.add(row)
    finish(output, device, left_out, not options.no_plot)
    bench.raise_failures()


def roofline_notes(rows: Sequence[OpRow], flop_per_us: float, *more: str) -> list[str]:
    """What the columns of rows of a ``ComputeBench`` mean."""
    bandwidth = next((row.bandwidth_gbs for row in rows if row.bandwidth_gbs), None)
    if bandwidth is None:
        return []
    lines = [
        "Device time per call in a CUDA graph over rotating inputs, L2 emptied before each replay.",
        f"roofline: the longer of bytes that must move / {bandwidth:.0f} GB/s, a copy of 256 MiB "
        f"here, and FLOP / {flop_per_us / 1e6:.0f} TFLOP/s.",
        *more,
        "times_faster = baseline_us / compiled_us.",
        "host: Python time of a call outside of a graph. kernels: what a compiled call runs.",
    ]
    return ["\n".join(lines)]


def notes_of(rows: Sequence[OpRow], left_out: Sequence[str]) -> list[str]:
    """Errors and notes of a run, with the cases of each."""
    notes = []
    for field in ("error", "baseline_error", "baseline_note", "package_error", "note"):
        by_text: dict[str, list[str]] = {}
        for row in rows:
            if text := getattr(row, field, None):
                where = " ".join(part for part in (row.case, row.shape, row.variant) if part)
                by_text.setdefault(text, []).append(where)
        notes += [f"{field}: {text} ({'; '.join(where)})" for text, where in by_text.items()]
    if left_out:
        notes.append(f"left out, --max-seconds: {'; '.join(left_out)}")
    return notes
