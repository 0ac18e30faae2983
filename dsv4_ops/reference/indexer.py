"""References of the lightning indexer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.core.layout import IndexerLayout, PlainLayout
from dsv4_ops.core.tiles import SCHEDULE_KEYS
from dsv4_ops.core.types import ABSENT, INT32_MAX, IndexerQuery
from dsv4_ops.reference.batch import token_map
from dsv4_ops.reference.common import dense, runs_on_cpu, valid_tokens, visible_rows
from dsv4_ops.reference.indices import global_topk_indices_and_lens
from dsv4_ops.reference.kv_cache import gathered_bits
from dsv4_ops.reference.pages import gather_rows, insert_parts, locate, row_columns
from dsv4_ops.reference.quantization import (
    as_e4m3,
    bf16_bits,
    e4m3_values,
    float_values,
    from_bytes,
    quantize,
    scale_values,
    to_bytes,
)
from dsv4_ops.reference.rotation import rotate_values


def quantize_and_insert_indexer_k(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, *, block_size: int, layout: str
) -> None:
    indexer = IndexerLayout(block_size)
    codes, scales = quantize(bf16_bits(k[: slot_mapping.shape[0]]), indexer.quant_block)
    parts = {0: codes, indexer.data_bytes: to_bytes(scales << 23, indexer.scale_bytes)}
    insert_parts(indexer, parts, k_cache, slot_mapping)


def gather_indexer_k(
    k_cache: Tensor,
    cu_seq_lens: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_rows: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    lens = cu_seq_lens[1:] - cu_seq_lens[:-1]
    req_indices, positions = token_map(cu_seq_lens, lens, num_tokens=num_rows)
    return keys_at(k_cache, req_indices, positions, block_table, block_size=block_size)


def keys_at(
    k_cache: Tensor, req_indices: Tensor, positions: Tensor, block_table: Tensor, *, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of one cache row per (request, position); zeros for absent
    rows."""
    pages, rows = locate(block_table, req_indices, positions, req_indices >= 0, block_size)
    return _stored(k_cache, pages, rows, block_size)


