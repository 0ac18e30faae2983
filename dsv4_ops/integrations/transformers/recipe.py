"""The computations whose precision differs between DeepSeek-V4's official code and Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dsv4_ops.core.checks import Checks


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which computations follow DeepSeek's official code, and which follow Hugging Face.

    ``Recipe.serve()`` follows the official code, and ``Recipe.reference()`` follows Hugging Face.
    In a float32 model, only ``shared_expert_clamp`` and ``rope_float32`` change results.

    ``activations``, ``activation_scale`` and ``expert_activations`` are for models with FP8 and FP4
    weights, whose routed experts always compute SwiGLU in float32. Besides these three fields, all
    families but V4 read only ``norms_float32``, ``rope_float32``, ``logits_float32`` and, for
    experts in bf16 on a GPU, ``swiglu_float32``.

    Three other differences have no field. The official code multiplies the input of an expert's
    last projection by the routing weight, and Hugging Face multiplies the output. The official code
    simulates FP4 in the indexer; we use FP8 in the indexer with ``kv="fp8"``, and do not quantise
    otherwise. Hugging Face quantises the activations of FP4 experts in blocks of 32; we keep these
    activations in bf16, or use the official blocks of 128.

    Args:
        norms_float32: Multiply by a norm's weight in float32 and round once, as Hugging Face does
            since transformers 5.18.
        rope_float32: Compute cosines and sines in float64, and keep them in float32. If False,
            compute them in float32, and round them to the model's dtype.
        compressor_float32: Let the compressor's projections return float32.
        router_float32: Compute router logits and scores in float32.
        swiglu_float32: Compute SwiGLU of all experts in float32, and round once.
        streams_float32: Mix the residual streams in float32, and round once.
        logits_float32: Compute logits in float32.
        shared_expert_clamp: Clamp shared experts like routed experts, as do Hugging Face and one of
            the two public copies of the official code.
        activations: Activations of quantised linear layers: "bf16", or "fp8" in blocks of 128.
        activation_scale: Scales of FP8 activations: "pow2" (official) or "float32" (Hugging Face).
        expert_activations: Activations of quantised experts: "bf16" or "fp8".
    """

    norms_float32: bool
    rope_float32: bool
    compressor_float32: bool
    router_float32: bool
    swiglu_float32: bool
    streams_float32: bool
    logits_float32: bool
    shared_expert_clamp: bool = True
    activations: str = "bf16"
    activation_scale: str = "pow2"
    expert_activations: str = "bf16"

    def __post_init__(self) -> None:
        checks = Checks("Recipe")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _WORDS:
                words = _WORDS[field.name]
                checks.one_of(field.name, value, *words, belongs_to="the recipe has")
            else:
                checks.flag(field.name, value)

    @classmethod
    def serve(cls, *, activations: str = "bf16") -> Recipe:
        """Follow the official code.

        ``activations`` is for models with quantised weights: "fp8" is the official choice, and less
        precise than "bf16".
        """
        precisions: dict[str, Any] = dict.fromkeys(_PRECISIONS, True)
        return cls(**precisions, activations=activations, expert_activations=activations)

    @classmethod
    def reference(cls) -> Recipe:
        """Follow Hugging Face."""
        precisions: dict[str, Any] = dict.fromkeys(_PRECISIONS, False)
        return cls(**precisions, activations="fp8", activation_scale="float32")

    @classmethod
    def named(cls, op: str, precision: str | Recipe) -> Recipe:
        """Return the recipe for "serve", "reference" or a ``Recipe``."""
        if isinstance(precision, Recipe):
            return precision
        asked = "the model shall have, or a Recipe"
        Checks(op).one_of("precision", precision, "serve", "reference", belongs_to=asked)
        return cls.serve() if precision == "serve" else cls.reference()


_PRECISIONS = tuple(field.name for field in fields(Recipe) if field.name.endswith("float32"))
_WORDS = {
    "activations": ("bf16", "fp8"),
    "activation_scale": ("pow2", "float32"),
    "expert_activations": ("bf16", "fp8"),
}
