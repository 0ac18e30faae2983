"""The checks of numbers, which arguments and layouts share."""

from __future__ import annotations

import math

import torch

from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.torch_compat import statically_known_true
from dsv4_ops.core.types import INT32_MAX

INT64_MAX = 2**63 - 1


def at_least(op: str, minimum: int, *, most: int = INT32_MAX, **values: int) -> None:
    """Every value is an int of at least ``minimum`` and at most ``most``."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            advice = "Pass a Python int that is known on the host, never a tensor"
            raise refusal(TypeError, op, name, "be an int", type(value).__name__, advice)
        if value < minimum:
            rule, advice = f"be at least {known(minimum)}", f"Pass {known(minimum)} or more"
            raise refusal(ValueError, op, name, rule, known(value), advice)
        if _known_above(value, most):
            of_indices = "Indices are int32, so that larger ones address nothing"
            advice = of_indices if most == INT32_MAX else "Numbers are int64"
            raise refusal(ValueError, op, name, f"be at most {most}", known(value), advice)


def _known_above(value: int, most: int) -> bool:
    """Whether ``value`` exceeds ``most``: of a symbol in a trace False, and no guard. Nothing of
    such sizes is there to trace with."""
    if not torch.compiler.is_compiling():
        return value > most
    return statically_known_true(value > most)


def above(op: str, limit: int, **values: float) -> None:
    """Every value is a finite number above ``limit``."""
    for name, value in values.items():
        is_float(op, name, value)
        if not limit < value < math.inf:
            rule, advice = f"be above {limit} and finite", f"Pass a number above {limit}"
            raise refusal(ValueError, op, name, rule, float(value), advice)


def is_float(op: str, name: str, value: float) -> None:
    """``value`` is a float, or an int to be taken for one."""
    if isinstance(value, bool) or not isinstance(value, (float, int, torch.SymFloat)):
        advice = "Pass a Python float that is known on the host, never a tensor"
        raise refusal(TypeError, op, name, "be a float", type(value).__name__, advice)


def held(op: str, name: str, value: float, owner: str, dtype: torch.dtype) -> None:
    """``value`` is a number that a tensor of ``dtype`` holds, and that ``owner`` is one of."""
    is_float(op, name, value)
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
        return
    if dtype == torch.bool or dtype.is_floating_point:
        low, high = 0, int(dtype == torch.bool)
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if not (low <= value <= high and value % 1 == 0):
        rule = f"be a whole number in {low}..{high} for {owner} of {dtype}"
        raise refusal(ValueError, op, name, rule, float(value), f"Pass one that {owner} can hold")


def known(value: int) -> int:
    """``value`` as an int that Dynamo can put into a message even where it traces it as a symbol:
    an error ends the trace, so that the guard costs nothing."""
    return int(value)
