"""Other calls of ours beside those that are measured of every case: both variants of a prefill, and
the package of a form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from benchmarks.baselines.prefill import PrefillWork
from benchmarks.cases.attention_calls import on_hopper, prefill_by_copy, prefill_from_pages
from benchmarks.harness.measure import ComputeBench
from benchmarks.harness.report import one_line
from benchmarks.harness.rows import SparseMlaRow
from benchmarks.harness.timing import wall_us
from benchmarks.harness.work import Case, Work, Written, check, checked
from benchmarks.packages import Packages, PackageWork
from benchmarks.run import WrongResult

OFF_HOPPER = "pages_us and copied_us are of a Hopper GPU, which this is not"

_PACKAGE = "package_us"
_NAMES = {_PACKAGE: "package", "pages_us": "from the pages", "copied_us": "by a copy"}

Ours = Callable[..., Any]


class WaysBench(ComputeBench[SparseMlaRow]):
    """One that does not run here is said in the row; one that gives something else is wrong."""

    row_type = SparseMlaRow

    @functools.cached_property
    def packages(self) -> Packages:
        """Those of this run."""
        return Packages(self.device)

    def check_more(
        self,
        row: SparseMlaRow,
        work: Work,
        written: Written,
        expected: Sequence[Tensor],
        case: Case,
    ) -> Mapping[str, Ours]:
        found: dict[str, Ours] = {}
        for field, make in self._makers(row, work).items():
            try:
                call = make()
                results = checked(work, written, call)
            except Exception as error:
                _say(row, field, error)
                continue
            check(_NAMES[field], work, results, expected, case)
            found[field] = call
        return found

    def _makers(self, row: SparseMlaRow, work: Work) -> dict[str, Callable[[], Ours]]:
        """What gives the other calls of a case, by the field of their time."""
        if isinstance(work, PackageWork):
            return {_PACKAGE: functools.partial(self.packages.of, work.form)}
        if self.cold is None or not isinstance(work, PrefillWork):
            return {}
        if not on_hopper(work.sets[0][0]):
            row.note = OFF_HOPPER
            return {}
        pages, copied = (
            functools.partial(way, work.context.ratio)
            for way in (prefill_from_pages, prefill_by_copy)
        )
        return {"pages_us": lambda: pages, "copied_us": lambda: copied}

    def time_more(
        self,
        row: SparseMlaRow,
        work: Work,
        written: Written,
        calls: Mapping[str, Ours],
        case: Case,
    ) -> None:
        for field, call in calls.items():
            try:
                self._time_way(row, field, work, written, call, case)
            except WrongResult:  # noqa: PERF203 # a few calls of milliseconds
                raise
            except Exception as error:
                _say(row, field, error)

    def _time_way(
        self, row: SparseMlaRow, field: str, work: Work, written: Written, call: Ours, case: Case
    ) -> None:
        if field == _PACKAGE:
            self._time_package(row, work, written, call, case)
            return
        setattr(row, field, self.graph_us([functools.partial(call, *args) for args in work.sets]))

    def _time_package(
        self, row: SparseMlaRow, work: Work, written: Written, package: Ours, case: Case
    ) -> None:
        if self.cold is None:
            call = functools.partial(package, *work.sets[0])
            timing = wall_us(call, self.device, budget_s=self.budget_s)
        else:
            compiled = self.compiled(work.call)
            wanted = [work.results(compiled, args) for args in work.sets]
            timing = self._device_us("package", package, work, written, wanted, case)
        row.package_us, row.package_us_range = timing.median, [timing.low, timing.high]


def _say(row: SparseMlaRow, field: str, error: Exception) -> None:
    """Why a call was not timed."""
    if field == _PACKAGE:
        row.package_error = one_line(error)
    else:
        found = f"{_NAMES[field]}: {one_line(error)}"
        row.note = found if row.note is None else f"{row.note}; {found}"
