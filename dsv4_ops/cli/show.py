"""Print the registry: the table of all ops, or everything about one op."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dsv4_ops
from dsv4_ops.core.registry import OPS, OpSpec
from dsv4_ops.dispatch.layers import module_of
from dsv4_ops.lowering.kinds import own_lowering

LAYERS = ("ops", "meta", "reference", "kernels", "lowering", "testing")
_HEADER = ("op", "lowering on CPU", "lowering on CUDA", "opaque", "providers", "dynamic dims")
_ROOT = Path(dsv4_ops.__file__).resolve().parent.parent


def rows() -> list[tuple[str, ...]]:
    """Return one row per op: name, kinds of lowering on CPU and CUDA, the opaque call in graphs,
    providers, dynamic dimensions."""
    return [
        (
            name,
            spec.lowering.get("cpu", "-"),
            spec.lowering.get("cuda", "-"),
            _opaque(spec) or "-",
            ", ".join(spec.providers),
            ", ".join(spec.dynamic),
        )
        for name, spec in OPS.items()
    ]


def records() -> list[dict[str, Any]]:
    """Return ``rows`` as JSON-compatible values."""
    return [
        {
            "op": name,
            "lowering": spec.lowering,
            "hopper_call": spec.hopper_call,
            "providers": list(spec.providers),
            "dynamic": list(spec.dynamic),
        }
        for name, spec in OPS.items()
    ]


def table() -> str:
    """Format ``rows`` in columns."""
    return columns([_HEADER, *rows()])


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Format lines of cells; the cells of a column are padded to the same width."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown_table() -> str:
    """Format ``rows`` as a Markdown table."""
    lines = [_HEADER, ("---",) * len(_HEADER)]
    lines += [(f"`{name}`", *cells) for name, *cells in rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def facts(name: str) -> dict[str, str]:
    """Return the facts of op ``name``.

    The facts include signature, schema, lowering, source lines and docstring.

    Raises:
        ValueError: no such op; the message names close matches.
    """
    if name not in OPS:
        close = difflib.get_close_matches(name, OPS, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(
            f"show: op must be a name in the registry, got {name!r}. "
            f"{hint}`python -m dsv4_ops list` prints all of them."
        )
    spec = OPS[name]
    function = spec.implementation("ops")
    return {
        "signature": _signature(function),
        "schema": f"dsv4_ops::{spec.schema}",
        "lowering": ", ".join(f"{device}: {kind}" for device, kind in spec.lowering.items()),
        "opaque": _opaque(spec) or "no",
        "gradient": spec.gradient,
        "providers": ", ".join(spec.providers),
        "dynamic": ", ".join(spec.dynamic),
        "source": spec.source,
        **{layer: _place(spec, layer) for layer in LAYERS if layer != "kernels" or spec.has_kernel},
        "doc": inspect.getdoc(function) or "no docstring",
    }


def describe(name: str) -> str:
    """Format ``facts`` as text.

    Raises:
        ValueError: as ``facts``.
    """
    record = facts(name)
    signature, doc = record.pop("signature"), record.pop("doc")
    width = max(map(len, record))
    lines = [f"{fact:<{width}}  {value}" for fact, value in record.items()]
    return "\n".join([signature, "", *lines, "", doc])


def _opaque(spec: OpSpec) -> str:
    """Return the name of the opaque op that graphs call instead of this op, or an empty string if
    graphs contain this op's kernel launches on every GPU."""
    return f"{spec.hopper_call} on Hopper" if spec.hopper_call else ""


def _signature(function: Any) -> str:
    """Return the signature as in the source, without the quotes of postponed annotations."""
    name: str = function.__name__
    return name + re.sub(r"'([^']*)'", r"\1", str(inspect.signature(function)))


def _place(spec: OpSpec, layer: str) -> str:
    """Return the file:line of the op's implementation in ``layer``. If the implementation is made
    of functions, add the file:line of each function."""
    try:
        entry = spec.implementation(layer)
    except (ImportError, AttributeError) as error:
        return f"missing ({error})"
    if inspect.isroutine(entry):
        return _line(entry)
    if layer == "lowering" and own_lowering(spec) is None:
        return f"the default, {type(entry).__name__}: function at {_line(entry.function)}"
    inner = ", ".join(f"{part} at {_line(function)}" for part, function in _parts(entry))
    where = _assignment(module_of(layer, spec.stem), spec.name)
    return f"{where} ({type(entry).__name__}: {inner})" if inner else where


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    for part in ("function", "cases", "make", "strategy"):
        function = getattr(value, part, None)
        if inspect.isfunction(function):  # not methods, which all ops share
            yield part, function


def _line(function: Any) -> str:
    function = inspect.unwrap(function)
    return f"{_relative(inspect.getsourcefile(function))}:{inspect.getsourcelines(function)[1]}"


def _assignment(module: str, name: str) -> str:
    """Return the file:line of ``name = ...`` in a loaded module."""
    file = inspect.getsourcefile(sys.modules[module])
    assignment = re.compile(rf"{name}\s*(:.*)?=")
    for number, line in enumerate(Path(file or "").read_text().splitlines(), 1):
        if assignment.match(line):
            return f"{_relative(file)}:{number}"
    return _relative(file)


def _relative(file: str | None) -> str:
    path = Path(file or "").resolve()
    return path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else str(path)
