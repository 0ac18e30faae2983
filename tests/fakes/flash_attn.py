"""Stand-in for torch's ragged flash attention: results as FlashAttention 2 has them."""

from typing import Any

import torch
from torch import Tensor


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    seqused_k: Tensor,
) -> tuple[Any, ...]:
    """Rows of no request are NaN, the log-sum-exp of no key and of NaN is +inf; what the library
    would read out of bounds, or with another head size, is an error."""
    assert query.dtype == key.dtype == value.dtype
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert query.shape[1:] == key.shape[1:] == value.shape[1:]
    assert key.shape == value.shape
    assert query.shape[2] % 8 == 0
    assert all(each.stride(-1) == 1 for each in (query, key, value))
    starts, keys, used = (each.tolist() for each in (cum_seq_q, cum_seq_k, seqused_k))
    assert {each.dtype for each in (cum_seq_q, cum_seq_k, seqused_k)} == {torch.int32}
    assert len(starts) == len(keys) == len(used) + 1 > 1
    assert dropout_p == 0.0
    assert return_debug_mask is False
    out = torch.full_like(query, torch.nan)
    lse = torch.full(query.shape[1::-1], torch.nan)
    for request, count in enumerate(used):
        first, last = starts[request], starts[request + 1]
        assert 0 <= first <= last <= query.shape[0]
        assert last - first <= max_q
        assert 0 <= count <= max_k
        assert 0 <= keys[request] <= keys[request] + count <= key.shape[0]
        seen = slice(keys[request], keys[request] + count)
        logits = torch.einsum("thd,khd->htk", query[first:last].float(), key[seen].float()) * scale
        if is_causal:  # the last query sees the last key
            behind = torch.arange(last - first).flip(0)[:, None]
            logits = logits.masked_fill(torch.arange(count) >= count - behind, -torch.inf)
        found = torch.logsumexp(logits, 2)
        weights = torch.exp(logits - found[..., None])
        weights = torch.where(found[..., None] == -torch.inf, 0.0, weights)
        out[first:last] = torch.einsum("htk,khd->thd", weights, value[seen].float()).to(out.dtype)
        lse[:, first:last] = torch.where(found > -torch.inf, found, torch.inf)
    return out, lse, query.new_empty(2), query.new_empty(0), query.new_empty(0)
