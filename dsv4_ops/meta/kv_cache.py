"""Fakes of paged caches of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import MainLayout


def quantize_and_insert_k_cache(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, *, block_size: int, layout: str
) -> None:
    return None


def quantize_and_insert_k_cache_functional(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, *, block_size: int, layout: str
) -> Tensor:
    return k_cache.new_empty(k_cache.shape)


def dequantize_and_gather_k_cache(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    *,
    block_size: int,
    offset: int,
    layout: str,
) -> None:
    return None


def gather_k_cache(
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    *,
    block_size: int,
    num_rows: int,
    offset: int,
    layout: str,
) -> Tensor:
    rows = (seq_lens.shape[0], num_rows)
    if layout == "plain":
        return k_cache.new_empty((*rows, k_cache.shape[2]))
    return k_cache.new_empty((*rows, MainLayout.head_dim), dtype=torch.bfloat16)


def insert_k_cache(k: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> None:
    return None


def insert_k_cache_functional(k: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> Tensor:
    return k_cache.new_empty(k_cache.shape)
