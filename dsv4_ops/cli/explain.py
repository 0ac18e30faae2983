"""Print what ``impl="auto"`` chooses on this machine."""

from __future__ import annotations

import textwrap
from typing import Any

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.registry import OPS, REFERENCE, OpSpec
from dsv4_ops.dispatch.choice import (
    DEVICES,
    FASTER_LIBRARY,
    MEASURED,
    NOT_SELECTED,
    SCALED_MM_FROM,
    ours,
    scaled_mm_obstacle,
)
from dsv4_ops.dispatch.libraries import LIBRARIES, SCALED_MM
from dsv4_ops.dispatch.limits import WORDS
from dsv4_ops.dispatch.prefill import NOTE
from dsv4_ops.dispatch.probes import probe

_SOURCE = "Measured on an H200 with: python -m benchmarks.choice"
_WIDTH = 100


def explain(op: str | None = None) -> str:
    """Describe the implementations of one op, or of every op that takes ``impl``.

    The text names the implementation that runs the op. For each library, the text says at which
    sizes "auto" selects the library, and whether the library is available here.

    Raises:
        ValueError: no such op.
    """
    lines = [line for spec in _chosen(op) for line in (*_of(spec), "")]
    return "\n".join([*lines, _SOURCE])


def records(op: str | None = None) -> list[dict[str, Any]]:
    """Return what ``explain`` describes, as JSON-compatible values.

    The record of an op has the op's implementation on CUDA and elsewhere, and its libraries. The
    record of a library has the sizes at which "auto" selects the library, and whether it is usable
    here.

    Raises:
        ValueError: no such op.
    """
    return [_record(spec) for spec in _chosen(op)]


def _chosen(op: str | None) -> list[OpSpec]:
    specs = [spec for spec in OPS.values() if spec.has_choice]
    if op is not None:
        if op not in OPS:
            raise argument_error(
                "explain",
                "op",
                must="be the name of an op",
                got=repr(op),
                do="`python -m dsv4_ops list` prints all of them",
            )
        specs = [OPS[op]]
    return specs


def _record(spec: OpSpec) -> dict[str, Any]:
    libraries: dict[str, Any] = {}
    for library in LIBRARIES:
        if library in spec.providers:
            here = probe(library)
            libraries[library] = {
                "usable": here.usable,
                "reason": here.reason,
                "taken_from": MEASURED if (spec.name, library) == FASTER_LIBRARY else "",
            }
    if SCALED_MM in spec.providers:
        obstacle = scaled_mm_obstacle()
        state = {"usable": not obstacle, "reason": obstacle or "torch has it"}
        libraries[SCALED_MM] = {**state, "taken_from": SCALED_MM_FROM.get(spec.name, "")}
    each = {"op": spec.name, "elsewhere": REFERENCE, DEVICES[0]: ours(spec)}
    return {**each, "note": "; ".join(_notes(spec)), "libraries": libraries}


def _notes(spec: OpSpec) -> list[str]:
    """Say when the reference runs instead of our kernel, and how ``sparse_mla_prefill`` reads its
    rows."""
    notes = [f"but the reference for {WORDS[spec.name]}"] if spec.name in WORDS else []
    return [*notes, NOTE] if spec.name == "sparse_mla_prefill" else notes


def _of(spec: OpSpec) -> list[str]:
    lines = [spec.name, *_wrapped("elsewhere", REFERENCE), *_wrapped(DEVICES[0], ours(spec))]
    lines += [line for note in _notes(spec) for line in _wrapped("", note)]
    for library, here in _record(spec)["libraries"].items():
        sizes = here["taken_from"]
        never = NOT_SELECTED.get((spec.name, library), "it was faster at no size")
        when = f"for {sizes}" if sizes else f"only with impl={library!r}: {never}"
        state = "available here" if here["usable"] else "not available here"
        lines += [*_wrapped(library, when), *_wrapped("", f"{state}: {here['reason']}")]
    return lines


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"  {label:<10} ",
        subsequent_indent=" " * 13,
        break_on_hyphens=False,
    )
