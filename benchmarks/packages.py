"""Measure AOTInductor packages of sparse MLA; one package per form, for any number of tokens."""

from __future__ import annotations

import dataclasses
import functools
import sys
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
from benchmarks.harness.work import Case, Work, tensors
from dsv4_ops.lowering.inspect import build_package, load_package

GROUP = "packages"

_TOKENS = "tokens"
_MOST_TOKENS = 8192
_GATHERED_BEFORE = "baseline_us is FlashMLA alone, over bf16 rows gathered before"

Dims = Mapping[int, str]
"""Names of an argument's dynamic dimensions, by number; equal names mean equal sizes."""

_PER_TOKEN: Dims = {0: _TOKENS}


@dataclass(frozen=True)
class Form:
    """A form of a call; each form is exported once."""

    name: str
    case: Callable[[int], Case]  # makes the case for a number of tokens
    dims: Sequence[Dims]  # one entry per argument
    exported: int  # number of tokens in the export


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
"""Dynamic dimensions of arguments: caches, tables and workspaces of cases differ in size."""


def forms(
    heads: int, selected: int, dense: int, keys: int, *, prefix: int, rows: int, exported: int
) -> dict[str, Form]:
    """Return the forms: decode of ``selected`` rows, decode of ``dense`` rows by block tables,
    prefill of ``selected`` rows after ``prefix`` tokens, and attention to ``keys`` gathered rows of
    ``rows``."""
    cases: dict[str, Callable[[int], Case]] = {
        "decode": lambda count: decode_cases((count,), (heads,), (selected,))[-1],
        "paged": lambda count: paged_cases((count,), heads, dense, (dense,))[0],
        "prefill": lambda count: selecting_cases((count,), ((heads, selected),), prefix)[0],
        "gathered": lambda count: gathered_cases((count,), ((heads, keys),), rows)[0],
    }
    return {name: Form(name, case, _DIMS[name], exported) for name, case in cases.items()}


def package_cases(form: Form, tokens: Sequence[int]) -> list[Case]:
    """Make cases of a form for these numbers of tokens; they run the form's package."""
    cases = [(case, functools.partial(_work, form, case)) for case in map(form.case, tokens)]
    named: dict[str, Any] = {"case": GROUP, "variant": form.name}
    return [dataclasses.replace(case, build=build, **named) for case, build in cases]


def _work(form: Form, case: Case, device: torch.device) -> Work:
    note = _GATHERED_BEFORE if form.name == "prefill" else None
    return dataclasses.replace(case.build(device), details=form, baseline_note=note)


class Packages:
    """The packages of a run, each built at its first use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[str, Callable[..., Any] | Exception] = {}

    def of(self, form: Form) -> Callable[..., Any]:
        """Return the package of a form, or raise the error of its first build."""
        if form.name not in self._made:
            try:
                self._made[form.name] = build(form, self._device)
            # a second build would be as slow; drop the error's frames, which keep inputs alive
            except Exception as error:
                self._made[form.name] = error.with_traceback(None)
        made = self._made[form.name]
        if isinstance(made, Exception):
            raise made
        return made


class _Call(torch.nn.Module):
    """Wraps a call as a module that returns a tuple."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors(self.call(*given)))


def build(form: Form, device: torch.device) -> Callable[..., Any]:
    """Export a form, compile its package, and load it so that CUDA graphs can capture it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{form.name}.pt2"
        print(f"package of {form.name}: export, compile, load", file=sys.stderr, flush=True)
        build_package(_exported(form, device), path)
        loaded: Callable[..., Any] = load_package(path, run_single_threaded=True)
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
