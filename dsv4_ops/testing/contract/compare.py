"""Compare results of an op: bit for bit, or within an error budget against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.testing.case import Case, Exact, OpTesting, results

SLACK = 1.5
"""Allowed error of an implementation, as a multiple of the reference's error or of one rounding,
whichever is larger."""

ROUNDINGS = 2 * SLACK
"""Allowed error of the reference, in roundings. The reference may round twice: attention rounds P
and its output."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same(what: str, actual: Any, expected: Any) -> None:
    """Assert that results are equal in number, shape, dtype, device and every value."""
    pairs = zip(results(actual), results(expected), strict=True)
    for index, (left, right) in enumerate(pairs):
        _assert_alike(what, index, left, right)
        _assert_equal(what, index, left, right)


def assert_agrees(
    what: str,
    op_testing: OpTesting,
    case: Case,
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
) -> None:
    """Assert that ``actual`` equals the reference's ``expected``, or is within an error budget.

    ``op_testing.precise`` has the float64 values of the results that have a budget.
    """
    if op_testing.precise is None:
        assert_same(what, actual, expected)
        return
    for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
        _assert_alike(what, index, left, right)
    case = case.copy()
    read = (op_testing.decode(case, outcome) for outcome in (actual, expected))
    pairs = zip(*read, exact_results(op_testing, case), strict=True)
    for index, (left, right, exact) in enumerate(pairs):
        if exact is None:
            _assert_equal(what, index, left, right)
        else:
            _assert_within(what, index, left, right, exact)


def assert_precise(what: str, op_testing: OpTesting, case: Case, outcome: Sequence[Tensor]) -> None:
    """Assert that the ``outcome`` of the reference is within ROUNDINGS of float64."""
    read = op_testing.decode(case, outcome)
    pairs = zip(read, exact_results(op_testing, case), strict=True)
    for index, (result, exact) in enumerate(pairs):
        if exact is not None:
            perfect = exact.value.to(result.dtype)
            _assert_within(what, index, result, perfect, exact, ROUNDINGS)


def exact_results(op_testing: OpTesting, case: Case) -> tuple[Exact | None, ...]:
    """Return the float64 results of ``case``, on the device of its tensors."""
    assert op_testing.precise is not None
    return op_testing.precise(*case.copy().tensors, **case.settings)


def equal(left: Tensor, right: Tensor) -> bool:
    """Whether tensors are bit-identical, except for NaN payloads."""
    if not left.is_floating_point():
        return torch.equal(left, right)
    if left.itemsize == 1:  # NaN of e4m3 has no payload
        return torch.equal(
            left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
        )
    words = _WORDS[left.itemsize]
    nan = left.isnan()
    if not torch.equal(nan, right.isnan()):
        return False
    bits = (torch.where(nan, 0, tensor.contiguous().view(words)) for tensor in (left, right))
    return torch.equal(*bits)


def _assert_alike(what: str, index: int, left: Tensor, right: Tensor) -> None:
    assert (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device), (
        f"{what}: result {index} is {left.shape} {left.dtype} {left.device}, "
        f"not {right.shape} {right.dtype} {right.device}"
    )


def _assert_equal(what: str, index: int, left: Tensor, right: Tensor) -> None:
    assert equal(left, right), f"{what}: result {index} differs:\n{left}\nexpected\n{right}"


def _assert_within(
    what: str, index: int, actual: Tensor, reference: Tensor, exact: Exact, slack: float = SLACK
) -> None:
    value = exact.value.to(actual.device)
    rounded = value.to(actual.dtype)
    number = rounded.isfinite()
    same = equal(torch.where(number, 0.0, actual), torch.where(number, 0.0, rounded))
    assert same, f"{what}: result {index} has other NaN or infinities:\n{actual}\nexpected\n{value}"
    if actual.numel() == 0:
        return
    unit = torch.finfo(actual.dtype).eps / 2 if exact.unit is None else exact.unit
    error, allowed = (
        torch.where(number, (tensor.to(torch.float64) - value).abs(), 0.0)
        for tensor in (actual, reference)
    )
    worst = allowed.amax(-1, keepdim=True) if allowed.dim() else allowed
    subnormal = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
    magnitude = exact.magnitude.to(actual.device).abs().nan_to_num(0.0, 0.0, 0.0)
    budget = slack * torch.maximum(worst, unit * magnitude) + subnormal
    excess = torch.where(number, error / budget, 0.0)
    assert bool((excess <= 1).all()), (
        f"{what}: result {index} is {float(excess.max()):.3g} budgets from float64 at "
        f"{_index_of(excess)}: {float(actual.flatten()[excess.argmax()])}, reference "
        f"{float(reference.flatten()[excess.argmax()])}, float64 "
        f"{float(value.flatten()[excess.argmax()])}"
    )


def _index_of(values: Tensor) -> list[int]:
    return [int(axis) for axis in torch.unravel_index(values.argmax(), values.shape)]
