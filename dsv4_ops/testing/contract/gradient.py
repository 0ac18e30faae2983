"""Check an op's autograd behaviour: a derivative, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.gradient import INTEGERS, REFUSED
from dsv4_ops.core.registry import OpSpec
from dsv4_ops.testing.case import Case, results
from dsv4_ops.testing.contract.compare import assert_agrees
from dsv4_ops.testing.strategies.calls import Results, op_testing, reference

Call = Callable[..., Results]


def check_gradient(spec: OpSpec, device: str = "cpu") -> None:
    """Check that an op without a derivative runs on inputs that require gradients, and that its
    backward raises.

    The op must raise at once if it would mutate a tensor that requires a gradient.
    """
    cases = [case for case in op_testing(spec).cases() if any(map(_is_float, case.tensors))]
    assert bool(cases) == (spec.gradient != INTEGERS), (
        f"{spec.name}: gradient is {spec.gradient!r}, of {len(cases)} cases with floats"
    )
    if not cases or spec.gradient != REFUSED:
        return
    case = min(cases, key=_size).on(device)
    args = [arg for arg, tensor in enumerate(case.tensors) if _is_float(tensor)]
    written = [arg for arg in args if arg in spec.mutated]
    read = [arg for arg in args if arg not in written]
    if spec.op._schema.returns and read:
        inputs = _recorded(case, read)
        outcome = results(spec.op(*inputs, **case.settings), *(inputs[arg] for arg in spec.mutated))
        assert not any(inputs[arg].requires_grad for arg in written), f"{spec.name}: history"
        detached = tuple(result.detach() for result in outcome)
        assert_agrees(
            f"{spec.name}, recorded", op_testing(spec), case, detached, reference(spec, case)
        )
        if not any(map(_is_float, outcome)):
            return  # integer results, like those of an argmax
    for differentiable in ([read] if read else []) + [[arg] for arg in written]:
        for form in (_backward, _vjp, _jvp):
            _assert_refused(spec, case, differentiable, form)


def _assert_refused(
    spec: OpSpec, case: Case, args: list[int], form: Callable[[Call, Results], Any]
) -> None:
    def call(*values: Tensor) -> Results:
        tensors = list(case.copy().tensors)
        for arg, value in zip(args, values, strict=True):
            tensors[arg] = value
        return tuple(filter(_is_float, results(spec.op(*tensors, **case.settings))))

    values = tuple(each for arg in args if (each := case.tensors[arg]) is not None)
    what = f"{spec.name}, inputs {args}, {form.__name__}"
    try:
        form(call, tuple(value.clone() for value in values))
        message = "no error"
    except NotImplementedError as error:
        message = str(error)
    assert message.startswith(f"{spec.name}: "), f"{what}: {message}"


def _backward(call: Call, values: Results) -> Any:
    outputs = call(*(value.requires_grad_() for value in values))
    torch.autograd.backward(outputs, tuple(map(torch.ones_like, outputs)))


def _vjp(call: Call, values: Results) -> Any:
    outputs, pull = torch.func.vjp(call, *values)[:2]
    return pull(tuple(map(torch.ones_like, outputs)))


def _jvp(call: Call, values: Results) -> Any:
    return torch.func.jvp(call, values, tuple(map(torch.ones_like, values)))


def _size(case: Case) -> tuple[bool, int]:
    """Sort key: cases without empty tensors first, then by size."""
    sizes = [tensor.numel() for tensor in case.tensors if tensor is not None]
    return 0 in sizes, sum(sizes)


def _recorded(case: Case, args: list[int]) -> list[Any]:
    tensors: list[Any] = list(case.copy().tensors)
    for arg in args:
        tensors[arg].requires_grad_()
    return tensors


def _is_float(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point()
