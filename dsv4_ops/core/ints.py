"""Checks of ints and floats for ops and layouts, and helpers for symbolic sizes."""

from __future__ import annotations

import math
from typing import Any

import torch

from dsv4_ops.core.errors import argument_error, plain_int
from dsv4_ops.core.torch_compat import statically_known_true
from dsv4_ops.core.types import INT32_MAX

INT64_MAX = 2**63 - 1


def single(value: torch.Tensor) -> torch.Tensor:
    """Return the only element of a tensor [1], as a tensor without dimensions.

    If torch broadcasts a tensor whose symbolic size is 1, Inductor may not know the size, and then
    reads past the element.
    """
    return value[0]


def positive(number: Any) -> Any:
    """Return ``int(number > 0)``, without a guard if ``number`` is a SymInt."""
    return torch.sym_max(0, torch.sym_min(1, number))


def at_least(op: str, minimum: int, *, most: int = INT32_MAX, **values: int) -> None:
    """Check that every value is an int from ``minimum`` to ``most``."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise argument_error(
                op,
                name,
                must="be an int",
                got=type(value).__name__,
                do="Pass a Python int that is known on the host, never a tensor",
                kind=TypeError,
            )
        if value < minimum:
            raise argument_error(
                op,
                name,
                must=f"be at least {plain_int(minimum)}",
                got=plain_int(value),
                do=f"Pass {plain_int(minimum)} or more",
            )
        if _known_above(value, most):
            known = {
                INT32_MAX: "Indices are int32, so that larger ones address nothing",
                INT64_MAX: "Numbers are int64",
            }
            raise argument_error(
                op,
                name,
                must=f"be at most {most}",
                got=plain_int(value),
                do=known.get(most, f"Pass {most} or less"),
            )


def _known_above(value: int, most: int) -> bool:
    """Whether ``value`` is certainly above ``most``. A symbolic size gets no guard, because no
    tensor of a trace is that large."""
    if not torch.compiler.is_compiling():
        return value > most
    return statically_known_true(value > most)


def above(op: str, limit: int, **values: float) -> None:
    """Check that every value is a finite number above ``limit``."""
    for name, value in values.items():
        is_float(op, name, value)
        if not limit < value < math.inf:
            raise argument_error(
                op,
                name,
                must=f"be above {limit} and finite",
                got=float(value),
                do=f"Pass a number above {limit}",
            )


def is_float(op: str, name: str, value: float) -> None:
    """Check that ``value`` is a float or an int."""
    if isinstance(value, bool) or not isinstance(value, (float, int, torch.SymFloat)):
        raise argument_error(
            op,
            name,
            must="be a float",
            got=type(value).__name__,
            do="Pass a Python float that is known on the host, never a tensor",
            kind=TypeError,
        )


def fits_dtype(op: str, name: str, value: float, owner: str, dtype: torch.dtype) -> None:
    """Check that ``dtype``, the dtype of the tensor ``owner``, can represent ``value``."""
    is_float(op, name, value)
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
        return
    if dtype == torch.bool or dtype.is_floating_point:
        low, high = 0, int(dtype == torch.bool)
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if not (low <= value <= high and value % 1 == 0):
        raise argument_error(
            op,
            name,
            must=f"be a whole number in {low}..{high} for {owner} of {dtype}",
            got=float(value),
            do=f"Pass one that {owner} can hold",
        )
