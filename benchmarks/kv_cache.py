"""Benchmark inserts, gathers and sparse indices against their roofline and vLLM."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import vllm_metadata
from benchmarks.cases.cache_cases import (
    fused_cases,
    gather_all_cases,
    gather_cases,
    indexer_gather_cases,
    insert_cases,
)
from benchmarks.cases.index_cases import combine_cases, mixed_cases
from benchmarks.harness import report
from benchmarks.harness.measure import OpBench, notes_of, run_cases
from benchmarks.harness.memory import Copies
from benchmarks.harness.options import add_cases
from benchmarks.harness.plot import cache_panels, try_plot
from benchmarks.harness.report import Report
from benchmarks.harness.rows import CACHE_CPU_COLUMNS, CACHE_CUDA_COLUMNS, CacheRow
from benchmarks.harness.work import Case, Work, differing_bytes

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
    add_cases(parser, CASES)


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
    groups = options.cases or (_SMOKE_CASES if options.smoke else CASES)
    run_cases(options, chosen_cases(groups, smoke=options.smoke), Bench, finish)


class Bench(OpBench[CacheRow]):
    """The limit of an op that only moves bytes is a copy; vLLM's caches are equal byte for byte."""

    row_type = CacheRow

    def load(self, folder: Path) -> Any:
        return vllm_metadata.load(folder, _NEEDED_MODULES)

    def set_limits(self, row: CacheRow, work: Work, copies: Copies, us: float) -> None:
        row.copy_us = copies.us(work.moved_bytes)
        row.roofline_us = work.moved_bytes / copies.bytes_per_us
        row.pct_of_copy = 100 * row.copy_us / us
        row.pct_of_bandwidth = 100 * row.roofline_us / us

    def compare_baseline(
        self,
        row: CacheRow,
        baseline: Sequence[Tensor],
        ours: Sequence[Tensor],
        expected: Sequence[Tensor],
    ) -> None:
        wrong = differing_bytes(baseline, expected)
        row.baseline_exact = wrong == 0
        if wrong:
            row.baseline_note = f"{wrong} of {sum(item.nbytes for item in expected)} bytes differ"


def finish(
    output: Report[CacheRow], device: torch.device, left_out: Sequence[str], with_plot: bool
) -> None:
    """Table and plot of all rows."""
    cuda = device.type == "cuda"
    measured = [row for row in output.rows if row.error is None]
    title = "Cache ops, microseconds; every result was checked byte for byte before timing"
    columns = CACHE_CUDA_COLUMNS if cuda else CACHE_CPU_COLUMNS
    notes = [*copy_notes(output.rows, _BASELINE), *notes_of(output.rows, left_out)]
    output.write_text(report.text(title, output, report.table(measured, columns), *notes))
    if with_plot:
        title = f"Cache ops · {output.stamp['device']}"
        panels = cache_panels(measured, cuda=cuda)
        try_plot(panels, output.path(".png"), title=title, ylabel="microseconds per call")


_BASELINE = (
    f"baseline: {vllm_metadata.VERSION}'s kernel on the same inputs; times_faster = baseline_us / "
    "compiled_us.\n"
)


def copy_notes(rows: Sequence[CacheRow], baseline: str = "") -> list[str]:
    """What the columns of measured rows mean."""
    bandwidth = next((row.bandwidth_gbs for row in rows if row.bandwidth_gbs), None)
    if bandwidth is None:
        return []
    return [
        "Device time per call in a CUDA graph over rotating inputs, L2 emptied before each "
        "replay.\n"
        f"roofline: bytes that must move / {bandwidth:.0f} GB/s, a copy of 256 MiB here. copy: "
        "the faster of a memcpy and a kernel that moves as many bytes.\n"
        f"{baseline}"
        "host: Python time of a call outside of a graph. kernels: what a compiled call runs."
    ]
