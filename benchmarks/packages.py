"""Measure AOTInductor packages of sparse MLA beside the eager calls. There is one package per form,
exported once for any number of tokens."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from benchmarks.cases.attention_cases import decode_cases, paged_cases
from benchmarks.cases.gathered_cases import gathered_cases
from benchmarks.cases.prefill_cases import selecting_cases
from benchmarks.harness import report
from benchmarks.harness.work import Case, Work, tensors
from dsv4_ops.lowering.inspect import build_package, load_package

GROUP = "packages"

_TOKENS = "tokens"
_MOST_TOKENS = 8192
_GATHERED_BEFORE = "baseline_us is FlashMLA alone, over bf16 rows gathered before"

Dims = Mapping[int, str]
"""Dynamic dimensions of an argument, by number; equal names are equal sizes."""

_PER_TOKEN: Dims = {0: _TOKENS}


@dataclass(frozen=True)
class Form:
    """A call that is exported once.

    Args:
        name: Name in the rows.
        case: Makes the case for a number of tokens.
        dims: Dynamic dimensions of every argument.
        exported: Number of tokens of the export.
        baseline_note: Work that the baseline leaves out.
    """

    name: str
    case: Callable[[int], Case]
    dims: Sequence[Dims]
    exported: int
    baseline_note: str | None = None


@dataclass(frozen=True, kw_only=True)
class PackageWork(Work):
    """A ``Work`` with its package."""

    form: Form


_SWA: tuple[Dims, ...] = ({0: "swa_blocks"}, _PER_TOKEN, _PER_TOKEN)
_PAGES: Dims = {0: "extra_pages"}
_DIMS: dict[str, tuple[Dims, ...]] = {
    "decode": (_PER_TOKEN, *_SWA, _PAGES, _PER_TOKEN, _PER_TOKEN, {}),
    "paged": (_PER_TOKEN, *_SWA, _PAGES, _PER_TOKEN, _PER_TOKEN, {0: "requests"}, {}),
    "prefill": (
        _PER_TOKEN, *_SWA, {1: "swa_columns"}, _PAGES, {1: "extra_columns"}, _PER_TOKEN, {},
    ),
    "gathered": (_PER_TOKEN, {0: "rows"}, _PER_TOKEN, _PER_TOKEN, {}),
}  # fmt: skip
"""Dynamic dimensions: caches, tables and workspaces of the cases differ in size."""


def forms(
    heads: int, selected: int, dense: int, keys: int, *, prefix: int, rows: int, exported: int
) -> dict[str, Form]:
    """Return the forms: decode of ``selected`` rows, decode of ``dense`` rows through block tables,
    prefill of ``selected`` rows after ``prefix`` tokens, and ``keys`` of gathered ``rows``."""
    cases: dict[str, Callable[[int], Case]] = {
        "decode": lambda count: decode_cases((count,), (heads,), (selected,))[-1],
        "paged": lambda count: paged_cases((count,), heads, dense, (dense,))[0],
        "prefill": lambda count: selecting_cases((count,), ((heads, selected),), prefix)[0],
        "gathered": lambda count: gathered_cases((count,), ((heads, keys),), rows)[0],
    }
    notes = {"prefill": _GATHERED_BEFORE}
    return {
        name: Form(name, case, _DIMS[name], exported, notes.get(name))
        for name, case in cases.items()
    }


def package_cases(form: Form, tokens: Sequence[int]) -> list[Case]:
    """Make the cases of a form for these numbers of tokens, with its package."""
    return [_case(form, form.case(count)) for count in tokens]


def _case(form: Form, case: Case) -> Case:
    build = functools.partial(package_work, form, case.build)
    return dataclasses.replace(case, case=GROUP, variant=form.name, build=build)


def package_work(
    form: Form, build: Callable[[torch.device], Work], device: torch.device
) -> PackageWork:
    """Build the case with the same inputs and calls."""
    work = build(device)
    same = {field.name: getattr(work, field.name) for field in dataclasses.fields(Work)}
    return PackageWork(**{**same, "baseline_note": form.baseline_note}, form=form)


class Packages:
    """The packages of a run; each is built at its first use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[str, Callable[..., Any] | Exception] = {}

    def of(self, form: Form) -> Callable[..., Any]:
        """Return the package of a form. If it cannot be built, raise the same error at every
        call."""
        if form.name not in self._made:
            try:
                self._made[form.name] = build(form, self._device)
            # stored: another build takes as long; without frames, which hold inputs
            except Exception as error:
                self._made[form.name] = error.with_traceback(None)
        made = self._made[form.name]
        if isinstance(made, Exception):
            raise made
        return made


class _Call(torch.nn.Module):
    """A module for a call, which returns its results as a tuple."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors(self.call(*given)))


def build(form: Form, device: torch.device) -> Callable[..., Any]:
    """Export a form, compile its package, and load it so that CUDA graphs can capture it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{form.name}.pt2"
        steps: dict[str, Callable[[Any], Any]] = {
            "export": functools.partial(_exported, form),
            "compile": lambda program: build_package(program, path),
            "load": lambda package: load_package(package, run_single_threaded=True),
        }
        made: Any = device
        for name in report.progress(list(steps), f"package of {form.name}"):
            made = steps[name](made)
    loaded: Callable[..., Any] = made
    return loaded


def _exported(form: Form, device: torch.device) -> torch.export.ExportedProgram:
    work = form.case(form.exported).build(device)
    names = {name for dims in form.dims for name in dims.values()}
    symbols = {
        name: Dim(name, min=2, max=_MOST_TOKENS if name == _TOKENS else None) for name in names
    }
    shapes = tuple({place: symbols[name] for place, name in dims.items()} for dims in form.dims)
    return torch.export.export(
        _Call(work.call), tuple(work.sets[0]), dynamic_shapes=(shapes,), strict=False
    )
