"""Lightning indexer: the selection of compressed rows, exactly."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.core.types import ABSENT, INT32_MAX
from dsv4_ops.reference.common import valid_tokens, visible_rows
from dsv4_ops.reference.indexer import paged_scores
from dsv4_ops.reference.topk_indices import global_topk_indices_and_lens

ABSENT_KEY = -(2**31)
"""Key of what is no candidate, below that of any score."""

_NAN_KEY = ABSENT_KEY + 1
_INFINITY = 0x7F800000


def sortable(scores: Tensor) -> Tensor:
    """int32 keys in the order of float32 scores: -0 is 0, and NaN is below every number."""
    bits = scores.view(torch.int32)
    magnitude = bits & INT32_MAX
    keys = torch.where(bits < 0, -magnitude - 1, bits)
    keys = torch.where(magnitude == 0, 0, keys)
    return torch.where(magnitude > _INFINITY, _NAN_KEY, keys)


def best(keys: Tensor, topk: int) -> Tensor:
    """Ascending columns of the ``topk`` largest keys of every row, of equal ones the first, then
    -1."""
    column = torch.arange(keys.shape[1], device=keys.device)
    # key and column in one integer, whose order leaves no tie
    order = (keys.to(torch.int64) << 32) | (INT32_MAX - column)
    order = pad(order, (0, topk), value=torch.iinfo(torch.int64).min)
    chosen = order.topk(topk, dim=1, sorted=False).values
    last = torch.where(chosen >> 32 > ABSENT_KEY, INT32_MAX - (chosen & INT32_MAX), INT32_MAX)
    columns = last.sort(dim=1).values
    return torch.where(columns < INT32_MAX, columns, ABSENT).to(torch.int32)


def indexer_topk(logits: Tensor, lens: Tensor, *, topk: int) -> Tensor:
    column = torch.arange(logits.shape[1], device=logits.device)
    candidate = (column < lens.unsqueeze(1)) & (logits != -torch.inf)
    return best(torch.where(candidate, sortable(logits), ABSENT_KEY), topk)


def indexer_select(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    schedule: Tensor | None = None,
    *,
    block_size: int,
    compress_ratio: int,
    topk: int,
    layout: str,
    slots: bool = False,
    impl: str = "auto",
) -> Tensor:
    num_reqs, max_blocks = block_table.shape
    valid = valid_tokens(positions, req_indices, num_reqs)
    lens = torch.where(valid, visible_rows(positions, compress_ratio), 0)
    scores, exists = paged_scores(
        q,
        weights,
        k_cache,
        lens,
        req_indices,
        block_table,
        block_size,
        max_blocks * block_size,
        layout,
    )
    rows = best(torch.where(exists, sortable(scores), ABSENT_KEY), topk)
    if not slots:
        return rows
    return global_topk_indices_and_lens(rows, req_indices, block_table, block_size=block_size)[0]
