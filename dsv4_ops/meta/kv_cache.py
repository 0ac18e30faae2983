"""Fakes of the ops on paged key caches."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import MainLayout, PlainLayout


def gather_k_cache(k_cache: Tensor, seq_lens: Tensor, num_rows: int, layout: str) -> Tensor:
    rows = (seq_lens.shape[0], num_rows)
    if layout == PlainLayout.tag:
        return k_cache.new_empty((*rows, k_cache.shape[2]))
    return k_cache.new_empty((*rows, MainLayout.head_dim), dtype=torch.bfloat16)
