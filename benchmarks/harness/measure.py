"""Measure an op case by case: check the op, then time it, a copy and a baseline."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.harness import builds, report
from benchmarks.harness.batches import captured_calls
from benchmarks.harness.memory import ColdCache, Copies
from benchmarks.harness.options import chosen_device, matching
from benchmarks.harness.report import Report, one_line
from benchmarks.harness.timing import (
    Call,
    Capture,
    Timing,
    alternating_us,
    device_activities,
    host_us,
    wall_us,
)
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
"""Highest measured rate of bf16 MMAs on an H200; FP8 has twice that rate."""

Function = Callable[..., Any]


def compiled_op(function: Function) -> Function:
    """Compile a function for all sizes."""
    compiled: Function = torch.compile(function, fullgraph=True, dynamic=True)
    return compiled


@dataclass(kw_only=True)
class OpRow:
    """One measured op. Times are in microseconds: device times, or wall times on a CPU; None if a
    device has no such time. ``*_range`` are the 20th and 80th percentiles."""

    case: str
    shape: str
    variant: str
    requests: int
    rows: int
    moved_bytes: int | None = None  # minimum that any implementation reads and writes
    flop: int | None = None  # FLOP of the products
    input_sets: int = 1
    compiled_us: float | None = None  # time per call, compiled with dynamic sizes
    eager_us: float | None = None  # time per call in a CUDA graph, without a compiler
    baseline_us: float | None = None  # time of the baseline on the same inputs
    roofline_us: float | None = None  # the longer of two times: bytes at a copy's rate, and FLOP
    copy_us: float | None = None  # time of a copy of as many bytes
    bandwidth_gbs: float | None = None
    kernels: int | None = None  # kernels of one compiled call
    host_us: float | None = None  # Python time per call outside of a graph (also the next)
    baseline_host_us: float | None = None
    baseline_agrees: bool | None = None  # byte for byte, or within the baseline's tolerance
    baseline_max_diff: float | None = None  # maximum difference of an element
    baseline_note: str | None = None
    baseline_error: str | None = None
    note: str | None = None
    error: str | None = None
    seconds: float | None = None
    compiled_us_range: list[float] = field(default_factory=list)
    eager_us_range: list[float] = field(default_factory=list)
    baseline_us_range: list[float] = field(default_factory=list)
    activities: list[list[Any]] = field(default_factory=list)  # each kernel and its time
    baseline_activities: list[list[Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)  # fields that only some benchmarks have

    def say(self, name: str, text: str | None) -> None:
        """Append a text to the text in a field."""
        texts = (getattr(self, name), text)
        setattr(self, name, "; ".join(each for each in texts if each) or None)


@dataclass
class Checked:
    """A case whose results are right, ready to be timed."""

    row: OpRow  # gets the times
    case: Case
    work: Work
    written: Written  # resets the tensors that the calls write
    ours: Sequence[Tensor]  # results of the compiled call for the first input set
    expected: Sequence[Tensor]  # the reference's results
    wanted: Sequence[Sequence[Tensor]] = ()  # correct results by input set, or after all writes


class OpBench:
    """Holds the compiled functions of a run, and measures cases."""

    groups: ClassVar[Mapping[str, Callable[[bool], list[Case]]]]
    """Functions that make the cases of a group (small ones if True), in order of measurement."""
    smoke_groups: ClassVar[Sequence[str]] = ()
    """Groups of a smoke run; empty for all groups."""
    title: ClassVar[str]
    notes: ClassVar[tuple[str, ...]] = ()
    all_compare: ClassVar[bool] = False  # all cases have a baseline, without ``Work.baseline``
    flop_per_us: ClassVar[float] = FLOP_PER_US

    def __init__(self, device: torch.device, baseline: Path | None, *, budget_s: float) -> None:
        self.device, self.budget_s = device, budget_s
        self.failures: list[Exception] = []
        self._compiled: dict[Function, Function] = {}
        self.modules: Any = None
        self.baseline: str | None = None
        self.baseline_error: str | None = None
        if baseline is not None:
            try:
                self.modules = self.load(baseline)
                self.baseline = builds.names(*self.loaded())
            except Exception as error:
                self.baseline_error = one_line(error)
        self.cold: ColdCache | None = None
        self.copies: Copies | None = None
        if device.type == "cuda":
            self.cold = ColdCache(device)
            self.copies = Copies(device, self.cold)

    @classmethod
    def cases(cls, groups: Iterable[str], *, smoke: bool) -> list[Case]:
        """Make the cases of some groups."""
        return [case for group in groups for case in cls.groups[group](smoke)]

    @classmethod
    def run(cls, options: argparse.Namespace) -> None:
        """Check and time the cases that the command line selects."""
        device = chosen_device(options)
        start = time.perf_counter()
        groups = options.cases or (options.smoke and cls.smoke_groups) or cls.groups
        cases = matching(options, cls.cases(groups, smoke=options.smoke))
        left_out = []
        # allow graphs for one token, for one request, and for each configuration
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
            bench = cls(device, options.baseline, budget_s=0.1 if options.smoke else 0.5)
            output = Report(options, device, baseline=bench.baseline)
            for case in report.progress(cases, options.bench):
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

    def load(self, folder: Path) -> Any:
        """Load the modules for ``Work.baseline`` from a bundle; any failure raises."""
        raise NotImplementedError

    def loaded(self) -> Sequence[Any]:
        """Return the libraries and modules that name the baseline."""
        return [self.modules]

    def compare_baseline(self, at: Checked, baseline: Sequence[Tensor]) -> None:
        """Record how the baseline's results differ: by default, in how many bytes."""
        wrong = differing_bytes(baseline, at.expected)
        at.row.baseline_agrees = wrong == 0
        if wrong:
            total = sum(item.nbytes for item in at.expected)
            at.row.say("baseline_note", f"{wrong} of {total} bytes differ")

    def others(self, row: OpRow, work: Work) -> Mapping[str, Callable[[], Function]]:
        """Return other forms of our call with the same results, by the field for their time."""
        return {}

    def measure(self, case: Case) -> OpRow:
        """Check and time a case. The row gets an error, which the run raises at its end."""
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
        """Return the compiled form of an op; all cases share it."""
        if call not in self._compiled:
            self._compiled[call] = compiled_op(call)
        return self._compiled[call]

    def graph_us(self, calls: Sequence[Call], *, repeated: bool = True) -> float:
        """Return the device time of one call, in a graph of several calls.

        If a call reads little, its repeat in the same graph would find the data in the L2. Without
        repeats the time is more accurate, although more of it is the graph's launch.
        """
        calls = captured_calls(calls) if repeated else calls
        return Capture(calls).device_us(self.cold).median

    def _measure(self, row: OpRow, case: Case) -> None:
        work = case.build(self.device)
        written, expected, compiled = Written(work), work.expected(), self.compiled(work.call)
        row.moved_bytes, row.flop, row.input_sets = work.moved_bytes, work.flop, len(work.sets)
        check("eager", work, checked(work, written, work.call), expected, case)
        ours = checked(work, written, compiled)
        check("compiled", work, ours, expected, case)
        more: dict[str, Function] = {}
        for name, make in self.others(row, work).items():
            try:
                call = make()
                results = checked(work, written, call)
            except Exception as error:  # the row names the form that cannot run here
                row.say("note", f"{name}: {one_line(error)}")
                continue
            check(name, work, results, expected, case)
            more[name] = call
        if not case.timed:
            return
        at = Checked(row, case, work, written, ours, expected)
        if self.copies is not None:
            self._time_cuda(at, compiled, self.copies)
        else:
            row.compiled_us, row.compiled_us_range = _fields(self._wall(compiled, work))
            row.eager_us, row.eager_us_range = _fields(self._wall(work.call, work))
        for name, call in more.items():
            try:
                row.more[name] = self._time_other(name, call, at)
            except WrongResult:  # noqa: PERF203 # a few calls of milliseconds
                raise
            except Exception as error:
                row.say("note", f"{name}: {one_line(error)}")
        if work.baseline is None and not self.all_compare:
            return
        row.baseline_error = self.baseline_error
        if self.modules is None:
            return
        try:
            self.time_baseline(at)
        except Exception as error:  # the row gets the error, and the run continues
            row.baseline_error = one_line(error)

    def _wall(self, call: Function, work: Work) -> Timing:
        args = work.sets[0]
        return wall_us(lambda: call(*args), self.device, budget_s=self.budget_s)

    def _time_other(self, name: str, call: Function, at: Checked) -> float:
        if self.copies is None:
            return float(self._wall(call, at.work).median)
        return float(self._device_us(name, call, at).median)

    def _time_cuda(self, at: Checked, compiled: Function, copies: Copies) -> None:
        """Time a case, and store the right results of every input set."""
        row, work, written = at.row, at.work, at.written
        first = work.sets[0]
        written.reset()
        at.wanted = [work.results(compiled, args) for args in work.sets]
        if written.groups:  # the results of all calls together
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
        """Compare the baseline with the expected results, then time it."""
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
    """Return the calls of a CUDA graph: one per input set, repeated if there are few sets."""
    return captured_calls([functools.partial(call, *args) for args in work.sets])


