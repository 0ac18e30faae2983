"""Benchmark the compressor, saved states and compressed windows, against its roofline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from benchmarks import kv_cache
from benchmarks.cases.compressor_cases import KINDS, compressor_cases
from benchmarks.harness import report
from benchmarks.harness.measure import notes_of, run_cases
from benchmarks.harness.options import add_cases
from benchmarks.harness.plot import compressor_panels, try_plot
from benchmarks.harness.report import Report
from benchmarks.harness.rows import CACHE_CPU_COLUMNS, CACHE_CUDA_COLUMNS, CacheRow
from benchmarks.harness.work import Case

CASES = tuple(KINDS)
"""Kinds of compressors, in the order in which they are measured."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
    add_cases(parser, CASES)


def chosen_cases(kinds: Sequence[str], *, smoke: bool) -> list[Case]:
    """The cases of some kinds of compressors."""
    decode, prefill = ((2, 8), (256,)) if smoke else ((1, 8, 128), (4096, 8192))
    return [case for kind in kinds for case in compressor_cases(kind, decode, prefill)]


def run(options: argparse.Namespace) -> None:
    """Check and time the cases of the command line; rows, table and plot go to ``options.out``."""
    kinds = options.cases or (CASES[1:2] if options.smoke else CASES)
    run_cases(options, chosen_cases(kinds, smoke=options.smoke), kv_cache.Bench, finish)


def finish(
    output: Report[CacheRow], device: torch.device, left_out: Sequence[str], with_plot: bool
) -> None:
    """Table and plot of all rows."""
    cuda = device.type == "cuda"
    measured = [row for row in output.rows if row.error is None]
    title = (
        "KV compressor, states saved and windows compressed, microseconds; checked before timing: "
        "states byte for byte, rows within float32 rounding"
    )
    columns = CACHE_CUDA_COLUMNS if cuda else CACHE_CPU_COLUMNS
    notes = [*kv_cache.copy_notes(output.rows), *notes_of(output.rows, left_out)]
    output.write_text(report.text(title, output, report.table(measured, columns), *notes))
    if with_plot:
        title = f"KV compressor · {output.stamp['device']}"
        panels = compressor_panels(measured, cuda=cuda)
        try_plot(panels, output.path(".png"), title=title, ylabel="microseconds per step")
