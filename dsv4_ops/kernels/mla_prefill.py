"""Launcher of sparse MLA for prefill."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.tiles import head_tiles
from dsv4_ops.core.types import SparseMla
from dsv4_ops.kernels.launch import EMULATE, Launch
from dsv4_ops.kernels.prefill_keys import prefill_keys_kernel
from dsv4_ops.kernels.sparse_mla import HEADS, KEYS, WARPS, supported
from dsv4_ops.reference import mla_prefill as reference

LISTED = 512
"""Selected rows that are looked through at a time for the last one that counts."""


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
    **settings: Any,
) -> SparseMla:
    swa = (swa_cache, positions, req_indices, swa_block_table)
    extra = (extra_cache, extra_block_table, topk_indices)
    caches = (swa_cache,) if extra_cache is None else (swa_cache, extra_cache)
    if not supported(q, *caches):
        return reference.sparse_mla_prefill(q, *swa, *extra, attn_sink, **settings)
    return _attend(launch, q, *swa, *extra, attn_sink, **settings)


def _attend(
    launch: Launch,
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
    num_tokens, num_heads, head_dim = q.shape[0], int(q.shape[1]), int(q.shape[2])
    out = q.new_empty(q.shape)
    lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
    if num_tokens == 0 or num_heads == 0:
        return SparseMla(out, lse)
    main = MainLayout(swa_block_size)
    coded = layout == main.tag
    cache = swa_cache if extra_cache is None else extra_cache
    table = swa_table if extra_table is None else extra_table
    chosen = table if topk_indices is None else topk_indices
    if coded:
        Checks("sparse_mla_prefill").page_start("swa_cache", swa_cache, main)
        Checks("sparse_mla_prefill").page_start("extra_cache", cache, main)
    sink = lse if attn_sink is None else attn_sink.contiguous()
    launch(prefill_keys_kernel)[(num_tokens, head_tiles(num_heads))](
        q,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        out,
        lse,
        sink,
        positions,
        positions.stride(0),
        req_indices,
        req_indices.stride(0),
        swa_cache,
        swa_cache.stride(0),
        swa_cache.shape[0],
        swa_table,
        swa_table.stride(0),
        swa_table.stride(1),
        swa_table.shape[1],
        cache,
        cache.stride(0),
        cache.shape[0],
        table,
        table.stride(0),
        table.stride(1),
        table.shape[1],
        chosen,
        chosen.stride(0),
        chosen.stride(1),
        chosen.shape[1],
        swa_table.shape[0],
        num_heads,
        SOFTMAX_SCALE=float(softmax_scale),  # Inductor would pass it as a float64
        WINDOW_SIZE=window_size,
        COMPRESS_RATIO=compress_ratio,
        LISTED=LISTED,
        SWA_BLOCK_SIZE=swa_block_size,
        EXTRA_BLOCK_SIZE=extra_block_size,
        HAS_EXTRA=extra_cache is not None,
        HAS_TOPK=topk_indices is not None,
        HAS_SINK=attn_sink is not None,
        HEAD_DIM=head_dim,
        ROW=main.data_bytes if coded else head_dim,
        ROW_BYTES=main.data_bytes if coded else 2 * head_dim,
        CODE_DIM=main.code_dim if coded else head_dim,
        QUANT_BLOCK=main.quant_block,
        SCALE_BYTES=main.scale_bytes if coded else 0,
        HEADS=HEADS,
        KEYS=KEYS,
        EMULATE=EMULATE,
        num_warps=WARPS,
    )
    return SparseMla(out, lse)
