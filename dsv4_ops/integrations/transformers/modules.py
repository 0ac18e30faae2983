"""Method replacement, and checks of the modules that our ops stand in for.

A step may call modules of any kind, but modules that it replaces by ops must be unchanged.
``patch`` decides on the host which class each module has and stores the answer on the module; a
trace reads that constant. A tracer may show other names and other functions than the host has:
Dynamo of torch 2.15 shows the wrapper of a decorated forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _globals

from dsv4_ops.attention import ContextParallel
from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.torch_compat import group_members

if TYPE_CHECKING:
    from dsv4_ops.integrations.transformers.architectures.base import ModelSpec

Forward = Callable[..., Any]
Maker = Callable[[Forward], Forward]

_MODELLING = {
    f"transformers.models.deepseek_v{version}.modeling_deepseek_v{version}": f"DeepseekV{version}"
    for version in (2, 3, 4)
}
"""Prefix of the class names in each of Hugging Face's modelling files."""
_ACTIVATIONS = "transformers.activations", "torch.nn.modules.activation"
_TRUSTED = ("torch", "transformers")
"""Packages whose decorators leave a forward Hugging Face's own."""
QUANTIZED_LINEAR, QUANTIZED_EXPERTS = ("weight",), ("gate_up_proj", "down_proj")
SOURCE = "_dsv4_ops_source"
"""What a module's buffers were made of: where its weight is, and its version."""
CLASS = "_dsv4_ops_class"
"""Name of the class that ``mark`` saw on a module."""
_BELOW_HOOK = "_old_forward"
"""What accelerate's hooks call."""
REPLACED = "_dsv4_ops_replaced_forward"
"""What a bound method's module had as a forward of its own, or None."""
_ONE_DEVICE = "Load the model on one device, without offloading, and make its cache there"
_AGAIN = "Call unpatch, change the configuration with the layers, and patch again"
_CHANGED = "be Hugging Face's own as patch saw it, without hooks, as ops do its work"


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
    """Makes ``method``, whatever it replaces; picklable."""
    return partial(_first, method)


def _first(method: Forward, _: Forward) -> Forward:
    return method


def _missing(*_: Any, **__: Any) -> Any:
    raise AttributeError("dsv4_ops replaced a method that the class does not have")


def with_methods(module: Any, made: dict[int, Any] | None = None) -> Any:
    """A model of the same parameters, buffers and hooks whose replaced methods are bound methods.

    Dynamo guards these by their code, and any other object by its identity, with which it would
    compile every layer.
    """
    made = {} if made is None else made
    if id(module) not in made:
        twin = made[id(module)] = copy.copy(module)
        children = {
            name: child and with_methods(child, made) for name, child in module._modules.items()
        }
        twin.__dict__["_modules"] = children
        for name, value in vars(module).items():
            if isinstance(value, Replacement) and name != _BELOW_HOOK:
                twin.__dict__[name] = MethodType(value.function, twin)
                if name == "forward":
                    twin.__dict__[REPLACED] = value.before
    return made[id(module)]


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


def mark(model: Any) -> None:
    """Store the class of every module on it, for traces to read."""
    for module in model.modules():
        found = defining_class(module)
        if found is not None:
            setattr(module, CLASS, found)


def unmark(model: Any) -> None:
    """Remove what ``mark`` stored."""
    for module in model.modules():
        vars(module).pop(CLASS, None)


def class_of(module: Any) -> str | None:
    """Name of the Hugging Face class that ``mark`` saw on a module, or None."""
    return vars(module).get(CLASS) if isinstance(module, nn.Module) else None


def is_part(module: Any, part: str) -> bool:
    """Whether a module is Hugging Face's ``part``, such as "Attention", of any family.

    Only for the host.
    """
    found = defining_class(module)
    return found is not None and any(found == prefix + part for prefix in _MODELLING.values())


