"""All inserts of a C4 layer and the preparation of its queries: four calls in one op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dsv4_ops.core.layout import IndexerLayout, MainLayout
from dsv4_ops.core.types import C4Step
from dsv4_ops.reference.compressor import save_and_compress
from dsv4_ops.reference.indexer import indexer_quantize_q
from dsv4_ops.reference.rope import qnorm_rope_kv_insert


def insert_c4_step(
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
    save_first: bool = False,
) -> C4Step:
    window = (q, kv, swa_cache, swa_slot_mapping, positions, cos_sin_cache)
    q_out = qnorm_rope_kv_insert(*window, eps=eps, block_size=swa_block_size, layout=MainLayout.tag)
    main = (kv_score, ape, states), norm_weight, k_cache, MainLayout.tag
    of_indexer = indexer_kv_score, indexer_ape, indexer_states
    indexer = of_indexer, indexer_norm_weight, indexer_cache, IndexerLayout.tag
    tokens = (state_block_table, state_slot_mapping, positions, req_indices)
    settings: dict[str, Any] = {"compress_ratio": compress_ratio, "overlap": True, "eps": eps}
    settings |= {"state_block_size": state_block_size, "block_size": block_size}
    settings["save_first"] = save_first
    for source, weight, cache, layout in (main, indexer):
        target = (weight, cos_sin_cache, cache, slot_mapping)
        save_and_compress(*source, *tokens, *target, **settings, layout=layout)
    query = indexer_quantize_q(
        indexer_q, indexer_weights, positions, cos_sin_cache, softmax_scale=softmax_scale
    )
    return C4Step(q_out, query.q, query.weights)
