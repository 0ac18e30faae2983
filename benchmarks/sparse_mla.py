"""Benchmark sparse attention against its roofline and FlashMLA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.baselines import flash_mla, vllm_metadata
from benchmarks.baselines.prefill import Context, whole_prefills
from benchmarks.cases.attention_calls import PREFILLS, on_hopper, prefill_by_copy
from benchmarks.cases.attention_cases import (
    decode_cases,
    mtp_cases,
    paged_cases,
    ragged_cases,
    window_cases,
)
from benchmarks.cases.gathered_cases import ROWS, gathered_cases
from benchmarks.cases.prefill_cases import PREFIX, dense_cases, selecting_cases
from benchmarks.cases.token_check import Tolerance, outside
from benchmarks.harness.measure import Checked, Function, OpBench, OpRow
from benchmarks.harness.report import one_line
from benchmarks.harness.work import Case, Work
from benchmarks.packages import GROUP, Form, Packages, forms, package_cases

DECODE_OUT, DECODE_LSE = Tolerance(1e-3, 2.01 / 128, 5e-6), Tolerance(1e-6, 8.01 / 65536)
PREFILL_OUT = Tolerance(8e-4, 3.01 / 128, 7e-6)
"""Tolerances of FlashMLA's own tests."""

_BATCHES = (1, 2, 8, 32, 64, 128, 256)
_PREFILLS = (1, 8, 64, 128, 256, 512, 2048)
_SHORT_PREFIX, _TABLE_ROWS = 2048, 8192  # a table for C128 rows of 1M tokens
_LARGEST_PREFIX = 983040  # FlashMLA takes 1048576 rows at most, including window rows
_PACKAGED, _LARGE = (2, 8, 64, 256), (512, 2048)


def _packages(small: bool) -> list[Case]:
    sizes: dict[str, tuple[int, ...]]
    if small:
        made = forms(4, 64, 64, 128, prefix=512, rows=256, exported=3)
        # a prefill of 70 tokens needs more window blocks than the exported prefill of 3
        sizes = {name: (2, 70 if name == "prefill" else 5) for name in made}
    else:
        made = forms(64, 512, 1024, 640, prefix=PREFIX, rows=ROWS, exported=64)
        more = {"prefill": _LARGE, "gathered": _LARGE}
        sizes = {name: (*_PACKAGED, *more.get(name, ())) for name in made}
    return [case for name, form in made.items() for case in package_cases(form, sizes[name])]


Calls = dict[str, list[tuple[Any, ...]]]
"""Functions that make cases, with their arguments, by group."""

_SMALL: Calls = {
    "decode": [(decode_cases, (2, 8), (4,), (64,))],
    "window": [(window_cases, (3,), 4)],
    "mtp": [(mtp_cases, (3,), 4, 64, 2)],
    "paged": [(paged_cases, (3,), 4, 64, (7, 64))],
    "ragged": [(ragged_cases, (6,), 4, (64, 128))],
    "prefill": [
        (selecting_cases, (16,), ((4, 64),), 512),
        (dense_cases, (16,), (4,), 512),
        (dense_cases, (16,), (4,), 512, 32),
    ],
    "gathered": [(gathered_cases, (3,), ((4, 128),), 256)],
    GROUP: [(_packages, True)],
}
_WHOLE: Calls = {
    "decode": [(decode_cases, _BATCHES, (64, 128), (512, 1024))],
    "window": [(window_cases, _BATCHES, 64)],
    "mtp": [(mtp_cases, (8, 32, 64, 128), 64, 512, 2)],
    "paged": [
        (paged_cases, (8, 32, 64, 128), 64, 1024, (16, 128, 512, 1024)),
        (paged_cases, (24, 32, 64, 128), 128, 1024, (16, 1024)),
    ],
    "ragged": [
        (ragged_cases, (8, 32, 48, 64, 96, 128, 256, 512), 64, (512, 1024)),
        (ragged_cases, (8, 32, 64, 96, 128, 256), 128, (1024, 1024)),
    ],
    "prefill": [
        (selecting_cases, _PREFILLS, ((64, 512), (128, 1024))),
        (dense_cases, _PREFILLS, (64, 128)),
        (dense_cases, (64, 512, 2048), (64,), _SHORT_PREFIX),
        (dense_cases, (64, 128, 512, 2048), (64,), _SHORT_PREFIX, _TABLE_ROWS),
        (dense_cases, (64, 128), (64,), _LARGEST_PREFIX),
    ],
    "gathered": [
        (gathered_cases, (1, 8, 32, 128, 512, 2048), ((64, 128), (64, 640), (128, 1152))),
        (gathered_cases, (512, 2048, 8192), ((64, 512), (64, 1024), (128, 1024))),
    ],
    GROUP: [(_packages, False)],
}


