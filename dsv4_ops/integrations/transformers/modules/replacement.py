"""Replace methods on instances, and recognise modules by their class.

``patch`` finds the class of each module on the host and stores the class's name on the module,
where a trace reads the name as a constant. A trace may see other names and functions than the host
does: Dynamo of torch 2.15 shows the wrapper of a decorated forward.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _globals

Forward = Callable[..., Any]
Maker = Callable[[Forward], Forward]

_FAMILIES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "deepseek_v32": "DeepseekV32",
    "deepseek_v4": "DeepseekV4",
    "glm_moe_dsa": "GlmMoeDsa",
}
_MODELLING = {
    f"transformers.models.{family}.modeling_{family}": prefix
    for family, prefix in _FAMILIES.items()
}
"""Prefix of the class names in each modelling file of Hugging Face."""
_ACTIVATIONS = "transformers.activations", "torch.nn.modules.activation"
_TRUSTED = ("torch", "transformers")
"""Packages whose decorators may wrap a forward that we still treat as Hugging Face's own."""
QUANTIZED_LINEAR, QUANTIZED_EXPERTS = ("weight",), ("gate_up_proj", "down_proj")
SOURCE = "_dsv4_ops_source"
"""Attribute that holds the address and the version of the weight that buffers were made from."""
CLASS = "_dsv4_ops_class"
"""Attribute that holds the class name that ``mark`` stored."""
_BELOW_HOOK = "_old_forward"
"""Attribute that holds the forward that accelerate's hooks call."""
REPLACED = "_dsv4_ops_replaced_forward"
"""Attribute of a copy that ``with_methods`` made. It holds the forward that the instance itself had
before ``patch``, or None."""


class Replacement:
    """A replaced method of an instance. The method is copied and pickled with the instance.

    Args:
        module: The instance.
        name: Name of the method.
        make: Picklable function that makes the new method from the old method. The first argument
            of both methods is the instance.
        before: The instance attribute that had this name, or None.
    """

    def __init__(self, module: Any, name: str, make: Maker, before: Any) -> None:
        self.module, self.name, self.make, self.before = module, name, make, before
        self.function = make(_unbound(module, name, before))

    def __call__(self, *args: Any, **rest: Any) -> Any:
        return self.function(self.module, *args, **rest)

    def __reduce__(self) -> tuple[Any, ...]:
        return Replacement, (self.module, self.name, self.make, self.before)


def _unbound(module: Any, name: str, before: Any) -> Forward:
    """Return the old method as a function that takes the instance, or a copy of the instance."""
    if before is None:
        return getattr(type(module), name, None) or _missing
    if isinstance(before, MethodType) and before.__self__ is module:
        return before.__func__
    return lambda _, *args, **rest: before(*args, **rest)


def in_place_of(method: Forward) -> Maker:
    """Return a picklable maker that ignores the old method and returns ``method``."""
    return partial(_first, method)


def _first(method: Forward, _: Forward) -> Forward:
    return method


def _missing(*_: Any, **__: Any) -> Any:
    raise AttributeError("dsv4_ops replaced a method that the class does not have")


def with_methods(module: Any, copies: dict[int, Any] | None = None) -> Any:
    """Copy a model with its parameters, buffers and hooks, and bind the replaced methods.

    Dynamo guards bound methods by their code. Dynamo would guard other callables by their identity,
    and so compile each layer again.
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
    """Return the name of the Hugging Face class that defines a module's forward, or None.

    For a subclass that inherits the forward, return the name of the base class. If other code
    replaced or decorated the forward, return None. Traces must not call this function.
    """
    owner = _owner_of(type(module), "forward")
    if owner is None or owner.__module__ not in (*_MODELLING, *_ACTIVATIONS):
        return None
    return owner.__name__ if is_library_method(type(module), "forward") else None


def is_library_method(kind: type, name: str) -> bool:
    """Whether a class has a method of this name that only Hugging Face and torch defined and
    decorated. Traces must not call this function."""
    owner = _owner_of(kind, name)
    return owner is not None and is_library_function(vars(owner)[name])


def is_library_function(function: Any) -> bool:
    """Whether only Hugging Face and torch defined and decorated a function. Traces must not call
    this function."""
    is_known = function is not None
    while function is not None:
        is_known = is_known and _package_of(function) in _TRUSTED
        function = getattr(function, "__wrapped__", None)
    return is_known


def _owner_of(kind: type, name: str) -> type | None:
    return next((each for each in kind.__mro__ if name in vars(each)), None)


def _package_of(function: Any) -> str:
    """Return the package of a function's code. The package is read from the function's globals,
    because functools.wraps copies ``__module__``, but not the globals."""
    name: str = getattr(function, "__globals__", {}).get("__name__", "")
    return name.partition(".")[0]


def mark(module: Any) -> None:
    """Store the name of a module's class on the module, for traces."""
    name = defining_class(module)
    if name is not None:
        setattr(module, CLASS, name)


