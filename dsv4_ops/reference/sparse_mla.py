"""Sparse MLA: every token attends to the rows that its own index lists name; keys are values."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import SparseMla, SparseMlaGathered
from dsv4_ops.reference.common import masked_index
from dsv4_ops.reference.kv_cache import row_bits
from dsv4_ops.reference.pages import locate, words
from dsv4_ops.reference.rotation import rotate_tail


def listed(indices: Tensor, lens: Tensor) -> Tensor:
    """Which entries of ``indices`` are among the first ``lens`` of their row and name a row."""
    column = torch.arange(indices.shape[1], device=indices.device)
    return (column < lens[:, None]) & (indices >= 0)


def stored_keys(
    cache: Tensor, pages: Tensor, rows: Tensor, *, block_size: int, layout: str
) -> tuple[Tensor, Tensor]:
    """Keys [..., head_dim] at (page, row) and which of them exist; zeros for the others."""
    exists = (pages >= 0) & (pages < cache.shape[0])
    bits = row_bits(cache, pages, rows, block_size=block_size, layout=layout)
    return bits.view(cache.dtype if layout == "plain" else torch.bfloat16), exists


def indexed_keys(
    cache: Tensor, indices: Tensor, lens: Tensor, *, block_size: int, layout: str
) -> tuple[Tensor, Tensor]:
    """Keys [num_tokens, width, head_dim] of the listed slots, and which of them exist."""
    wanted = listed(indices, lens)
    slots = torch.where(wanted, indices, 0)
    pages = torch.where(wanted, slots // block_size, -1)
    return stored_keys(cache, pages, slots % block_size, block_size=block_size, layout=layout)


def paged_keys(
    cache: Tensor,
    lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Keys of the first ``lens`` rows of every token's request, and which of them exist."""
    num_rows = block_table.shape[1] * block_size
    row = torch.arange(num_rows, device=lens.device)
    wanted = row < lens[:, None]
    pages, rows = locate(block_table, req_indices[:, None], row, wanted, block_size)
    return stored_keys(cache, pages, rows.expand(pages.shape), block_size=block_size, layout=layout)


def attend(
    q: Tensor, keys: Tensor, exists: Tensor, attn_sink: Tensor | None, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, largest logit and log-sum-exp of [num_tokens, num_heads, head_dim] queries over
    [num_tokens, num_keys, head_dim] keys.

    Sums in float32; of a bf16 query the weights are rounded to bf16 before they meet the values, as
    the tensor cores have them.
    """
    values = keys.to(torch.float32)
    logits = torch.matmul(q.to(torch.float32), values.mT) * softmax_scale
    logits = torch.where(exists[:, None, :], logits, -torch.inf)
    largest = logits.amax(-1)
    origin = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(logits - origin[..., None])
    total = weights.sum(-1)
    summed = torch.matmul(weights.to(q.dtype).to(torch.float32), values)
    sink = torch.zeros_like(total) if attn_sink is None else torch.exp(attn_sink - origin)
    out = summed / (total + sink)[..., None]
    out = torch.where(total[..., None] == 0.0, 0.0, out)
    return out.to(q.dtype), largest, origin + torch.log(total)


def over_both(
    q: Tensor,
    swa: tuple[Tensor, Tensor],
    extra: tuple[Tensor, Tensor] | None,
    attn_sink: Tensor | None,
    softmax_scale: float,
) -> SparseMla:
    both = [swa] if extra is None else [swa, extra]
    keys = torch.cat([keys for keys, _ in both], 1)
    exists = torch.cat([exists for _, exists in both], 1)
    out, _, lse = attend(q, keys, exists, attn_sink, softmax_scale)
    return SparseMla(out, lse)


def turned_back(
    attended: SparseMla, positions: Tensor | None, cos_sin_cache: Tensor | None
) -> SparseMla:
    """The output with the end of every head rotated back, as ``inverse_rope_group`` does."""
    if positions is None or cos_sin_cache is None:
        return attended
    out, lse = attended
    turned = rotate_tail(out.to(torch.float32), positions, cos_sin_cache, inverse=True)
    return SparseMla(turned.to(out.dtype), lse)


def sparse_mla_decode(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    extra_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_lens: Tensor | None,
    attn_sink: Tensor | None,
    plan: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    *,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
    impl: str = "auto",
) -> SparseMla:
    extra = None
    if extra_cache is not None and extra_indices is not None and extra_lens is not None:
        extra = indexed_keys(
            extra_cache, extra_indices, extra_lens, block_size=extra_block_size, layout=layout
        )
    swa = indexed_keys(swa_cache, swa_indices, swa_lens, block_size=swa_block_size, layout=layout)
    attended = over_both(q, swa, extra, attn_sink, softmax_scale)
    return turned_back(attended, positions, cos_sin_cache)


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
    plan: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    *,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
    impl: str = "auto",
) -> SparseMla:
    swa = indexed_keys(swa_cache, swa_indices, swa_lens, block_size=swa_block_size, layout=layout)
    extra = paged_keys(
        extra_cache,
        extra_lens,
        req_indices,
        extra_block_table,
        block_size=extra_block_size,
        layout=layout,
    )
    attended = over_both(q, swa, extra, attn_sink, softmax_scale)
    return turned_back(attended, positions, cos_sin_cache)


def sparse_mla_gathered(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lens: Tensor,
    attn_sink: Tensor | None,
    *,
    softmax_scale: float,
    impl: str = "auto",
) -> SparseMlaGathered:
    exists = listed(indices, lens) & (indices < kv.shape[0])
    column = torch.arange(kv.shape[1], device=kv.device)
    rows, mask, column = torch.broadcast_tensors(indices[..., None], exists[..., None], column)
    keys = masked_index(words(kv), mask, [rows, column], 0).view(kv.dtype)
    out, largest, lse = attend(q, keys, exists, attn_sink, softmax_scale)
    return SparseMlaGathered(out, largest, lse)
