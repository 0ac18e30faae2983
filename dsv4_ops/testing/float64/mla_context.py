"""Attention over chunked contexts, and the merge of its parts, in float64 from the formulas."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.testing.case import Exact

_LN_2 = 0.6931471805599453


def exact_merge(outs: list[Tensor], lses: list[Tensor], lse_base: str) -> tuple[Exact, Exact]:
    """Compute the merged output and log-sum-exp.

    Error scale: the subtraction of the maximum rounds, and so does exp; these errors become
    relative errors of a weight. The sums, the quotient and the products round once per part, and a
    few times more.
    """
    unit = 1.0 if lse_base == "e" else _LN_2
    every = torch.stack([lse.to(torch.float64) * unit for lse in lses])
    every = torch.where(every < torch.inf, every, -torch.inf)  # also replaces NaN
    total = torch.logsumexp(every, 0)
    weights = torch.exp(every - total).nan_to_num(0.0)[..., None]
    values = torch.stack([out.to(torch.float64) for out in outs])
    values = torch.where(weights > 0, values, 0.0)
    spread = torch.where(
        total == -torch.inf, 0.0, (every - every.amax(0)).nan_to_num(0.0, 0.0, 0.0)
    )
    relative = len(outs) + 4 + 2 * torch.where(weights[..., 0] > 0, spread.abs(), 0.0)
    dtype = torch.promote_types(outs[0].dtype, outs[-1].dtype)
    if dtype != torch.float32:
        relative = torch.ones_like(relative)
    magnitude = (weights * values.abs() * relative[..., None]).sum(0)
    size = total.abs().nan_to_num(0.0, 0.0, 0.0) + len(outs) + 4
    return Exact((weights * values).sum(0), magnitude), Exact(total / unit, size / unit)


def exact_share(out: Tensor, lse: Tensor, lses: Tensor, lse_base: str) -> tuple[Exact, Exact]:
    """Compute one rank's part of a merge, and the log-sum-exp of all ranks. For the error scale,
    see ``exact_merge``."""
    others = [torch.zeros_like(out)] * lses.shape[0]
    _, total = exact_merge(others, list(lses), lse_base)
    unit = 1.0 if lse_base == "e" else _LN_2
    own = lse.to(torch.float64)
    weight = torch.exp((own - total.value) * unit).where(own < torch.inf, 0.0).nan_to_num(0.0)
    value = torch.where(weight[..., None] > 0, weight[..., None] * out.to(torch.float64), 0.0)
    relative = torch.ones_like(weight)
    if out.dtype == torch.float32:
        relative = lses.shape[0] + 4 + 2 * ((own - total.value) * unit).abs().nan_to_num(0.0, 0.0)
    return Exact(value, value.abs() * relative[..., None]), total


def exact_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    cu_seq_lens: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    **unused: Any,
) -> tuple[Exact, Exact]:
    """Compute output and log-sum-exp, request by request. For error scales, see
    ``exact_attention``."""
    num_tokens, num_heads, _ = q.shape
    shape = (num_tokens, num_heads, v.shape[2])
    value, magnitude = (q.new_zeros(shape, dtype=torch.float64) for _ in range(2))
    total = q.new_full(shape[:2], -torch.inf, dtype=torch.float64)
    error = torch.zeros_like(total)
    starts, keys = query_start_loc.tolist(), cu_seq_lens.clamp(0, v.shape[0]).tolist()
    for request, (first, end) in enumerate(pairwise(starts)):
        key_start, key_end = keys[request], max(keys[request], keys[request + 1])
        for token in range(max(first, 0), min(end, num_tokens)):
            stop = key_end - (end - 1 - token) * causal
            if stop <= key_start:
                continue
            visible = slice(key_start, stop)
            shared = k_pe[visible, None].expand(-1, num_heads, -1)
            k = torch.cat([k_nope[visible], shared], 2).to(torch.float64)
            query, values = q[token].to(torch.float64), v[visible].to(torch.float64)
            logits = torch.einsum("hd,khd->hk", query, k) * softmax_scale
            lse = torch.logsumexp(logits, 1)
            weights = torch.exp(logits - lse[:, None])
            size = torch.einsum("hd,khd->hk", query.abs(), k.abs()).amax(1) * softmax_scale
            spread = torch.einsum("hk,khd->hd", weights, values.abs())
            if q.dtype == torch.float32:
                spread = spread * (5 + 2 * logits.shape[1] ** 0.5 + 3 * size[:, None])
            value[token] = torch.einsum("hk,khd->hd", weights, values)
            magnitude[token], total[token] = spread, lse
            error[token] = 1 + 3 * size + 3 * lse.abs()
    return Exact(value, magnitude), Exact(total, error)