def run_kernels(
    options: argparse.Namespace,
    cases: Iterable[tuple[Any, Callable[[Any, torch.device], Mapping[str, Sequence[Call]]]]],
    **more: Any,
) -> None:
    """Check and time kernels on CUDA; write rows, with ``more`` fields, and a table.

    A case is a row and a function. The function checks the case, and returns calls over rotating
    inputs, by the name of the row's field for their time.
    """
    device = chosen_device(options)
    if device.type != "cuda":
        raise BenchError(f"{options.bench}: it times kernels, which run on CUDA only")
    copies = Copies(device, ColdCache(device)).bytes_per_us
    output = Report(options, device, copy_tbs=copies / 1e6, **more)
    for row, checked_calls in cases:
        name = " ".join(str(value) for value in vars(row).values() if value)
        if options.match and options.match not in name:
            continue
        print(f"{options.bench}: {name}", file=sys.stderr, flush=True)
        with output.measured(row):
            _time_forms(row, checked_calls(row, device))
            row.compare(copies)
        del checked_calls  # frees a pool of rows before the next case makes its own
    output.finish(f"{options.bench}, microseconds")
    output.raise_failures()


def _time_forms(row: Any, forms: Mapping[str, Sequence[Call]]) -> None:
    timings = alternating_us([Capture(calls) for calls in forms.values()])
    for form, timing in zip(forms, timings, strict=True):
        setattr(row, form, timing.median)


_GRAPHS = (
    "Device time per call in a CUDA graph over rotating inputs, L2 emptied before each replay.\n"
    "roofline: the longer of the bytes that must move, at the bandwidth of a copy of 256 MiB in "
    "this run, and of the FLOP at 790 TFLOP/s (twice that in FP8).\n"
    "host: Python time of a call outside of a graph. kernels: what a compiled call runs."
)
