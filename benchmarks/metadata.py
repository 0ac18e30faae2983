"""Benchmark decode metadata against its roofline, eager PyTorch and vLLM."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import vllm_metadata
from benchmarks.baselines.vllm_metadata import VERSION as VLLM
from benchmarks.harness import report
from benchmarks.harness.batches import (
    Batch,
    captured_calls,
    draw_batch,
    input_bytes,
    mixed_lengths,
    output_bytes,
    rotating_sets,
)
from benchmarks.harness.options import chosen_device, size, sizes
from benchmarks.harness.plot import metadata_panels, try_plot
from benchmarks.harness.report import Report, one_line
from benchmarks.harness.rows import METADATA_CPU_COLUMNS, METADATA_CUDA_COLUMNS, MetadataRow
from benchmarks.harness.timing import Capture, Timing, device_activities, host_us, wall_us
from benchmarks.run import BenchError, WrongResult
from dsv4_ops.attention.metadata import (
    COMPILE_OPTIONS,
    AttentionSpec,
    BlockTables,
    DecodeMetadata,
    build_decode_metadata,
)

Builder = Callable[..., DecodeMetadata]

BYTES_PER_US = 4.3e6
"""Copy bandwidth measured on an H200, reads plus writes: what ``roofline_us`` divides by."""

_CONTEXTS = (1024, 16384, 131072, 1048576)
_CONTEXT_REQUESTS = 128
_POISON = 0x5A


@dataclass(frozen=True)
class Case:
    """One row to measure: a mix of lengths, or every request of the same ``context``."""

    requests: int
    next_n: int
    context: int | None = None

    def __str__(self) -> str:
        lengths = "mixed contexts" if self.context is None else f"context {self.context}"
        return f"{self.requests} x {self.next_n} tokens, {lengths}"


@dataclass(frozen=True)
class Plan:
    """What a run does: sizes, device and patience."""

    device: torch.device
    spec: AttentionSpec
    cases: tuple[Case, ...]
    longest: int
    budget_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
    add = parser.add_argument
    add("--requests", type=sizes, metavar="N,N,..", help="default: 1,8,32,128,512")
    add("--next-n", type=sizes, metavar="N,N,..", help="tokens per request; default: 1,2,4")
    add("--context", type=size, metavar="N", help="longest context sampled; default: 131072")
    add("--max-model-len", type=size, metavar="N", help="default: 1048576, as DeepSeek-V4-Flash")
    add(
        "--tuned",
        action="store_true",
        help="compile with dsv4_ops.attention.metadata.COMPILE_OPTIONS",
    )


def run(options: argparse.Namespace) -> None:
    """Check and time the cases of the command line; rows, table and plot go to ``options.out``."""
    plan = make_plan(options)
    output: Report[MetadataRow] = Report(
        options.out, "metadata", report.stamp(plan.device, options.command)
    )
    with torch.no_grad(), _compiler_settings(tuned=options.tuned):
        bench = Bench(plan, options.baseline)
        for case in report.progress(plan.cases, "metadata"):
            output.add(bench.measure(case))
    finish(output, plan, with_plot=not options.no_plot)


def make_plan(options: argparse.Namespace) -> Plan:
    """The run that the command line asks for."""
    smoke = options.smoke
    max_model_len = options.max_model_len or (16384 if smoke else 1048576)
    longest = min(options.context or 131072, max_model_len)
    requests = options.requests or ((1, 8) if smoke else (1, 8, 32, 128, 512))
    next_ns = options.next_n or ((1, 2) if smoke else (1, 2, 4))
    if max(next_ns) > longest:
        raise BenchError(f"--context {longest} is shorter than --next-n {max(next_ns)}")
    grid = [Case(count, next_n) for next_n in next_ns for count in requests]
    flat_requests = min(_CONTEXT_REQUESTS, max(requests))
    contexts = [length for length in _CONTEXTS if length <= max_model_len]
    flat = [Case(flat_requests, 1, length) for length in contexts]
    return Plan(
        device=chosen_device(options),
        spec=AttentionSpec.deepseek_v4_flash(next_n=max(next_ns), max_model_len=max_model_len),
        cases=(*grid, *flat),
        longest=longest,
        budget_s=0.1 if smoke else 0.5,
    )


@contextlib.contextmanager
def _compiler_settings(*, tuned: bool) -> Iterator[None]:
    """Fail where CUDA graphs cannot be used; allow a graph per size, several modes per code."""
    settings: dict[str, Any] = {
        "triton.cudagraph_or_error": True,
        "triton.cudagraph_dynamic_shape_warn_limit": None,
        **(COMPILE_OPTIONS if tuned else {}),
    }
    with torch._inductor.config.patch(settings), torch._dynamo.config.patch(recompile_limit=64):
        yield


def eager_builder(spec: AttentionSpec) -> Builder:
    """The builder as a function of its six tensors."""

    def build(
        query_start_loc: Tensor,
        seq_lens: Tensor,
        slots: Tensor,
        swa: Tensor,
        c4: Tensor,
        c128: Tensor,
    ) -> DecodeMetadata:
        tables = BlockTables(swa=swa, c4=c4, c128=c128)
        return build_decode_metadata(spec, query_start_loc, seq_lens, slots, tables)

    return build


def compiled_builder(spec: AttentionSpec, mode: str | None = None) -> Builder:
    """The builder as one compiled function for all sizes."""
    compiled: Builder = torch.compile(eager_builder(spec), fullgraph=True, dynamic=True, mode=mode)
    return compiled


def check(name: str, actual: DecodeMetadata, expected: DecodeMetadata, case: object) -> None:
    """Every field equals the reference exactly, or nothing is timed."""
    for item in dataclasses.fields(DecodeMetadata):
        got, want = getattr(actual, item.name), getattr(expected, item.name)
        if got.dtype != want.dtype or got.shape != want.shape:
            raise WrongResult(
                f"{name} ({case}): {item.name} is {got.dtype} {list(got.shape)}, "
                f"the reference has {want.dtype} {list(want.shape)}. The case was not timed."
            )
        got = got.to(want.device)
        if not torch.equal(got, want):
            wrong = int((got != want).sum())
            raise WrongResult(
                f"{name} ({case}): {item.name} differs from the reference in {wrong} of "
                f"{want.numel()} entries. The case was not timed."
            )


def poison(metadata: DecodeMetadata) -> None:
    """Overwrite results, so that memory that the next call leaves unwritten shows."""
    for tensor in vars(metadata).values():
        tensor.fill_(_POISON)


class Bench:
    """The compiled functions of a run and the measurement of one case."""

    def __init__(self, plan: Plan, baseline: Path | None) -> None:
        self.plan, self.spec, self.device = plan, plan.spec, plan.device
        self.cuda = plan.device.type == "cuda"
        self.eager = eager_builder(plan.spec)
        self.compiled = compiled_builder(plan.spec)
        self.captured = compiled_builder(plan.spec, "reduce-overhead") if self.cuda else None
        self.modules: Any = None
        self.baseline_error: str | None = None
        if baseline is not None:
            try:
                self.modules = vllm_metadata.load(baseline)
            except Exception as error:
                self.baseline_error = one_line(error)
        self._compile()

    def _compile(self) -> None:
        """Compile for a batch whose sizes all differ: no two are taken for one and guarded on."""
        warm = self.draw(_distinct_sizes(self.plan), 0)
        self.compiled(*warm.arguments())
        if self.captured is not None:
            self.captured(*_static(warm.arguments()))

    def draw(self, case: Case, seed: int) -> Batch:
        """An input set of a case."""
        if case.context is None:
            generator = torch.Generator().manual_seed(seed)
            lengths = mixed_lengths(case.requests, longest=self.plan.longest, generator=generator)
        else:
            lengths = torch.full((case.requests,), case.context, dtype=torch.int32)
        return draw_batch(self.spec, lengths, next_n=case.next_n, device=self.device, seed=seed)

    def measure(self, case: Case) -> MetadataRow:
        """Check, then time one case."""
        first = self.draw(case, 1)
        expected = self.eager(*first.arguments(torch.device("cpu")))
        step_bytes = input_bytes(self.spec, first) + output_bytes(expected)
        sets = rotating_sets(step_bytes, self.device)
        batches = [first, *(self.draw(case, seed) for seed in range(2, sets + 1))]
        row = MetadataRow(
            kind="grid" if case.context is None else "context",
            requests=case.requests,
            next_n=case.next_n,
            context="mixed" if case.context is None else str(case.context),
            tokens=first.tokens,
            input_sets=sets,
        )
        self._check_compiled(first, expected, case)
        if self.cuda:
            self._time_cuda(row, batches, expected, case, step_bytes)
        else:
            self._time_cpu(row, first)
        self._time_baseline(row, batches, expected)
        return row

    def _check_compiled(self, batch: Batch, expected: DecodeMetadata, case: Case) -> None:
        poison(self.compiled(*batch.arguments()))  # freed at once: the next call gets this memory
        check("compiled", self.compiled(*batch.arguments()), expected, case)

    def _time_cpu(self, row: MetadataRow, batch: Batch) -> None:
        arguments, budget = batch.arguments(), self.plan.budget_s
        call = wall_us(lambda: self.compiled(*arguments), self.device, budget_s=budget)
        eager = wall_us(lambda: self.eager(*arguments), self.device, budget_s=budget)
        row.call_us, row.call_us_range = call.median, [call.low, call.high]
        row.eager_us, row.eager_speedup = eager.median, eager.median / call.median

    def _time_cuda(
        self,
        row: MetadataRow,
        batches: Sequence[Batch],
        expected: DecodeMetadata,
        case: Case,
        step_bytes: int,
    ) -> None:
        arguments = batches[0].arguments()
        self._time_call(row, arguments, expected, case)
        single = Capture([lambda: self.compiled(*arguments)])
        self._check_replay(single, [expected], case)
        activities = device_activities(single.graph.replay)
        row.kernels, row.activities = len(activities), [list(item) for item in activities]
        host = host_us(single.graph.replay)
        row.host_us, row.host_us_range = host.median, [host.low, host.high]
        device = self._device_us(batches, case)
        row.device_us, row.device_us_range = device.median, [device.low, device.high]
        row.roofline_us = step_bytes / BYTES_PER_US
        row.pct_of_roofline = 100 * row.roofline_us / device.median
        eager = wall_us(lambda: self.eager(*arguments), self.device, budget_s=0.1)
        row.eager_us, row.eager_speedup = eager.median, eager.median / (host.median + device.median)

    def _time_call(
        self, row: MetadataRow, arguments: Sequence[Tensor], expected: DecodeMetadata, case: Case
    ) -> None:
        """The ``reduce-overhead`` call, which replays a CUDA graph of its own."""
        captured, static = self.captured, _static(arguments)
        assert captured is not None
        for _ in range(3):  # warm up, record, replay
            poison(captured(*static))
        check("compiled for reduce-overhead", captured(*static), expected, case)
        row.call_kernels = len(device_activities(lambda: captured(*static)))
        call = host_us(lambda: captured(*static))
        row.call_us, row.call_us_range = call.median, [call.low, call.high]

    def _device_us(self, batches: Sequence[Batch], case: Case) -> Timing:
        arguments = [batch.arguments() for batch in batches]
        calls = [functools.partial(self.compiled, *inputs) for inputs in arguments]
        capture = Capture(calls * (captured_calls(len(calls)) // len(calls)))
        self._check_replay(capture, [self.compiled(*inputs) for inputs in arguments], case)
        return capture.device_us()

    def _check_replay(
        self, capture: Capture, expected: Sequence[DecodeMetadata], case: Case
    ) -> None:
        for output in capture.outputs:
            poison(output)
        capture.graph.replay()
        for call, output in enumerate(capture.outputs):
            check("CUDA graph replay", output, expected[call % len(expected)], case)

    def _time_baseline(
        self, row: MetadataRow, batches: Sequence[Batch], expected: DecodeMetadata
    ) -> None:
        row.baseline_error = self.baseline_error
        if self.modules is None:
            return
        try:
            result = vllm_metadata.measure(
                self.modules, self.spec, batches, expected, captured_calls(len(batches))
            )
        except Exception as error:  # a broken baseline is a row, not the end of the run
            row.baseline_exact = (
                False if isinstance(error, vllm_metadata.BaselineMismatch) else None
            )
            row.baseline_error = one_line(error)
            return
        row.baseline_exact, row.baseline_note = True, result.note
        if result.device_us is None or result.host_us is None:
            return
        row.baseline_kernels = len(result.activities)
        row.baseline_activities = [list(item) for item in result.activities]
        row.baseline_device_us, row.baseline_host_us = (
            result.device_us.median,
            result.host_us.median,
        )
        assert row.device_us is not None
        assert row.host_us is not None
        assert row.call_us is not None
        baseline_us = row.baseline_device_us + row.baseline_host_us
        row.speedup = baseline_us / (row.device_us + row.host_us)
        row.call_speedup = baseline_us / (row.device_us + row.call_us)


def _static(arguments: Sequence[Tensor]) -> list[Tensor]:
    """Copies at fixed addresses: the compiled call then copies nothing into its CUDA graph."""
    copies = [tensor.clone() for tensor in arguments]
    for copy in copies:
        torch._dynamo.mark_static_address(copy)
    return copies


def _distinct_sizes(plan: Plan) -> Case:
    """A typical batch with no two sizes equal: Dynamo takes equal ones for one symbol."""
    spec = plan.spec
    taken = {-(-spec.max_model_len // page) for page in (spec.block_tokens, spec.swa_block_size)}
    requests = max(2, min(_CONTEXT_REQUESTS, max(case.requests for case in plan.cases)))
    while {requests, requests + 1, 2 * requests} & taken:
        requests += 1
    return Case(requests, 2)


def finish(output: Report[MetadataRow], plan: Plan, *, with_plot: bool) -> None:
    """Table and plot of all rows."""
    cuda = plan.device.type == "cuda"
    columns = METADATA_CUDA_COLUMNS if cuda else METADATA_CPU_COLUMNS
    grid = [row for row in output.rows if row.kind == "grid"]
    flat = [row for row in output.rows if row.kind == "context"]
    title = (
        "Decode metadata of one step, microseconds; every result was checked exactly before timing"
    )
    parts = [report.table(grid, columns)]
    if flat:
        parts += ["All requests of the same context", report.table(flat, columns)]
    parts += _notes(output.rows)
    output.write_text(report.text(title, output, *parts))
    if with_plot:
        title = f"Decode metadata of one step · {output.stamp['device']}"
        panels = metadata_panels(grid, cuda=cuda)
        try_plot(panels, output.path(".png"), title=title, ylabel="microseconds per step")


def _notes(rows: Sequence[MetadataRow]) -> list[str]:
    notes = []
    if any(row.baseline_device_us is not None for row in rows):
        notes.append(
            f"baseline: {VLLM}'s builder sequence; for next_n = 4 it also expands the\n"
            "indexer's block table, which ours does not need. kernels count copies and fills.\n"
            "speedup = (baseline host + device) / (ours host + device), ours a CUDA graph replay."
        )
    notes += sorted({row.baseline_note for row in rows if row.baseline_note})
    return notes
