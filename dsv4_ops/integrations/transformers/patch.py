"""Forwards of a model's modules, replaced on the instances."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.choice import IMPLS
from dsv4_ops.core.refusal import refusal
from dsv4_ops.integrations.transformers import forwards, generation
from dsv4_ops.integrations.transformers.config import ModelSpec
from dsv4_ops.integrations.transformers.recipe import Recipe

_SPEC, _REPLACED = "dsv4_ops_spec", "_dsv4_ops_replaced"


def patch(
    model: Any,
    *,
    kv: str = "fp8",
    precision: str | Recipe = "serve",
    impl: str = "auto",
    batch_invariant: bool = False,
    plan: bool = True,
) -> Any:
    """Let a ``DeepseekV4ForCausalLM`` run from a ``PagedCache``.

    Forwards are replaced on the instances; parameters, state dict and classes stay as they are. A
    call with another cache, or with none, still runs Hugging Face's attention. ``generate`` makes a
    ``PagedCache`` where it would make a ``DynamicCache`` or a ``StaticCache``; ask for Hugging
    Face's own with ``cache_implementation="dynamic"``.

    Args:
        model: The model. It is changed, and returned.
        kv: What keys are stored as: "fp8" (584 bytes per row, FlashMLA's layout), "bf16" or "fp32".
        precision: "serve" computes what the official code computes where Hugging Face differs,
            "reference" what Hugging Face does; or a ``Recipe``.
        impl: What runs the selection and the attention: "triton" our kernels,
            "flash_mla" and "deep_gemm" these libraries in what they can do, "reference" the
            definitions; "auto" what is fastest here.
        batch_invariant: Whether a request's attention is bit-equal whatever its neighbours are.
        plan: Whether decodes share the keys of their C128 layers by a plan, made once a step
            (``build_attention_step``): for requests of different lengths. Where all are about as
            long it gains nothing, and costs 5 microseconds a step and up to 9 a C128 layer (256
            tokens of 128 heads; 2 up to 64 of 64). There is none with ``batch_invariant``, for an
            ``impl`` that would not go by it, nor for more than 16383 tokens: export with that limit
            on their dimension, or without.

    Returns:
        ``model``.

    Raises:
        NotImplementedError: another architecture, layer type or size than this version knows.
        ValueError, TypeError: an argument that is none of those above, or a model that is patched.

    Example:
        >>> from dsv4_ops.demo.model import small_model
        >>> from dsv4_ops.integrations.transformers import patch
        >>> model = patch(small_model(), kv="fp32", precision="reference")
        >>> model.dsv4_ops_spec.kinds
        ('window', 'c4', 'c128')
    """
    config = getattr(model, "config", model)
    checks = Checks("patch")
    checks.flag("batch_invariant", batch_invariant)
    checks.flag("plan", plan)
    checks.one_of("impl", impl, *IMPLS, belongs_to="shall run")
    chosen: dict[str, Any] = {"batch_invariant": batch_invariant, "impl": impl, "plan": plan}
    spec = ModelSpec.of("patch", config, kv, precision, **chosen)
    _check_model(model)
    replaced = _Replacements(model)
    for name, hook in generation.HOOKS.items():
        replaced.method(model, name, hook)
    replaced.forward(model.model, forwards.model_forward(spec))
    for layer in model.model.layers:
        replaced.forward(layer.self_attn, forwards.attention_forward(spec))
    for module, forward in forwards.of_recipe(model, spec.recipe):
        replaced.forward(module, forward)
    for experts, gate in forwards.gates_of_recipe(model, spec.recipe):
        replaced.method(experts, "_apply_gate", gate)
    setattr(model, _SPEC, spec)
    setattr(model, _REPLACED, replaced)
    return model


def unpatch(model: Any) -> Any:
    """Give a model its own forwards back.

    Args:
        model: A patched model. It is changed, and returned.

    Returns:
        ``model``.

    Raises:
        ValueError: it is not patched.
    """
    replaced = getattr(model, _REPLACED, None)
    if replaced is None:
        raise refusal(
            ValueError, "unpatch", "model", "be patched", "another", "There is nothing to undo"
        )
    replaced.undo()
    delattr(model, _SPEC)
    delattr(model, _REPLACED)
    return model


def _check_model(model: Any) -> None:
    if not isinstance(getattr(model, "model", None), nn.Module) or not hasattr(model, "lm_head"):
        raise refusal(
            TypeError,
            "patch",
            "model",
            "be a DeepseekV4ForCausalLM",
            type(model).__name__,
            "Pass the model with its output projection",
        )
    if hasattr(model, _SPEC):
        raise refusal(
            ValueError,
            "patch",
            "model",
            "not be patched yet",
            "a patched one",
            "Call unpatch first",
        )


class _Replacements:
    """Attributes that instances got, and those they had before."""

    def __init__(self, model: Any) -> None:
        self.undone: list[tuple[Any, str, Any]] = []

    def forward(self, module: Any, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace a forward by what ``make`` makes of the one before."""
        self.method(module, "forward", make)

    def method(self, module: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """The same for another method, or one that the instance does not have."""
        before = module.__dict__.get(name)
        self.undone.append((module, name, before))
        setattr(module, name, MethodType(make(_unbound(module, name, before)), module))

    def undo(self) -> None:
        """Put everything back."""
        for module, name, before in reversed(self.undone):
            if before is None:
                delattr(module, name)
            else:
                setattr(module, name, before)
        self.undone.clear()


def _unbound(module: Any, name: str, before: Any) -> Callable[..., Any]:
    """The method before, as a function of the instance: a copy of the model then calls its own."""
    if before is None:
        return getattr(type(module), name, None) or _missing
    if isinstance(before, MethodType) and before.__self__ is module:
        return before.__func__
    return lambda _, *args, **rest: before(*args, **rest)


def _missing(*_: Any, **__: Any) -> Any:
    raise AttributeError("dsv4_ops replaced a method that the class does not have")
