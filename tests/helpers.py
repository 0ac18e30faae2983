"""Helpers for all test files: tensors from lists, exact comparison, layouts."""

import os
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_ops.core.registry import OPS
from dsv4_ops.core.types import INT32_MAX as INT32_MAX
from dsv4_ops.testing import op_testing
from dsv4_ops.testing.case import Case, i32 as i32, i64 as i64
from dsv4_ops.testing.contract.compare import assert_agrees
from dsv4_ops.testing.strategies.batches import INT32_MIN as INT32_MIN

NIGHTLY = os.environ.get("DSV4_OPS_NIGHTLY") == "1"
"""Whether `make test-all` runs: more sampled calls, and tests marked nightly."""
SMOKE = "DSV4_OPS_SMOKE" in os.environ
"""Whether `make smoke` runs. Few tests run, so each covers more than in `make test`."""
EVERY = NIGHTLY or os.environ.get("DSV4_OPS_SMOKE") == "every"
"""Whether `make test-all` or `make lanes` runs: all examples of kernels, all types of layers."""

Result = Tensor | Sequence[Tensor]


def nightly(shown_by: str, *values: Any) -> list[Any]:
    """Return parameters for ``make test-all`` only; a tuple has the values of several arguments."""
    mark = pytest.mark.nightly(shown_by)
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=mark) for each in values
    ]


def strided(tensor: Tensor) -> Tensor:
    """Return the same values in a view that is not contiguous, with junk between the values."""
    if tensor.dim() == 1:
        base = torch.full((tensor.shape[0] + 1, 3), 77, dtype=tensor.dtype)
        base[1:, 1] = tensor
        return base[1:, 1]
    rows, columns = tensor.shape
    base = torch.full((columns + 1, rows + 2), 77, dtype=tensor.dtype)
    base[:columns, 1 : rows + 1] = tensor.t()
    return base[:columns, 1 : rows + 1].t()


def widened(table: Tensor) -> Tensor:
    """Return the same table as columns of a wider table, with a row stride above the width."""
    rows, columns = table.shape
    base = torch.full((rows, columns + 3), 77, dtype=table.dtype)
    base[:, 1 : columns + 1] = table
    return base[:, 1 : columns + 1]


def call(op: Callable[..., Any], *tensors: Tensor, **settings: int) -> Any:
    """Run an op, and assert that it did not change its inputs."""
    before = [tensor.clone() for tensor in tensors]
    result = op(*tensors, **settings)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor, copy), "the op modified an input"
    return result


def assert_exact(actual: Result, expected: Result) -> None:
    """Assert equal numbers of tensors, dtypes, shapes and values."""
    if isinstance(expected, Tensor):
        actual, expected = [actual], [expected]
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert isinstance(got, Tensor)
        text = f"{got=}\n{want=}"
        assert (got.dtype, got.shape) == (want.dtype, want.shape), text
        assert torch.equal(got, want), text


def assert_right(name: str, case: Case, actual: Sequence[Tensor]) -> None:
    """Assert that results of an op agree with its reference's, as in the contract."""
    expected = case.run(OPS[name].reference, OPS[name].mutated)
    assert_agrees(f"{name}, {case.name}", op_testing(name), case, actual, expected)


def maybe_strided(layout: Random, tensor: Tensor) -> Tensor:
    return strided(tensor) if layout.random() < 0.3 else tensor


class Called(TorchDispatchMode):
    """Records calls of our ops in order, their names, and the dtypes of their first arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.calls: list[tuple[str, Any, Any]] = []
        self.dtypes: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "dsv4_ops":
            self.names.append(op._opname)
            self.calls.append((op._opname, args, kwargs or {}))
            self.dtypes += [(op._opname, each.dtype) for each in args[:1] if torch.is_tensor(each)]
        return op(*args, **(kwargs or {}))