def _cases(group: str, small: bool) -> list[Case]:
    calls = (_SMALL if small else _WHOLE)[group]
    return [case for make, *args in calls for case in make(*args)]


CASES = {group: functools.partial(_cases, group) for group in _WHOLE}


class Bench(OpBench):
    """Measure sparse MLA; FlashMLA must agree within the tolerances of its own tests."""

    groups, smoke_groups = CASES, ("decode",)
    title = (
        "Sparse MLA, microseconds; before timing every result was within 1.5 times the error of "
        "the reference against float64, or of one rounding"
    )
    notes = (
        "Shapes are tokens x heads, rows of the window + of the compressed cache.\n"
        "baseline_us: of FlashMLA on the same inputs, its plan made before, or in the call where "
        "planning is counted, as ours then.\n"
        "baseline_whole_us: of prefill, from FP8 caches as ours: vLLM's gather of gathered_rows to "
        "bf16, its combined indices and FlashMLA, in one graph; baseline_us is FlashMLA alone. "
        "baseline_gather_us and baseline_combine_us: in graphs of their own.\n"
        "pages_us and copied_us: of prefill on Hopper, our two variants, from the FP8 blocks and "
        "by way of a copy of the rows in bf16, eager; compiled_us and eager_us have the one that "
        "sizes choose.\n"
        "gathered: sparse_mla_gathered and FlashMLA over the same bf16 rows and indices; the "
        "roofline has each row that a call lists once.\n"
        "package_us: an AOTInductor package of the form that the variant names, made once for any "
        "number of tokens, timed as compiled_us.",
    )
    cache: Any = None  # vLLM's cache ops, or the reason for their absence

    @functools.cached_property
    def packages(self) -> Packages:
        """The packages of this run."""
        return Packages(self.device)

    def load(self, folder: Path) -> Any:
        try:
            self.cache = vllm_metadata.load(folder, ("cache",)).cache
        except Exception as error:  # only the whole prefill needs cache ops; it reports the error
            self.cache = error
        return flash_mla.load(folder)

    def loaded(self) -> Sequence[Any]:
        return self.modules, self.cache

    def others(self, row: OpRow, work: Work) -> Mapping[str, Callable[[], Function]]:
        """Return a case's package, or prefills over FP8 rows and over a bf16 copy of them."""
        if isinstance(work.details, Form):
            return {"package_us": functools.partial(self.packages.of, work.details)}
        if self.copies is None or not isinstance(work.details, Context):
            return {}
        if not on_hopper(work.sets[0][0]):
            row.say("note", "pages_us and copied_us are of a Hopper GPU, which this is not")
            return {}
        ratio = work.details.ratio
        return {
            "pages_us": lambda: functools.partial(PREFILLS[ratio], impl="triton"),
            "copied_us": lambda: functools.partial(prefill_by_copy, ratio),
        }

    def compare_baseline(self, at: Checked, baseline: Sequence[Tensor]) -> None:
        row, ours = at.row, at.ours
        kind = row.variant if row.case == GROUP else row.case
        out = PREFILL_OUT if kind in ("prefill", "gathered") else DECODE_OUT
        pairs = zip(("out", "lse"), baseline, ours, (out, DECODE_LSE), strict=False)
        found = [text for pair in pairs if (text := outside(*pair))]
        row.baseline_agrees = not found
        if baseline[0].shape == ours[0].shape:
            row.baseline_max_diff = float((baseline[0].double() - ours[0].double()).abs().max())
        row.say("baseline_note", "; ".join(found))

    def time_baseline(self, at: Checked) -> None:
        super().time_baseline(at)
        row, work = at.row, at.work
        if not isinstance(work.details, Context):
            return
        try:
            self._time_whole(row, work, at.ours)
        except Exception as error:  # the row gets the error, and the run continues
            row.say("baseline_error", f"whole: {one_line(error)}")

    def _time_whole(self, row: OpRow, work: Work, ours: Sequence[Tensor]) -> None:
        """Time vLLM's whole prefill from FP8 blocks, and its stages one after the other."""
        if isinstance(self.cache, Exception):
            raise self.cache
        held = whole_prefills(self.modules, self.cache, work)
        if found := outside("whole", held[0].whole(), ours[0], PREFILL_OUT):
            row.baseline_agrees = False
            row.say("baseline_note", found)
        if self.copies is None:
            return
        row.more["baseline_gather_us"] = self.graph_us([w.gather for w in held], repeated=False)
        row.more["baseline_combine_us"] = self.graph_us([w.combine for w in held])
        row.more["baseline_whole_us"] = self.graph_us([w.whole for w in held])


run = Bench.run
