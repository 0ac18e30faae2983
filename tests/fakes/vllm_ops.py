"""Fakes of vLLM's files around attention: our ops and plain PyTorch, with vLLM's arguments."""

from types import SimpleNamespace

import torch

import dsv4_ops
from dsv4_ops.core.layout import IndexerLayout, MainLayout


def save_partial_states(
    kv, score, ape, positions, state_cache, slot_mapping, block_size, state_width, compress_ratio,
    pdl_kwargs,
):  # fmt: skip
    assert state_cache.shape[1:] == (block_size, 2 * state_width)
    for token, slot in enumerate(slot_mapping.tolist()):
        row = state_cache[slot // block_size, slot % block_size]
        row[:state_width] = kv[token]
        row[state_width:] = score[token] + ape[positions[token] % compress_ratio]


def compress_norm_rope_store_triton(
    *, state_cache, num_actual, token_to_req_indices, positions, slot_mapping, block_table,
    block_size, state_width, cos_sin_cache, kv_cache, k_cache_metadata, pdl_kwargs, head_dim,
    rope_head_dim, compress_ratio, overlap, use_fp4_cache, rms_norm_weight, rms_norm_eps,
    quant_block, token_stride, scale_dim,
):  # fmt: skip
    layout = (MainLayout if head_dim == 512 else IndexerLayout)(kv_cache.shape[1])
    assert (quant_block, token_stride, scale_dim) == (
        layout.quant_block, layout.data_bytes, layout.scale_bytes
    )  # fmt: skip
    assert not use_fp4_cache
    assert (slot_mapping >= 0).all()
    rows = []
    for token in range(num_actual):
        last = int(positions[token])
        assert (last + 1) % compress_ratio == 0
        place = torch.arange(last - (1 + overlap) * compress_ratio + 1, last + 1)
        pages = block_table[int(token_to_req_indices[token]), place // block_size].long()
        states = state_cache[pages, place % block_size]
        kv, score = (states[:, start : start + state_width] for start in (0, state_width))
        if overlap:  # the first columns belong to the previous window
            kv, score = (
                torch.cat([part[:compress_ratio, :head_dim], part[compress_ratio:, head_dim:]])
                for part in (kv, score)
            )
        row = (score.softmax(0) * kv).sum(0)
        row = row * torch.rsqrt((row * row).mean() + rms_norm_eps) * rms_norm_weight
        rows.append(row)
    first = positions // compress_ratio * compress_ratio
    keys = dsv4_ops.apply_rope(torch.stack(rows), first, cos_sin_cache).bfloat16()
    cache = kv_cache.as_strided(
        (kv_cache.shape[0], layout.page_bytes), (kv_cache.stride(0), 1)
    )  # fmt: skip
    op = "quantize_and_insert_k_cache" if head_dim == 512 else "quantize_and_insert_indexer_k"
    getattr(dsv4_ops, op)(keys, cache, k_cache_metadata.slot_mapping, block_size=layout.block_size)


def fused_indexer_q_rope_quant(
    positions, index_q, index_q_cos_sin_cache, index_weights, softmax_scale, head_scale
):
    query = dsv4_ops.indexer_quantize_q(
        index_q, index_weights, positions, index_q_cos_sin_cache,
        softmax_scale=softmax_scale * head_scale,
    )  # fmt: skip
    return query.q, query.weights


def fused_inv_rope_fp8_quant(o, positions, cos_sin_cache, n_groups, heads_per_group):
    assert o.shape[1] == n_groups * heads_per_group
    found = dsv4_ops.inverse_rope_group_quantize(
        o, positions, cos_sin_cache, num_groups=n_groups, scale_layout="row"
    )
    return found.values.transpose(0, 1), found.scales.transpose(0, 1)


def fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, q_head_padded, eps, cache_block_size
):
    assert q_head_padded == q.shape[1]
    return dsv4_ops.qnorm_rope_kv_insert(
        q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, eps=eps,
        block_size=cache_block_size,
    )  # fmt: skip


def fakes():
    """Return the fakes by their names in ``Libraries``."""
    return {
        "extension": SimpleNamespace(
            fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert=(
                fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
            )
        ),
        "states": SimpleNamespace(save_partial_states=save_partial_states),
        "compressor": SimpleNamespace(
            compress_norm_rope_store_triton=compress_norm_rope_store_triton
        ),
        "indexer_query": SimpleNamespace(fused_indexer_q_rope_quant=fused_indexer_q_rope_quant),
        "inverse_rope": SimpleNamespace(fused_inv_rope_fp8_quant=fused_inv_rope_fp8_quant),
    }
