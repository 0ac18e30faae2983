"""The last stages of a layer: attention over its caches, and its output for the projection."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dsv4_ops.attention.impl import attender, attender_of_many, compressed_table, plan_of
from dsv4_ops.attention.spec import LayerSpec
from dsv4_ops.attention.step import AttentionStep
from dsv4_ops.attention.tensors import LayerCaches, LayerWeights
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.types import QuantizedGroups
from dsv4_ops.ops.rope import (
    ROPE_DIM,
    apply_rope,
    inverse_rope_group,
    inverse_rope_group_quantize,
)
from dsv4_ops.ops.sparse_mla import sparse_mla_decode, sparse_mla_decode_paged, sparse_mla_prefill


def model_sizes(spec: LayerSpec, q: Tensor) -> bool:
    """Whether these are the sizes and the dtype of DeepSeek-V4, which the fused ops have."""
    sizes = (spec.head_dim, spec.rope_dim) == (MainLayout.head_dim, ROPE_DIM)
    return sizes and q.dtype == torch.bfloat16


def turns_back(spec: LayerSpec, q: Tensor) -> bool:
    """Whether ``attend`` can undo the rotation of an output that nothing but that is done to."""
    return spec.scale_layout is None and model_sizes(spec, q)


def attend(
    spec: LayerSpec,
    kind: str,
    q: Tensor,
    slots: Tensor | None,
    weights: LayerWeights,
    caches: LayerCaches,
    step: AttentionStep,
    *,
    turned: bool,
) -> Tensor:
    """Attention of few tokens, in C4 to the selected ``slots``; its rotation is undone by the
    kernel that stores it if ``turned``."""
    window = (q, caches.swa, step.swa_indices, step.swa_lens)
    settings: dict[str, Any] = {
        "softmax_scale": spec.softmax_scale,
        "swa_block_size": spec.attention.swa_block_size,
        "extra_block_size": 1 if kind == "window" else spec.block_size(kind),
        "layout": spec.layout,
        "batch_invariant": spec.batch_invariant,
        "impl": attender(spec),
    }
    if turned:
        settings |= {"positions": step.positions, "cos_sin_cache": weights.cos_sin_cache}
    plan = plan_of(spec, step, kind)
    if kind == "c128":
        return sparse_mla_decode_paged(
            *window,
            cast(Tensor, caches.compressed),
            step.c128.lens,
            step.req_indices,
            step.c128.block_table,
            weights.attn_sink,
            plan,
            **settings,
        ).out
    extra: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if slots is not None:
        # no more are selected than there are; to count the selected ones would take a reduction
        extra = (caches.compressed, slots, step.c4.lens)
    return sparse_mla_decode(*window, *extra, weights.attn_sink, plan, **settings).out


def attend_whole(
    spec: LayerSpec,
    kind: str,
    q: Tensor,
    selected: Tensor | None,
    weights: LayerWeights,
    caches: LayerCaches,
    step: AttentionStep,
) -> Tensor:
    """Attention of many tokens, in C4 to the ``selected`` rows of their requests; its rotation is
    undone behind it."""
    table = compressed_table(step, kind)
    return sparse_mla_prefill(
        q,
        caches.swa,
        step.positions,
        step.req_indices,
        cast(Tensor, step.swa_block_table),
        None if table is None else caches.compressed,
        table,
        selected,
        weights.attn_sink,
        softmax_scale=spec.softmax_scale,
        window_size=spec.attention.window_size,
        compress_ratio=1 if kind == "window" else spec.ratio(kind),
        swa_block_size=spec.attention.swa_block_size,
        extra_block_size=1 if kind == "window" else spec.block_size(kind),
        layout=spec.layout,
        impl=attender_of_many(spec, q),
    ).out


def grouped(
    spec: LayerSpec, out: Tensor, weights: LayerWeights, step: AttentionStep, *, turned: bool
) -> Tensor | QuantizedGroups:
    """The output for the grouped projection, its rotation undone; of one that is ``turned`` a
    view."""
    table, groups = weights.cos_sin_cache, spec.num_groups
    if spec.scale_layout is not None:
        return inverse_rope_group_quantize(
            out, step.positions, table, num_groups=groups, scale_layout=spec.scale_layout
        )
    if not turned and out.dtype == torch.bfloat16:
        return inverse_rope_group(out, step.positions, table, num_groups=groups)
    if not turned:
        out = apply_rope(out, step.positions, table, inverse=True)
    tokens, heads, dim = out.shape
    return out.view(tokens, groups, heads // groups * dim)
