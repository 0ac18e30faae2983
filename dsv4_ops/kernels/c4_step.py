"""Launcher of everything that a C4 layer writes before it selects rows, and of its queries."""

from __future__ import annotations

from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout, MainLayout, StateLayout
from dsv4_ops.kernels.compressor_step import save_and_compress
from dsv4_ops.kernels.indexer import indexer_quantize_q
from dsv4_ops.kernels.launch import Launch
from dsv4_ops.kernels.qnorm import qnorm_rope_kv_insert


def insert_c4_step(
    launch: Launch,
    q: Tensor,
    kv: Tensor,
    kv_score: Tensor,
    indexer_q: Tensor,
    indexer_weights: Tensor,
    indexer_kv_score: Tensor,
    swa_cache: Tensor,
    swa_slot_mapping: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    states: Tensor,
    k_cache: Tensor,
    indexer_ape: Tensor,
    indexer_norm_weight: Tensor,
    indexer_states: Tensor,
    indexer_cache: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    cos_sin_cache: Tensor,
    *,
    eps: float,
    softmax_scale: float,
    compress_ratio: int,
    state_block_size: int,
    swa_block_size: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    checks = Checks("insert_c4_step")
    checks.page_start("swa_cache", swa_cache, MainLayout(swa_block_size))
    checks.page_start("states", states, StateLayout(state_block_size, 4 * MainLayout.head_dim))
    checks.page_start("k_cache", k_cache, MainLayout(block_size))
    indexer_layout = StateLayout(state_block_size, 4 * IndexerLayout.head_dim)
    checks.page_start("indexer_states", indexer_states, indexer_layout)
    checks.page_start("indexer_cache", indexer_cache, IndexerLayout(block_size))
    q_out = qnorm_rope_kv_insert(
        launch,
        q,
        kv,
        swa_cache,
        swa_slot_mapping,
        positions,
        cos_sin_cache,
        eps=eps,
        block_size=swa_block_size,
        layout=MainLayout.tag,
    )
    save_and_compress(
        launch,
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
        overlap=True,
        eps=eps,
        state_block_size=state_block_size,
        block_size=block_size,
        layout=MainLayout.tag,
    )
    save_and_compress(
        launch,
        indexer_kv_score,
        indexer_ape,
        indexer_states,
        state_block_table,
        state_slot_mapping,
        positions,
        req_indices,
        indexer_norm_weight,
        cos_sin_cache,
        indexer_cache,
        slot_mapping,
        compress_ratio=compress_ratio,
        overlap=True,
        eps=eps,
        state_block_size=state_block_size,
        block_size=block_size,
        layout=IndexerLayout.tag,
    )
    codes, scaled = indexer_quantize_q(
        launch,
        indexer_q,
        indexer_weights,
        positions,
        cos_sin_cache,
        softmax_scale=softmax_scale,
    )
    return q_out, codes, scaled
