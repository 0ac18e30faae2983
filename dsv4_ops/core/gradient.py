"""What autograd makes of an op: an op without a derivative computes, and raises in backward.

Without a rule of its own torch takes an op for a constant: compiled code and ``torch.func`` then
answer with gradients of 0. Inference with weights that require gradients has to work nevertheless,
so that only ``backward`` can refuse.
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
"""No argument of the op is a float: autograd passes it by."""
REFUSED = "refused"
"""The op has no derivative."""
REFERENCE = "reference"
"""The derivative is that of the reference, which is traced in place of the op."""
KINDS = (INTEGERS, REFUSED, REFERENCE)

_LEAVE = "Call it under torch.no_grad()"


def no_derivative(op: str) -> Exception:
    """The error of a derivative that is asked for."""
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
    """The results of ``call``, whose derivative is an error.

    The dispatcher calls it at one level of ``torch.func``'s transforms at a time.
    """

    @staticmethod
    def forward(ctx: Any, op: str, call: Callable[..., Any], *args: Any) -> Any:
        ctx.set_materialize_grads(False)  # zeros for unused results would hide what was asked for
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
        asked = next(grad for grad in grads if grad is not None)
        refused = torch.ops.dsv4_ops._no_derivative.default(asked, ctx.op)
        found: list[Tensor | None] = [None] * ctx.count
        for place, shape, dtype in ctx.inputs:
            if ctx.needs_input_grad[2 + place]:
                found[place] = refused.to(dtype).expand(shape)
        return None, None, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_derivative(ctx.op)


def _refused(op: str, call: Callable[..., Any], *args: Any) -> Any:
    with enable_single_level_autograd_function():
        return _Refused.apply(op, call, *args)  # type: ignore[attr-defined] # of its C base


def define(library: torch.library.Library) -> None:
    """Define in ``library`` what graphs of a forward and its backward hold."""
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
    """Those that require a gradient, where autograd records; none is looked at where it does
    not."""
    if not torch.is_grad_enabled():
        return []
    return [each for each in tensors if isinstance(each, Tensor) and each.requires_grad]


def without_derivative(op: str, values: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """``values`` that ``op`` computed from ``sources`` where autograd did not look: a copy, in
    whose backward it raises."""
    copy: Tensor = torch.ops.dsv4_ops._without_derivative.default(values, list(sources), op)
    return copy


def autograd_rule(
    name: str, op: OpOverload, kind: str, reference: Callable[..., Any]
) -> Callable[..., Any]:
    """What autograd calls in place of ``op``, with the keys that are left to dispatch to; ``kind``
    is ``REFUSED`` or ``REFERENCE``."""
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
        return _refused(name, lambda *given: redispatch(op, keyset, *given, **kwargs), *args)

    return rule


def _recorded(args: Sequence[Any]) -> Sequence[int]:
    """Places of the tensors that autograd, of either mode, follows."""
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
