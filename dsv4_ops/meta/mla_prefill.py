"""Fake of sparse MLA for prefill."""

from __future__ import annotations

from torch import Tensor

from dsv4_ops.core.types import SparseMla
from dsv4_ops.meta.sparse_mla import attended


def sparse_mla_prefill(
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
    softmax_scale: float,
    window_size: int,
    compress_ratio: int,
    swa_block_size: int,
    extra_block_size: int,
    layout: str,
    impl: str = "auto",
) -> SparseMla:
    return attended(q)
