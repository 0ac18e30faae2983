"""Benchmark the compressor (saved states and compressed windows) against its roofline."""

from __future__ import annotations

import functools

from benchmarks.cases.compressor_cases import KINDS, compressor_cases
from benchmarks.harness.measure import OpBench
from benchmarks.harness.work import Case


def _cases(kind: str, small: bool) -> list[Case]:
    sizes = ((2, 8), (256,)) if small else ((1, 8, 128), (4096, 8192))
    return compressor_cases(kind, *sizes)


CASES = {kind: functools.partial(_cases, kind) for kind in KINDS}


class Bench(OpBench):
    """Measure the compressor, whose roofline is a copy."""

    groups, smoke_groups = CASES, ("c4_indexer",)
    title = (
        "KV compressor, states saved and windows compressed, microseconds; checked before timing: "
        "states byte for byte, rows within float32 rounding"
    )


run = Bench.run
