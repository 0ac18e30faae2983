"""Methods replaced on instances, and what a module is.

``patch`` decides on the host which class each module has and stores the answer on the module; a
trace reads that constant. A tracer may show other names and other functions than the host has:
Dynamo of torch 2.15 shows the wrapper of a decorated forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _globals

Forward = Callable[..., Any]
Maker = Callable[[Forward], Forward]

_MODELLING = {
    f"transformers.models.deepseek_v{version}.modeling_deepseek_v{version}": f"DeepseekV{version}"
    for version in (2, 3, 4)
}
"""Prefix of the class names in each of Hugging Face's modelling files."""
_ACTIVATIONS = "transformers.activations", "torch.nn.modules.activation"
_TRUSTED = ("torch", "transformers")
"""Packages whose decorators may wrap a forward that counts as Hugging Face's own."""
QUANTIZED_LINEAR, QUANTIZED_EXPERTS = ("weight",), ("gate_up_proj", "down_proj")
SOURCE = "_dsv4_ops_source"
"""Attribute with the address and version of the weight that a module's buffers were made of."""
CLASS = "_dsv4_ops_class"
"""Attribute with the class name that ``mark`` stored."""
_BELOW_HOOK = "_old_forward"
"""Attribute with the forward that accelerate's hooks call."""
REPLACED = "_dsv4_ops_replaced_forward"
"""Attribute with the own forward of a module whose forward is a bound method now, or None."""


class Replacement:
    """A method replaced on an instance; copied and pickled with it.

    Args:
        module: The instance.
        name: Name of the method.
        make: Makes the new method from the old one, both functions of the instance; picklable.
        before: The instance's own attribute of that name, or None.
    """

    def __init__(self, module: Any, name: str, make: Maker, before: Any) -> None:
        self.module, self.name, self.make, self.before = module, name, make, before
        self.function = make(_unbound(module, name, before))

    def __call__(self, *args: Any, **rest: Any) -> Any:
        return self.function(self.module, *args, **rest)

    def __reduce__(self) -> tuple[Any, ...]:
        return Replacement, (self.module, self.name, self.make, self.before)


def _unbound(module: Any, name: str, before: Any) -> Forward:
    """The old method as a function of the instance, so that a copied model calls its own."""
    if before is None:
        return getattr(type(module), name, None) or _missing
    if isinstance(before, MethodType) and before.__self__ is module:
        return before.__func__
    return lambda _, *args, **rest: before(*args, **rest)


def in_place_of(method: Forward) -> Maker:
    """Return a picklable maker that returns ``method``, whatever it replaces."""
    return partial(_first, method)


def _first(method: Forward, _: Forward) -> Forward:
    return method


def _missing(*_: Any, **__: Any) -> Any:
    raise AttributeError("dsv4_ops replaced a method that the class does not have")


def with_methods(module: Any, copies: dict[int, Any] | None = None) -> Any:
    """Copy a model, with the same parameters, buffers and hooks, and bind its replaced methods.

    Dynamo guards a bound method by its code and any other object by its identity: it would compile
    every layer.
    """
    copies = {} if copies is None else copies
    if id(module) not in copies:
        copied = copies[id(module)] = copy.copy(module)
        children = {
            name: child and with_methods(child, copies) for name, child in module._modules.items()
        }
        copied.__dict__["_modules"] = children
        for name, value in vars(module).items():
            if isinstance(value, Replacement) and name != _BELOW_HOOK:
                copied.__dict__[name] = MethodType(value.function, copied)
                if name == "forward":
                    copied.__dict__[REPLACED] = value.before
    return copies[id(module)]


def defining_class(module: Any) -> str | None:
    """Name of the Hugging Face class that defines a module's forward, or None.

    Only for the host. A subclass that inherits the forward counts; a class whose forward somebody
    else replaced or decorated does not.
    """
    owner = next((each for each in type(module).__mro__ if "forward" in vars(each)), None)
    if owner is None or owner.__module__ not in (*_MODELLING, *_ACTIVATIONS):
        return None
    function = vars(owner)["forward"]
    while function is not None:
        if _package_of(function) not in _TRUSTED:
            return None
        function = getattr(function, "__wrapped__", None)
    return owner.__name__


def _package_of(function: Any) -> str:
    """Package of a function's code: functools.wraps copies ``__module__``, but not the globals."""
    name: str = getattr(function, "__globals__", {}).get("__name__", "")
    return name.partition(".")[0]


def mark(module: Any) -> None:
    """Store the class of a module on it, for traces to read."""
    name = defining_class(module)
    if name is not None:
        setattr(module, CLASS, name)


