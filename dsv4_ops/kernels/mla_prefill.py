"""Launcher of sparse MLA for prefill."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.choice import AUTO, not_ours
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.types import SparseMla
from dsv4_ops.kernels.launch import Launch
from dsv4_ops.kernels.prefill_launch import prefill_keys
from dsv4_ops.kernels.sparse_mla import supported
from dsv4_ops.reference import mla_prefill as reference


def sparse_mla_prefill(
    launch: Launch,
    q: Tensor,
    swa_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    swa_block_table: Tensor,
    extra_cache: Tensor | None,
    extra_block_table: Tensor | None,
    topk_indices: Tensor | None,
    attn_sink: Tensor | None,
    *,
    impl: str = AUTO,
    **settings: Any,
) -> SparseMla:
    swa = (swa_cache, positions, req_indices, swa_block_table)
    extra = (extra_cache, extra_block_table, topk_indices)
    caches = (swa_cache,) if extra_cache is None else (swa_cache, extra_cache)
    if not supported(q, *caches):
        not_ours("sparse_mla_prefill", impl, "with such queries or caches")
        return reference.sparse_mla_prefill(q, *swa, *extra, attn_sink, **settings)
    return _attend(launch, impl == AUTO, q, *swa, *extra, attn_sink, **settings)


def _attend(
    launch: Launch,
    by_size: bool,
    q: Tensor,
    swa_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    swa_table: Tensor,
    extra_cache: Tensor | None,
    extra_table: Tensor | None,
    topk_indices: Tensor | None,
    attn_sink: Tensor | None,
    *,
    softmax_scale: float,
    window_size: int,
    compress_ratio: int,
    swa_block_size: int,
    extra_block_size: int,
    layout: str,
) -> SparseMla:
    num_tokens, num_heads = q.shape[0], int(q.shape[1])
    if num_tokens == 0 or num_heads == 0:
        lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
        return SparseMla(q.new_empty(q.shape), lse)
    main = MainLayout(swa_block_size)
    coded = layout == main.tag
    if coded:
        cache = swa_cache if extra_cache is None else extra_cache
        Checks("sparse_mla_prefill").page_start("swa_cache", swa_cache, main)
        Checks("sparse_mla_prefill").page_start("extra_cache", cache, main)
    swa = (q, swa_cache, positions, req_indices, swa_table)
    extra = (extra_cache, extra_table, topk_indices, attn_sink)
    sizes = (softmax_scale, window_size, compress_ratio, swa_block_size, extra_block_size, coded)
    return SparseMla(*prefill_keys(launch, by_size, *swa, *extra, *sizes))
