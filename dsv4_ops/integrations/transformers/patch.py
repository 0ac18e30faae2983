"""``patch`` and ``unpatch``: replace and restore methods of a model's modules."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from dsv4_ops.attention import ContextParallel
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error, kind_of
from dsv4_ops.dispatch.choice import IMPLS
from dsv4_ops.integrations.transformers import forwards
from dsv4_ops.integrations.transformers.architectures import spec_of_config
from dsv4_ops.integrations.transformers.architectures.base import (
    DRAFT,
    ModelSpec,
    require_transformers,
    unpatched,
)
from dsv4_ops.integrations.transformers.batching import hooks as batching
from dsv4_ops.integrations.transformers.generation import decoding, hooks
from dsv4_ops.integrations.transformers.generation.kept import STEPS, empty_cache
from dsv4_ops.integrations.transformers.modules import rewrite
from dsv4_ops.integrations.transformers.modules.checks import check_layers, check_placement
from dsv4_ops.integrations.transformers.modules.replacement import Maker, Replacement
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
    parallel: ContextParallel | None = None,
    query: str | None = None,
    score: bool = False,
) -> Any:
    """Let a DeepSeek model of Hugging Face run from a ``PagedCache``.

    ``patch`` replaces methods on the instances of ``DeepseekV4ForCausalLM``,
    ``DeepseekV3ForCausalLM`` (V3, R1, Kimi-K2), ``DeepseekV2ForCausalLM``,
    ``DeepseekV32ForCausalLM`` or ``GlmMoeDsaForCausalLM`` (GLM-5). Parameters, state dict and
    classes stay as they are, and the model can still be copied, saved and pickled. A call without a
    ``PagedCache`` runs Hugging Face's attention, unless ``score`` is True. ``generate`` makes a
    ``PagedCache`` instead of a ``DynamicCache`` or ``StaticCache``, unless you pass
    ``cache_implementation="dynamic"``. ``generate_batch`` and managers of Hugging Face's continuous
    batching run all of their requests from one ``PagedCache`` (transformers 5.19 or newer).

    Hooks, PEFT adapters, parametrizations and replaced modules keep working, except on modules that
    our ops replace. Our ops replace ``q_b_norm``, ``kv_b_proj`` (except in V4), and all parts of
    ``compressor`` and ``indexer`` but their projections; a step raises if one of these modules was
    changed. Linear layers of other classes than ``nn.Linear`` keep their precision. Hugging Face's
    tensor parallelism works (``tp_plan="auto"``). ``patch`` refuses a model that the library
    ``accelerate`` split or offloaded.

    A model with FP8 and FP4 weights (``FineGrainedFP8Config``, not dequantised) runs the ops
    ``fp8_linear``, ``fp8_grouped_linear`` and ``experts``, without kernels from Hugging Face's hub.
    ``patch`` reads all codes and scales once on their device. ``patch`` refuses NaN and infinities,
    and scales that are missing, transposed or negative. Experts in bfloat16 on a GPU also run
    ``experts``, unless ``precision`` or ``impl`` is "reference", a gradient is needed,
    ``set_experts_implementation`` chose another implementation, or the mean number of rows per
    expert exceeds 256.

    Args:
        model: The model, which ``patch`` changes.
        kv: How the cache stores keys: "fp8", "bf16" or "fp32". "fp8" takes 584 bytes per row for V4
            (FlashMLA's layout), and 576 bytes per row with one scale per layer for V3 and V2. V3
            and V2 also have "ds_fp8": 656 bytes per row with four scales. V3.2 and GLM-5 use these
            656 bytes for "fp8", and store indexer keys in FP8 unless ``kv`` is "fp32".
        precision: "serve" follows DeepSeek's official code where Hugging Face differs from it,
            "reference" follows Hugging Face, and a ``Recipe`` sets each computation.
        impl: Implementation of indexer selection and attention: "triton" (our kernels),
            "flash_mla" or "deep_gemm" (where the library has the op), "reference", or "auto" (the
            fastest on this device). If a library needs a schedule, each step builds the schedule
            once, for the number of SMs that ``patch`` read.
        batch_invariant: Whether a request's attention is bit-identical in every batch.
        plan: Whether decode steps of V4 build a split-KV schedule for their C128 layers
            (``build_attention_step``). The schedule saves time if the lengths of the requests
            differ. If the lengths are nearly equal, the schedule costs 5 us per step, and per C128
            layer up to 2 us (at most 64 tokens, 64 heads) or 9 us (256 tokens, 128 heads). Steps
            build no schedule with ``batch_invariant``, with impl "flash_mla" or "reference", or
            with more than 16383 tokens. For export, limit the token dimension to 16383, or pass
            False.
        parallel: Ranks that share the cache of every request (context parallelism). Each rank
            stores a part of the rows, and all ranks run the same steps. If Hugging Face's tensor
            parallelism split the heads over the same ranks, each rank gathers all queries and keeps
            the outputs of its own heads. V3, V3.2, GLM-5 and V2 then need "colwise" for
            ``q_b_proj`` and ``kv_b_proj``, "rowwise" for ``o_proj``, and an indexer that is not
            split. V4 needs "rowwise" for ``o_b_proj``, and "colwise" for ``q_b_proj``, ``sinks``,
            ``o_a_proj``, and the indexer's ``q_b_proj`` and ``weights_proj``. With split heads, V4
            runs only from a ``PagedCache``.
        query: "fp8" quantises the absorbed queries of V3 and V2 (with kv "fp8") to e4m3 with one
            scale per layer. The scale is the buffer ``dsv4_ops_q_scale`` of the layer's attention,
            and is 1 until you set it. The ranks of ``parallel`` gather half the bytes, but results
            are less exact than with None, and steps are no faster. None keeps queries in bfloat16.
        score: Whether a call ``model(**inputs)`` without a cache also makes a ``PagedCache``, and
            runs as one prefill step. Loss and log-likelihoods (for example in lm_eval) then show
            the effects of ``kv``, ``precision`` and ``impl``. These calls have no gradient and
            cannot be compiled.

    Returns:
        ``model``.

    Raises:
        NotImplementedError: an architecture, layer type, rotary embedding or size is not supported;
            ``accelerate`` split or offloaded the model; or tensor parallelism split the heads over
            other ranks than those of ``parallel``, or split only some of the parameters.
        ValueError, TypeError: an argument is invalid, the model is patched already, a failed
            ``generate_batch`` has left Hugging Face's paged attention set, or the ranks of
            ``parallel`` patch different models.

    Example:
        >>> from dsv4_ops.testing.models import small_model
        >>> from dsv4_ops.integrations.transformers import patch
        >>> model = patch(small_model(), kv="fp32", precision="reference")
        >>> model.dsv4_ops_spec.kinds
        ('window', 'c4', 'c128')
    """
    checks = Checks("patch")
    _check_is_model(checks, model)
    config = getattr(model, "config", model)
    checks.flag("batch_invariant", batch_invariant)
    checks.flag("plan", plan)
    checks.flag("score", score)
    checks.one_of("impl", impl, *IMPLS, belongs_to="shall run")
    if query is not None:
        checks.one_of("query", query, "fp8", belongs_to="queries shall be, or None")
    settings: dict[str, Any] = {"batch_invariant": batch_invariant, "impl": impl, "plan": plan}
    settings |= {"parallel": parallel, "query": query}
    spec = spec_of_config("patch", config, kv, precision, **settings)
    _check_model(model, spec)
    spec = spec.of_model(model)
    spec.check_model("patch", model)
    if spec.parallel is not None:
        ranks = spec.parallel
        given = {"kv": kv, "precision": precision, "interleave": ranks.interleave, "via": ranks.via}
        ranks.agree("patch", "model", model.device, **given, spec=spec)
    spec = spec.scheduled(next(model.parameters()).device)
    rewrites = forwards.rewrites(model, spec, score)
    rewrite.check("patch", model, rewrites)
    replacements = list(rewrite.apply(model, rewrites))
    replaced = _Replacements()
    for name, hook in (hooks.HOOKS | batching.HOOKS).items():
        replaced.method(model, name, hook)
    setattr(model, _SPEC, spec)
    setattr(model, _REPLACED, replaced)
    setattr(model, STEPS, decoding.CompiledSteps())
    add_replacements(model, replacements)
    return model


def add_replacements(model: Any, replacements: Iterable[tuple[Any, str, Maker]]) -> None:
    """Replace more methods of a patched model. ``unpatch`` restores these methods too.

    Each replacement is a module, the name of its method, and the maker of the new method.
    """
    replaced: _Replacements = getattr(model, _REPLACED)
    for module, name, make in replacements:
        replaced.method(module, name, make)


def unpatch(model: Any) -> Any:
    """Restore the methods that ``patch`` replaced, and remove the draft layer.

    Args:
        model: A patched model, which ``unpatch`` changes.

    Returns:
        ``model``.

    Raises:
        ValueError: the model is not patched or is generating, or other code has replaced one of
            our methods.
    """
    replaced = getattr(model, _REPLACED, None)
    if replaced is None:
        raise unpatched("unpatch", model, "There is nothing to undo")
    if hooks.generates(model):
        raise argument_error(
            "unpatch",
            "model",
            must="not be generating",
            got="a call inside of its generate",
            do="Call unpatch after generate",
        )
    replaced.undo()
    if batching.CACHED in vars(model):
        model.destroy_cached_continuous_batching_manager()
    model._modules.pop(DRAFT, None)
    rewrite.restore(model, forwards.rewrites(model, getattr(model, _SPEC)))
    empty_cache(model)
    for name in (_SPEC, _REPLACED, STEPS):
        delattr(model, name)
    return model


def _check_is_model(checks: Checks, model: Any) -> None:
    if isinstance(model, nn.Module):
        return
    is_name = isinstance(model, str | Path)
    folder = repr(str(model)) if is_name else "path"
    raise checks.error(
        "model",
        must="be a model",
        got="its name" if is_name else "a class" if isinstance(model, type) else kind_of(model),
        do=f"Load it first: transformers.AutoModelForCausalLM.from_pretrained({folder})",
        kind=TypeError,
    )


def _check_model(model: Any, spec: ModelSpec) -> None:
    library = require_transformers("patch")
    architectures = tuple(getattr(library, name) for name in spec.causal_lm)
    if not isinstance(model, architectures):
        advice = "Pass the model with its output projection"
        if hasattr(model, "get_base_model"):
            advice = "Pass model.get_base_model()"
        elif hasattr(model, "_orig_mod"):
            advice = "Compile it once it is patched"
        raise argument_error(
            "patch",
            "model",
            must="be a " + " or ".join(spec.causal_lm),
            got=type(model).__name__,
            do=advice,
            kind=TypeError,
        )
    if hasattr(model, _SPEC):
        raise argument_error(
            "patch",
            "model",
            must="not be patched yet",
            got="a patched one",
            do="Call unpatch first",
        )
    if str(model.config._attn_implementation).startswith("paged|"):
        raise argument_error(
            "patch",
            "model",
            must="have an attention that runs without a cache of continuous batching",
            got=f"{model.config._attn_implementation!r}, which a failed generate_batch leaves set",
            do="Call model.set_attn_implementation('eager')",
        )
    check_layers("patch", spec.kinds, model.model)
    check_placement("patch", model)


class _Replacements:
    """The methods that ``patch`` replaced on a model's modules."""

    def __init__(self) -> None:
        self.made: list[Replacement] = []

    def method(self, module: Any, name: str, make: Maker) -> None:
        """Replace a method with what ``make`` returns for the old method."""
        self.made.append(Replacement(module, name, make, vars(module).get(name)))
        setattr(module, name, self.made[-1])

    def undo(self) -> None:
        """Restore all methods; if one cannot be restored, raise and restore none."""
        for one in self.made:
            current = vars(one.module).get(one.name)
            if current is not one:
                raise argument_error(
                    "unpatch",
                    f"{one.name} of {type(one.module).__name__}",
                    must="be the one that patch set",
                    got="that of its class" if current is None else kind_of(current),
                    do="Take off first what was put on last",
                )
        for one in reversed(self.made):
            if one.before is None:
                delattr(one.module, one.name)
            else:
                setattr(one.module, one.name, one.before)
        self.made.clear()
