"""Print what ``impl="auto"`` chooses on this machine."""

from __future__ import annotations

from typing import Any

from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.registry import OPS, REFERENCE, OpSpec
from dsv4_ops.dispatch.choice import DEEP_GEMM_FASTER, DEVICES, MEASURED_BY, ours
from dsv4_ops.dispatch.libraries import LIBRARIES
from dsv4_ops.dispatch.prefill import NOTE
from dsv4_ops.dispatch.probes import probe

NOTES = {
    "mla_prefill": "flash attention of torch for bfloat16 on Hopper; the reference for float32",
    "sparse_mla_prefill": NOTE,
    "sparse_mla_gathered": "on Hopper; on other GPUs the reference",
}
"""What is to be said of our own kernels, by op."""


def explain(op: str | None = None) -> str:
    """Describe the implementations of one op, or of every op that has several.

    Says what runs the op, from which sizes on a library does, and whether that is available here.

    Raises:
        ValueError: no such op, or an op with one implementation only.
    """
    lines = [line for spec in _chosen(op) for line in (*_of(spec), "")]
    return "\n".join([*lines, f"measured on an H200 by: {MEASURED_BY}"])


def records(op: str | None = None) -> list[dict[str, Any]]:
    """``explain`` as JSON-compatible values.

    Per op: what runs it on CUDA and elsewhere, and its libraries, each with the sizes from which it
    is chosen and whether it is usable here.

    Raises:
        ValueError: as ``explain``.
    """
    found = []
    for spec in _chosen(op):
        libraries = {}
        for library in LIBRARIES:
            if library in spec.providers:
                here = probe(library)
                libraries[library] = {
                    "usable": here.usable,
                    "reason": here.reason,
                    "taken_from": _faster(spec, library),
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


def _faster(spec: OpSpec, library: str) -> list[dict[str, Any]]:
    rule = DEEP_GEMM_FASTER
    return [rule] if (rule["op"], rule["library"]) == (spec.name, library) else []


def _of(spec: OpSpec) -> list[str]:
    lines = [spec.name, f"  elsewhere  {REFERENCE}", f"  {DEVICES[0]:<9}  {ours(spec)}"]
    if spec.name in NOTES:
        lines.append(f"  {'':<9}  {NOTES[spec.name]}")
    for library in LIBRARIES:
        if library not in spec.providers:
            continue
        when = (
            "; ".join(map(_text, _faster(spec, library)))
            or "only if asked for: it was faster at no size"
        )
        found = probe(library)
        state = "usable" if found.usable else "not usable"
        lines += [f"  {library:<9}  {when}", f"  {'':<9}  {state}: {found.reason}"]
    return lines


def _text(rule: dict[str, Any]) -> str:
    ours_us, library_us = rule["measured"]
    sizes = f"{rule['heads']} heads, from {rule['tokens']} tokens and {rule['columns']} columns on"
    return f"{sizes} ({library_us} us there where ours takes {ours_us})"
