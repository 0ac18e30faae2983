"""The last stages of a layer: attention over its caches, and the grouped output."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dsv4_ops.attention.impl import compressed_table, decode_impl, flash_mla_plan_of, prefill_impl
from dsv4_ops.attention.spec import LayerSpec
from dsv4_ops.attention.tensors import LayerCall
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.types import QuantizedGroups, SparseMla
from dsv4_ops.ops.rope import (
    ROPE_DIM,
    apply_rope,
    inverse_rope_group,
    inverse_rope_group_quantize,
)
from dsv4_ops.ops.sparse_mla import sparse_mla_decode, sparse_mla_decode_paged, sparse_mla_prefill


def has_v4_sizes(spec: LayerSpec, q: Tensor) -> bool:
    """Whether sizes and dtype are DeepSeek-V4's, as the fused ops require."""
    sizes = (spec.head_dim, spec.rope_dim) == (MainLayout.head_dim, ROPE_DIM)
    return sizes and q.dtype == torch.bfloat16


def fuses_inverse_rope(spec: LayerSpec, q: Tensor) -> bool:
    """Whether ``attend_decode`` can apply inverse RoPE in the attention kernel."""
    return spec.scale_layout is None and has_v4_sizes(spec, q)


def attend_decode(
    layer: LayerCall,
    q: Tensor,
    selected: tuple[Tensor, Tensor] | None,
    *,
    inverse_rope: bool,
    sink: bool = True,
) -> SparseMla:
    """Attend with split keys, for few tokens; C4 layers attend to the ``selected`` slots.

    ``selected`` holds the slots, and an upper bound of the number of slots per token.
    """
    spec, kind, _, weights, caches, step = layer
    attn_sink = weights.attn_sink if sink else None
    shared = step if sink or step.share is None else step.share
    window = (q, caches.swa, shared.swa_indices, shared.swa_lens)
    settings: dict[str, Any] = {
        "softmax_scale": spec.softmax_scale,
        "swa_block_size": spec.attention.swa_block_size,
        "extra_block_size": 1 if kind == "window" else spec.block_size(kind),
        "layout": spec.layout,
        "batch_invariant": spec.batch_invariant,
        "impl": decode_impl(spec),
    }
    if inverse_rope:
        settings |= {"positions": step.positions, "cos_sin_cache": weights.cos_sin_cache}
    settings["flash_mla_plan"] = flash_mla_plan_of(step, kind) if spec.sm_parts else None
    if kind == "c128":
        return sparse_mla_decode_paged(
            *window,
            cast(Tensor, caches.compressed),
            step.c128.lens,
            step.req_indices,
            step.c128.block_table,
            attn_sink,
            step.c128.plan,
            **settings,
        )
    extra: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if selected is not None:
        extra = (caches.compressed, *selected)
    return sparse_mla_decode(*window, *extra, attn_sink, **settings)


def attend_prefill(layer: LayerCall, q: Tensor, selected: Tensor | None) -> Tensor:
    """Attend through block tables, for many tokens; C4 layers attend to the ``selected`` rows."""
    spec, kind, _, weights, caches, step = layer
    table = compressed_table(step, kind)
    extra = (None if table is None else caches.compressed, table, selected)
    tokens = (step.positions, step.req_indices, cast(Tensor, step.swa_block_table))
    return sparse_mla_prefill(
        q,
        caches.swa,
        *tokens,
        *extra,
        weights.attn_sink,
        softmax_scale=spec.softmax_scale,
        window_size=spec.attention.window_size,
        compress_ratio=1 if kind == "window" else spec.ratio(kind),
        swa_block_size=spec.attention.swa_block_size,
        extra_block_size=1 if kind == "window" else spec.block_size(kind),
        layout=spec.layout,
        impl=prefill_impl(spec, q),
    ).out


def group_output(layer: LayerCall, out: Tensor, *, inverse_rope: bool) -> Tensor | QuantizedGroups:
    """Group the output for the output projection; return a view if the attention kernel applied the
    inverse RoPE."""
    groups, layout = layer.spec.num_groups, layer.spec.scale_layout
    angles = (layer.step.positions, layer.weights.cos_sin_cache)
    if layout is not None:
        return inverse_rope_group_quantize(out, *angles, num_groups=groups, scale_layout=layout)
    if not inverse_rope and out.dtype == torch.bfloat16:
        return inverse_rope_group(out, *angles, num_groups=groups)
    if not inverse_rope:
        out = apply_rope(out, *angles, inverse=True)
    tokens, heads, dim = out.shape
    return out.view(tokens, groups, heads // groups * dim)
