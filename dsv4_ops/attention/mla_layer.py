"""One dense MLA layer, without its linear projections."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dsv4_ops.attention.mla_spec import MlaSpec
from dsv4_ops.attention.mla_step import MlaStep
from dsv4_ops.attention.parallel import every_rank
from dsv4_ops.attention.tensors import MlaCache, MlaInputs, MlaWeights, without_gradients
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import MlaFp8Layout, PlainLayout
from dsv4_ops.core.types import ContextChunks, MlaAttention
from dsv4_ops.dispatch.choice import check_device, require
from dsv4_ops.dispatch.libraries import LIBRARIES
from dsv4_ops.ops.context_parallel import cp_combine, cp_gather_heads, cp_gather_rows
from dsv4_ops.ops.mla import (
    mla_absorb_q,
    mla_decode,
    mla_dequantize_rows,
    mla_expand_kv,
    mla_gather_codes,
    mla_gather_kv,
    mla_insert_kv,
    mla_v_up,
)
from dsv4_ops.ops.mla_context import (
    merge_attn_states,
    merge_states,
    mla_prefill,
)
from dsv4_ops.ops.rope import apply_rope


@without_gradients
def mla_layer(
    spec: MlaSpec, inputs: MlaInputs, weights: MlaWeights, cache: MlaCache, step: MlaStep
) -> Tensor:
    """Insert a step's latents into the layer's cache and attend to all visible rows.

    With the context "absorbed", all tokens attend to latent rows with absorbed queries. With
    "chunked", only decode tokens do, and prefill tokens attend to expanded keys and values: first
    those of the step, then those of the context, chunk by chunk.

    Args:
        spec: The model's attention configuration.
        inputs: Projection outputs of every token of the step.
        weights: Parameters of the layer.
        cache: Cache of the layer.
        step: From ``build_mla_step``.

    Returns:
        The input of the output projection, [num_tokens, num_heads * v_head_dim], dense, in the
        dtype of q. Padding tokens have output 0, except for tokens of a padding request in a step
        of expanded keys, whose output is undefined.

    Mutates: ``cache``, at the slots of the step, before attention reads it.

    Raises:
        ValueError, TypeError: a tensor is missing or does not match ``spec``, or the process group
            does not match ``spec.parallel``. Nothing is written.
        NotImplementedError, ImportError, RuntimeError: ``spec.impl`` does not support the step, or
            is not available here. Nothing is written. Backward raises NotImplementedError.

    Example:
        >>> import torch
        >>> from dsv4_ops.attention import *
        >>> spec = MlaSpec(
        ...     num_heads=1, softmax_scale=1.0, qk_nope_head_dim=2, qk_rope_head_dim=2,
        ...     v_head_dim=1, kv_lora_rank=2, block_size=2, dtype=torch.float32,
        ... )
        >>> table = torch.tensor([[0]], dtype=torch.int32)
        >>> start_loc, lens = torch.tensor([0, 2]).int(), torch.tensor([2]).int()
        >>> step = build_mla_step(spec, start_loc, lens, table, num_tokens=2)
        >>> weights = MlaWeights(torch.ones(4, 2), torch.eye(2)[None], torch.ones(1, 2, 1))
        >>> kv_c = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
        >>> inputs = MlaInputs(torch.zeros(2, 1, 4), kv_c, torch.zeros(2, 2))
        >>> mla_layer(spec, inputs, weights, MlaCache.allocate(spec, 1), step).tolist()
        [[2.0], [3.0]]
    """
    check_layer(Checks("mla_layer"), spec, inputs, weights, cache, step)
    q, k_pe = insert_latents(spec, inputs, weights, cache, step)
    if step.prefill_start_loc is None:
        return attend_absorbed(spec, q, weights, cache, step)
    num_tokens, capacity = q.shape[0], step.decode_lens.shape[0]
    if num_tokens == 0:
        return q.new_zeros(0, spec.num_heads * spec.v_head_dim)
    prefilled = attend_expanded(spec, q, inputs.kv_c, k_pe, weights, cache, step)
    if step.counts is None:
        return prefilled
    token = torch.arange(num_tokens, device=q.device)
    # indices, because a slice would make the graph compare capacity and num_tokens
    first = torch.arange(capacity, device=q.device).clamp(max=num_tokens - 1)
    decoded = attend_absorbed(spec, q.index_select(0, first), weights, cache, step)
    decoded = decoded.index_select(0, token.clamp(max=capacity - 1))
    is_decode = token < step.counts[2]
    return torch.where(is_decode[:, None], decoded, prefilled)


def insert_latents(
    spec: MlaSpec, inputs: MlaInputs, weights: MlaWeights, cache: MlaCache, step: MlaStep
) -> tuple[Tensor, Tensor]:
    """Insert the step's latents; return the rotated queries and the rotated key part."""
    table = weights.cos_sin_cache
    q = apply_rope(inputs.q, step.positions, table)
    k_pe = apply_rope(inputs.k_pe, step.positions, table)
    rows = (inputs.kv_c, k_pe, cache.kv, step.slot_mapping, cache.scale)
    mla_insert_kv(*rows, block_size=spec.block_size, layout=spec.layout)
    return q, k_pe


