"""Numerical differences between the official DeepSeek-V4 and Hugging Face's."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dsv4_ops.core.checks import Checks


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which computations follow the official code instead of Hugging Face.

    ``Recipe.serve()`` follows the official code, ``Recipe.reference()`` Hugging Face. For a float32
    model only ``shared_expert_clamp`` makes a difference. Not covered: the official code applies an
    expert's weight before its last projection (Hugging Face after it) and simulates FP4 in the
    indexer (ours uses FP8 with ``kv="fp8"``, else no quantisation); Hugging Face quantises the
    activations of FP4 experts in blocks of 32 (ours stay bf16, or in the official blocks of 128).
    Of DeepSeek-V3 and V2, ``norms_float32``, ``rope_float32``, ``logits_float32`` and, of experts
    in bf16 on a GPU, ``swiglu_float32`` count; the rest has no counterpart. ``activations`` and
    what follows it are for models loaded in the released precision, FP8 with FP4 or FP8 experts,
    whose SwiGLU is always in float32.

    Args:
        norms_float32: Norms multiply by their weight in float32 and round once, as Hugging Face
            does since 5.18.
        rope_float32: Keep cosines and sines in float32 instead of the model's dtype.
        compressor_float32: Compressor projections have float32 results.
        router_float32: Compute router logits and scores in float32.
        swiglu_float32: Compute expert and shared-expert activations in float32, rounded once.
        streams_float32: Mix the residual streams in float32, rounded once.
        logits_float32: Compute logits in float32.
        shared_expert_clamp: Clamp shared experts like routed ones, as do Hugging Face and one of
            the two public copies of the official code.
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
        """The official recipe; of a quantised model with bf16 activations, unless ``activations``
        is "fp8", which is the official one and less precise."""
        precisions: dict[str, Any] = dict.fromkeys(_PRECISIONS, True)
        return cls(**precisions, activations=activations, expert_activations=activations)

    @classmethod
    def reference(cls) -> Recipe:
        """Hugging Face's."""
        precisions: dict[str, Any] = dict.fromkeys(_PRECISIONS, False)
        return cls(**precisions, activations="fp8", activation_scale="float32")

    @classmethod
    def named(cls, op: str, precision: str | Recipe) -> Recipe:
        """Resolve ``precision``: "serve", "reference" or a ``Recipe``."""
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
