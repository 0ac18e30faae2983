"""Benchmark sparse attention against its roofline and FlashMLA."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import flash_mla, vllm_metadata
from benchmarks.baselines.prefill import OurGather, PrefillWork, whole_prefills
from benchmarks.baselines.vllm_metadata import VERSION as VLLM
from benchmarks.cases.attention_calls import prefill_with_flash_mla
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
from benchmarks.harness import report
from benchmarks.harness.measure import notes_of, roofline_notes, run_cases
from benchmarks.harness.options import add_cases
from benchmarks.harness.plot import mla_panels, try_plot
from benchmarks.harness.report import Report, one_line
from benchmarks.harness.rows import SPARSE_MLA_CPU_COLUMNS, SPARSE_MLA_CUDA_COLUMNS, SparseMlaRow
from benchmarks.harness.variants import WaysBench
from benchmarks.harness.work import Case, Work, Written, checked
from benchmarks.packages import GROUP, forms, package_cases
from benchmarks.run import WrongResult
from dsv4_ops.dispatch.choice import unusable
from dsv4_ops.dispatch.libraries import FLASH_MLA

CASES = ("decode", "window", "mtp", "paged", "ragged", "prefill", "gathered", GROUP)
"""Groups of cases, in the order in which they are measured."""

DECODE_OUT, DECODE_LSE = Tolerance(1e-3, 2.01 / 128, 5e-6), Tolerance(1e-6, 8.01 / 65536)
PREFILL_OUT = Tolerance(8e-4, 3.01 / 128, 7e-6)
"""Tolerances of FlashMLA's own tests."""

_PREFILL_LSE = Tolerance(1.5e-5, 8.01 / 65536)
"""As in ``tests/gpu/test_providers.py``: only our op has the lse of a prefill in known units."""

_OURS_WITH_IT = "ours with FlashMLA"

_SMOKE_CASES = ("decode",)
_BATCHES = (1, 2, 8, 32, 64, 128, 256)
_PREFILLS = (1, 8, 64, 128, 256, 512, 2048)
_SHORT_PREFIX, _TABLE_ROWS = 2048, 8192  # rows of C128 of 1M tokens
_LARGEST_PREFIX = 983040  # FlashMLA holds 1048576 rows, the window's among them
_GATHERED = (1, 8, 32, 128, 512, 2048)
_PACKAGED, _LARGE = (2, 8, 64, 256), (512, 2048)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
    add_cases(parser, CASES)


def chosen_cases(groups: Sequence[str], *, smoke: bool) -> list[Case]:
    """The cases of some groups."""
    if smoke:
        small: dict[str, Callable[[], list[Case]]] = {
            "decode": lambda: decode_cases((2, 8), (4,), (64,)),
            "window": lambda: window_cases((3,), 4),
            "mtp": lambda: mtp_cases((3,), 4, 64, 2),
            "paged": lambda: paged_cases((3,), 4, 64, (7, 64)),
            "ragged": lambda: ragged_cases((6,), 4, (64, 128)),
            "prefill": lambda: [
                *selecting_cases((16,), ((4, 64),), prefix=512),
                *dense_cases((16,), (4,), prefix=512),
                *dense_cases((16,), (4,), prefix=512, table_rows=32),
            ],
            "gathered": lambda: gathered_cases((3,), ((4, 128),), rows=256),
            GROUP: _small_packages,
        }
        return [case for group in groups for case in small[group]()]
    makers: dict[str, Callable[[], list[Case]]] = {
        "decode": lambda: decode_cases(_BATCHES, (64, 128), (512, 1024)),
        "window": lambda: window_cases(_BATCHES, 64),
        "mtp": lambda: mtp_cases((8, 32, 64, 128), 64, 512, 2),
        "paged": lambda: [
            *paged_cases((8, 32, 64, 128), 64, 1024, (16, 128, 512, 1024)),
            *paged_cases((24, 32, 64, 128), 128, 1024, (16, 1024)),
        ],
        "ragged": lambda: [
            *ragged_cases((8, 32, 48, 64, 96, 128, 256, 512), 64, (512, 1024)),
            *ragged_cases((8, 32, 64, 96, 128, 256), 128, (1024, 1024)),
        ],
        "prefill": lambda: [
            *selecting_cases(_PREFILLS, ((64, 512), (128, 1024))),
            *dense_cases(_PREFILLS, (64, 128)),
            *dense_cases((64, 512, 2048), (64,), _SHORT_PREFIX),
            *dense_cases((64, 128, 512, 2048), (64,), _SHORT_PREFIX, _TABLE_ROWS),
            *dense_cases((64, 128), (64,), _LARGEST_PREFIX),
        ],
        "gathered": lambda: [
            *gathered_cases(_GATHERED, ((64, 128), (64, 640), (128, 1152))),
            *gathered_cases((512, 2048, 8192), ((64, 512), (64, 1024), (128, 1024))),
        ],
        GROUP: _packages,
    }
    return [case for group in groups for case in makers[group]()]


