"""The selection of an indexer whose keys are spread over ranks.

Every rank scores its own rows, and sends the scores and row numbers of its best rows. All ranks
select the same rows among the rows sent, and each rank attends to the selected rows that it stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.attention.parallel import ContextParallel
from dsv4_ops.core.torch_compat import statically_known_true
from dsv4_ops.core.types import IndexerQuery
from dsv4_ops.ops.context_parallel import (
    cp_gather_heads,
    cp_gather_rows,
    cp_local_rows,
    cp_topk,
    gather_each,
)
from dsv4_ops.ops.indexer import indexer_logits, indexer_topk
from dsv4_ops.ops.indices import global_topk_indices_and_lens
from dsv4_ops.reference.common import masked_index


@dataclass(frozen=True)
class RankKeys:
    """The indexer keys of a rank, and which keys each token sees.

    Attributes:
        cache: The keys, in blocks.
        lens: Number of keys on this rank that each token sees, [num_tokens], int32.
        req_indices: Request of each token, [num_tokens], int32.
        block_table: Blocks of every request, [num_reqs, max_blocks], int32.
        cp_rank: This rank, [1], int32.
        schedule: DeepGEMM's schedule for ``lens``, or None.
    """

    cache: Tensor
    lens: Tensor
    req_indices: Tensor
    block_table: Tensor
    cp_rank: Tensor
    schedule: Tensor | None = None


def select_shared(
    query: IndexerQuery,
    keys: RankKeys,
    ranks: ContextParallel,
    *,
    topk: int,
    block_size: int,
    layout: str,
    max_logits_bytes: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Select the rows that a GPU with all rows would select; return the slots of the selected rows
    on this rank, [num_tokens, topk], and their number per token."""
    if ranks.shards_index_heads:
        query = _all_heads(query, ranks)
    settings: dict[str, Any] = {
        "topk": topk,
        "block_size": block_size,
        "layout": layout,
        "impl": impl,
    }
    scores, rows = _candidates(query, keys, max_logits_bytes, **settings)
    candidates = torch.stack((scores.view(torch.int32), rows), 1)
    candidates = cp_gather_rows(candidates, ranks.group, via=ranks.gathers_via)
    candidates = candidates.unflatten(0, (ranks.world_size, -1))
    scores, rows = candidates[:, :, 0].view(torch.float32), candidates[:, :, 1]
    turns = {"cp_interleave": ranks.interleave}
    selected = cp_topk(scores, rows, topk=topk, **turns)
    own = cp_local_rows(selected, keys.cp_rank, cp_world_size=ranks.world_size, **turns)
    return global_topk_indices_and_lens(
        own.rows, keys.req_indices, keys.block_table, block_size=block_size
    )


def _all_heads(query: IndexerQuery, ranks: ContextParallel) -> IndexerQuery:
    """Gather the queries and head weights of all ranks together, in one all-gather of bytes or in
    one kernel."""
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


def _candidates(
    query: IndexerQuery,
    keys: RankKeys,
    max_logits_bytes: int,
    *,
    topk: int,
    block_size: int,
    layout: str,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Select the rank's best rows; return their scores and their row numbers on this rank,
    [num_tokens, topk].

    Unlike ``indexer_select``, this function stores the logits. Unless sizes are symbolic, it stores
    at most ``max_logits_bytes`` at a time.
    """
    num_tokens, num_rows = query.q.shape[0], keys.block_table.shape[1] * block_size
    tensors = (*query, keys.lens, keys.req_indices)
    most = max_logits_bytes // 4
    parts = [tensors]
    if statically_known_true(num_tokens * num_rows > most):
        size = max(1, most // num_rows)
        parts = list(zip(*(each.split(size) for each in tensors), strict=True))
    schedule = keys.schedule if len(parts) == 1 else None
    gathered = []
    for q, head_weights, lens, req_indices in parts:
        logits = indexer_logits(
            q,
            head_weights,
            keys.cache,
            lens,
            req_indices,
            keys.block_table,
            schedule,
            block_size=block_size,
            num_rows=num_rows,
            layout=layout,
            impl=impl,
        )
        rows = indexer_topk(logits, lens, topk=topk)
        token = torch.arange(rows.shape[0], device=rows.device)[:, None]
        gathered.append((masked_index(logits, rows >= 0, [token, rows], -torch.inf), rows))
    if len(gathered) == 1:
        return gathered[0]
    scores, rows = (torch.cat(each) for each in zip(*gathered, strict=True))
    return scores, rows
