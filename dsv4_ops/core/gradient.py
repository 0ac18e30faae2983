"""Autograd rules of the ops. An op without a derivative runs as usual, and raises in backward.

torch treats the result of an op without a rule as a constant: compiled code and ``torch.func``
would return gradients of 0. Inference with weights that require gradients must work, so only
``backward`` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.torch_compat import (
    OpOverload,
    SingleLevelFunction,
    any_requires_grad,
    enable_single_level_autograd_function,
    forward_mode,
    redispatch,
)

INTEGERS = "integers"
"""No argument of the op is a float, so autograd ignores the op."""
REFUSED = "refused"
"""The op has no derivative."""
REFERENCE = "reference"
"""Autograd differentiates the reference instead of the op."""
KINDS = (INTEGERS, REFUSED, REFERENCE)

_LEAVE = "Call it under torch.no_grad()"


def no_derivative(op: str) -> Exception:
    """Make the error that ``backward`` raises."""
    return argument_error(
        op,
        "results",
        must="not be differentiated",
        got="a derivative of them",
        do=f"{_LEAVE}, or detach what goes into it; to train, compute this in ops of torch",
        kind=NotImplementedError,
    )


def _not_written(op: str, name: str) -> Exception:
    return argument_error(
        op,
        name,
        must="not require gradients, which a tensor that is written to would lose",
        got="requires_grad=True",
        do=f"{_LEAVE}, or detach {name}",
        kind=NotImplementedError,
    )


class _Refused(SingleLevelFunction):
    """Return the results of ``call``; raise when they are differentiated.

    ``torch.func`` nests transforms. The dispatcher runs this rule for one transform at a time.
    """

    @staticmethod
    def forward(ctx: Any, op: str, call: Callable[..., Any], *args: Any) -> Any:
        # torch would pass zeros for unused results, and so hide which gradients were requested
        ctx.set_materialize_grads(False)
        ctx.op = op
        ctx.inputs = [
            (place, arg.shape, arg.dtype)
            for place, arg in enumerate(args)
            if isinstance(arg, Tensor)
        ]
        ctx.count = len(args)
        return call(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        first = next(grad for grad in grads if grad is not None)
        refused = torch.ops.dsv4_ops._no_derivative.default(first, ctx.op)
        grads_of_args: list[Tensor | None] = [None] * ctx.count
        for place, shape, dtype in ctx.inputs:
            if ctx.needs_input_grad[2 + place]:
                grads_of_args[place] = refused.to(dtype).expand(shape)
        return None, None, *grads_of_args

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_derivative(ctx.op)


def _refused(op: str, call: Callable[..., Any], *args: Any) -> Any:
    with enable_single_level_autograd_function():
        return _Refused.apply(op, call, *args)  # type: ignore[attr-defined] # defined in C


def define(library: torch.library.Library) -> None:
    """Define the ops that the rules of this file put into traced graphs."""
    library.define("_no_derivative(Tensor grad, str op) -> Tensor")
    library.impl("_no_derivative", _raise, "CompositeExplicitAutograd")
    library.impl("_no_derivative", _raise, "FuncTorchBatched")
    torch.library.register_fake(
        "dsv4_ops::_no_derivative", lambda grad, op: grad.new_empty(()), lib=library
    )
    library.define("_without_derivative(Tensor values, Tensor[] sources, str op) -> Tensor")
    library.impl("_without_derivative", _copy, "CompositeExplicitAutograd")
    torch.library.register_fake("dsv4_ops::_without_derivative", _copy, lib=library)
    library.impl("_without_derivative", _copy_autograd, "Autograd")


def _raise(grad: Tensor, op: str) -> Tensor:
    raise no_derivative(op)


def _copy(values: Tensor, sources: Sequence[Tensor], op: str) -> Tensor:
    return values.clone()


def _copy_autograd(values: Tensor, sources: Sequence[Tensor], op: str) -> Tensor:
    copy: Tensor = _refused(op, lambda first, *rest: first.clone(), values, *sources)
    return copy


def differentiated(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the tensors that require a gradient; none if autograd does not record."""
    if not torch.is_grad_enabled():
        return []
    return [each for each in tensors if isinstance(each, Tensor) and each.requires_grad]


def without_derivative(op: str, values: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """Return a copy of ``values`` whose backward raises.

    ``op`` computed the values from ``sources`` in code that autograd does not record."""
    copy: Tensor = torch.ops.dsv4_ops._without_derivative.default(values, list(sources), op)
    return copy


def autograd_rule(
    name: str, op: OpOverload, kind: str, reference: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the function that autograd calls for ``op``. The function takes the remaining dispatch
    keys, then the arguments. ``kind`` is ``REFUSED`` or ``REFERENCE``."""
    names = [argument.name for argument in op._schema.arguments]
    writes = [
        place
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returns = len(op._schema.returns) > 0

    def rule(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        recorded = _recorded(args)
        if not recorded:
            return redispatch(op, keyset, *args, **kwargs)
        if kind == REFERENCE:
            return reference(*args, **kwargs)
        lost = [place for place in recorded if place in writes] if returns else recorded
        if lost:
            raise _not_written(name, names[lost[0]])
        return _refused(
            name, lambda *arguments: redispatch(op, keyset, *arguments, **kwargs), *args
        )

    return rule


def _recorded(args: Sequence[Any]) -> Sequence[int]:
    """Return the indices of the tensors that autograd records, in reverse or forward mode."""
    forward = forward_mode()
    if not forward and not (torch.is_grad_enabled() and any_requires_grad(args)):
        return ()
    return [
        place
        for place, arg in enumerate(args)
        if isinstance(arg, Tensor)
        and (
            (torch.is_grad_enabled() and arg.requires_grad)
            or (forward and forward_ad.unpack_dual(arg).tangent is not None)
        )
    ]