def _packages() -> list[Case]:
    made = forms(64, 512, 1024, 640, prefix=PREFIX, rows=ROWS, exported=64)
    more = {"prefill": _LARGE, "gathered": _LARGE}
    return [
        case
        for name, form in made.items()
        for case in package_cases(form, (*_PACKAGED, *more.get(name, ())))
    ]


def _small_packages() -> list[Case]:
    made = forms(4, 64, 64, 128, prefix=512, rows=256, exported=3)
    more = {"prefill": 70}  # of another number of blocks
    return [
        case for name, form in made.items() for case in package_cases(form, (2, more.get(name, 5)))
    ]


def run(options: argparse.Namespace) -> None:
    """Check and time the cases of the command line; rows, table and plot go to ``options.out``."""
    groups = options.cases or (_SMOKE_CASES if options.smoke else CASES)
    run_cases(options, chosen_cases(groups, smoke=options.smoke), Bench, finish)


class Bench(WaysBench):
    """FlashMLA agrees within the tolerances of its own tests."""

    cache: Any = None  # vLLM's cache ops, or why there are none

    def load(self, folder: Path) -> Any:
        try:
            self.cache = vllm_metadata.load(folder, ("cache",)).cache
        except Exception as error:  # only the whole prefill needs them, and says so
            self.cache = error
        return flash_mla.load(folder)

    def compare_baseline(
        self,
        row: SparseMlaRow,
        baseline: Sequence[Tensor],
        ours: Sequence[Tensor],
        expected: Sequence[Tensor],
    ) -> None:
        kind = row.variant if row.case == GROUP else row.case
        out = PREFILL_OUT if kind in ("prefill", "gathered") else DECODE_OUT
        pairs = zip(("out", "lse"), baseline, ours, (out, DECODE_LSE), strict=False)
        found = [text for pair in pairs if (text := outside(*pair))]
        row.baseline_agrees = not found
        if baseline[0].shape == ours[0].shape:
            row.baseline_max_diff = float((baseline[0].double() - ours[0].double()).abs().max())
        notes = [row.baseline_note, *found] if row.baseline_note else found
        row.baseline_note = "; ".join(notes) or None

    def _time_baseline(
        self,
        row: SparseMlaRow,
        work: Work,
        written: Written,
        ours: Sequence[Tensor],
        expected: Sequence[Tensor],
    ) -> None:
        super()._time_baseline(row, work, written, ours, expected)
        if self.modules is None or not isinstance(work, PrefillWork):
            return
        for name, part in (("whole", self._time_whole), (_OURS_WITH_IT, self._time_ours_with_it)):
            try:
                part(row, work, ours)
            except Exception as error:  # noqa: PERF203 # a broken baseline is a row, not the end
                texts = [row.baseline_error, f"{name}: {one_line(error)}"]
                row.baseline_error = "; ".join(text for text in texts if text)

    def _time_whole(self, row: SparseMlaRow, work: PrefillWork, ours: Sequence[Tensor]) -> None:
        """vLLM's way from FP8 blocks, and its parts in the order in which they need each other."""
        if isinstance(self.cache, Exception):
            raise self.cache
        held, ours_first = (
            whole_prefills(self.modules, cache, work)
            for cache in (self.cache, OurGather(self.cache))
        )
        results = {
            "whole": held[0].whole(),
            "with our gather": ours_first[0].whole(),
            "our kernel": held[0].attend_ours(),
        }
        for name, result in results.items():
            if found := outside(name, result, ours[0], PREFILL_OUT):
                row.baseline_agrees = False
                row.baseline_note = f"{row.baseline_note}; {found}"
        if self.cold is None:
            return
        row.baseline_gather_us = self.graph_us([each.gather for each in held], repeated=False)
        row.baseline_combine_us = self.graph_us([each.combine for each in held])
        row.baseline_whole_us = self.graph_us([each.whole for each in held])
        row.gathered_us = self.graph_us([each.attend_ours for each in held])
        row.baseline_our_gather_us = self.graph_us([each.whole for each in ours_first])
        if row.compiled_us:
            row.whole_times_faster = row.baseline_whole_us / row.compiled_us

    def _time_ours_with_it(
        self, row: SparseMlaRow, work: PrefillWork, ours: Sequence[Tensor]
    ) -> None:
        """Our op with ``impl="flash_mla"``: the library is the baseline's, which is loaded."""
        if reason := unusable(FLASH_MLA):
            row.baseline_note = f"{row.baseline_note}; {_OURS_WITH_IT}: {reason}"
            return
        call = functools.partial(prefill_with_flash_mla, work.context.ratio)
        results = checked(work, Written(work), call)
        pairs = zip(("out", "lse"), results, ours, (PREFILL_OUT, _PREFILL_LSE), strict=True)
        if found := [text for pair in pairs if (text := outside(*pair))]:
            raise WrongResult("; ".join(found))
        if self.cold is None:
            return
        row.flash_mla_us = self.graph_us([functools.partial(call, *args) for args in work.sets])
        if row.baseline_whole_us:
            row.whole_times_flash_mla = row.baseline_whole_us / row.flash_mla_us


