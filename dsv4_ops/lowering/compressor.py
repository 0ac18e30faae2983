"""Lowerings of the KV compressor."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.lowering.kinds import Decompose, TritonKernel
from dsv4_ops.reference import compressor as reference

save_compressor_states = TritonKernel(reference.save_compressor_states)


def _save_compressor_states_functional(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    *,
    compress_ratio: int,
    block_size: int,
) -> Tensor:
    written = states.clone(memory_format=torch.contiguous_format)
    torch.ops.dsv4_ops.save_compressor_states.default(
        kv_score,
        ape,
        written,
        slot_mapping,
        positions,
        compress_ratio=compress_ratio,
        block_size=block_size,
    )
    return written


save_compressor_states_functional = Decompose(_save_compressor_states_functional)


compress_and_insert = TritonKernel(reference.compress_and_insert)


def _compress_and_insert_functional(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    state_block_table: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
    overlap: bool,
    eps: float,
    state_block_size: int,
    block_size: int,
    layout: str,
) -> Tensor:
    written = k_cache.clone(memory_format=torch.contiguous_format)
    torch.ops.dsv4_ops.compress_and_insert.default(
        kv_score,
        ape,
        states,
        state_block_table,
        positions,
        req_indices,
        norm_weight,
        cos_sin_cache,
        written,
        slot_mapping,
        compress_ratio=compress_ratio,
        overlap=overlap,
        eps=eps,
        state_block_size=state_block_size,
        block_size=block_size,
        layout=layout,
    )
    return written


compress_and_insert_functional = Decompose(_compress_and_insert_functional)


save_and_compress = TritonKernel(reference.save_and_compress)


def _save_and_compress_functional(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
    overlap: bool,
    eps: float,
    state_block_size: int,
    block_size: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    saved = states.clone(memory_format=torch.contiguous_format)
    written = k_cache.clone(memory_format=torch.contiguous_format)
    torch.ops.dsv4_ops.save_and_compress.default(
        kv_score,
        ape,
        saved,
        state_block_table,
        state_slot_mapping,
        positions,
        req_indices,
        norm_weight,
        cos_sin_cache,
        written,
        slot_mapping,
        compress_ratio=compress_ratio,
        overlap=overlap,
        eps=eps,
        state_block_size=state_block_size,
        block_size=block_size,
        layout=layout,
    )
    return saved, written


save_and_compress_functional = Decompose(_save_and_compress_functional)
