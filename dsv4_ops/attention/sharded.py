"""A layer's attention if several ranks share the compressed rows.

Every rank stores all windows and compressor states, but only its share of the compressed rows.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from dsv4_ops.attention.impl import indexer_impl
from dsv4_ops.attention.output import attend_decode
from dsv4_ops.attention.parallel import ContextParallel, every_rank
from dsv4_ops.attention.step import RankShare
from dsv4_ops.attention.tensors import LayerCall
from dsv4_ops.core.torch_compat import statically_known_true
from dsv4_ops.core.types import IndexerQuery
from dsv4_ops.ops.context_parallel import (
    cp_combine,
    cp_gather_heads,
    cp_gather_rows,
    cp_local_rows,
    cp_topk,
    gather_each,
)
from dsv4_ops.ops.indexer import indexer_logits, indexer_topk
from dsv4_ops.ops.indices import global_topk_indices_and_lens
from dsv4_ops.ops.mla_context import merge_states
from dsv4_ops.reference.common import masked_index


def select_own(
    layer: LayerCall, ranks: ContextParallel, query: IndexerQuery
) -> tuple[Tensor, Tensor]:
    """Select the rows that one GPU would select; return the slots of this rank's part and their
    number."""
    spec, step = layer.spec, layer.step
    turns = {"cp_interleave": ranks.interleave}
    if ranks.shards_index_heads:
        query = _all_heads(query, ranks)
    scores, rows = _candidates(layer, query)
    candidates = torch.stack((scores.view(torch.int32), rows), 1)
    candidates = cp_gather_rows(candidates, ranks.group, via=ranks.gathers_via)
    candidates = candidates.unflatten(0, (ranks.world_size, -1))
    scores, rows = candidates[:, :, 0].view(torch.float32), candidates[:, :, 1]
    selected = cp_topk(scores, rows, topk=spec.attention.index_topk, **turns)
    rank = cast(RankShare, step.share).cp_rank
    own = cp_local_rows(selected, rank, cp_world_size=ranks.world_size, **turns)
    table, block_size = step.c4.block_table, spec.block_size("c4")
    return global_topk_indices_and_lens(own.rows, step.req_indices, table, block_size=block_size)


def _all_heads(query: IndexerQuery, ranks: ContextParallel) -> IndexerQuery:
    """Gather queries and head weights of all ranks, both in one all-gather of bytes or one
    kernel."""
    own = (query.q, query.weights[..., None])
    if ranks.gathers_via == "symmetric_memory":
        q, weights = gather_each("cp_gather_heads", own, ranks.group, dim=1, via=ranks.gathers_via)
        return IndexerQuery(q, weights.squeeze(-1))
    sent = torch.cat([each.contiguous().view(torch.uint8) for each in own], -1)
    gathered = cp_gather_heads(sent, ranks.group).split((sent.shape[-1] - 4, 4), -1)
    q, weights = (
        part.contiguous().view(each.dtype) for part, each in zip(gathered, own, strict=True)
    )
    return IndexerQuery(q, weights.squeeze(-1))


def _candidates(layer: LayerCall, query: IndexerQuery) -> tuple[Tensor, Tensor]:
    """Select the rank's best rows; return their scores and local rows, [num_tokens, index_topk].

    Unlike ``indexer_select`` this materialises the logits, for as many tokens at a time as fit into
    ``max_logits_bytes`` if the sizes are not symbolic.
    """
    spec, step = layer.spec, layer.step
    table, block_size = step.c4.block_table, spec.block_size("c4")
    num_tokens, num_rows = query.q.shape[0], table.shape[1] * block_size
    tensors = (*query, step.c4.lens, step.req_indices)
    most = spec.attention.max_logits_bytes // 4
    parts = [tensors]
    if statically_known_true(num_tokens * num_rows > most):
        size = max(1, most // num_rows)
        parts = list(zip(*(each.split(size) for each in tensors), strict=True))
    schedule = step.c4.schedule if len(parts) == 1 else None
    gathered = []
    for q, head_weights, lens, req_indices in parts:
        logits = indexer_logits(
            q,
            head_weights,
            cast(Tensor, layer.caches.indexer),
            lens,
            req_indices,
            table,
            schedule,
            block_size=block_size,
            num_rows=num_rows,
            layout=spec.indexer_layout,
            impl=indexer_impl(spec, q),
        )
        rows = indexer_topk(logits, lens, topk=spec.attention.index_topk)
        token = torch.arange(rows.shape[0], device=rows.device)[:, None]
        gathered.append((masked_index(logits, rows >= 0, [token, rows], -torch.inf), rows))
    if len(gathered) == 1:
        return gathered[0]
    scores, rows = (torch.cat(each) for each in zip(*gathered, strict=True))
    return scores, rows


def attend_own(
    layer: LayerCall, ranks: ContextParallel, q: Tensor, own: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Compute attention of the rank's heads over the rows of all ranks.

    Each rank attends to its share of the window and to its own rows, for all heads and without the
    sink; the sink is added once, to the combined result.
    """
    heads = cp_gather_heads(q, ranks.group, via=ranks.gathers_via) if ranks.shards_heads else q
    attended = attend_decode(layer, heads, own, inverse_rope=False, sink=False)
    if ranks.shards_heads:
        rank = cast(RankShare, layer.step.share).cp_rank
        merged = cp_combine(*attended, ranks.group, rank, via=ranks.via)
    else:
        merged = merge_states(*every_rank(*attended, ranks))
    return with_sink(*merged, layer.weights.attn_sink)


def with_sink(out: Tensor, lse: Tensor, attn_sink: Tensor) -> Tensor:
    """Add the sink to the denominator of attention that was computed without it."""
    share = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - attn_sink))
    return (out.to(torch.float32) * share[..., None]).to(out.dtype)
