"""Wrong calls of every public function, and their errors; ``test_errors.py`` makes the calls.

``TABLE`` has the rows of single functions, from the other files of this folder; ``generated`` adds
rows that all arguments of a kind share.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

import dsv4_ops as ops
from dsv4_ops.attention.metadata import AttentionSpec
from dsv4_ops.core.registry import OPS
from tests.ops import error_rows
from tests.ops.error_rows import wording as says
from tests.ops.error_rows.valid import MINIMUM, ORDER, SUMS, valid_tensor, valid_value


class Row(NamedTuple):
    """One wrong call: the changes of a valid call, and the expected error."""

    op: str
    spoiled: dict[str, Any]
    error: type[Exception]
    message: str


COLLECTIVES = ("cp_combine", "cp_gather_heads", "cp_gather_rows")
"""Functions that need a process group; ``test_collectives.py`` tests their errors."""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function
    for name, function in ((name, getattr(ops, name)) for name in ops.__all__)
    if name not in COLLECTIVES
    if callable(function) and not (inspect.isclass(function) and issubclass(function, tuple))
}
CALLABLES: dict[str, Callable[..., Any]] = {**FUNCTIONS, "AttentionSpec": AttentionSpec}

TENSOR_KINDS = ("Tensor", "Tensor | None")
DTYPES = (torch.int32, torch.int64, torch.float32, torch.bool)
TABLE: dict[str, list[says.Entry]] = {}
for stem in pkgutil.iter_modules(error_rows.__path__, f"{error_rows.__name__}."):
    if stem.name != __name__:
        TABLE |= getattr(importlib.import_module(stem.name), "TABLE", {})


def valid_arguments(op: str) -> dict[str, Any]:
    """Return valid arguments of the function."""
    if op == "AttentionSpec":
        return {}
    parameters = inspect.signature(FUNCTIONS[op]).parameters.values()
    return {each.name: valid_value(op, each.name, each.default) for each in parameters}


def rows() -> Iterator[Row]:
    for op in CALLABLES:
        for entry in (*TABLE.get(op, ()), *generated(op)):
            yield Row(op, entry.spoiled, entry.error, f"{op}: {entry.text}")


def generated(op: str) -> Iterator[says.Entry]:
    """Yield wrong values for each tensor and int of a function, as their kinds allow."""
    parameters = inspect.signature(CALLABLES[op]).parameters.values()
    kinds = {each.name: each.annotation for each in parameters}
    order = ORDER.get(op) or [name for name in kinds if kinds[name] in TENSOR_KINDS]
    for name, kind in kinds.items():
        if kind in TENSOR_KINDS:
            yield from tensor_rows(op, name, order[0], optional=kind.endswith("None"))
        elif kind in ("int", "int | None"):
            lowest = () if op == "AttentionSpec" else (-(2**40),)
            yield from int_rows(name, *lowest, optional=kind.endswith("None"))
        elif name == "impl":
            yield from impl_rows(op)
    yield from size_rows(op, order)


def tensor_rows(op: str, name: str, first: str, *, optional: bool) -> Iterator[says.Entry]:
    value, shape, dtypes, layout, advice, any_rank = valid_tensor(op, name)
    for other in (value.tolist(), 3) if optional else (value.tolist(), None, 3):
        yield says.no_tensor(name, other, advice or f"Pass a {value.dtype} tensor")
    none = torch.zeros(value.dim(), 0, dtype=torch.int64), torch.zeros(0, dtype=value.dtype)
    sparse = torch.sparse_coo_tensor(*none, value.shape)
    do = "Pass .to_dense() of a sparse one, or .values() of a nested one"
    got = "a torch.sparse_coo"
    yield says.wrong(name, "be a dense tensor", got, do, TypeError, **{name: sparse})
    dtypes = dtypes or str(value.dtype)
    for other in DTYPES:
        if str(other) not in dtypes:
            yield says.dtype(name, dtypes, value.to(other), advice, layout)
    for other in () if any_rank else (value[None], value[0]):
        yield says.rank(name, shape, other)
    if name != first:
        yield says.elsewhere(name, "cpu", first, "meta", **{name: value.to("meta")})


def size_rows(op: str, order: Iterable[str]) -> Iterator[says.Entry]:
    """Yield tensors with one entry more or less than earlier tensors, or limits, demand."""
    owners = dict(SUMS.get(op, {}))
    for name in order:
        value, shape = valid_tensor(op, name)[:2]
        for axis, dim in enumerate(shape[1:-1].split(", ")):
            word, size = dim.partition(" + ")[0], value.shape[axis]
            more = torch.cat([value, value.narrow(axis, 0, 1)], axis)
            for other in (more, value.narrow(axis, 1, size - 1)):
                if dim.isdigit():
                    yield says.exactly(name, shape, other, axis)
                elif owners.setdefault(word, name) != name:
                    count = size - dim.endswith(" + 1")
                    yield says.agree(name, shape, word, count, owners[word], other)


def int_rows(name: str, *lowest: int, optional: bool) -> Iterator[says.Entry]:
    for value in (True, 2.0, torch.tensor(2), "2", None):
        if value is not None or not optional:
            yield says.no_int(name, value)
    least = MINIMUM.get(name, 1)
    for low in (least - 1, *lowest):
        yield says.at_least(name, least, low)
    long = ("max_context_tokens", "max_logits_bytes", "workspace_size")
    most = 2**63 - 1 if name in long else 2**31 - 1
    why = "Indices are int32, so that larger ones address nothing"
    for high in (most + 1, 2**80):
        do = why if most == 2**31 - 1 else "Numbers are int64"
        yield says.wrong(name, f"be at most {most}", high, do)


def impl_rows(op: str) -> Iterator[says.Entry]:
    """Yield values of ``impl`` that do not exist, or cannot run on a CPU."""
    impls = [repr(impl) for impl in ("auto", *OPS[op].providers)]
    allowed = ", ".join(impls[:-1]) + f" or {impls[-1]}"
    yield says.of_type("impl", "be a str", None, f"Pass {allowed}")
    yield says.wrong("impl", f"be {allowed}", "'cutlass'", "Pass one of these", impl="cutlass")
    must, do = "be 'auto' or 'reference' on cpu", "Move the tensors to a CUDA device"
    for impl in sorted({*OPS[op].providers} - {"reference"}):
        yield says.wrong("impl", must, repr(impl), do, RuntimeError, impl=impl)


ROWS = [*rows()]
