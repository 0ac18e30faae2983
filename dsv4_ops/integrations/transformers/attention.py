"""Hugging Face's attention projections around ``attention_layer``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.attention import LayerInputs, LayerWeights, attention_layer
from dsv4_ops.integrations.transformers.config import KIND_OF_TYPE, ModelSpec
from dsv4_ops.integrations.transformers.modules import is_linear
from dsv4_ops.integrations.transformers.steps import LayerContext


def attention(module: Any, spec: ModelSpec, hidden: Tensor, context: LayerContext) -> Tensor:
    """Attention output of ``DeepseekV4Attention``, for [1, num_tokens, hidden_size]."""
    kind = KIND_OF_TYPE[module.layer_type]
    flat = hidden.flatten(0, 1)
    grouped = attention_layer(
        spec.step_layers,
        kind,
        _inputs(module, spec, flat),
        _weights(module, context.rope),
        context.caches,
        context.step,
        schedule=context.schedule,
        state_rings=context.state_rings,
    )
    assert isinstance(grouped, Tensor)  # spec.scale_layout is None
    out: Tensor = module.o_b_proj(module.o_a_proj(grouped.to(hidden.dtype)).flatten(1))
    return out.view(hidden.shape)


def _inputs(module: Any, spec: ModelSpec, x: Tensor) -> LayerInputs:
    dtype = spec.layers.dtype
    residual = module.q_a_norm(module.q_a_proj(x))
    q = module.q_b_proj(residual).unflatten(-1, (module.num_heads, module.head_dim))
    kv = module.kv_norm(module.kv_proj(x))
    found: dict[str, Tensor] = {"q": q.to(dtype), "kv": kv.to(dtype)}
    compressor = module.compressor
    if compressor is not None:
        found["kv_score"] = _kv_score(compressor, spec, x)
    indexer = getattr(compressor, "indexer", None)
    if indexer is not None:
        found["indexer_kv_score"] = _kv_score(indexer, spec, x)
        queries = indexer.q_b_proj(residual).unflatten(-1, (indexer.num_heads, indexer.head_dim))
        found["indexer_q"] = queries.to(dtype)
        weights = head_weights(indexer)(x)
        found["indexer_weights"] = weights if weights.dtype == torch.bfloat16 else weights.float()
    return LayerInputs(**found)


def _kv_score(compressor: Any, spec: ModelSpec, x: Tensor) -> Tensor:
    float32 = spec.recipe.compressor_float32
    both = [_project(layer, x, float32) for layer in (compressor.kv_proj, compressor.gate_proj)]
    return torch.cat(both, -1).to(torch.float32)


def _project(layer: Any, x: Tensor, float32: bool) -> Tensor:
    """Project ``x``; a replaced or wrapped layer keeps its own precision."""
    if float32 and is_linear(layer):
        return linear_float32(x, layer.weight)
    out: Tensor = layer(x.to(layer.weight.dtype) if type(layer) is torch.nn.Linear else x)
    return out


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.mT`` with a float32 result."""
    differentiated = torch.is_grad_enabled() and x.requires_grad  # mm(out_dtype=) has no gradient
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and not differentiated:
        flat = x.reshape(-1, x.shape[-1])
        return torch.mm(flat, weight.mT, out_dtype=torch.float32).view(*x.shape[:-1], -1)
    return torch.nn.functional.linear(x.float(), weight.float())


def head_weights(indexer: Any) -> Any:
    """The projection of the indexer's head weights; its owner depends on transformers' version."""
    owner = getattr(indexer, "scorer", indexer)
    return owner.weights_proj


def _weights(module: Any, rope: Tensor) -> LayerWeights:
    found = {"attn_sink": module.sinks.float()}
    sources = {"": module.compressor, "indexer_": getattr(module.compressor, "indexer", None)}
    for prefix, source in sources.items():
        if source is not None:
            found[f"{prefix}ape"] = source.position_bias.float()
            found[f"{prefix}norm_weight"] = source.kv_norm.weight.float()
    return LayerWeights(rope, **found)