def unmark(module: Any) -> None:
    """Remove what ``mark`` stored."""
    vars(module).pop(CLASS, None)


def class_of(module: Any) -> str | None:
    """Name of the Hugging Face class that ``mark`` saw on a module, or None."""
    return vars(module).get(CLASS) if isinstance(module, nn.Module) else None


def is_part(module: Any, part: str) -> bool:
    """Whether a module is Hugging Face's ``part``, such as "Attention", of any family.

    Only for the host.
    """
    name = defining_class(module)
    return name is not None and any(name == prefix + part for prefix in _MODELLING.values())


def own_forward(module: Any) -> Any:
    """An instance's own forward other than ours, or None."""
    forward = vars(module).get("forward")
    if isinstance(forward, Replacement):
        forward = forward.before
    return _below_hook(module, vars(module).get(REPLACED, forward))


def _below_hook(module: Any, forward: Any) -> Any:
    """Return the forward that accelerate's hook calls, if ``forward`` is a hook; None if it is the
    class's.

    A trace goes by the structure alone; the host also asks whose functions these are.
    """
    hook, below = vars(module).get("_hf_hook"), vars(module).get(_BELOW_HOOK)
    if hook is None or not isinstance(forward, partial) or not is_harmless(hook):
        return forward
    traced = torch.compiler.is_compiling()
    if not traced and _package_of(forward.func) != "accelerate":
        return forward
    if isinstance(below, Replacement):
        return below.before
    own = isinstance(below, MethodType) and (traced or _is_of_class(module, below))
    return None if own else below


def _is_of_class(module: Any, method: MethodType) -> bool:
    """Whether a bound method is the forward of the module's class; only for the host."""
    return method.__func__ is type(module).forward


def runs_ours(module: Any) -> bool:
    """Whether a module's forward is one of ours, which nobody replaced since."""
    forward = vars(module).get("forward")
    ours = isinstance(forward, Replacement) or REPLACED in vars(module)
    return ours and own_forward(module) is None


def is_harmless(hook: Any) -> bool:
    """Whether accelerate's hook, a forward of the instance, loads no weights.

    Only its hook that aligns devices has ``offload``; the host refuses classes derived from it.
    """
    aligns = getattr(hook, "offload", True) is False
    return aligns and (torch.compiler.is_compiling() or _is_accelerates(hook))


def _is_accelerates(hook: Any) -> bool:
    """Whether a hook's class is accelerate's own; only for the host."""
    return type(hook).__module__.partition(".")[0] == "accelerate"


def quantized_weights(module: Any) -> tuple[str, ...]:
    """Names of a module's weights in the released precision. Scales of other formats have other
    names."""
    parameters = module._parameters
    if f"{QUANTIZED_EXPERTS[0]}_scale_inv" in parameters:
        return QUANTIZED_EXPERTS
    weight = parameters.get("weight")
    fp8 = weight is not None and weight.dtype == torch.float8_e4m3fn
    return QUANTIZED_LINEAR if fp8 and "weight_scale_inv" in parameters else ()


def is_linear(module: Any) -> bool:
    """Whether a module is a plain linear layer without hooks, whose precision we may change."""
    return (
        type(module) is nn.Linear
        and has_plain_weight(module)
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not has_global_hooks()
    )


def has_global_hooks() -> bool:
    """Whether there are hooks of all modules."""
    return bool(_globals._global_forward_hooks or _globals._global_forward_pre_hooks)


def has_plain_weight(linear: nn.Linear) -> bool:
    """Whether a linear layer has no bias and a weight that is not quantised or distributed."""
    return linear.bias is None and not hasattr(type(linear.weight), "__tensor_flatten__")


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.mT`` with a float32 result."""
    differentiated = torch.is_grad_enabled() and x.requires_grad  # mm(out_dtype=) has no gradient
    if (
        (x.is_cuda or x.is_meta)
        and x.dtype == weight.dtype == torch.bfloat16
        and not differentiated
    ):
        flat = x.reshape(-1, x.shape[-1])
        return torch.mm(flat, weight.mT, out_dtype=torch.float32).view(*x.shape[:-1], -1)
    return torch.nn.functional.linear(x.float(), weight.float())


def unwrapped(module: Any) -> Any:
    """The module inside PEFT's adapters."""
    while "base_layer" in module._modules:
        module = module.base_layer
    return module


def local(weight: Any, split: bool | None = None) -> Tensor:
    """This rank's part of a weight that Hugging Face's tensor parallelism split.

    Dynamo does not see whether it is: ``split`` says so in a step.
    """
    split = hasattr(weight, "to_local") if split is None else split
    return weight.to_local() if split else weight
