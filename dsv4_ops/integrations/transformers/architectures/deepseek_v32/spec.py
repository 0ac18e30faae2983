"""The spec of models with DeepSeek sparse attention, their caches and their steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dsv4_ops.attention import (
    DsaCache,
    DsaSpec,
    IndexerInputs,
    MlaCache,
    dsa_layer,
    mla_layer,
)
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import IndexerLayout, MlaDsFp8Layout, PlainLayout
from dsv4_ops.integrations.transformers.architectures.base import (
    WITHOUT_MASKS,
    Execution,
    LayerContext,
    StepRun,
)
from dsv4_ops.integrations.transformers.architectures.deepseek_v3.spec import MlaModelSpec, normed
from dsv4_ops.integrations.transformers.modules.replacement import (
    class_of,
    is_part,
    is_split,
)
from dsv4_ops.integrations.transformers.tensors import CacheTensors

FULL, SHARED = "indexed", "shared"
"""Kinds of layers: a layer with an indexer, and a layer that uses the selection of the nearest
indexer before the layer."""

_KIND_OF_TYPE = {"full": FULL, "shared": SHARED}


@dataclass(frozen=True, kw_only=True)
class DsaModelSpec(MlaModelSpec):
    """The configuration of a patched ``DeepseekV32ForCausalLM`` or ``GlmMoeDsaForCausalLM``.

    Attributes:
        layers: Spec of the attention layers.
        passes_selection: Whether layers take and return selections, as the layers of GLM-5 do.
    """

    layers: DsaSpec
    passes_selection: bool

    causal_lm = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
    memory_groups: ClassVar[dict[str, str]] = {"kv": "latents", "indexer": "indexer"}
    draft_layers: ClassVar[tuple[str, ...]] = (FULL,)
    shared_groups: ClassVar[tuple[str, ...]] = ("latents", "indexer")
    layout_of_kv: ClassVar[dict[str, tuple[str, torch.dtype]]] = {
        "fp8": (MlaDsFp8Layout.tag, torch.bfloat16),
        "bf16": (PlainLayout.tag, torch.bfloat16),
        "fp32": (PlainLayout.tag, torch.float32),
    }

    @classmethod
    def check_config(cls, op: str, config: Any, kv: str, execution: Execution) -> None:
        if execution.query is not None:
            raise argument_error(
                op,
                "query",
                must=f"be None for {config.model_type}",
                got=repr(execution.query),
                do="Leave it out",
                kind=NotImplementedError,
            )
        if config.index_head_dim != IndexerLayout.head_dim:
            raise argument_error(
                op,
                "config.index_head_dim",
                must=f"be {IndexerLayout.head_dim}",
                got=config.index_head_dim,
                do="Indexer keys of other sizes are unknown to this version",
                kind=NotImplementedError,
            )
        types = _indexer_types(config)
        checks = Checks(op)
        checks.equal("config.indexer_types", len(types), config.num_hidden_layers, "all layers")
        for kind in types:
            checks.one_of("config.indexer_types", kind, *_KIND_OF_TYPE, belongs_to="layers have")
        if types[:1] == ["shared"]:
            raise checks.error(
                "config.indexer_types",
                must="begin with 'full'",
                got="'shared'",
                do="A layer needs an indexer of its own, or an earlier layer with an indexer",
            )

    @classmethod
    def layer_spec(cls, config: Any, **settings: Any) -> DsaSpec:
        plain = settings["dtype"] == torch.float32
        return DsaSpec(
            **settings,
            index_topk=config.index_topk,
            index_heads=config.index_n_heads,
            indexer_layout=PlainLayout.tag if plain else IndexerLayout.tag,
            interleaved=_is_glm(config),
        )

    @classmethod
    def layer_kinds(cls, config: Any) -> tuple[str, ...]:
        return tuple(_KIND_OF_TYPE[kind] for kind in _indexer_types(config))

    @classmethod
    def rotates_pairs(cls, config: Any) -> bool:
        return True  # Hugging Face's attention always rotates pairs

    @classmethod
    def own_settings(cls, config: Any) -> dict[str, Any]:
        return {"passes_selection": _is_glm(config)}

    @classmethod
    def own_properties(cls, layers: Any) -> dict[str, Any]:
        return {
            "indexer_layout": layers.indexer_layout,
            "indexer_pairs": layers.interleaved,
            "index_topk": layers.index_topk,  # up to this length, caches have no indexer keys
        }

    # The cache

    def layer_caches(
        self,
        kind: str,
        num_rows: int,
        num_blocks: int,
        max_cache_len: int,
        rings: dict[str, int],
        device: torch.device,
    ) -> DsaCache:
        # in a short cache every row is selected, so no step reads indexer keys: allocate no block
        keys = 0 if max_cache_len <= self.layers.index_topk else num_blocks
        selects = kind == FULL
        return DsaCache.allocate(
            self.layers, num_blocks, device, selects=selects, num_key_blocks=keys
        )

    def kind_of(self, caches: Any) -> str:
        if not isinstance(caches, DsaCache):
            return type(caches).__name__
        return SHARED if caches.indexer is None else FULL

    # A step

    def expands(
        self, cache: CacheTensors, num_tokens: int, num_reqs: int, has_context: bool
    ) -> bool:
        first = not has_context and self.most_first_tokens is not None
        attends_to_all = self.is_dense(cache.rope.table) or first
        return (
            attends_to_all
            and self.layers.expands
            and super().expands(cache, num_tokens, num_reqs, has_context)
        )

    @property
    def most_first_tokens(self) -> int | None:
        # a request must not get other bits if another request has a context
        selects = self.layers.batch_invariant or not self.layers.expands
        return None if selects else self.layers.index_topk

    def skips_contexts(self, num_tokens: int, num_reqs: int, longest: int) -> bool:
        most = self.most_first_tokens
        fits = most is not None and longest <= most
        return fits and super().skips_contexts(num_tokens, num_reqs, longest)

    def is_dense(self, rope: Tensor) -> bool:
        """Whether a cache with this RoPE table stores at most ``index_topk`` tokens per request.
        If so, every token attends to all rows."""
        return rope.shape[0] <= self.layers.index_topk

    # The model

    def run_layers(
        self, body: Any, hidden: Tensor, ids: Tensor | None, step_run: StepRun
    ) -> Tensor:
        cache, slots = step_run.cache, None
        layers = zip(self.kinds, body.layers, cache.layers, strict=True)
        for number, (kind, layer, caches) in enumerate(layers):
            outputs = step_run.run(
                f"{kind}_{class_of(layer.mlp)}",
                layer,
                hidden,
                dsv4_ops=step_run.context(number, caches, cache.rope.table),
                **self._selection(slots if kind == SHARED else None),
                **WITHOUT_MASKS,
            )
            hidden, slots = outputs if self.passes_selection else (outputs, None)
        return step_run.run("norm", normed, body, hidden, step_run.output_tokens)

    def _selection(self, slots: Tensor | None) -> dict[str, Tensor | None]:
        return {"prev_topk_indices": slots} if self.passes_selection else {}

    def attention_outputs(
        self, module: Any, hidden: Tensor, context: LayerContext, given: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        x, slots = hidden.flatten(0, 1), given.get("prev_topk_indices")
        inputs, residual = self.project(module, x)
        weights, caches, step = self.weights(module, context), context.caches, context.step
        if self.is_dense(context.rope):
            rows = MlaCache(caches.kv)
            attended, slots = mla_layer(self.layers.dense, inputs, weights, rows, step), None
        else:
            indexer = None
            if module.indexer is not None:
                selects = step.prefill_start_loc is None
                indexer = self._indexer_inputs(module.indexer, x, residual, selects)
            attended, slots = dsa_layer(self.layers, inputs, weights, caches, step, indexer, slots)
        outputs = (self.output(module, attended, hidden), None)
        return (*outputs, slots) if self.passes_selection else outputs

    def _indexer_inputs(
        self, indexer: Any, x: Tensor, residual: Tensor, selects: bool
    ) -> IndexerInputs:
        """Return the projections of an indexer for tokens [num_tokens, hidden_size]; only keys if
        the step selects no rows."""
        spec = self.layers
        k = indexer.k_norm(indexer.wk(x)).to(spec.dtype)
        if not selects:
            return IndexerInputs(None, k)
        q = indexer.wq_b(residual).unflatten(-1, (spec.index_heads, spec.index_dim))
        weights = indexer.weights_proj(x.to(indexer.weights_proj.weight.dtype))
        return IndexerInputs(q.to(spec.dtype), k, weights.to(torch.float32))

    def check_model(self, op: str, model: Any) -> None:
        super().check_model(op, model)
        for name, module in model.named_modules():
            if is_part(module, "Indexer") and any(map(is_split, module.parameters())):
                raise argument_error(
                    op,
                    name,
                    must="be whole on every rank, as each rank selects with all heads",
                    got="split parameters",
                    do="Split the model with a plan that leaves out the indexer",
                    kind=NotImplementedError,
                )

    def check_attention(self, op: str, name: str, kind: str, attention: Any) -> None:
        super().check_attention(op, name, kind, attention)
        indexer, topk = attention.indexer, self.layers.index_topk
        if (indexer is not None) != (kind == FULL):
            found, other = ("one", "none") if indexer is not None else ("none", "one")
            raise argument_error(
                op,
                f"{name}.indexer",
                must=f"be {other}, as config.indexer_types has it",
                got=found,
                do="Make the model from its configuration",
            )
        if indexer is not None and indexer.index_topk != topk:
            raise argument_error(
                op,
                f"{name}.indexer.index_topk",
                must=f"be {topk}, as config.index_topk has it",
                got=indexer.index_topk,
                do="Set config.index_topk, and make the model from this configuration",
            )

    def skipped_modules(self, attention: Any) -> Iterator[tuple[str, Any]]:
        yield from super().skipped_modules(attention)
        if attention.indexer is not None:
            yield "indexer", attention.indexer


def _is_glm(config: Any) -> bool:
    return bool(config.model_type == "glm_moe_dsa")


def _indexer_types(config: Any) -> list[str]:
    """Return the type of every layer; all layers of DeepSeek-V3.2 have an indexer."""
    types = config.indexer_types if _is_glm(config) else None
    return list(types or ["full"] * config.num_hidden_layers)
