"""Measure an op case by case: check it, then time it, its roofline and a baseline."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.harness import report
from benchmarks.harness.batches import captured_calls
from benchmarks.harness.memory import ColdCache, Copies
from benchmarks.harness.options import chosen_device, matching
from benchmarks.harness.report import Report, one_line
from benchmarks.harness.rows import OpRow
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

FLOP_PER_US = 790e6
"""Best measured bf16 matrix product of an H200; FP8 has twice the rate."""

Function = Callable[..., Any]


def compiled_op(function: Function) -> Function:
    """Compile a function for all sizes."""
    compiled: Function = torch.compile(function, fullgraph=True, dynamic=True)
    return compiled


@dataclass
class Checked:
    """A case to time, whose results are right.

    Args:
        row: Gets the times.
        case, work: The case and its inputs.
        written: Resets what the calls write.
        ours: Results of the compiled call for the first input set.
        expected: Those of the reference.
        wanted: Results of every input set, or of all calls together if they write to a tensor.
    """

    row: OpRow
    case: Case
    work: Work
    written: Written
    ours: Sequence[Tensor]
    expected: Sequence[Tensor]
    wanted: Sequence[Sequence[Tensor]] = ()


class OpBench:
    """The compiled functions of a run, and the measurement of one case. A benchmark defines its
    title, its notes and its baseline."""

    title: ClassVar[str]
    notes: ClassVar[tuple[str, ...]] = ()
    flop_per_us: ClassVar[float] = FLOP_PER_US

    def __init__(self, device: torch.device, baseline: Path | None, *, budget_s: float) -> None:
        self.device, self.budget_s = device, budget_s
        self.failures: list[Exception] = []
        self._compiled: dict[Function, Function] = {}
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

    def load(self, folder: Path) -> Any:
        """Load the modules that ``Work.baseline`` takes from a bundle; any failure raises."""
        raise NotImplementedError

    def has_baseline(self, work: Work) -> bool:
        """Whether there is a baseline of a case."""
        return work.baseline is not None

    def compare_baseline(self, at: Checked, baseline: Sequence[Tensor]) -> None:
        """Record the difference of the baseline's results in the row: by default, the number of
        bytes."""
        wrong = differing_bytes(baseline, at.expected)
        at.row.baseline_agrees = wrong == 0
        if wrong:
            total = sum(item.nbytes for item in at.expected)
            at.row.say("baseline_note", f"{wrong} of {total} bytes differ")

    def others(self, row: OpRow, work: Work) -> Mapping[str, Callable[[], Function]]:
        """Return other forms of our call with the same results, by the field of their time."""
        return {}

    def measure(self, case: Case) -> OpRow:
        """Check, then time one case. A failure is written to the row; the run raises after the last
        case."""
        start = time.perf_counter()
        row = OpRow(
            case=case.case, shape=case.shape, variant=case.variant, requests=case.requests,
            rows=case.rows, more=dict(case.labels),
        )  # fmt: skip
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

    def compiled(self, call: Function) -> Function:
        """Return the compiled form of an op, one for all cases."""
        if call not in self._compiled:
            self._compiled[call] = compiled_op(call)
        return self._compiled[call]

    def graph_us(self, calls: Sequence[Call], *, repeated: bool = True) -> float:
        """Time one call in a graph of several; device time.

        If a call reads little, its next repeat finds the data in the L2. A graph per call is then
        more accurate, although its launch counts.
        """
        repeats = captured_calls(len(calls)) // len(calls) if repeated else 1
        return float(Capture(list(calls) * repeats).device_us(self.cold).median)

    def _measure(self, row: OpRow, case: Case) -> None:
        work = case.build(self.device)
        written, expected, compiled = Written(work), work.expected(), self.compiled(work.call)
        row.moved_bytes, row.flop, row.input_sets = work.moved_bytes, work.flop, len(work.sets)
        check("eager", work, checked(work, written, work.call), expected, case)
        ours = checked(work, written, compiled)
        check("compiled", work, ours, expected, case)
        more: dict[str, Function] = {}
        for field, make in self.others(row, work).items():
            try:
                more[field] = make()
                results = checked(work, written, more[field])
            except Exception as error:  # the row says which form does not run here
                more.pop(field, None)
                row.say("note", f"{field}: {one_line(error)}")
                continue
            check(field, work, results, expected, case)
        if not case.timed:
            return
        at = Checked(row, case, work, written, ours, expected)
        if self.copies is not None:
            self._time_cuda(at, compiled, self.copies)
        else:
            row.compiled_us, row.compiled_us_range = _fields(self._wall(compiled, work))
            row.eager_us, row.eager_us_range = _fields(self._wall(work.call, work))
        for field, call in more.items():
            try:
                row.more[field] = self._time_other(field, call, at)
            except WrongResult:  # noqa: PERF203 # a few calls of milliseconds
                raise
            except Exception as error:
                row.say("note", f"{field}: {one_line(error)}")
        if not self.has_baseline(work):
            return
        row.baseline_error = self.baseline_error
        if self.modules is None:
            return
        try:
            self.time_baseline(at)
        except Exception as error:  # a broken baseline becomes a row and does not end the run
            row.baseline_error = one_line(error)

    def _wall(self, call: Function, work: Work) -> Timing:
        args = work.sets[0]
        return wall_us(lambda: call(*args), self.device, budget_s=self.budget_s)

    def _time_other(self, name: str, call: Function, at: Checked) -> float:
        if self.copies is None:
            return float(self._wall(call, at.work).median)
        return float(self._device_us(name, call, at).median)

    def _time_cuda(self, at: Checked, compiled: Function, copies: Copies) -> None:
        """Time a case, and collect the results for each input set."""
        row, work, written = at.row, at.work, at.written
        first = work.sets[0]
        written.reset()
        at.wanted = [work.results(compiled, args) for args in work.sets]
        if written.groups:  # results of all calls together
            at.wanted = written.copies()
        ours = self._device_us("compiled", compiled, at)
        row.compiled_us, row.compiled_us_range = _fields(ours)
        single = Capture([functools.partial(compiled, *first)])
        row.activities = [list(item) for item in device_activities(single.graph.replay)]
        row.kernels = len(row.activities)
        if work.eager:
            eager = self._device_us("eager", work.call, at)
            row.eager_us, row.eager_us_range = _fields(eager)
            row.host_us = host_us(functools.partial(work.call, *first)).median
        row.bandwidth_gbs = copies.bytes_per_us / 1e3
        row.roofline_us = max(work.moved_bytes / copies.bytes_per_us, work.flop / self.flop_per_us)
        if not work.flop:
            row.copy_us = copies.us(work.moved_bytes)

    def _device_us(self, name: str, call: Call, at: Checked) -> Timing:
        """Check a graph of calls over all input sets, then time it."""
        work, written = at.work, at.written
        capture = Capture(_captured(call, work))
        written.reset()
        for output in capture.outputs:
            poison(tensors(output))
        capture.graph.replay()
        left = written.groups or [tensors(output) for output in capture.outputs]
        for number, results in enumerate(left):
            place, expected = number % len(work.sets), at.wanted[number % len(at.wanted)]
            if work.reference is not None and differing_bytes(results, expected):
                expected = work.expected(place)
            check("CUDA graph replay", work, results, expected, f"{name}, {at.case}", place)
        return capture.device_us(self.cold)

    def time_baseline(self, at: Checked) -> None:
        """Compare the baseline, then time it; what it raises is in the row."""
        row, work = at.row, at.work
        assert work.baseline is not None
        row.baseline_note, of_baseline = work.baseline_note, work.of_baseline()
        call = work.baseline(self.modules)
        self.compare_baseline(at, checked(of_baseline, at.written, call))
        if self.copies is None:
            return
        device = Capture(_captured(call, of_baseline)).device_us(self.cold)
        row.baseline_us, row.baseline_us_range = _fields(device)
        row.baseline_host_us = host_us(functools.partial(call, *of_baseline.sets[0])).median


def _fields(timing: Timing) -> tuple[float, list[float]]:
    return timing.median, [timing.low, timing.high]


def _captured(call: Call, work: Work) -> list[Call]:
    """Return the calls of a CUDA graph: every input set in turn."""
    calls: list[Call] = [functools.partial(call, *args) for args in work.sets]
    return calls * (captured_calls(len(calls)) // len(calls))


def run_cases(
    options: argparse.Namespace, cases: Sequence[Case], bench_type: type[OpBench]
) -> None:
    """Check and time the cases of the command line; rows and table go to ``options.out``."""
    device = chosen_device(options)
    output, start = Report(options, device), time.perf_counter()
    left_out = []
    # allow a graph for one token and one request each, and one per configuration
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        bench = bench_type(device, options.baseline, budget_s=0.1 if options.smoke else 0.5)
        for case in report.progress(matching(options, cases), options.bench):
            if options.max_seconds and time.perf_counter() - start > options.max_seconds:
                left_out.append(str(case))
                continue
            row = bench.measure(case)
            if case.timed or row.error:
                output.add(row)
    notes = [_GRAPHS, *bench.notes] if bench.copies is not None else []
    if left_out:
        notes.append(f"left out, --max-seconds: {'; '.join(left_out)}")
    output.finish(bench.title, *notes)
    bench.raise_failures()


_GRAPHS = (
    "Device time per call in a CUDA graph over rotating inputs, L2 emptied before each replay.\n"
    "roofline: the longer of the bytes that must move, at the bandwidth of a copy of 256 MiB in "
    "this run, and of the FLOP at 790 TFLOP/s (twice that in FP8).\n"
    "host: Python time of a call outside of a graph. kernels: what a compiled call runs."
)
