"""Hugging Face's model of the released sizes, with a prefilled cache."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.testing.models import YARN

LAYER_TYPES = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
)
"""Types of the model's four layers, in order."""


def flash_shaped(*, num_experts: int, device: torch.device, **changed: Any) -> Any:
    """Build a bf16 model of DeepSeek-V4-Flash's sizes with few layers and experts, and random
    weights.

    From 5.24 on, transformers itself keeps the parameters of ``keep_float32`` in float32.
    """
    import transformers

    config = transformers.DeepseekV4Config(
        **{
            "num_hidden_layers": len(LAYER_TYPES), "layer_types": list(LAYER_TYPES),
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "n_routed_experts": num_experts,
            "rope_parameters": dict(YARN), "attn_implementation": "eager", **changed,
        }
    )  # fmt: skip
    model = in_bfloat16(transformers.DeepseekV4ForCausalLM, config, device)
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in model.named_parameters():
        spread = float(weight.shape[-1] ** -0.5) if weight.dim() > 1 else 0.5
        centre, spread = (1.0, 0.1) if name.endswith("norm.weight") else (0.0, spread)
        weight.normal_(centre, spread, generator=generator)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            picks = torch.rand(len(table), num_experts, generator=generator, device=device)
            table.copy_(picks.argsort(1)[:, : table.shape[1]])
    return model


def in_bfloat16(kind: Any, config: Any, device: torch.device) -> Any:
    """Build a model with bfloat16 parameters, directly on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return kind(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def filled_cache(model: Any, *, batch: int, context: int) -> Any:
    """Fill a ``DynamicCache`` for requests of ``context`` tokens (a multiple of all ratios)."""
    import transformers

    config, device = model.config, model.device

    def rows(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, dtype=torch.bfloat16, device=device)

    cache = transformers.DynamicCache(config=config)
    for kind, layer in zip(config.layer_types, cache.layers, strict=True):
        layer.keys = layer.values = rows(1, config.sliding_window - 1, config.head_dim)
        layer.is_initialized, layer.dtype, layer.device = True, torch.bfloat16, device
        layer.cumulative_length = context
        ratio = config.compress_rates.get(kind)
        for name in getattr(layer, "compressed_kv", ()):
            dim = config.index_head_dim if name == "indexer" else config.head_dim
            width = 2 * dim if hasattr(layer, "overlap_kv") else dim
            layer.compressed_kv[name] = rows(context // ratio, dim)
            layer.entry_count[name] = context // ratio
            layer.buffer_kv[name], layer.buffer_gate[name] = rows(0, width), rows(0, width)
            if hasattr(layer, "overlap_kv"):
                layer.overlap_kv[name] = rows(ratio, dim)
                layer.overlap_gate[name] = rows(ratio, dim).float()
    return cache


def same_again(cache: Any) -> Any:
    """Copy a cache, so that a step replaces tensors in the copy only."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in made.layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(layer, name, dict(value))
    return made
