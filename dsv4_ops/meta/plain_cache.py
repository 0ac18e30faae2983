"""Fakes of the unquantised key cache."""

from __future__ import annotations

from torch import Tensor


def insert_k_cache(k: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> None:
    return None


def insert_k_cache_functional(k: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> Tensor:
    return k_cache.new_empty(k_cache.shape)
