"""``patch`` and ``unpatch``: replace the forwards of a model's modules on the instances."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
from dsv4_ops.integrations.transformers.generation import decoding, hooks
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
) -> Any:
    """Let a DeepSeek model of Hugging Face run from a ``PagedCache``.

    ``DeepseekV4ForCausalLM``, ``DeepseekV3ForCausalLM`` (V3, R1, Kimi-K2) or
    ``DeepseekV2ForCausalLM``.

    Forwards are replaced on the instances; parameters, state dict and classes stay as they are. A
    call with another cache, or with none, still runs Hugging Face's attention. ``generate`` makes a
    ``PagedCache`` where it would make a ``DynamicCache`` or a ``StaticCache``; ask for Hugging
    Face's own with ``cache_implementation="dynamic"``. A patched model is copied, saved and pickled
    as any other is.

    Hooks, PEFT adapters, parametrizations and replaced modules keep working, whether added before
    or after. Layers other than a plain ``nn.Linear`` keep their own precision. Two exceptions: our
    ops replace ``q_b_norm`` and ``compressor`` except for its projections, and ``kv_b_proj`` of V3
    and V2, so steps refuse changes there; and a model that accelerate split or offloaded is
    refused. Hugging Face's tensor parallel works (``tp_plan="auto"``).

    A model loaded in the released precision (``FineGrainedFP8Config``, without dequantisation)
    multiplies its FP8 and FP4 codes with ``fp8_linear``, ``fp8_grouped_linear`` and ``experts``,
    and needs no kernels from Hugging Face's hub. Scales that are missing, transposed or negative
    are refused, and so are scales and codes that are NaN or infinite: two reductions read the
    codes, on their device and without a copy. Experts in bfloat16 on a GPU run ``experts`` too,
    where no gradient is wanted, ``set_experts_implementation`` chose no other, and an expert has at
    most 256 rows on average.

    Args:
        model: The model. It is changed, and returned.
        kv: Storage of the keys: "fp8" (584 bytes per row, FlashMLA's layout), "bf16" or "fp32". Of
            V3 and V2 "fp8" is 576 bytes per row with one scale per layer, and "ds_fp8" 656 bytes
            with four scales.
        precision: "serve" follows the official code where Hugging Face differs from it,
            "reference" follows Hugging Face; or a ``Recipe``.
        impl: Implementation of indexer selection and attention: "triton" (our kernels),
            "flash_mla" or "deep_gemm" (for the ops that the library has), "reference", or "auto"
            (the fastest one here). A library's schedule is built once per step, for the SMs that it
            uses at the time of patching.
        batch_invariant: Whether a request's attention is bit-identical whatever else is in the
            batch.
        plan: Whether decode steps build a split-KV schedule for their C128 layers, for requests of
            different lengths (``build_attention_step``). For nearly equal lengths it gains nothing
            and costs 5 us a step and up to 9 us a C128 layer (256 tokens of 128 heads; 2 us up to
            64 tokens of 64 heads). Not used with ``batch_invariant``, impl "flash_mla" or
            "reference", or more than 16383 tokens; export with that limit on the token dimension,
            or without a plan. V3 and V2 have none.
        parallel: Ranks that share the cache of every request: each stores the rows of its turns.
            All of them run the same steps. Where Hugging Face's tensor parallelism split the heads
            over the same ranks, they gather queries and keep their own heads: ``q_b_proj`` and
            ``kv_b_proj`` ("colwise") and ``o_proj`` ("rowwise") of V3 and V2, ``q_b_proj``,
            ``sinks`` and ``o_a_proj`` ("colwise") and ``o_b_proj`` ("rowwise") of V4, and of its
            indexer ``q_b_proj`` and ``weights_proj`` ("colwise"). Such a V4 runs from a
            ``PagedCache`` only.
        query: "fp8", of V3 and V2 with the kv "fp8": absorbed queries as e4m3 codes over one scale
            a layer, the buffer ``dsv4_ops_q_scale`` of its attention, 1 until you fill it. It makes
            results less exact and no step faster, but ranks gather half the bytes. None for queries
            in bfloat16.

    Returns:
        ``model``.

    Raises:
        NotImplementedError: an unsupported architecture, layer type, rotary embedding or size, or a
            split or offloaded model; heads that are split over other ranks than those of
            ``parallel``, or some of whose parameters are.
        ValueError, TypeError: an invalid argument, a model that is patched already, or ranks of
            ``parallel`` that patch different models.

    Example:
        >>> from dsv4_ops.testing.models import small_model
        >>> from dsv4_ops.integrations.transformers import patch
        >>> model = patch(small_model(), kv="fp32", precision="reference")
        >>> model.dsv4_ops_spec.kinds
        ('window', 'c4', 'c128')
    """
    if isinstance(model, str):
        raise argument_error(
            "patch",
            "model",
            must="be a model",
            got="its name",
            do=f"Load it first: DeepseekV4ForCausalLM.from_pretrained({model!r})",
            kind=TypeError,
        )
    config = getattr(model, "config", model)
    checks = Checks("patch")
    checks.flag("batch_invariant", batch_invariant)
    checks.flag("plan", plan)
    checks.one_of("impl", impl, *IMPLS, belongs_to="shall run")
    if query is not None:
        checks.one_of("query", query, "fp8", belongs_to="queries shall be, or None")
    settings: dict[str, Any] = {"batch_invariant": batch_invariant, "impl": impl, "plan": plan}
    settings |= {"parallel": parallel, "query": query}
    spec = spec_of_config("patch", config, kv, precision, **settings)
    _check_model(model, spec)
    spec = spec.of_model(model)
    rewrite.check("patch", model, forwards.rewrites(model, spec))
    spec.check_model("patch", model)
    if spec.parallel is not None:
        spec.parallel.agree("patch", "model", model.device, spec=spec)
    spec = spec.scheduled(next(model.parameters()).device)
    replacements = list(rewrite.apply(model, forwards.rewrites(model, spec)))
    replaced = _Replacements()
    for name, hook in hooks.HOOKS.items():
        replaced.method(model, name, hook)
    setattr(model, _SPEC, spec)
    setattr(model, _REPLACED, replaced)
    setattr(model, decoding.STEPS, decoding.CompiledSteps())
    add_replacements(model, replacements)
    return model


def add_replacements(model: Any, replacements: Iterable[tuple[Any, str, Maker]]) -> None:
    """Replace methods of a patched model's modules, (module, name, maker), until ``unpatch``."""
    replaced: _Replacements = getattr(model, _REPLACED)
    for module, name, make in replacements:
        replaced.method(module, name, make)


def unpatch(model: Any) -> Any:
    """Restore a model's own forwards, and remove its draft layer.

    Args:
        model: A patched model. It is changed, and returned.

    Returns:
        ``model``.

    Raises:
        ValueError: it is not patched, or something replaced a forward of ours since.
    """
    replaced = getattr(model, _REPLACED, None)
    if replaced is None:
        raise unpatched("unpatch", model, "There is nothing to undo")
    replaced.undo()
    model._modules.pop(DRAFT, None)
    rewrite.restore(model, forwards.rewrites(model, getattr(model, _SPEC)))
    for name in (_SPEC, _REPLACED, decoding.STEPS):
        delattr(model, name)
    return model


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
    check_layers("patch", spec.kinds, model.model)
    check_placement("patch", model)


class _Replacements:
    """The methods replaced on a model's modules."""

    def __init__(self) -> None:
        self.made: list[Replacement] = []

    def method(self, module: Any, name: str, make: Maker) -> None:
        """Replace a method by what ``make`` makes of the old one."""
        self.made.append(Replacement(module, name, make, vars(module).get(name)))
        setattr(module, name, self.made[-1])

    def undo(self) -> None:
        """Restore all methods, or raise and restore none."""
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
