"""Fakes of attention over chunked contexts."""

from __future__ import annotations

import torch
from torch import Tensor


def context_chunks(context_lens: Tensor, max_chunks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_reqs = context_lens.shape[0]
    sizes = (max_chunks, num_reqs), (max_chunks, num_reqs + 1), (max_chunks, num_reqs + 1), (1,)
    starts, whole, local, num_chunks = (context_lens.new_empty(size) for size in sizes)
    return starts, whole, local, num_chunks


def merge_attn_states(prefix_out: Tensor, suffix_out: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(prefix_out.dtype, suffix_out.dtype)
    out = prefix_out.new_empty(prefix_out.shape, dtype=dtype)
    return out, prefix_out.new_empty(prefix_out.shape[:2], dtype=torch.float32)


def merge_states(outs: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), outs.new_empty(outs.shape[1:3], dtype=torch.float32)


def mla_prefill(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q.shape
    lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
    return q.new_empty((num_tokens, num_heads, v.shape[2])), lse
