"""Benchmark the compressor (saved states and compressed windows) against its roofline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.cases.compressor_cases import KINDS, compressor_cases
from benchmarks.harness.measure import OpBench, run_cases
from benchmarks.harness.work import Case

CASES = tuple(KINDS)
"""Kinds of compressors, in the order of measurement."""


def chosen_cases(kinds: Sequence[str], *, smoke: bool) -> list[Case]:
    """Make the cases of some kinds of compressors."""
    decode, prefill = ((2, 8), (256,)) if smoke else ((1, 8, 128), (4096, 8192))
    return [case for kind in kinds for case in compressor_cases(kind, decode, prefill)]


def run(options: argparse.Namespace) -> None:
    """Check and time the cases of the command line; rows and table go to ``options.out``."""
    kinds = options.cases or (CASES[1:2] if options.smoke else CASES)
    run_cases(options, chosen_cases(kinds, smoke=options.smoke), Bench)


class Bench(OpBench):
    """Measure the compressor, whose limit is a copy."""

    title = (
        "KV compressor, states saved and windows compressed, microseconds; checked before timing: "
        "states byte for byte, rows within float32 rounding"
    )