def own_forward(module: Any) -> Any:
    """An instance's own forward other than ours, or None."""
    forward = vars(module).get("forward")
    if isinstance(forward, Replacement):
        forward = forward.before
    return _below_hook(module, vars(module).get(REPLACED, forward))


def _below_hook(module: Any, forward: Any) -> Any:
    """What accelerate's hook calls, if ``forward`` is such a hook: None if it is the class's own.

    A trace goes by the structure alone; the host also asks whose functions these are.
    """
    hook, below = vars(module).get("_hf_hook"), vars(module).get(_BELOW_HOOK)
    if hook is None or not isinstance(forward, partial) or not _is_harmless(hook):
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


def _is_harmless(hook: Any) -> bool:
    """Whether accelerate's hook, which is a forward of the instance, loads no weights.

    Only its hook that aligns devices has ``offload``; the host refuses classes derived from it.
    """
    aligns = getattr(hook, "offload", True) is False
    return aligns and (torch.compiler.is_compiling() or _is_accelerates(hook))


def _is_accelerates(hook: Any) -> bool:
    """Whether a hook's class is accelerate's own; only for the host."""
    return type(hook).__module__.partition(".")[0] == "accelerate"


def quantized_weights(module: Any) -> tuple[str, ...]:
    """Names of a module's weights in the released precision; others, such as bitsandbytes', have
    other scales."""
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


def check_layers(op: str, kinds: tuple[str, ...], body: Any) -> None:
    """Raise if ``body`` has more or fewer layers than the configuration."""
    if len(body.layers) != len(kinds):
        rule = f"be the {len(kinds)} of the configuration"
        raise refusal(ValueError, op, "model.layers", rule, len(body.layers), _AGAIN)


def check_modules(
    op: str, spec: ModelSpec, kinds: tuple[str, ...], body: Any, device: torch.device
) -> None:
    """Raise if a module of ``body`` that our ops replace was changed, or is on another device than
    the cache.

    The host also asks whether the class of a module still has the forward that ``patch`` saw.
    """
    if own_forward(body) is not None:
        raise _changed(op, "model.model", "a forward of its own")
    check_layers(op, kinds, body)
    for index, layer in enumerate(body.layers):
        attention = unwrapped(layer.self_attn)
        name = f"model.layers.{index}.self_attn"
        _check_hook(op, name, attention)
        if own_forward(attention) is not None:
            raise _changed(op, name, "a forward of its own")
        if class_of(attention) is None:
            raise refusal(ValueError, op, name, "be one that patch saw", "another", _AGAIN)
        check_skipped(op, spec, name, attention)
        weight: Tensor | None = next(attention.parameters(), None)
        if weight is None:
            rule = "have parameters of its own"
            advice = "FSDP1 keeps them in one flat tensor: load with Hugging Face's tp_plan instead"
            raise refusal(NotImplementedError, op, name, rule, "none", advice)
        if weight.device != device:
            rule = f"be on the cache's device, {device}"
            raise refusal(ValueError, op, name, rule, weight.device, _ONE_DEVICE)


def local(weight: Any, split: bool | None = None) -> Tensor:
    """This rank's part of a weight that Hugging Face's tensor parallelism split.

    Dynamo does not see whether it is: ``split`` says so in a step.
    """
    split = hasattr(weight, "to_local") if split is None else split
    return weight.to_local() if split else weight


HeadPart = tuple[str, Any, int, int]
"""A module's parameter that has heads: its name, itself, their dimension and its whole size."""