def attend_absorbed(
    spec: MlaSpec, q: Tensor, weights: MlaWeights, cache: MlaCache, step: MlaStep
) -> Tensor:
    """Attend to the cache's latent rows; ``q`` are the rotated queries of the decode tokens."""
    rows = (step.decode_lens, step.decode_req_indices, step.block_table, step.decode_start_loc)
    attended = mla_decode(
        absorbed_queries(spec, q, weights),
        cache.kv,
        *rows,
        q_scale=weights.q_scale,
        kv_scale=cache.scale,
        softmax_scale=spec.softmax_scale,
        block_size=spec.block_size,
        kv_lora_rank=spec.kv_lora_rank,
        layout=spec.layout,
        batch_invariant=spec.batch_invariant,
        impl=spec.decode_impl,
    )
    return attended_values(spec, attended, weights)


def absorbed_queries(spec: MlaSpec, q: Tensor, weights: MlaWeights) -> Tensor:
    """Project rotated queries into the latent space, by weight absorption. If each rank has a part
    of the heads, gather the queries of all heads."""
    nope, rope = q.split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), -1)
    absorbed, ranks = mla_absorb_q(nope, rope, weights.w_uk_t, weights.q_scale), spec.ranks
    if ranks is not None and ranks.shards_heads:
        return cp_gather_heads(absorbed, ranks.group, via=ranks.gathers_via)
    return absorbed


def attended_values(spec: MlaSpec, attended: MlaAttention, weights: MlaWeights) -> Tensor:
    """Merge the attention of all ranks, each to its own rows; return the values of this rank's
    heads, [num_tokens, num_heads * v_head_dim]."""
    ranks = spec.ranks
    if ranks is not None and ranks.shards_heads:
        attended = MlaAttention(*cp_combine(*attended, ranks.group, via=ranks.via))
    up = mla_v_up(attended.out.to(spec.dtype), weights.w_uv)  # for FP8 queries, out is bfloat16
    if ranks is None or ranks.shards_heads:
        return up
    # ranks exchange values and not latents, because values are a quarter as wide
    values = up.unflatten(-1, (spec.num_heads, spec.v_head_dim))
    return merge_states(*every_rank(values, attended.lse, ranks)).out.flatten(1)


def attend_expanded(
    spec: MlaSpec,
    q: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    weights: MlaWeights,
    cache: MlaCache,
    step: MlaStep,
) -> Tensor:
    """Attend to expanded keys and values: those of the step, then those of the contexts, chunk by
    chunk."""
    start_loc = cast(Tensor, step.prefill_start_loc)
    w_kv_b = cast(Tensor, weights.w_kv_b)
    heads = (spec.num_heads, spec.qk_nope_head_dim + spec.v_head_dim)

    def attend(
        expanded: Tensor, k_pe: Tensor, cu_seq_lens: Tensor, causal: bool
    ) -> tuple[Tensor, ...]:
        k_nope, v = expanded.split((spec.qk_nope_head_dim, spec.v_head_dim), -1)
        tensors = (q, k_nope, k_pe, v)
        settings: dict[str, Any] = {"softmax_scale": spec.softmax_scale, "impl": spec.prefill_impl}
        return mla_prefill(*tensors, start_loc, cu_seq_lens, causal=causal, **settings)

    def expand(latents: Tensor) -> Tensor:
        expanded = torch.nn.functional.linear(latents, w_kv_b)
        split: Tensor = expanded.to(q.dtype).unflatten(-1, heads)  # autocast changes the dtype
        return split

    out, lse = attend(expand(kv_c), k_pe, start_loc, True)
    if step.chunk_slots is not None:
        chunks = cast(ContextChunks, step.chunks)
        merged = (out.to(torch.float32), lse)  # kept in float32 until the last chunk
        for chunk in range(step.chunk_slots.shape[0]):
            rows = _context_rows(spec, cache, step, chunk)
            latent, rope = rows.split((spec.kv_lora_rank, spec.qk_rope_head_dim), -1)
            bounds = chunks.cu_seq_lens[chunk]
            # chunk 0 is the fullest: one product of all rows takes 2/3 of the time of mla_expand_kv
            if chunk == 0:
                expanded = expand(latent)
            else:
                expanded = mla_expand_kv(latent, w_kv_b.unflatten(0, heads), bounds[-1:])
            part = attend(expanded, rope, bounds, False)
            merged = merge_attn_states(*merged, *part)
        out = merged[0].to(out.dtype)
    return out.flatten(1)


