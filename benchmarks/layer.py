"""Benchmark an attention layer in decode against its roofline and the baselines."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines.layer import BaselineStages, Libraries, baseline_calls, load, note
from benchmarks.baselines.vllm_metadata import VERSION as VLLM
from benchmarks.cases.layer_cases import (
    FLASH,
    PRO,
    LayerWork,
    Model,
    layer_cases,
    ragged_cases,
)
from benchmarks.cases.layer_check import compare
from benchmarks.cases.layer_stages import Results, our_stages
from benchmarks.harness import report
from benchmarks.harness.measure import ComputeBench, notes_of, roofline_notes, run_cases
from benchmarks.harness.memory import Copies
from benchmarks.harness.options import add_cases
from benchmarks.harness.plot import layer_panels, try_plot
from benchmarks.harness.report import Report, one_line
from benchmarks.harness.rows import COMPUTE_CPU_COLUMNS, COMPUTE_CUDA_COLUMNS, LayerRow
from benchmarks.harness.timing import host_us
from benchmarks.harness.work import Case, Work, Written
from dsv4_ops.attention import LayerSpec
from dsv4_ops.attention.metadata import AttentionSpec

CASES = ("window", "c4", "c128")
"""Kinds of layers, in the order in which they are measured."""

_SMOKE_CASES = ("window",)
_SIZES = ((1, 16384), (8, 16384), (64, 16384), (128, 16384))
_LONG = ((8, 131072),)
_RAGGED = (8, 64)
_SMALL = Model("small", 4, LayerSpec(attention=AttentionSpec(index_topk=64), num_groups=2))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
    add_cases(parser, CASES)


def chosen_cases(groups: Sequence[str], *, smoke: bool) -> list[Case]:
    """The cases of some kinds of layers."""
    if smoke:
        return [case for kind in groups for case in layer_cases(kind, (_SMALL,), ((3, 1024),))]
    found = []
    for kind in groups:
        sizes = _SIZES if kind == "window" else (*_SIZES, *_LONG)
        found += layer_cases(kind, (FLASH, PRO), sizes)
        if kind == "c128":
            found += ragged_cases((FLASH,), _RAGGED)
    return found


def run(options: argparse.Namespace) -> None:
    """Check and time the cases of the command line; rows, table and plot go to ``options.out``."""
    groups = options.cases or (_SMOKE_CASES if options.smoke else CASES)
    run_cases(options, chosen_cases(groups, smoke=options.smoke), Bench, finish)


class Bench(ComputeBench[LayerRow]):
    """The layer and its stages; the baselines stage by stage and in sequence."""

    row_type = LayerRow

    def load(self, folder: Path) -> Libraries:
        return load(folder)

    def compare_baseline(
        self,
        row: LayerRow,
        baseline: Sequence[Tensor],
        ours: Sequence[Tensor],
        expected: Sequence[Tensor],
    ) -> None:
        """Of the attention; ``layer_check`` compares the stages."""
        row.baseline_max_diff = float((baseline[0].double() - ours[0].double()).abs().max())

    def _time_cuda(
        self,
        row: LayerRow,
        work: Work,
        written: Written,
        compiled: Callable[..., Any],
        case: Case,
        copies: Copies,
    ) -> None:
        super()._time_cuda(row, work, written, compiled, case, copies)
        assert isinstance(work, LayerWork)
        by_stage: dict[str, list[Callable[[], Any]]] = {}
        for args in work.sets:
            for stage in our_stages(work.kind, work.spec, args)[0]:
                # the others are launches of our kernels, compiled or not
                fused = stage.name in ("attention", "output")
                whole = self.compiled(stage.call) if fused else stage.call
                call = functools.partial(whole, *stage.args)
                by_stage.setdefault(stage.name, []).append(call)
        for name, calls in by_stage.items():
            row.stages[name] = self.graph_us(calls)

    def _time_baseline(
        self,
        row: LayerRow,
        work: Work,
        written: Written,
        ours: Sequence[Tensor],
        expected: Sequence[Tensor],
    ) -> None:
        row.baseline_error = self.baseline_error
        if self.modules is None:
            return
        assert isinstance(work, LayerWork)
        row.baseline_note = note(self.modules, work.kind)
        try:
            self._run_baselines(row, work)
        except Exception as error:  # a broken baseline is a row, not the end of the run
            row.baseline_error = one_line(error)

    def _run_baselines(self, row: LayerRow, work: LayerWork) -> None:
        results: list[Results] = [our_stages(work.kind, work.spec, args)[1] for args in work.sets]
        sets = [
            BaselineStages(self.modules, work.kind, work.spec, args, mine)
            for args, mine in zip(work.sets, results, strict=True)
        ]
        stages, errors = baseline_calls(sets)
        if errors:
            row.baseline_error = "; ".join(errors)
        found = compare(sets[0], {name: calls[0] for name, calls in stages.items()})
        row.baseline_note = "; ".join([str(row.baseline_note), *found.wrong, *found.notes])
        if sets[0].out is not None:
            row.baseline_agrees = not found.wrong
            self.compare_baseline(row, [sets[0].out], [results[0].out], [])
        elif found.wrong:
            row.baseline_agrees = False
        if self.cold is None:
            return
        for name, calls in stages.items():
            row.baseline_stages[name] = self.graph_us(calls)
        if errors:
            return
        order = [[calls[place] for calls in stages.values()] for place in range(len(sets))]
        sequence = [functools.partial(_in_turn, calls) for calls in order]
        row.baseline_us = self.graph_us(sequence)
        row.baseline_host_us = host_us(sequence[0]).median
        if row.compiled_us:
            row.times_faster = row.baseline_us / row.compiled_us


def _in_turn(calls: Sequence[Callable[[], Any]]) -> Any:
    """The stages of one input set; what the last one returns."""
    return [call() for call in calls][-1]


def finish(
    output: Report[LayerRow], device: torch.device, left_out: Sequence[str], with_plot: bool
) -> None:
    """Table and plot of all rows."""
    cuda = device.type == "cuda"
    measured = [row for row in output.rows if row.error is None]
    title = (
        "An attention layer between its projections, one decode step, microseconds; before timing "
        "every output was that of the references on the CPU, within the tolerances of FlashMLA's "
        "tests"
    )
    columns = COMPUTE_CUDA_COLUMNS if cuda else COMPUTE_CPU_COLUMNS
    shown = [replace(row, stages=_words(row.stages), baseline_stages=_words(row.baseline_stages))
             for row in measured]  # fmt: skip
    notes = [
        *roofline_notes(output.rows, Bench.flop_per_us, *_NOTES),
        *notes_of(output.rows, left_out),
    ]
    parts = [report.table(shown, columns)]
    if cuda:
        parts.append(report.table(shown, ("case", "shape", "variant", "stages", "baseline_stages")))
    output.write_text(report.text(title, output, *parts, *notes))
    if with_plot:
        title = f"Attention layer, decode · {output.stamp['device']}"
        panels = layer_panels(measured, cuda=cuda)
        try_plot(panels, output.path(".png"), title=title, ylabel="microseconds per step")


def _words(stages: Any) -> Any:
    """Times of stages in one cell."""
    return " ".join(f"{name}={us:.1f}" for name, us in stages.items()) or None


_NOTES = (
    "Shapes are model, requests x context. Every request finishes a window in this step: of four "
    "steps of C4, or 128 of C128, that is the most expensive one.",
    "planned: the plan that the step makes once for all its C128 layers was made before.",
    "FLOP of the indexer's FP8 products count half.",
    "stages: each alone in a graph of its own; together they have more launches, and no overlap.",
    f"baseline: the same step by the kernels of {VLLM}, its FlashMLA and DeepGEMM, and "
    "torch.topk, one behind the other on one stream, where vLLM overlaps the compressors and the "
    "indexer with the rest; plans made before. What else it does otherwise: baseline_note.",
    "baseline_agrees: all stages left what ours leave: the same bytes in caches, or no value over "
    "a step of its code away; attention within the tolerances of FlashMLA's own tests.",
)