def heads_are_split(
    op: str, body: Any, ranks: ContextParallel | None, parts: Callable[[Any], Iterator[HeadPart]]
) -> bool:
    """Whether Hugging Face's tensor parallelism split the heads of all layers over ``ranks``.

    ``parts`` are the parameters with heads of an attention layer; those without a weight may be
    None.

    Raises:
        NotImplementedError: some are split and others are not, or over other ranks.
    """
    found = [
        (f"model.layers.{index}.self_attn.{name}", weight, local(weight).shape[dim], size)
        for index, layer in enumerate(body.layers)
        for name, weight, dim, size in parts(unwrapped(layer.self_attn))
        if weight is not None
    ]
    if all(held == size for _, _, held, size in found):
        return False
    world = 1 if ranks is None else ranks.world_size
    members = [] if ranks is None else group_members(ranks.group)
    for name, weight, held, size in found:
        mesh = getattr(weight, "device_mesh", None)
        others = mesh is not None and mesh.mesh.flatten().tolist() != members
        if held * world != size or others:
            rule = f"be split over the ranks of parallel as all heads are, {size} over {world}"
            actual = f"{held} of {size} on {'other ranks' if others else 'this rank'}"
            advice = "Pass parallel=ContextParallel.of(), and a tp_plan that splits all heads"
            raise refusal(NotImplementedError, op, name, rule, actual, advice)
    return True


def check_skipped(op: str, spec: ModelSpec, name: str, attention: Any) -> None:
    """Raise if a module of an attention layer that steps do not call was changed."""
    for part, module in spec.skipped_modules(attention):
        # of a split module Hugging Face replaced forward
        split = spec.shards_heads and hasattr(module, "weight")
        found = None if split else _change(module)
        if found:
            raise _changed(op, f"{name}.{part}", found)


def check_placement(op: str, model: Any) -> None:
    """Raise if a model is split or offloaded: our attention bypasses the hooks that load it."""
    for name, module in model.named_modules():
        _check_hook(op, name or "model", module)
        if is_part(module, "Model"):
            layers = [unwrapped(layer.self_attn) for layer in module.layers]
            others = [type(one).__name__ for one in layers if not is_part(one, "Attention")]
            if others:
                rule = "have Hugging Face's attention in every layer"
                advice = "Other layers are unknown to this version"
                raise refusal(NotImplementedError, op, name, rule, others[0], advice)
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        rule, found = "be on one device", ", ".join(devices)
        raise refusal(NotImplementedError, op, "model", rule, found, _ONE_DEVICE)


def _check_hook(op: str, name: str, module: Any) -> None:
    hook = vars(module).get("_hf_hook")
    if hook is not None and not _is_harmless(hook):
        rule = "have no hook of accelerate that loads weights or sends inputs"
        raise refusal(NotImplementedError, op, name, rule, type(hook).__name__, _ONE_DEVICE)


def check_body(op: str, model: Any) -> None:
    """Raise if the model around the layers has hooks or a forward, which steps do not call."""
    if not hasattr(model.model, "layers"):  # a PEFT wrapper of the patched model
        rule = "be the model that was patched"
        advice = "Pass model.get_base_model()"
        raise refusal(TypeError, op, "model", rule, type(model).__name__, advice)
    for name, module in (("model", model), ("model.model", model.model)):
        hooks = module._forward_hooks or module._forward_pre_hooks
        if hooks or own_forward(module) is not None:
            rule = "have no hooks, nor a forward of its own, as they are not called"
            advice = "Call the model itself with cache=cache, or remove them"
            raise refusal(NotImplementedError, op, name, rule, "one", advice)


def is_unchanged(module: Any) -> bool:
    """Whether a module is Hugging Face's own, without hooks."""
    return _change(module) is None


def _change(module: Any) -> str | None:
    if module._forward_hooks or module._forward_pre_hooks:
        return "a hook"
    if own_forward(module) is not None:
        return "a forward of its own"
    marked, plain = class_of(module), type(module) is nn.Linear and has_plain_weight(module)
    if not (marked or plain or quantized_weights(module) == QUANTIZED_LINEAR):
        split = type(module) is nn.Linear
        return "a bias, or a split weight" if split else type(module).__name__
    if not torch.compiler.is_compiling() and defining_class(module) != marked:
        return "another forward of its class"
    return None


def _changed(op: str, name: str, found: str) -> Exception:
    advice = "Undo that, or pass Hugging Face's cache"
    return refusal(NotImplementedError, op, name, _CHANGED, found, advice)
