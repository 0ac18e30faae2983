"""Lightning indexer: queries in FP8, and the scores of compressed rows."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import IndexerLayout, PlainLayout
from dsv4_ops.core.types import IndexerQuery
from dsv4_ops.reference.common import dense
from dsv4_ops.reference.pages import gather_rows, locate, row_columns
from dsv4_ops.reference.plain_cache import gathered_bits
from dsv4_ops.reference.quantization import bf16_bits, from_bytes, quantize, scale_values
from dsv4_ops.reference.rotation import rotate_tail


def indexer_quantize_q(
    q: Tensor, weights: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, softmax_scale: float
) -> IndexerQuery:
    rotated = rotate_tail(q.to(torch.float32), positions, cos_sin_cache).to(q.dtype)
    codes, scale = quantize(bf16_bits(rotated), IndexerLayout.head_dim)
    scaled = weights.to(torch.float32) * scale_values(scale).squeeze(-1) * softmax_scale
    return IndexerQuery(dense(codes).view(torch.float8_e4m3fn), dense(scaled))


def scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """float32 [num_tokens, num_keys] scores of float32 queries [num_tokens, heads, dim] over keys
    [num_keys, dim] or [num_tokens, num_keys, dim]."""
    products = torch.matmul(q, keys.transpose(-1, -2)).relu()
    summed: Tensor = (products * weights.unsqueeze(-1)).sum(1)
    return summed


def numbers(codes: Tensor) -> Tensor:
    """float32 values of uint8 e4m3 codes."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def paged_scores(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    block_size: int,
    num_rows: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Scores [num_tokens, num_rows] of the first rows of every token's request, and which of these
    are among the first ``lens`` and exist."""
    row = torch.arange(num_rows, device=q.device).unsqueeze(0)
    wanted = row < lens.unsqueeze(1)
    pages, rows = locate(block_table, req_indices.unsqueeze(1), row, wanted, block_size)
    exists = (pages >= 0) & (pages < k_cache.shape[0])
    if layout == PlainLayout.tag:
        values = gathered_bits(k_cache, pages, rows).view(k_cache.dtype)
        return scores(q.to(torch.float32), weights, values.to(torch.float32)), exists
    indexer = IndexerLayout(block_size)

    def stored(byte: int, width: int) -> Tensor:
        return gather_rows(k_cache, pages, rows, row_columns(indexer, byte, width, q.device))

    scales = from_bytes(stored(indexer.data_bytes, indexer.scale_bytes), indexer.scale_bytes)
    keys = numbers(stored(0, indexer.data_bytes))
    found = scores(q.to(torch.float32), weights, keys)
    return found * scales.squeeze(-1).view(torch.float32), exists


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    schedule: Tensor | None = None,
    *,
    block_size: int,
    num_rows: int,
    layout: str,
    impl: str = "auto",
) -> Tensor:
    found, exists = paged_scores(
        q, weights, k_cache, lens, req_indices, block_table, block_size, num_rows, layout
    )
    return torch.where(exists, found, -torch.inf)


def indexer_logits_ragged(
    q: Tensor, weights: Tensor, k: Tensor, scales: Tensor, row_start: Tensor, row_stop: Tensor
) -> Tensor:
    row = torch.arange(k.shape[0], device=q.device)
    inside = (row >= row_start.unsqueeze(1)) & (row < row_stop.unsqueeze(1))
    found = scores(q.to(torch.float32), weights, numbers(k)) * scales
    return torch.where(inside, found, -torch.inf)
