"""Sparse MLA straight from block tables: window, then all or the selected compressed rows."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import SparseMla
from dsv4_ops.reference.common import valid_tokens, visible_rows
from dsv4_ops.reference.pages import locate
from dsv4_ops.reference.sparse_mla import over_both, stored_keys


def window_keys(
    cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    window_size: int,
    block_size: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Keys [num_tokens, window_size, head_dim] up to every token's own, and which exist."""
    back = torch.arange(1 - window_size, 1, device=positions.device)
    wanted = valid_tokens(positions, req_indices, block_table.shape[0])[:, None]
    place = torch.where(wanted, positions[:, None] + back, -1)
    pages, rows = locate(block_table, req_indices[:, None], place, wanted, block_size)
    return stored_keys(cache, pages, rows, block_size=block_size, layout=layout)


def compressed_keys(
    cache: Tensor,
    topk_indices: Tensor | None,
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    compress_ratio: int,
    block_size: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Keys of the selected rows, or of all of the block table, and which of them a token sees."""
    if topk_indices is None:
        row = torch.arange(block_table.shape[1] * block_size, device=positions.device)[None, :]
    else:
        row = topk_indices.long()
    visible = visible_rows(positions, compress_ratio)[:, None]
    wanted = valid_tokens(positions, req_indices, block_table.shape[0])[:, None]
    wanted = wanted & (row >= 0) & (row < visible)
    pages, rows = locate(block_table, req_indices[:, None], row, wanted, block_size)
    return stored_keys(cache, pages, rows.expand(pages.shape), block_size=block_size, layout=layout)


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
    swa = window_keys(
        swa_cache,
        positions,
        req_indices,
        swa_block_table,
        window_size=window_size,
        block_size=swa_block_size,
        layout=layout,
    )
    extra = None
    if extra_cache is not None and extra_block_table is not None:
        extra = compressed_keys(
            extra_cache,
            topk_indices,
            positions,
            req_indices,
            extra_block_table,
            compress_ratio=compress_ratio,
            block_size=extra_block_size,
            layout=layout,
        )
    return over_both(q, swa, extra, attn_sink, softmax_scale)
