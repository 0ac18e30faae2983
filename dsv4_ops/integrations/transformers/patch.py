"""Forwards of a model's modules, replaced on the instances."""

from __future__ import annotations

from typing import Any

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.refusal import refusal
from dsv4_ops.dispatch.choice import IMPLS
from dsv4_ops.integrations.transformers import forwards, generation
from dsv4_ops.integrations.transformers.config import ModelSpec, require_transformers
from dsv4_ops.integrations.transformers.modules import Maker, Replacement, check_placement
from dsv4_ops.integrations.transformers.recipe import Recipe
from dsv4_ops.integrations.transformers.rotary import check_rotary

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
    Face's own with ``cache_implementation="dynamic"``. A patched model is copied, saved and pickled
    as any other is.

    Hooks, adapters of PEFT, parametrizations and modules that you put in place of others run, put
    there before or after. What is not a plain ``nn.Linear`` keeps its own precision. Of each
    attention layer ops do the work of ``q_b_norm`` and ``compressor``, of which only projections
    are called: steps refuse a change there. The model is on one device: what accelerate split or
    offloaded is refused. Hugging Face's tensor parallel works (``tp_plan="auto"``).

    Args:
        model: The model. It is changed, and returned.
        kv: What keys are stored as: "fp8" (584 bytes per row, FlashMLA's layout), "bf16" or "fp32".
        precision: "serve" computes what the official code computes where Hugging Face differs,
            "reference" what Hugging Face does; or a ``Recipe``.
        impl: What runs the selection and the attention: "triton" our kernels,
            "flash_mla" and "deep_gemm" these libraries in what they can do, "reference" the
            definitions; "auto" what is fastest here. What a library would plan in every layer is
            then made once a step, for the SMs that it uses when the model is patched.
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
        NotImplementedError: another architecture, layer type, rotary embedding or size than this
            version knows; a model that is split or offloaded.
        ValueError, TypeError: an argument that is none of those above, or a model that is patched.

    Example:
        >>> from dsv4_ops.testing.models import small_model
        >>> from dsv4_ops.integrations.transformers import patch
        >>> model = patch(small_model(), kv="fp32", precision="reference")
        >>> model.dsv4_ops_spec.kinds
        ('window', 'c4', 'c128')
    """
    if isinstance(model, str):
        advice = f"Load it first: DeepseekV4ForCausalLM.from_pretrained({model!r})"
        raise refusal(TypeError, "patch", "model", "be a model", "its name", advice)
    config = getattr(model, "config", model)
    checks = Checks("patch")
    checks.flag("batch_invariant", batch_invariant)
    checks.flag("plan", plan)
    checks.one_of("impl", impl, *IMPLS, belongs_to="shall run")
    chosen: dict[str, Any] = {"batch_invariant": batch_invariant, "impl": impl, "plan": plan}
    spec = ModelSpec.of("patch", config, kv, precision, **chosen)
    _check_model(model)
    check_rotary("patch", model, spec.layers)
    spec = spec.scheduled(next(model.parameters()).device)
    replaced = _Replacements()
    for name, hook in generation.HOOKS.items():
        replaced.method(model, name, hook)
    for module, name, make in list(forwards.of_model(model, spec)):
        replaced.method(module, name, make)
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
        ValueError: it is not patched, or something replaced a forward of ours since.
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
    architecture = require_transformers("patch").DeepseekV4ForCausalLM
    if not isinstance(model, architecture):
        advice = "Pass the model with its output projection"
        if hasattr(model, "get_base_model"):
            advice = "Pass model.get_base_model()"
        elif hasattr(model, "_orig_mod"):
            advice = "Compile it once it is patched"
        rule = "be a DeepseekV4ForCausalLM"
        raise refusal(TypeError, "patch", "model", rule, type(model).__name__, advice)
    if hasattr(model, _SPEC):
        raise refusal(
            ValueError,
            "patch",
            "model",
            "not be patched yet",
            "a patched one",
            "Call unpatch first",
        )
    check_placement("patch", model)


class _Replacements:
    """Methods that instances got."""

    def __init__(self) -> None:
        self.made: list[Replacement] = []

    def method(self, module: Any, name: str, make: Maker) -> None:
        """Replace a method, or one that the instance does not have, by what ``make`` makes of the
        one before."""
        self.made.append(Replacement(module, name, make, vars(module).get(name)))
        setattr(module, name, self.made[-1])

    def undo(self) -> None:
        """Put everything back."""
        for one in self.made:
            if vars(one.module).get(one.name) is not one:
                what = f"{one.name} of {type(one.module).__name__}"
                rule, advice = "be the one that patch set", "Take off first what was put on last"
                raise refusal(ValueError, "unpatch", what, rule, "another", advice)
        for one in reversed(self.made):
            if one.before is None:
                delattr(one.module, one.name)
            else:
                setattr(one.module, one.name, one.before)
        self.made.clear()
