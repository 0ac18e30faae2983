"""Lowerings of the unquantised key cache: our kernels on CUDA, elsewhere the references."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.lowering.kinds import Decompose, TritonKernel
from dsv4_ops.reference import plain_cache as reference

insert_k_cache = TritonKernel(reference.insert_k_cache)


def _insert_k_cache_functional(k: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> Tensor:
    written = k_cache.clone(memory_format=torch.contiguous_format)
    torch.ops.dsv4_ops.insert_k_cache.default(k, written, slot_mapping)
    return written


insert_k_cache_functional = Decompose(_insert_k_cache_functional)