def unmark(module: Any) -> None:
    """Remove the class name that ``mark`` stored."""
    vars(module).pop(CLASS, None)


def class_of(module: Any) -> str | None:
    """Return the name of the Hugging Face class that ``mark`` stored on a module, or None."""
    return vars(module).get(CLASS) if isinstance(module, nn.Module) else None


def is_part(module: Any, part: str) -> bool:
    """Whether a module is Hugging Face's ``part``, such as "Attention", of any model family.

    Traces must not call this function.
    """
    name = defining_class(module)
    return name is not None and any(name == prefix + part for prefix in _MODELLING.values())


def own_forward(module: Any) -> Any:
    """Return the forward that other code set on an instance, or None."""
    forward = vars(module).get("forward")
    if isinstance(forward, Replacement):
        forward = forward.before
    return _below_hook(module, vars(module).get(REPLACED, forward))


def _below_hook(module: Any, forward: Any) -> Any:
    """Return ``forward``. If ``forward`` is accelerate's hook, return the forward below the hook.

    Return None if the hook calls the forward of the class. A trace compares only types; the host
    also checks which package defined the functions.
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
    """Whether a bound method is the forward of its module's class. Traces must not call this
    function."""
    return method.__func__ is type(module).forward


def runs_ours(module: Any) -> bool:
    """Whether a module runs one of our forwards."""
    forward = vars(module).get("forward")
    ours = isinstance(forward, Replacement) or REPLACED in vars(module)
    return ours and own_forward(module) is None


def is_harmless(hook: Any) -> bool:
    """Whether a hook is accelerate's and loads no weights.

    Only accelerate's hook that aligns devices has an attribute ``offload``. The host also refuses
    hooks whose class another package defines.
    """
    aligns = getattr(hook, "offload", True) is False
    return aligns and (torch.compiler.is_compiling() or _is_accelerates(hook))


def _is_accelerates(hook: Any) -> bool:
    """Whether accelerate defines a hook's class. Traces must not call this function."""
    return type(hook).__module__.partition(".")[0] == "accelerate"


def quantized_weights(module: Any) -> tuple[str, ...]:
    """Return the names of the module's weights that are quantised as in DeepSeek's checkpoints.
    Other formats name scales differently."""
    parameters = module._parameters
    if f"{QUANTIZED_EXPERTS[0]}_scale_inv" in parameters:
        return QUANTIZED_EXPERTS
    weight = parameters.get("weight")
    fp8 = weight is not None and weight.dtype == torch.float8_e4m3fn
    return QUANTIZED_LINEAR if fp8 and "weight_scale_inv" in parameters else ()


def is_linear(module: Any) -> bool:
    """Whether a module is a plain linear layer without hooks, so that we may raise its
    precision."""
    return (
        type(module) is nn.Linear
        and has_plain_weight(module)
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not has_global_hooks()
    )


def has_global_hooks() -> bool:
    """Whether global module hooks are registered."""
    return bool(_globals._global_forward_hooks or _globals._global_forward_pre_hooks)


def has_plain_weight(linear: nn.Linear) -> bool:
    """Whether a linear layer has no bias, and a weight that is not quantised or distributed."""
    return linear.bias is None and not hasattr(type(linear.weight), "__tensor_flatten__")


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.mT`` in float32."""
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
    """Return the module without PEFT's adapters."""
    while "base_layer" in module._modules:
        module = module.base_layer
    return module


def modelling(family: str) -> tuple[Any, str]:
    """Return Hugging Face's modelling file of a ``model_type``, and the prefix of its classes."""
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return file, _FAMILIES[family]


def is_split(weight: Any) -> bool:
    """Whether Hugging Face's tensor parallelism split a weight. Traces must not call this
    function."""
    return hasattr(weight, "to_local")


def local(weight: Any, split: bool | None = None) -> Tensor:
    """Return this rank's part of a weight that Hugging Face's tensor parallelism split.

    Pass ``split`` in a step, because a trace cannot see whether the weight is split.
    """
    split = is_split(weight) if split is None else split
    return weight.to_local() if split else weight
