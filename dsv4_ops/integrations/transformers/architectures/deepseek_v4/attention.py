"""Run Hugging Face's attention projections before and after ``attention_layer``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.attention import LayerInputs, LayerSpec, LayerWeights, attention_layer
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.integrations.transformers.architectures.base import LayerContext
from dsv4_ops.integrations.transformers.modules.checks import HeadPart
from dsv4_ops.integrations.transformers.modules.fused_projections import (
    fused_layer,
    of_attention,
    of_compressor,
    of_queries,
)
from dsv4_ops.integrations.transformers.modules.quantized import takes_codes
from dsv4_ops.integrations.transformers.modules.replacement import (
    is_linear,
    linear_float32,
    unwrapped,
)
from dsv4_ops.integrations.transformers.recipe import Recipe

KIND_OF_TYPE = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "c4",
    "heavily_compressed_attention": "c128",
}
"""Layer kind for each of Hugging Face's layer types."""

OWN_SINKS = "dsv4_ops_own_sinks"
"""Buffer with the attention sinks of this rank's heads."""


def attention(
    module: Any, spec: LayerSpec, recipe: Recipe, hidden: Tensor, context: LayerContext
) -> Tensor:
    """Return ``DeepseekV4Attention``'s output for ``hidden`` [1, num_tokens, hidden_size]."""
    kind, float32 = KIND_OF_TYPE[module.layer_type], recipe.compressor_float32
    if context.schedule == "prefill" and _quantizes(spec, recipe, module.o_a_proj):
        spec = replace(spec, scale_layout="row")
    flat = hidden.flatten(0, 1)
    grouped = attention_layer(
        spec,
        kind,
        _inputs(module, spec, float32, flat),
        _weights(module, spec, context.rope),
        context.caches,
        context.step,
        schedule=context.schedule,
        state_rings=context.state_rings,
        save_first=context.save_first,
    )
    grouped = grouped.to(hidden.dtype) if isinstance(grouped, Tensor) else grouped
    out: Tensor = module.o_b_proj(module.o_a_proj(grouped).flatten(1).to(hidden.dtype))
    return out.view(hidden.shape)


def _quantizes(spec: LayerSpec, recipe: Recipe, projection: Any) -> bool:
    """Whether the kernel that splits the attention output into groups can also quantise the output.

    The codes equal the codes that ``projection`` computes, except in blocks with an amax below
    1e-4, for which this kernel chooses smaller scales. Only prefill steps quantise in this kernel.
    In a decode step, the attention kernel writes the groups, so quantising here saves no pass.
    """
    fp8 = recipe.activations == "fp8" and recipe.activation_scale == "pow2"
    sizes = spec.head_dim == MainLayout.head_dim and spec.dtype == torch.bfloat16
    return fp8 and sizes and takes_codes(projection)


def _inputs(module: Any, spec: LayerSpec, float32: bool, x: Tensor) -> LayerInputs:
    dtype = spec.dtype
    together = fused_layer(module, of_attention(module))
    normed = None if together is None else together.normed(x, (module.q_a_norm, module.kv_norm))
    if normed is not None:
        residual, kv = normed
    else:
        if together is None:
            q_a, kv = module.q_a_proj(x), module.kv_proj(x)
        else:
            q_a, kv = together(x).split(together.sizes, -1)
        residual, kv = module.q_a_norm(q_a), module.kv_norm(kv)
    compressor = module.compressor
    indexer: Any = getattr(compressor, "indexer", None)
    together = None if indexer is None else fused_layer(indexer, of_queries(module))
    if together is not None:
        q, queries = together.heads(residual, (module.head_dim, indexer.head_dim))
    else:
        q = module.q_b_proj(residual).unflatten(-1, (-1, module.head_dim))
        queries = None
        if indexer is not None:
            queries = indexer.q_b_proj(residual).unflatten(-1, (-1, indexer.head_dim))
    inputs: dict[str, Tensor] = {"q": q.to(dtype), "kv": kv.to(dtype)}
    if compressor is None:
        return LayerInputs(**inputs)
    together = fused_layer(compressor, of_compressor(compressor))
    if together is not None:
        # kv and gate of the compressor; kv and gate of the indexer; head weights of the indexer
        parts = together(x).split(_pairs(together.sizes), -1)
        inputs |= dict(zip(("kv_score", "indexer_kv_score"), parts[:2], strict=False))
        if indexer is not None:
            inputs["indexer_weights"] = parts[2]
    else:
        inputs["kv_score"] = _kv_score(compressor, float32, x)
        if indexer is not None:
            inputs["indexer_kv_score"] = _kv_score(indexer, float32, x)
            weights = head_weights(indexer)(x)
            is_bf16 = weights.dtype == torch.bfloat16
            inputs["indexer_weights"] = weights if is_bf16 else weights.float()
    if queries is not None:
        inputs["indexer_q"] = queries.to(dtype)
    return LayerInputs(**inputs)


