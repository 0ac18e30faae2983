"""Lowerings of paged caches of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.lowering.kinds import Decompose, TritonKernel
from dsv4_ops.reference import kv_cache as reference

quantize_and_insert_k_cache = TritonKernel(reference.quantize_and_insert_k_cache)
dequantize_and_gather_k_cache = TritonKernel(reference.dequantize_and_gather_k_cache)
gather_k_cache = TritonKernel(reference.gather_k_cache)


def _quantize_and_insert_k_cache_functional(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, *, block_size: int, layout: str
) -> Tensor:
    written = k_cache.clone(memory_format=torch.contiguous_format)
    torch.ops.dsv4_ops.quantize_and_insert_k_cache.default(
        k, written, slot_mapping, block_size=block_size, layout=layout
    )
    return written


quantize_and_insert_k_cache_functional = Decompose(_quantize_and_insert_k_cache_functional)


insert_k_cache = TritonKernel(reference.insert_k_cache)


def _insert_k_cache_functional(k: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> Tensor:
    written = k_cache.clone(memory_format=torch.contiguous_format)
    torch.ops.dsv4_ops.insert_k_cache.default(k, written, slot_mapping)
    return written


insert_k_cache_functional = Decompose(_insert_k_cache_functional)
