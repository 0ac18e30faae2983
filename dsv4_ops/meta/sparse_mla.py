"""Fakes of sparse MLA."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.tiles import METADATA_COLUMNS, PLAN_COLUMNS, programs_per_tile
from dsv4_ops.core.types import SparseMla


def sparse_mla_plan(
    swa_lens: Tensor, extra_lens: Tensor | None, *, num_heads: int, num_programs: int
) -> Tensor:
    num_pieces = swa_lens.shape[0] + programs_per_tile(num_heads, num_programs)
    return swa_lens.new_empty((num_pieces, PLAN_COLUMNS))


def flash_mla_metadata(
    swa_lens: Tensor,
    extra_lens: Tensor | None,
    *,
    swa_width: int,
    extra_width: int,
    num_sm_parts: int,
) -> Tensor:
    return swa_lens.new_empty((num_sm_parts + swa_lens.shape[0] + 1, METADATA_COLUMNS))


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
