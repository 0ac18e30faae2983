"""One MLA layer with sparse attention, without its linear projections: tokens attend to selected
rows."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dsv4_ops.attention.dsa_spec import DsaSpec
from dsv4_ops.attention.metadata import AttentionSpec
from dsv4_ops.attention.mla_layer import (
    absorbed_queries,
    attended_values,
    check_layer,
    insert_latents,
    mla_layer,
)
from dsv4_ops.attention.mla_step import MlaStep
from dsv4_ops.attention.shared_selection import RankKeys, select_shared
from dsv4_ops.attention.tensors import (
    DsaAttention,
    DsaCache,
    IndexerInputs,
    MlaCache,
    MlaInputs,
    MlaWeights,
    without_gradients,
)
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import PlainLayout
from dsv4_ops.core.registry import AUTO, TRITON
from dsv4_ops.core.types import IndexerQuery
from dsv4_ops.dispatch.choice import impl_for
from dsv4_ops.ops.indexer import (
    PROVIDERS as INDEXER_PROVIDERS,
    indexer_quantize_q,
    indexer_select,
    quantize_and_insert_indexer_k,
)
from dsv4_ops.ops.kv_cache import insert_k_cache
from dsv4_ops.ops.mla import PROVIDERS as SPARSE_PROVIDERS, mla_sparse
from dsv4_ops.ops.rope import apply_rope


@without_gradients
def dsa_layer(
    spec: DsaSpec,
    inputs: MlaInputs,
    weights: MlaWeights,
    cache: DsaCache,
    step: MlaStep,
    indexer: IndexerInputs | None = None,
    slots: Tensor | None = None,
) -> DsaAttention:
    """Insert a step's latents and indexer keys, select rows, and attend to them.

    Decodes and prefills are computed alike: every token attends, with an absorbed query, to the
    ``index_topk`` visible rows that the indexer scores highest, or to all if there are fewer. Ties
    go to the earlier row. If ranks share the cache, each rank scores its own keys with all heads of
    the indexer; the ranks exchange the scores of their best keys, and merge their attention.

    If no request has a context, and no request has more than ``index_topk`` tokens, tokens need no
    selection. A step with the context "chunked" and ``max_chunks`` 0 attends to expanded keys and
    values of all tokens of the step instead, which is faster for long prompts, and only inserts the
    indexer's keys.

    Args:
        spec: The model's attention configuration.
        inputs: Projection outputs of every token of the step.
        weights: Parameters of the layer.
        cache: Cache of the layer.
        step: From ``build_mla_step``, with the context "absorbed", or "chunked" without chunks.
        indexer: Projection outputs of the layer's indexer. None for a layer without an indexer.
        slots: The result ``slots`` of an earlier layer of the same step, for a layer without an
            indexer (GLM-5 has such layers); otherwise None.

    Returns:
        ``DsaAttention(out, slots)``, dense; ``out`` has the dtype of q. For padding tokens, ``out``
        is 0 and all slots are -1. A step of expanded keys has no slots, and ``out`` is undefined
        for tokens of a padding request.

    Mutates: ``cache``, at the slots of the step, before rows are selected.

    Raises:
        ValueError, TypeError: a tensor is missing or does not match ``spec``. Nothing is written.
        NotImplementedError, ImportError, RuntimeError: ``spec.impl`` does not support the step, or
            is not available here. Nothing is written. Backward raises NotImplementedError.

    Example:
        >>> import torch
        >>> from dsv4_ops.attention import *
        >>> spec = DsaSpec(
        ...     num_heads=1, softmax_scale=1.0, qk_nope_head_dim=2, qk_rope_head_dim=2,
        ...     v_head_dim=1, kv_lora_rank=2, block_size=4, dtype=torch.float32, index_topk=2,
        ...     index_heads=1, indexer_layout="plain",
        ... )
        >>> table = torch.tensor([[0]], dtype=torch.int32)
        >>> start_loc, lens = torch.tensor([0, 3]).int(), torch.tensor([3]).int()
        >>> step = build_mla_step(spec, start_loc, lens, table, num_tokens=3)
        >>> angles = torch.tensor([[1.0, 0.0]]).expand(4, 2)  # cosine and sine of no turn
        >>> weights = MlaWeights(angles, torch.eye(2)[None], torch.ones(1, 2, 1))
        >>> latents = torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])
        >>> inputs = MlaInputs(torch.zeros(3, 1, 4), latents, torch.zeros(3, 2))
        >>> keys = torch.tensor([[3.0], [1.0], [2.0]]).expand(3, 128)
        >>> indexer = IndexerInputs(torch.ones(3, 1, 128), keys, torch.ones(3, 1))
        >>> found = dsa_layer(spec, inputs, weights, DsaCache.allocate(spec, 1), step, indexer)
        >>> found.slots.tolist(), found.out.tolist()
        ([[0, -1], [0, 1], [0, 2]], [[2.0], [3.0], [5.0]])
    """
    _check(spec, inputs, weights, cache, step, indexer, slots)
    if step.prefill_start_loc is not None:
        if indexer is not None:
            _insert_keys(spec, indexer.k, weights.cos_sin_cache, cast(Tensor, cache.indexer), step)
        return DsaAttention(mla_layer(spec.dense, inputs, weights, MlaCache(cache.kv), step), None)
    q, _ = insert_latents(spec, inputs, weights, MlaCache(cache.kv), step)
    if indexer is not None:
        slots = _select(spec, indexer, weights.cos_sin_cache, cast(Tensor, cache.indexer), step)
    selected, lens = cast(Tensor, slots), step.decode_lens
    if spec.ranks is not None:  # other ranks have the rest of the selected rows
        lens = (selected >= 0).sum(1, dtype=torch.int32)
    attended = mla_sparse(
        absorbed_queries(spec, q, weights),
        cache.kv,
        selected,
        lens,
        softmax_scale=spec.softmax_scale,
        block_size=spec.block_size,
        kv_lora_rank=spec.kv_lora_rank,
        layout=spec.layout,
        batch_invariant=spec.batch_invariant,
        impl=impl_for(SPARSE_PROVIDERS, spec.impl),
    )
    return DsaAttention(attended_values(spec, attended, weights), selected)


def _turn(spec: DsaSpec) -> dict[str, Any]:
    """Return the settings of the indexer's RoPE."""
    return {"rope_first": True, "interleaved": spec.interleaved}