def finish(
    output: Report[SparseMlaRow], device: torch.device, left_out: Sequence[str], with_plot: bool
) -> None:
    """Table and plot of all rows."""
    cuda = device.type == "cuda"
    measured = [row for row in output.rows if row.error is None]
    title = (
        "Sparse MLA, microseconds; before timing every result was within 1.5 times the error of "
        "the reference against float64, or of one rounding"
    )
    columns = SPARSE_MLA_CUDA_COLUMNS if cuda else SPARSE_MLA_CPU_COLUMNS
    notes = [
        *roofline_notes(output.rows, Bench.flop_per_us, *_NOTES),
        *notes_of(output.rows, left_out),
    ]
    output.write_text(report.text(title, output, report.table(measured, columns), *notes))
    if with_plot:
        title = f"Sparse MLA decode · {output.stamp['device']}"
        panels = mla_panels(measured, cuda=cuda)
        try_plot(panels, output.path(".png"), title=title, ylabel="microseconds per call")


_NOTES = (
    "Shapes are tokens x heads, rows of the window + of the compressed cache.",
    f"baseline: {VLLM}'s FlashMLA on the same inputs, its plan made before, or in the "
    "call where planning is counted, as ours then.",
    "baseline_whole_us: of prefill, from FP8 caches as ours: vLLM's gather of gathered_rows to "
    "bf16, its combined indices and FlashMLA, in one graph; baseline_us is FlashMLA alone. "
    "baseline_gather_us and baseline_combine_us: in graphs of their own. baseline_our_gather_us: "
    "the whole with our gather in the place of vLLM's in Triton. gathered_us: our kernel over "
    "the rows and indices that FlashMLA has for baseline_us. flash_mla_us: our op with "
    'impl="flash_mla", eager.',
    "pages_us and copied_us: of prefill on Hopper, our two variants, from the FP8 blocks and by "
    "way of a copy of the rows in bf16, eager; compiled_us and eager_us have the one that sizes "
    "choose.",
    "gathered: sparse_mla_gathered and FlashMLA over the same bf16 rows and indices; the roofline "
    "has each row that a call lists once.",
    "package_us: an AOTInductor package of the form that the variant names, made once for any "
    "number of tokens, timed as compiled_us.",
    "baseline_agrees: with our results, within the tolerances of its own tests.",
)
