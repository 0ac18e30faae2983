"""Benchmark an attention layer in a decode step against its roofline and the baselines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.baselines.layer import NOTES, BaselineStages, Libraries, load, our_results
from benchmarks.cases.layer_cases import FLASH, PRO, Model, layer_cases
from benchmarks.cases.layer_check import Found
from benchmarks.harness.measure import Checked, OpBench
from benchmarks.harness.timing import device_activities, host_us
from benchmarks.harness.work import Case
from dsv4_ops.attention import LayerSpec
from dsv4_ops.attention.metadata import AttentionSpec

_SIZES = ((1, 16384), (8, 16384), (64, 16384), (128, 16384))
_LONG = ((8, 131072),)
_SMALL = Model("small", 4, LayerSpec(attention=AttentionSpec(index_topk=64), num_groups=2))


def _cases(kind: str, small: bool) -> list[Case]:
    if small:
        return layer_cases(kind, (_SMALL,), ((3, 1024),))
    return layer_cases(kind, (FLASH, PRO), _SIZES if kind == "window" else (*_SIZES, *_LONG))


CASES = {kind: functools.partial(_cases, kind) for kind in ("window", "c4", "c128")}


def _in_turn(calls: Sequence[Callable[[], Any]]) -> Any:
    """Run the baseline's stages of one input set; return the result of the last stage."""
    return [call() for call in calls][-1]


class Bench(OpBench):
    """Measure the layer, and a sequence of the baselines' stages."""

    groups, smoke_groups, all_compare = CASES, ("window",), True
    title = (
        "An attention layer between its projections, one decode step, microseconds; before timing "
        "every output was that of the references on the CPU, within the tolerances of FlashMLA's "
        "tests"
    )
    notes = (
        "Shapes are model, requests x context. Every request finishes a window in this step: of "
        "four steps of C4, or 128 of C128, that is the most expensive one.\n"
        "FLOP of the indexer's FP8 products count half.\n"
        "baseline_us: of the same step by vLLM's kernels, FlashMLA, DeepGEMM and torch.topk, one "
        "behind the other on one stream, where vLLM overlaps the compressors and the indexer with "
        "the rest; plans made before. What else it does otherwise: baseline_note.\n"
        "baseline_agrees: all stages left what ours leave: the same bytes in caches, or no value "
        "over a step of its code away; attention within the tolerances of FlashMLA's own tests.",
    )

    def load(self, folder: Path) -> Libraries:
        return load(folder)

    def loaded(self) -> Sequence[Any]:
        return list(self.modules[:3])

    def time_baseline(self, at: Checked) -> None:
        row, work = at.row, at.work
        kind, spec = work.details
        row.baseline_note = f"{NOTES[kind]}vLLM's inverse RoPE quantises to FP8, ours leaves bf16"
        held = []
        for args in work.sets:
            results = our_results(kind, spec, args)
            held.append(BaselineStages(self.modules, kind, spec, args, results))
        found = Found()
        calls = [each.calls(None if number else found) for number, each in enumerate(held)]
        row.baseline_agrees = not found.wrong
        row.say("baseline_note", "; ".join([*found.wrong, *found.notes]))
        difference = held[0].out.double() - held[0].ours.out.double()
        row.baseline_max_diff = float(difference.abs().max())
        if self.copies is None:
            return
        sequence = [functools.partial(_in_turn, stages) for stages in calls]
        row.baseline_us = self.graph_us(sequence)
        row.baseline_host_us = host_us(sequence[0]).median
        row.baseline_activities = [list(each) for each in device_activities(sequence[0])]


run = Bench.run
