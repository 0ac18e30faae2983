"""Benchmark inserts and gathers against their roofline and vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.baselines import vllm_metadata
from benchmarks.cases.cache_cases import gather_cases, insert_cases
from benchmarks.harness.measure import OpBench
from benchmarks.harness.work import Case

_FEW, _INSERTS = (8, 128), (1, 8, 32, 128, 512, 2048, 8192, 65536)
_GATHERS = ((1, 128), (4, 128), (4, 2048), (1, 8192), (4, 8192), (1, 32768), (8, 8192))

CASES: dict[str, Callable[[bool], list[Case]]] = {
    "insert": lambda small: insert_cases(_FEW if small else _INSERTS, smoke=small),
    "gather": lambda small: gather_cases(_GATHERS[:2] if small else _GATHERS, smoke=small),
}


class Bench(OpBench):
    """Measure ops that only move bytes; vLLM's kernels must write the same bytes."""

    groups = CASES
    title = "Cache ops, microseconds; every result was checked byte for byte before timing"
    notes = (
        "copy_us: the faster of a memcpy and a kernel that moves as many bytes.\n"
        "baseline_us: of vLLM's kernel on the same inputs.",
    )

    def load(self, folder: Path) -> Any:
        return vllm_metadata.load(folder, ("cache",))

    def loaded(self) -> Sequence[Any]:
        return [self.modules.cache]


run = Bench.run