def _context_rows(spec: MlaSpec, cache: MlaCache, step: MlaStep, chunk: int) -> Tensor:
    """Gather the context rows of a chunk in the order of their positions, in the spec's dtype;
    unused rows are 0."""
    slots, size = cast(Tensor, step.chunk_slots)[chunk], spec.block_size
    if spec.ranks is None:
        rows = mla_gather_kv(cache.kv, slots, cache.scale, block_size=size, layout=spec.layout)
        return rows.to(spec.dtype)  # codes become bfloat16
    coded = spec.layout != PlainLayout.tag
    gather = mla_gather_codes if coded else mla_gather_kv
    own = gather(cache.kv, slots, block_size=size, layout=spec.layout)
    rows, index = cp_gather_rows(own, spec.ranks.group), cast(Tensor, step.chunk_rows)[chunk]
    # an index below 0 marks an unused row, which must be 0 and not the row that the clamp reads
    rows = torch.where(index[:, None] >= 0, rows.index_select(0, index.clamp(min=0)), 0)
    if coded:
        rows = mla_dequantize_rows(rows, cache.scale, layout=spec.layout)
    return rows.to(spec.dtype)


def check_layer(
    checks: Checks,
    spec: MlaSpec,
    inputs: MlaInputs,
    weights: MlaWeights,
    cache: MlaCache,
    step: MlaStep,
) -> None:
    """Raise errors that an op would otherwise raise after the insert."""
    heads, nope, rope = spec.num_heads, spec.qk_nope_head_dim, spec.qk_rope_head_dim
    rank, value = spec.kv_lora_rank, spec.v_head_dim
    checks.tensor("inputs.q", inputs.q, spec.dtype, "num_tokens", heads, nope + rope)
    checks.tensor("inputs.kv_c", inputs.kv_c, spec.dtype, "num_tokens", rank)
    checks.tensor("inputs.k_pe", inputs.k_pe, spec.dtype, "num_tokens", rope)
    table = weights.cos_sin_cache
    checks.tensor("weights.cos_sin_cache", table, torch.float32, "num_positions", rope)
    checks.tensor("weights.w_uk_t", weights.w_uk_t, spec.dtype, heads, nope, rank)
    checks.tensor("weights.w_uv", weights.w_uv, spec.dtype, heads, rank, value)
    if spec.query is None:
        checks.without("weights.q_scale", weights.q_scale, None, "query None")
    else:
        checks.tensor("weights.q_scale", weights.q_scale, torch.float32, 1)
    if step.prefill_start_loc is not None:
        w_kv_b = cast(Tensor, weights.w_kv_b)
        checks.tensor("weights.w_kv_b", w_kv_b, spec.dtype, heads * (nope + value), rank)
    layout = spec.cache_layout()
    shape = layout.shape(0)[1:]
    checks.tensor("cache.kv", cache.kv, layout.storage_dtype, "num_blocks", *shape)
    if cache.scale is not None:
        checks.tensor("cache.scale", cache.scale, torch.float32, 1)
    if spec.layout != MlaFp8Layout.tag:
        checks.without("cache.scale", cache.scale, None, f"layout {spec.layout!r}")
    checks.tensor("step.positions", step.positions, torch.int64, "num_tokens")
    op, device = checks.op, inputs.q.device
    check_device(op, spec.impl, device)
    # under compile, the lowering checks this
    if spec.impl in LIBRARIES and not torch.compiler.is_compiling():
        require(op, spec.impl)
    spec.check_impl(op, step.decode_lens.shape[0])
    if spec.ranks is not None:
        spec.ranks.check(op, rank * spec.dtype.itemsize, device)
        if step.cp_rank is None:
            raise argument_error(
                op,
                "step",
                must="be of a rank",
                got="a step of one GPU",
                do="Build each step with the layer's own MlaSpec and a cp_rank",
            )
