"""The flash attention that torch brings, as an execution of our op.

It has one head size for keys and values, so that values are padded with zeros; it is given the keys
of a head in one tensor. It checks no bounds, leaves rows of no request as they were, and has +inf
as the log-sum-exp of no key, and of NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.reference.common import query_lens
from dsv4_ops.reference.mla_context import sees_any, visible_keys

_forward: Any = torch.ops.aten._flash_attention_forward.default


def mla_prefill(
    launch: object,
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    cu_seq_lens: Tensor,
    softmax_scale: float,
    causal: bool,
    impl: str = "auto",
) -> tuple[Tensor, ...]:
    num_tokens, num_heads, width = q.shape[0], int(q.shape[1]), int(q.shape[2])
    num_k, value_dim = v.shape[0], int(v.shape[2])
    if num_tokens == 0 or num_k == 0 or query_start_loc.shape[0] == 1:
        out = q.new_zeros((num_tokens, num_heads, value_dim))
        return out, q.new_full((num_tokens, num_heads), -torch.inf, dtype=torch.float32)
    starts = query_start_loc.clamp(0, num_tokens)
    keys = cu_seq_lens.clamp(0, num_k)
    used = query_lens(keys)
    if causal:  # the last query that there is sees as many keys less as there are queries behind it
        used = (used - (query_start_loc - starts)[1:].clamp(min=0)).clamp(min=0)
    tokens = torch.ops.dsv4_ops.token_map.default(
        query_start_loc, query_lens(query_start_loc), num_tokens=num_tokens
    )
    seen = visible_keys(*tokens, query_start_loc, cu_seq_lens, num_k, causal)
    if causal:  # P of a key that a query does not see is 0, and 0 * NaN would be NaN
        number = v.isfinite().all(2)
        lost = sees_any(~number, *seen)
        v = torch.where(number[..., None], v, 0.0)
    k = torch.cat([k_nope, k_pe[:, None].expand(-1, num_heads, -1)], 2)
    out, lse, *_ = _forward(
        q if q.stride(2) == 1 else q.contiguous(), k, pad(v, (0, width - value_dim)), starts, keys,
        num_tokens, num_k, 0.0, causal, False, scale=softmax_scale, seqused_k=used,
    )  # fmt: skip
    sees = (seen[0] < seen[1])[:, None]
    lse = torch.where(sees, torch.where(lse.T < torch.inf, lse.T, torch.nan), -torch.inf)
    out = torch.where(sees[..., None], out[..., :value_dim], 0.0)
    if causal:
        out = torch.where(lost[..., None], torch.nan, out)
    # dense strides, as the fake has them, of sizes of 1 too
    return tuple(each.clone(memory_format=torch.contiguous_format) for each in (out, lse))
