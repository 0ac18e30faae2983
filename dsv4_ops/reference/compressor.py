"""References of the ops of the KV compressor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.core.layout import IndexerLayout, PlainLayout
from dsv4_ops.core.types import ABSENT
from dsv4_ops.reference.common import masked_index, materialized, runs_on_cpu, take, valid_tokens
from dsv4_ops.reference.indexer import quantize_and_insert_indexer_k
from dsv4_ops.reference.kv_cache import insert_k_cache, quantize_and_insert_k_cache
from dsv4_ops.reference.pages import Columns, insert_rows, locate
from dsv4_ops.reference.rotation import rotate_values


def save_compressor_states(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    *,
    compress_ratio: int,
    block_size: int,
) -> None:
    width = ape.shape[1]
    exists = positions >= 0
    bias = take(ape, torch.where(exists, positions, 0) % compress_ratio)
    rows = torch.cat([kv_score[:, :width], kv_score[:, width:] + bias], 1)
    slots = torch.where(exists, slot_mapping, ABSENT)
    columns = Columns(block_size, 0, 2 * width, 2 * width)
    insert_rows(states, rows, slots, columns)


def finishing_tokens(
    positions: Tensor, req_indices: Tensor, slot_mapping: Tensor, num_reqs: int, compress_ratio: int
) -> Tensor:
    """Flag the tokens that are the last of their window and have a slot for the window's row."""
    valid = valid_tokens(positions, req_indices, num_reqs) & (slot_mapping >= 0)
    return valid & (torch.where(valid, positions, 0) % compress_ratio == compress_ratio - 1)


class _Ends(NamedTuple):
    """The tokens whose windows are computed.

    A traced call computes a window for every token. An eager call on a CPU computes only finished
    windows, of which there is one per 4 or 128 tokens."""

    token: Tensor
    positions: Tensor
    req_indices: Tensor
    slot_mapping: Tensor
    finishes: Tensor


def _ends(
    positions: Tensor, req_indices: Tensor, slot_mapping: Tensor, num_reqs: int, compress_ratio: int
) -> _Ends:
    finishes = finishing_tokens(positions, req_indices, slot_mapping, num_reqs, compress_ratio)
    if runs_on_cpu(positions):
        token = finishes.nonzero().squeeze(1)
        tensors = (positions, req_indices, slot_mapping, finishes)
        return _Ends(token, *(each[token] for each in tensors))
    token = torch.arange(positions.shape[0], device=positions.device)
    return _Ends(token, positions, req_indices, slot_mapping, materialized(finishes))


def _window(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    state_block_table: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    ends: _Ends,
    head_dim: int,
    compress_ratio: int,
    overlap: bool,
    state_block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the kv and the biased score [num_ends, rows, head_dim] of the window that each token
    finishes, and the mask of existing rows [num_ends, rows, 1]."""
    width = ape.shape[1]
    num_rows = compress_ratio * (2 if overlap else 1)
    row = torch.arange(num_rows, device=positions.device)
    back = num_rows - 1 - row
    position = ends.positions[:, None] - back
    in_window = ends.finishes[:, None] & (position >= 0)
    # rows of this call's tokens are in kv_score, at a fixed distance from the finishing token
    token = ends.token[:, None] - back
    near = in_window & (token >= 0)
    token = torch.where(near, token, 0)
    near = near & (take(req_indices, token) == ends.req_indices[:, None])
    near = near & (take(positions, token) == position)
    pages, state_rows = locate(
        state_block_table, ends.req_indices[:, None], position, in_window & ~near, state_block_size
    )
    stored = (pages >= 0) & (pages < states.shape[0])
    # the first half of an overlapping window is the previous window, in the left columns
    column = torch.where(row < compress_ratio, 0, width - head_dim)[:, None]
    column = column + torch.arange(head_dim, device=positions.device)
    token, pages = materialized(token)[..., None], materialized(pages)[..., None]
    near, stored = materialized(near)[..., None], materialized(stored)[..., None]
    first = materialized(state_rows * (2 * width))[..., None]

    def values(offset: int) -> tuple[Tensor, Tensor]:
        fresh = masked_index(kv_score, near, [token, column + offset], 0)
        old = masked_index(states, stored, [pages, first + column + offset], 0)
        return fresh, old

    bias = torch.ops.aten._unsafe_index.Tensor(ape, [row[:, None] % compress_ratio, column])
    kv = torch.where(near, *values(0))
    fresh, old = values(width)
    return kv, torch.where(near, fresh + bias, old), near | stored


def _weighted_sum(kv: Tensor, score: Tensor, exists: Tensor) -> Tensor:
    """Sum the rows of a window, weighted by a softmax per channel."""
    row_max = torch.where(exists, score, float("-inf")).amax(1, keepdim=True)
    weight = torch.where(exists, torch.exp(score - row_max), 0.0)
    summed: Tensor = (weight * kv).sum(1) / weight.sum(1)
    return summed


def compress_and_insert(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    state_block_table: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
    overlap: bool,
    eps: float,
    state_block_size: int,
    block_size: int,
    layout: str,
) -> None:
    # row sizes come from the configuration, so they are constants in compiled code
    num_reqs, head_dim = state_block_table.shape[0], int(norm_weight.shape[0])
    ends = _ends(positions, req_indices, slot_mapping, num_reqs, compress_ratio)
    sources = (kv_score, ape, states, state_block_table, positions, req_indices)
    sizes = (head_dim, compress_ratio, overlap, state_block_size)
    rows = _weighted_sum(*_window(*sources, ends, *sizes))
    rows = rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + eps) * norm_weight
    first = torch.where(ends.finishes, ends.positions, 0) // compress_ratio * compress_ratio
    rows = rotate_values(rows, first, cos_sin_cache)
    slots = torch.where(ends.finishes, ends.slot_mapping, ABSENT)
    if layout == PlainLayout.tag:
        insert_k_cache(rows.to(k_cache.dtype), k_cache, slots)
        return
    insert = quantize_and_insert_k_cache
    if layout == IndexerLayout.tag:
        insert = quantize_and_insert_indexer_k
    insert(rows.to(torch.bfloat16), k_cache, slots, block_size=block_size, layout=layout)


def save_and_compress(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
    overlap: bool,
    eps: float,
    state_block_size: int,
    block_size: int,
    layout: str,
    save_first: bool = False,
) -> None:
    source = (kv_score, ape, states)
    windows = (positions, req_indices, norm_weight, cos_sin_cache, k_cache, slot_mapping)
    settings: dict[str, Any] = {"overlap": overlap, "eps": eps, "layout": layout}
    settings |= {"state_block_size": state_block_size, "block_size": block_size}
    ratio = compress_ratio

    def save() -> None:
        saved = (*source, state_slot_mapping, positions)
        save_compressor_states(*saved, compress_ratio=ratio, block_size=state_block_size)

    if save_first:
        save()
    compress_and_insert(*source, state_block_table, *windows, compress_ratio=ratio, **settings)
    if not save_first:
        save()
