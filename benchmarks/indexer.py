"""Benchmark the indexer in decode against its roofline, and DeepGEMM with ``torch.topk``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import deep_gemm
from benchmarks.cases import indexer_cases
from benchmarks.cases.token_check import Tolerance, outside
from benchmarks.harness.measure import FLOP_PER_US, Checked, OpBench
from benchmarks.harness.work import Case

LOGITS = Tolerance(torch.inf, 0.0, 5e-6)
"""The tolerance of DeepGEMM's own tests."""

SHARED = 0.99
"""Minimum share of selected rows that the baseline selects too; FP8 rounding may change some."""

_BATCHES, _CONTEXTS = (1, 8, 64, 128), (8192, 32768, 65536, 131072)
_V32_CONTEXTS = (32768, 131072)


def _cases(group: str, small: bool) -> list[Case]:
    contexts = _V32_CONTEXTS if group == indexer_cases.V32 else _CONTEXTS
    sizes = ((2, 5), (2560,)) if small else (_BATCHES, contexts)
    return indexer_cases.indexer_cases(group, *sizes, smoke=small)


CASES = {group: functools.partial(_cases, group) for group in ("logits", *indexer_cases.SELECTIONS)}


def _not_shared(baseline: Tensor, ours: Tensor) -> str | None:
    """Say how many of our rows the baseline selects, or return None if it selects enough."""
    there = ours >= 0
    found = (ours[:, :, None] == baseline[:, None].int()).any(-1) & there
    shared, total = int(found.sum()), int(there.sum())
    return None if shared >= SHARED * total else f"{shared} of {total} selected rows are shared"


class Bench(OpBench):
    """Measure the indexer, whose roofline is memory bandwidth or the FP8 tensor cores."""

    groups, smoke_groups = CASES, tuple(indexer_cases.SELECTIONS)
    title = (
        "Lightning indexer, microseconds; before timing every score was within 1.5 times the error "
        "that the reference has against float64, or that the FP8 matrix unit allows"
    )
    notes = (
        "Shapes are requests x context; 4 tokens are one row, in select_v32 each is one.\n"
        "baseline_us: of DeepGEMM on the same inputs, its plan made before: logits; of select, "
        "logits and torch.topk of them.\n"
        "baseline_agrees: its logits are ours within the tolerance of its own tests; of our "
        f"selected rows it selects {SHARED:.0%}.",
    )
    flop_per_us = 2 * FLOP_PER_US

    def load(self, folder: Path) -> Any:
        return deep_gemm.load(folder)

    def compare_baseline(self, at: Checked, baseline: Sequence[Tensor]) -> None:
        row, ours = at.row, at.ours
        if row.case == "logits":
            found = outside("logits", baseline[0], ours[0], LOGITS)
            row.baseline_max_diff = float((baseline[0].double() - ours[0].double()).abs().max())
        else:
            found = _not_shared(baseline[0], ours[0])
        row.baseline_agrees = found is None
        row.say("baseline_note", found)


run = Bench.run
