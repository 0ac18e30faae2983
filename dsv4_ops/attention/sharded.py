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
from dsv4_ops.attention.shared_selection import RankKeys, select_shared
from dsv4_ops.attention.step import RankShare
from dsv4_ops.attention.tensors import LayerCall
from dsv4_ops.core.types import IndexerQuery
from dsv4_ops.ops.context_parallel import (
    cp_combine,
    cp_gather_heads,
)
from dsv4_ops.ops.mla_context import merge_states


def select_own(
    layer: LayerCall, ranks: ContextParallel, query: IndexerQuery
) -> tuple[Tensor, Tensor]:
    """Select the rows that a GPU with all rows would select; return the slots of the selected rows
    that this rank stores, and their number per token."""
    spec, step = layer.spec, layer.step
    keys = RankKeys(
        cache=cast(Tensor, layer.caches.indexer),
        lens=step.c4.lens,
        req_indices=step.req_indices,
        block_table=step.c4.block_table,
        cp_rank=cast(RankShare, step.share).cp_rank,
        schedule=step.c4.schedule,
    )
    return select_shared(
        query,
        keys,
        ranks,
        topk=spec.attention.index_topk,
        block_size=spec.block_size("c4"),
        layout=spec.indexer_layout,
        max_logits_bytes=spec.attention.max_logits_bytes,
        impl=indexer_impl(spec, query.q),
    )


def attend_own(
    layer: LayerCall, ranks: ContextParallel, q: Tensor, own: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Compute the attention of the rank's heads over the rows of all ranks.

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
