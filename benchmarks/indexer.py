"""Benchmark the indexer in decode against its roofline, and DeepGEMM with ``torch.topk``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import deep_gemm, vllm_metadata
from benchmarks.cases import indexer_cases
from benchmarks.cases.token_check import Tolerance, outside
from benchmarks.harness.measure import FLOP_PER_US, Checked, OpBench, run_cases
from benchmarks.harness.work import Case

CASES = ("logits", "select", indexer_cases.V32)
"""Groups of cases, in the order of measurement."""

LOGITS = Tolerance(torch.inf, 0.0, 5e-6)
"""The tolerance of DeepGEMM's own tests."""

SHARED = 0.99
"""Minimum share of the selected rows that the baseline selects too: FP8 products are rounded, which
decides between two close scores."""

_BATCHES, _CONTEXTS = (1, 8, 64, 128), (8192, 32768, 65536, 131072)
_V32_CONTEXTS = (32768, 131072)


def chosen_cases(groups: Sequence[str], *, smoke: bool) -> list[Case]:
    """Make the cases of some groups."""
    found = []
    for group in groups:
        contexts = _V32_CONTEXTS if group == indexer_cases.V32 else _CONTEXTS
        sizes = ((2, 5), (2560,)) if smoke else (_BATCHES, contexts)
        found += indexer_cases.indexer_cases(group, *sizes, smoke=smoke)
    return found


def run(options: argparse.Namespace) -> None:
    """Check and time the cases of the command line; rows and table go to ``options.out``."""
    groups = options.cases or (CASES[1:] if options.smoke else CASES)
    run_cases(options, chosen_cases(groups, smoke=options.smoke), Bench)


class Bench(OpBench):
    """Measure the indexer. Its limit is memory or the FP8 matrix units. DeepGEMM computes logits
    only, and PyTorch selects from them."""

    title = (
        "Lightning indexer, microseconds; before timing every score was within 1.5 times the error "
        "that the reference has against float64, or that the FP8 matrix unit allows"
    )
    notes = (
        "Shapes are requests x context; 4 tokens are one row, in select_v32 each is one.\n"
        f"baseline: {vllm_metadata.VERSION}'s DeepGEMM on the same inputs, its plan made before: "
        "logits; of select, logits and torch.topk of them.\n"
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


def _not_shared(baseline: Tensor, ours: Tensor) -> str | None:
    """Return the number of our rows that the baseline does not select."""
    there = ours >= 0
    found = (ours[:, :, None] == baseline[:, None].int()).any(-1) & there
    shared, total = int(found.sum()), int(there.sum())
    return None if shared >= SHARED * total else f"{shared} of {total} selected rows are shared"
