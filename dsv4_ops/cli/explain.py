"""What ``impl="auto"`` takes on this machine, for people."""

from __future__ import annotations

from typing import Any

from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.registry import OPS, REFERENCE, OpSpec
from dsv4_ops.dispatch.choice import DEVICES, ours
from dsv4_ops.dispatch.crossovers import MEASURED_BY, NOTES, RULES, Rule
from dsv4_ops.dispatch.libraries import LIBRARIES
from dsv4_ops.dispatch.probes import probe


def explain(op: str | None = None) -> str:
    """Executions of every op that has a choice, or of one: what runs it, from which sizes on a
    library does, and whether that runs here.

    Raises:
        ValueError: no such op, or one that runs in one way only.
    """
    lines = [line for spec in _chosen(op) for line in (*_of(spec), "")]
    return "\n".join([*lines, f"measured on an H200 by: {MEASURED_BY}"])


def records(op: str | None = None) -> list[dict[str, Any]]:
    """``explain`` for machines: by op what runs it elsewhere and on CUDA, and its libraries, each
    with the sizes that it is taken from and whether it is usable here.

    Raises:
        ValueError: as ``explain``.
    """
    found = []
    for spec in _chosen(op):
        libraries = {}
        for library in LIBRARIES:
            if library in spec.providers:
                here = probe(library)
                taken = [rule._asdict() for rule in _rules(spec, library)]
                libraries[library] = {
                    "usable": here.usable,
                    "reason": here.reason,
                    "taken_from": taken,
                }
        each = {"op": spec.name, "elsewhere": REFERENCE, DEVICES[0]: ours(spec)}
        found.append({**each, "note": NOTES.get(spec.name, ""), "libraries": libraries})
    return found


def _chosen(op: str | None) -> list[OpSpec]:
    specs = [spec for spec in OPS.values() if spec.has_choice]
    if op is not None:
        names = [spec.name for spec in specs]
        if op not in names:
            rule = "be one of " + ", ".join(names)
            raise refusal(ValueError, "explain", "op", rule, repr(op), "Others have no choice")
        specs = [OPS[op]]
    return specs


def _rules(spec: OpSpec, library: str) -> list[Rule]:
    return [rule for rule in RULES if (rule.op, rule.library) == (spec.name, library)]


def _of(spec: OpSpec) -> list[str]:
    lines = [spec.name, f"  elsewhere  {REFERENCE}", f"  {DEVICES[0]:<9}  {ours(spec)}"]
    if spec.name in NOTES:
        lines.append(f"  {'':<9}  {NOTES[spec.name]}")
    for library in LIBRARIES:
        if library not in spec.providers:
            continue
        when = (
            "; ".join(map(_text, _rules(spec, library)))
            or "only if asked for: the table has no size"
        )
        found = probe(library)
        state = "usable" if found.usable else "not usable"
        lines += [f"  {library:<9}  {when}", f"  {'':<9}  {state}: {found.reason}"]
    return lines


def _text(rule: Rule) -> str:
    heads = "any heads" if rule.heads is None else f"{rule.heads} heads"
    plan = ", with a plan of flash_mla_plan" if rule.planned else ""
    ours_us, theirs_us = rule.measured
    figures = f"{theirs_us} us there where ours takes {ours_us}"
    sizes = f"{heads}, from {rule.tokens} tokens and {rule.columns} columns on"
    return f"{sizes}{plan} ({figures})"