def _pairs(sizes: list[int]) -> list[int]:
    return [sum(sizes[first : first + 2]) for first in range(0, len(sizes), 2)]


def _kv_score(compressor: Any, float32: bool, x: Tensor) -> Tensor:
    both = [_project(layer, x, float32) for layer in (compressor.kv_proj, compressor.gate_proj)]
    return torch.cat(both, -1).to(torch.float32)


def _project(layer: Any, x: Tensor, float32: bool) -> Tensor:
    """Project ``x``. The result is in float32 if ``float32`` is True and ``layer`` is unchanged,
    and otherwise in the layer's precision."""
    if float32 and is_linear(layer):
        return linear_float32(x, layer.weight)
    return layer(x.to(layer.weight.dtype) if type(layer) is torch.nn.Linear else x)


def head_weights(indexer: Any) -> Any:
    """Return the projection to the indexer's head weights. The module that owns this projection
    depends on the version of transformers."""
    owner = getattr(indexer, "scorer", indexer)
    return owner.weights_proj


def head_parts(attention: Any) -> Iterator[HeadPart]:
    """Yield the parameters that have a dimension of attention heads."""
    config = attention.config
    heads, groups = config.num_attention_heads, config.o_groups * config.o_lora_rank
    yield "q_b_proj", _weight(attention.q_b_proj), 0, heads * config.head_dim
    yield "sinks", attention.sinks, 0, heads
    yield "o_a_proj", _weight(attention.o_a_proj), 0, groups
    yield "o_b_proj", _weight(attention.o_b_proj), 1, groups


def index_head_parts(attention: Any) -> Iterator[HeadPart]:
    """Yield the parameters that have a dimension of indexer heads."""
    config, indexer = attention.config, getattr(attention.compressor, "indexer", None)
    if indexer is not None:
        heads = config.index_n_heads
        yield "compressor.indexer.q_b_proj", _weight(indexer.q_b_proj), 0, heads * indexer.head_dim
        yield "weights_proj of compressor.indexer", _weight(head_weights(indexer)), 0, heads


def _weight(linear: Any) -> Any:
    return getattr(unwrapped(linear), "weight", None)


def _weights(module: Any, spec: LayerSpec, rope: Tensor) -> LayerWeights:
    split = spec.ranks is not None and spec.ranks.shards_heads
    sinks = getattr(module, OWN_SINKS) if split else module.sinks
    weights = {"attn_sink": sinks.float()}
    sources = {"": module.compressor, "indexer_": getattr(module.compressor, "indexer", None)}
    for prefix, source in sources.items():
        if source is not None:
            weights[f"{prefix}ape"] = source.position_bias.float()
            weights[f"{prefix}norm_weight"] = source.kv_norm.weight.float()
    return LayerWeights(rope, **weights)


def skipped_modules(attention: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules of an attention layer that steps do not call."""
    yield "q_b_norm", attention.q_b_norm
    compressor = attention.compressor
    indexer = getattr(compressor, "indexer", None)
    for name, module in (("compressor", compressor), ("compressor.indexer", indexer)):
        if module is not None:
            yield name, module
            yield f"{name}.kv_norm", module.kv_norm
            yield f"{name}.rotary_emb", module.rotary_emb
    scorer = getattr(indexer, "scorer", None)
    if scorer is not None:
        yield "compressor.indexer.scorer", scorer