def _stored(k_cache: Tensor, pages: Tensor, rows: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the codes [..., head_dim] and scales [...] of an FP8 cache at (block, row)."""
    indexer = IndexerLayout(block_size)

    def stored(byte: int, width: int) -> Tensor:
        return gather_rows(k_cache, pages, rows, row_columns(indexer, byte, width))

    scales = from_bytes(stored(indexer.data_bytes, indexer.scale_bytes), indexer.scale_bytes)
    return stored(0, indexer.data_bytes), scales.squeeze(-1).view(torch.float32)


def paged_mqa_logits_metadata(seq_lens: Tensor, *, block_size: int, num_sms: int) -> Tensor:
    if seq_lens.dim() == 2:
        seq_lens = pad(seq_lens, (0, 1)).amax(1)  # a request without tokens has no keys
    splits = (seq_lens.long().clamp(min=0) + SCHEDULE_KEYS - 1) // SCHEDULE_KEYS
    before = pad(splits.cumsum(0), (1, 0))
    sm = torch.arange(num_sms + 1, device=seq_lens.device)
    share, rest = splits.sum() // num_sms, splits.sum() % num_sms
    start = (sm * share + torch.minimum(sm, rest))[:, None]
    # compare with all entries at once: the loads of a search would wait for one another
    reached = before <= start
    request = reached.sum(1) - 1
    split = start[:, 0] - torch.where(reached, before, 0).amax(1)
    return torch.stack((request, split), 1).to(torch.int32)


def indexer_quantize_q(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    softmax_scale: float,
    rope_first: bool = False,
    interleaved: bool = True,
) -> IndexerQuery:
    rotated = rotate_values(
        q.to(torch.float32),
        positions,
        cos_sin_cache,
        rope_first=rope_first,
        interleaved=interleaved,
    ).to(q.dtype)
    codes, scale = quantize(bf16_bits(rotated), IndexerLayout.head_dim)
    scaled = weights.to(torch.float32) * scale_values(scale).squeeze(-1) * softmax_scale
    return IndexerQuery(as_e4m3(dense(codes)), dense(scaled))


_TOKENS_AT_ONCE = 128
"""Maximum number of tokens whose products with all keys are in memory at once, in eager mode on a
CPU."""


def scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Compute float32 scores [num_tokens, num_keys] from float32 queries [num_tokens, heads, dim]
    and keys [num_keys, dim] or [num_tokens, num_keys, dim]."""
    products = torch.matmul(q, keys.transpose(-1, -2)).relu()
    summed: Tensor = (products * weights.unsqueeze(-1)).sum(1)
    return summed


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
    """Compute the scores [num_tokens, num_rows] of the first ``num_rows`` rows of each token's
    request, and the mask of the rows that exist and are among the first ``lens``."""
    if runs_on_cpu(q):
        tensors = (q, weights, k_cache, lens, req_indices, block_table)
        return _scores_by_request(*tensors, block_size, num_rows, layout)
    row = torch.arange(num_rows, device=q.device).unsqueeze(0)
    in_length = row < lens.unsqueeze(1)
    pages, rows = locate(block_table, req_indices.unsqueeze(1), row, in_length, block_size)
    keys, scales, exists = _keys(k_cache, pages, rows, block_size, layout)
    return scores(float_values(q), weights, keys) * scales, exists


def _scores_by_request(
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
    """Compute ``paged_scores``, but gather the keys of a request once for many of its tokens."""
    found = torch.zeros(q.shape[0], num_rows, dtype=torch.float32, device=q.device)
    exists = torch.zeros_like(found, dtype=torch.bool)
    sees = lens > 0
    for request in req_indices[sees].unique():
        (tokens,) = torch.where(sees & (req_indices == request))
        for some in tokens.split(_TOKENS_AT_ONCE):
            longest = min(int(lens[some].max()), num_rows)
            row = torch.arange(longest, device=q.device).unsqueeze(0)
            pages, rows = locate(block_table, request.view(1, 1), row, row >= 0, block_size)
            keys, scales, stored = _keys(k_cache, pages, rows, block_size, layout)
            part = scores(q[some].to(torch.float32), weights[some], keys[0]) * scales
            found[some, :longest] = part
            exists[some, :longest] = stored & (row < lens[some].unsqueeze(1))
    return found, exists


def _keys(
    k_cache: Tensor, pages: Tensor, rows: Tensor, block_size: int, layout: str
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Return float32 keys at (block, row), their scales, and which keys exist."""
    exists = (pages >= 0) & (pages < k_cache.shape[0])
    if layout == PlainLayout.tag:
        values = gathered_bits(k_cache, pages, rows).view(k_cache.dtype)
        return values.to(torch.float32), 1.0, exists
    codes, scales = _stored(k_cache, pages, rows, block_size)
    return e4m3_values(codes), scales, exists


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
    tensors = (q, weights, k_cache, lens.reshape(-1), req_indices, block_table)
    logits, exists = paged_scores(*tensors, block_size, num_rows, layout)
    return torch.where(exists, logits, -torch.inf)


def indexer_logits_ragged(
    q: Tensor, weights: Tensor, k: Tensor, scales: Tensor, row_start: Tensor, row_stop: Tensor
) -> Tensor:
    row = torch.arange(k.shape[0], device=q.device)
    inside = (row >= row_start.unsqueeze(1)) & (row < row_stop.unsqueeze(1))
    logits = scores(float_values(q), weights, e4m3_values(k)) * scales
    return torch.where(inside, logits, -torch.inf)


ABSENT_KEY = -(2**31)
"""Sort key of a row that is no candidate: below the sort key of any score."""

_NAN_KEY = ABSENT_KEY + 1
_INFINITY = 0x7F800000


def sortable(scores: Tensor) -> Tensor:
    """Map float32 scores to int32 sort keys: -0 equals 0, and NaN is below every number."""
    bits = scores.view(torch.int32)
    absolute = bits & INT32_MAX
    keys = torch.where(bits < 0, -absolute - 1, bits)
    keys = torch.where(absolute == 0, 0, keys)
    return torch.where(absolute > _INFINITY, _NAN_KEY, keys)


def best(keys: Tensor, topk: int, column: Tensor | None = None) -> Tensor:
    """Return the columns of the ``topk`` largest sort keys of every row, sorted by column; unused
    entries are -1.

    Ties go to the lower column. If ``column`` is not None, its int64 numbers replace the indices of
    columns; they are below 2**31 - 1, in any order."""
    if column is None:
        column = torch.arange(keys.shape[1], device=keys.device)
    # sort key and column in one integer, so that there are no ties
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
    positions, (num_reqs, max_blocks) = positions.reshape(-1), block_table.shape
    valid = valid_tokens(positions, req_indices, num_reqs)
    lens = torch.where(valid, visible_rows(positions, compress_ratio), 0)
    tensors = (q, weights, k_cache, lens, req_indices, block_table)
    scores, exists = paged_scores(*tensors, block_size, max_blocks * block_size, layout)
    rows = best(torch.where(exists, sortable(scores), ABSENT_KEY), topk)
    if not slots:
        return rows
    return global_topk_indices_and_lens(rows, req_indices, block_table, block_size=block_size)[0]