def _insert_keys(spec: DsaSpec, k: Tensor, table: Tensor, cache: Tensor, step: MlaStep) -> None:
    k = apply_rope(k, step.positions, table, **_turn(spec))
    if spec.indexer_layout == PlainLayout.tag:
        insert_k_cache(k, cache, step.slot_mapping)
    else:
        quantize_and_insert_indexer_k(k, cache, step.slot_mapping, block_size=spec.block_size)


def _select(
    spec: DsaSpec, indexer: IndexerInputs, table: Tensor, cache: Tensor, step: MlaStep
) -> Tensor:
    """Insert the step's indexer keys, and return the slots of the rows selected for every token."""
    _insert_keys(spec, indexer.k, table, cache, step)
    turn, q, head_weights = _turn(spec), cast(Tensor, indexer.q), cast(Tensor, indexer.weights)
    if spec.indexer_layout == PlainLayout.tag:
        # a common scale would not change the selection
        query = IndexerQuery(apply_rope(q, step.positions, table, **turn), head_weights.float())
    else:
        query = indexer_quantize_q(q, head_weights, step.positions, table, **turn)
    impl = impl_for(INDEXER_PROVIDERS, spec.impl)
    by_size = impl == AUTO and spec.indexer_layout != PlainLayout.tag and cache.is_cuda
    impl = TRITON if by_size and spec.batch_invariant else impl
    settings: dict[str, Any] = {"topk": spec.index_topk, "block_size": spec.block_size}
    settings["impl"] = impl
    settings["layout"] = spec.indexer_layout
    if spec.ranks is not None:
        tokens = (step.decode_lens, step.req_indices, step.block_table)
        keys = RankKeys(cache, *tokens, cast(Tensor, step.cp_rank))
        budget = AttentionSpec.max_logits_bytes
        slots, _ = select_shared(query, keys, spec.ranks, max_logits_bytes=budget, **settings)
        return slots
    return indexer_select(
        *query,
        cache,
        step.positions,
        step.req_indices,
        step.block_table,
        compress_ratio=1,
        slots=True,
        **settings,
    )


def _check(
    spec: DsaSpec,
    inputs: MlaInputs,
    weights: MlaWeights,
    cache: DsaCache,
    step: MlaStep,
    indexer: IndexerInputs | None,
    slots: Tensor | None,
) -> None:
    """Raise errors that an op would otherwise raise after the insert."""
    checks = Checks("dsa_layer")
    check_layer(checks, spec, inputs, weights, MlaCache(cache.kv), step)
    expands = step.prefill_start_loc is not None
    if step.chunks is not None:
        raise checks.error(
            "step",
            must="have the context 'absorbed', or no chunks",
            got="expanded contexts",
            do="Build each step with the layer's own DsaSpec, or with max_chunks=0",
        )
    if (indexer is None) == (slots is None) and not expands:
        raise checks.error(
            "slots",
            must="be given to a layer without an indexer, and to no other",
            got="neither" if slots is None else "both",
            do="Pass indexer, or the slots that an earlier layer returned",
        )
    if indexer is None:
        if not expands:
            checks.tensor("slots", slots, torch.int32, "num_tokens", spec.index_topk)
        return
    heads, width = spec.index_heads, spec.index_dim
    checks.tensor("indexer.k", indexer.k, spec.dtype, "num_tokens", width)
    if not expands:
        checks.tensor("indexer.q", indexer.q, spec.dtype, "num_tokens", heads, width)
        floats = (torch.bfloat16, torch.float32)
        checks.tensor("indexer.weights", indexer.weights, floats, "num_tokens", heads)
    layout = spec.index_cache_layout()
    keys: Any = cache.indexer
    checks.tensor("cache.indexer", keys, layout.storage_dtype, "num_blocks", *layout.shape(0)[1:])
