"""Launcher of a whole step of the compressor: the kernels of its windows, which save states too."""

from __future__ import annotations

from torch import Tensor

from dsv4_ops.kernels.compressor import launch_windows
from dsv4_ops.kernels.launch import Launch


def save_and_compress(
    launch: Launch,
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
    launch_windows(
        launch,
        "save_and_compress",
        kv_score,
        ape,
        states,
        state_block_table,
        state_slot_mapping,
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
