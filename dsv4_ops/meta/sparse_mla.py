"""Fakes of sparse MLA."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import SparseMla


def attended(q: Tensor) -> SparseMla:
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return SparseMla(q.new_empty(q.shape), lse)


def sparse_mla_decode(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    extra_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_lens: Tensor | None,
    attn_sink: Tensor | None,
    plan: Tensor | None,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    *,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
    impl: str = "auto",
) -> SparseMla:
    return attended(q)


def sparse_mla_decode_paged(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    extra_cache: Tensor,
    extra_lens: Tensor,
    req_indices: Tensor,
    extra_block_table: Tensor,
    attn_sink: Tensor | None,
    plan: Tensor | None,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    *,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
    impl: str = "auto",
) -> SparseMla:
    return attended(q)


def sparse_mla_gathered(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lens: Tensor,
    attn_sink: Tensor | None,
    *,
    softmax_scale: float,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    per_head = q.shape[:2]
    return (
        q.new_empty(q.shape),
        q.new_empty(per_head, dtype=torch.float32),
        q.new_empty(per_head, dtype=torch.float32),
    )
