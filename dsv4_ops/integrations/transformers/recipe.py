"""Where the official DeepSeek-V4 computes otherwise than Hugging Face does."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dsv4_ops.core.checks import Checks


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a patched model computes as the official code does, not as Hugging Face does.

    ``Recipe.serve()`` follows the official code, ``Recipe.reference()`` Hugging Face. In float32
    all but ``shared_expert_clamp`` make no difference. Not covered: the official code multiplies an
    expert's weight in before its last projection, and simulates FP4 for the indexer; Hugging Face
    multiplies after it, and our indexer takes FP8 (``kv="fp8"``) or no quantisation.

    Args:
        norms_float32: Norms multiply by their weight in float32 and round once. Hugging Face does
            since 5.18.
        rope_float32: Cosines and sines in float32; otherwise rounded to the dtype of the model.
        compressor_float32: Projections of the compressors with float32 results.
        router_float32: Logits and scores of the routers in float32.
        swiglu_float32: Activation of experts and shared experts in float32, rounded once.
        streams_float32: The residual streams mixed in float32, rounded once.
        logits_float32: Logits in float32.
        shared_expert_clamp: The shared experts clamp as the routed ones do. Hugging Face does; of
            the two public copies of the official code one does.
    """

    norms_float32: bool
    rope_float32: bool
    compressor_float32: bool
    router_float32: bool
    swiglu_float32: bool
    streams_float32: bool
    logits_float32: bool
    shared_expert_clamp: bool = True

    def __post_init__(self) -> None:
        checks = Checks("Recipe")
        for field in fields(self):
            checks.flag(field.name, getattr(self, field.name))

    @classmethod
    def serve(cls) -> Recipe:
        """The official recipe."""
        return cls(**dict.fromkeys(_PRECISIONS, True))

    @classmethod
    def reference(cls) -> Recipe:
        """Hugging Face's."""
        return cls(**dict.fromkeys(_PRECISIONS, False))

    @classmethod
    def named(cls, op: str, precision: str | Recipe) -> Recipe:
        """The recipe that ``precision`` says: a name, or one of this class."""
        if isinstance(precision, Recipe):
            return precision
        asked = "the model shall have, or a Recipe"
        Checks(op).one_of("precision", precision, "serve", "reference", belongs_to=asked)
        return cls.serve() if precision == "serve" else cls.reference()


_PRECISIONS = tuple(field.name for field in fields(Recipe) if field.name.endswith("float32"))
