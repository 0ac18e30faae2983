"""Attention over chunked contexts: the chunk plan, attention to one chunk, and the merge of results
by their log-sum-exps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.core.types import INT32_MAX
from dsv4_ops.reference.batch import token_map
from dsv4_ops.reference.common import gather_rows, query_lens, take

PACKED = "packed"
NATURAL = "e"


def context_chunks(
    context_lens: Tensor,
    *,
    workspace_rows: int,
    max_chunks: int,
    chunk_plan: str,
    block_size: int,
    cp_world_size: int,
    cp_interleave: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    turn = local_turn(cp_world_size, cp_interleave)
    lens = context_lens.long().clamp(min=0)
    padded = (lens + turn * cp_world_size - 1) // (turn * cp_world_size) * turn
    chunk = torch.arange(max_chunks, device=lens.device)[:, None]
    if chunk_plan == PACKED:
        size = torch.full_like(padded[:1].sum(), workspace_rows // cp_world_size // turn * turn)
        first = chunk * size - (padded.cumsum(0) - padded)
        num_chunks = (padded.sum() + size - 1) // size
    else:
        align = math.lcm(block_size, turn * cp_world_size)
        num_with_context = (lens > 0).sum()
        global_size = workspace_rows // num_with_context.clamp(min=1) // align * align
        size = global_size // cp_world_size
        first = (chunk * size).expand(-1, lens.shape[0])
        longest = pad(lens, (0, 1)).amax()
        num_needed = (longest + global_size - 1) // global_size.clamp(min=1)
        num_chunks = torch.where((global_size == 0) & (longest > 0), INT32_MAX, num_needed)
    start = torch.minimum(first.clamp(min=0), padded)
    stop = torch.minimum((first + size).clamp(min=0), padded)
    local = stop - start
    whole = torch.minimum((lens - start * cp_world_size).clamp(min=0), local * cp_world_size)
    return (
        start.to(torch.int32),
        _cumulative(whole),
        _cumulative(local),
        num_chunks.clamp(max=INT32_MAX).to(torch.int32).reshape(1),
    )


def local_turn(cp_world_size: int, cp_interleave: int) -> int:
    """Return the number of adjacent rows that a rank owns at a time. With one rank, the interleave
    does not matter, so return 1."""
    return cp_interleave if cp_world_size > 1 else 1


def _cumulative(lens: Tensor) -> Tensor:
    return pad(lens.cumsum(1), (1, 0)).to(torch.int32)


def merge_attn_states(
    prefix_out: Tensor,
    prefix_lse: Tensor,
    suffix_out: Tensor,
    suffix_lse: Tensor,
    *,
    lse_base: str,
) -> tuple[Tensor, Tensor]:
    exp, log = functions(lse_base)
    prefix, suffix = existing(prefix_lse), existing(suffix_lse)
    row_max = torch.maximum(prefix, suffix)
    origin = torch.where(row_max == -torch.inf, 0.0, row_max)
    weights = exp(prefix - origin), exp(suffix - origin)
    total = weights[0] + weights[1]
    summed = weighted(prefix_out, weights[0]) + weighted(suffix_out, weights[1])
    dtype = torch.promote_types(prefix_out.dtype, suffix_out.dtype)
    return _over(summed, total).to(dtype), origin + log(total)


def merge_states(outs: Tensor, lses: Tensor, *, lse_base: str) -> tuple[Tensor, Tensor]:
    exp, log = functions(lse_base)
    parts = existing(lses)
    row_max = parts.amax(0)
    origin = torch.where(row_max == -torch.inf, 0.0, row_max)
    weights = exp(parts - origin)
    total = weights.sum(0)
    return _over(weighted(outs, weights).sum(0), total).to(outs.dtype), origin + log(total)


def functions(lse_base: str) -> tuple[Any, Any]:
    """Return the functions exp and log in the base of the log-sum-exps."""
    return (torch.exp, torch.log) if lse_base == NATURAL else (torch.exp2, torch.log2)


def existing(lse: Tensor) -> Tensor:
    """Return ``lse`` with -inf for NaN and +inf, which libraries write if there is no key."""
    return torch.where(lse < torch.inf, lse, -torch.inf)


def weighted(out: Tensor, weight: Tensor) -> Tensor:
    """Return ``out * weight`` in float32; 0 where the weight is 0, even if ``out`` is NaN."""
    weight = weight[..., None]
    return torch.where(weight > 0, weight * out.to(torch.float32), 0.0)


def _over(summed: Tensor, total: Tensor) -> Tensor:
    total = total[..., None]
    return torch.where(total > 0, summed / total, 0.0)


def mla_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    cu_seq_lens: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    tokens = token_map(query_start_loc, query_lens(query_start_loc), num_tokens=q.shape[0])
    start, stop = visible_keys(*tokens, query_start_loc, cu_seq_lens, v.shape[0], causal)
    mask = visible(start, stop, v.shape[0])
    nope = k_nope.shape[2]
    shared = k_pe.to(torch.float32).T
    outs, lses = [], []
    # one head at a time, because masks and logits of all heads take too much memory
    for head in range(q.shape[1]):
        query, value = q[:, head].to(torch.float32), v[:, head].to(torch.float32)
        logits = query[:, :nope] @ k_nope[:, head].to(torch.float32).T + query[:, nope:] @ shared
        logits = torch.where(mask, logits * softmax_scale, -torch.inf)
        row_max = pad(logits, (0, 1), value=-torch.inf).amax(-1)
        origin = torch.where(row_max == -torch.inf, 0.0, row_max)
        weights = torch.exp(logits - origin[:, None])
        total = weights.sum(-1)
        # a weight of 0 times a NaN in the values of another request would be NaN
        number = value.isfinite()
        summed = weights.to(q.dtype).to(torch.float32) @ torch.where(number, value, 0.0)
        poisoned = (mask & ~number.all(-1)).any(-1)
        summed = torch.where(poisoned[:, None], torch.nan, summed)
        outs.append(torch.where(start[:, None] < stop[:, None], summed / total[:, None], 0.0))
        lses.append(origin + torch.log(total))
    return torch.stack(outs, 1).to(q.dtype), torch.stack(lses, 1)


def visible_keys(
    req_indices: Tensor,
    query: Tensor,
    query_start_loc: Tensor,
    cu_seq_lens: Tensor,
    num_k: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return the key rows [start, stop) that each token sees. ``query`` is the token's index within
    its request.

    Both bounds are 0 for a token of no request."""
    exists = req_indices >= 0
    start, stop = (
        gather_rows(cu_seq_lens, req_indices + end, exists).clamp(0, num_k).long() for end in (0, 1)
    )
    if causal:
        queries = gather_rows(query_lens(query_start_loc), req_indices, exists)
        stop = stop - torch.where(exists, queries - 1 - query, 0)
    return start, torch.maximum(start, stop)


def visible(start: Tensor, stop: Tensor, num_k: int) -> Tensor:
    """Return the mask [num_tokens, num_k] of the keys that each token sees."""
    key = torch.arange(num_k, device=start.device)
    return (key >= start[:, None]) & (key < stop[:, None])


def sees_any(flags: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Whether any of the rows [start, stop) that a token sees is flagged.

    ``flags`` is [num_k, num_heads]; the result is [num_tokens, num_heads]."""
    counts = pad(flags.cumsum(0), (0, 0, 1, 0))
    return take(counts, stop) > take(counts, start)
