"""A whole step of the compressor: keys of the windows that it finishes, states of its tokens."""

from __future__ import annotations

from torch import Tensor

from dsv4_ops.reference.compressor import compress_and_insert, compress_and_insert_functional
from dsv4_ops.reference.compressor_states import (
    save_compressor_states,
    save_compressor_states_functional,
)


def save_and_compress_functional(
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
    written = compress_and_insert_functional(
        kv_score,
        ape,
        states,
        state_block_table,
        positions,
        req_indices,
        norm_weight,
        cos_sin_cache,
        k_cache,
        slot_mapping,
        compress_ratio=compress_ratio,
        overlap=overlap,
        eps=eps,
        state_block_size=state_block_size,
        block_size=block_size,
        layout=layout,
    )
    saved = save_compressor_states_functional(
        kv_score,
        ape,
        states,
        state_slot_mapping,
        positions,
        compress_ratio=compress_ratio,
        block_size=state_block_size,
    )
    return saved, written


def save_and_compress(
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
) -> None:
    compress_and_insert(
        kv_score,
        ape,
        states,
        state_block_table,
        positions,
        req_indices,
        norm_weight,
        cos_sin_cache,
        k_cache,
        slot_mapping,
        compress_ratio=compress_ratio,
        overlap=overlap,
        eps=eps,
        state_block_size=state_block_size,
        block_size=block_size,
        layout=layout,
    )
    save_compressor_states(
        kv_score,
        ape,
        states,
        state_slot_mapping,
        positions,
        compress_ratio=compress_ratio,
        block_size=state_block_size,
    )
