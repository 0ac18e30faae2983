"""Unquantised key cache: rows copied bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.reference.pages import gather_rows, scatter_rows, words


def page_columns(k_cache: Tensor) -> Tensor:
    """int64 [block_size, width]: where in its page the values of every row are."""
    block_size, width = k_cache.shape[1], k_cache.shape[2]
    row = torch.arange(block_size, device=k_cache.device)[:, None]
    return row * width + torch.arange(width, device=k_cache.device)


def insert_k_cache_functional(k: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> Tensor:
    rows = k[: slot_mapping.shape[0]]
    block_size, columns = k_cache.shape[1], page_columns(k_cache)
    # the written tensor is no view of another dtype: Inductor would convert values into it
    written = scatter_rows(k_cache.flatten(1), rows, slot_mapping, block_size, columns)
    return written.view(k_cache.shape)


def insert_k_cache(k: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> None:
    k_cache.copy_(insert_k_cache_functional(k, k_cache, slot_mapping))


def gathered_bits(k_cache: Tensor, pages: Tensor, rows: Tensor) -> Tensor:
    """Words [..., width] at (page, row); zeros where the page does not exist."""
    return gather_rows(words(k_cache).flatten(1), pages, rows, page_columns(k_cache))
