"""One attention layer, without its linear projections."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dsv4_ops.attention.impl import check_layer_impl, check_ranks, indexer_impl
from dsv4_ops.attention.output import (
    attend_decode,
    attend_prefill,
    fuses_inverse_rope,
    group_output,
    has_v4_sizes,
)
from dsv4_ops.attention.sharded import attend_own, select_own
from dsv4_ops.attention.spec import LayerSpec, check_kind
from dsv4_ops.attention.step import AttentionStep
from dsv4_ops.attention.tensors import (
    LayerCaches,
    LayerCall,
    LayerInputs,
    LayerWeights,
    without_gradients,
)
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from dsv4_ops.core.types import IndexerQuery, QuantizedGroups
from dsv4_ops.ops.c4_step import insert_c4_step
from dsv4_ops.ops.compressor import compress_and_insert, save_and_compress, save_compressor_states
from dsv4_ops.ops.indexer import indexer_quantize_q, indexer_select
from dsv4_ops.ops.kv_cache import insert_k_cache
from dsv4_ops.ops.rope import ROPE_DIM, apply_rope, qnorm_rope_kv_insert


@without_gradients
def attention_layer(
    spec: LayerSpec,
    kind: str,
    inputs: LayerInputs,
    weights: LayerWeights,
    caches: LayerCaches,
    step: AttentionStep,
    *,
    schedule: str = "decode",
    state_rings: bool = True,
    save_first: bool = False,
) -> Tensor | QuantizedGroups:
    """Insert a step's keys into the layer's caches and attend to all visible keys.

    Args:
        spec: The model's attention configuration.
        kind: "window", "c4" or "c128".
        inputs: Projection outputs of every token of the step.
        weights: Parameters of the layer.
        caches: Caches of the layer. Tensors that the kind does not use may be None, here and in
            ``inputs`` and ``weights``.
        step: From ``build_attention_step``. The step's plan only balances the work of a "c128"
            layer under the schedule "decode": the plan of another step with the same number of
            tokens gives the same attention, with a worse balance.
        schedule: "decode" splits the keys of few tokens over the GPU (``sparse_mla_decode``);
            "prefill" is for many tokens and reads the block tables (``sparse_mla_prefill``). Both
            take any batch, and their results agree up to rounding. If ranks share the rows,
            "prefill" runs as "decode". "decode" fuses the inverse RoPE if the output is bfloat16
            and has DeepSeek-V4's sizes; otherwise the inverse RoPE is a kernel of its own.
        state_rings: Whether the step may overwrite compressor states that it also reads, as with
            short rings of state blocks. Pass False if every request has at most the ``next_n``
            tokens for which the rings were sized: states are then saved without a launch of their
            own, and a "c4" decode with FP8 caches does all its inserts in one launch
            (``insert_c4_step``).
        save_first: Whether all compressor states are saved before any state is read; requires
            ``state_rings=False``. Pass True if requests may share blocks that one request fills in
            this step, as in a prefix cache: with False, compressed rows may then be wrong. Without
            shared blocks, True gives the same bits and takes one more launch per compressor. A
            decode step never needs True if shared prefixes end at multiples of both ratios and
            every request has fewer tokens than ``c4_ratio``: only the token that completes the
            first window after the prefix reads states of the prefix.

    Returns:
        The input of the grouped output projection after inverse RoPE, [num_tokens, num_groups,
        num_heads / num_groups * head_dim], dense, in the dtype of q; with ``spec.scale_layout``,
        ``QuantizedGroups``. Padding tokens have output 0.

    Mutates: ``caches``, at the slots of the step, before attention reads them.

    Raises:
        ValueError, TypeError: a tensor is missing or does not match ``spec``; a plan is for another
            number of tokens or heads, or the layer would ignore it. Nothing is written.
        NotImplementedError, ImportError, RuntimeError: ``spec.impl`` does not support the layer, or
            is not available here. Nothing is written. Backward raises NotImplementedError.

    Example:
        >>> import torch
        >>> from dsv4_ops.attention import *
        >>> from dsv4_ops.attention.metadata import BlockTables
        >>> spec = LayerSpec.deepseek_v4_flash(num_groups=1)
        >>> table, none = torch.arange(4, dtype=torch.int32)[None], torch.zeros(1, 0).int()
        >>> step = build_attention_step(
        ...     spec,
        ...     torch.tensor([0, 3], dtype=torch.int32),  # a prefill of three tokens
        ...     torch.tensor([3], dtype=torch.int32),
        ...     torch.tensor([0, 1, 2]),
        ...     BlockTables(swa=table, c4=none, c128=none),
        ...     StateTables(c4=none, c128=none),
        ... )
        >>> caches = LayerCaches.allocate(spec, "window", swa_blocks=4)
        >>> weights = LayerWeights(spec.rope_table("window", 16), torch.zeros(2))
        >>> q, kv = torch.ones(3, 2, 512).bfloat16(), torch.ones(3, 512).bfloat16()
        >>> out = attention_layer(spec, "window", LayerInputs(q, kv), weights, caches, step)
        >>> out.shape, int(caches.swa.count_nonzero(1)[0]) > 3 * 512
        (torch.Size([3, 1, 1024]), True)
    """
    layer = LayerCall(spec, kind, inputs, weights, caches, step)
    _check(layer)
    checks = Checks("attention_layer")
    checks.one_of("schedule", schedule, "decode", "prefill")
    checks.flag("state_rings", state_rings)
    checks.flag("save_first", save_first)
    if save_first and state_rings:
        raise checks.error(
            "save_first",
            must="be False with state_rings",
            got=True,
            do="Pass state_rings=False, and states in blocks that no step overwrites before it has "
            "read them",
        )
    if schedule == "prefill":
        table: Any = step.swa_block_table
        checks.tensor("step.swa_block_table", table, torch.int32, "num_reqs", "max_swa_blocks")
    # every rank stores the whole window
    ranks = None if kind == "window" else spec.ranks
    if ranks is not None:
        schedule = "decode"
        check_ranks(ranks, step, inputs.q)
    check_layer_impl(layer, schedule)
    decode = schedule == "decode"
    q, query = insert(layer, schedule, state_rings, save_first)
    if ranks is not None:
        own = None if query is None else select_own(layer, ranks, query)
        return group_output(layer, attend_own(layer, ranks, q, own), inverse_rope=False)
    selected = None if query is None else select(layer, query, slots=decode)
    inverse_rope = decode and fuses_inverse_rope(spec, q)
    if decode:
        # an upper bound of the selected rows; the exact count would take a reduction
        rows = None if selected is None else (selected, step.c4.lens)
        out = attend_decode(layer, q, rows, inverse_rope=inverse_rope).out
    else:
        out = attend_prefill(layer, q, selected)
    return group_output(layer, out, inverse_rope=inverse_rope)


def insert(
    layer: LayerCall, schedule: str, state_rings: bool, save_first: bool = False
) -> tuple[Tensor, IndexerQuery | None]:
    """Write the step to the layer's caches; return the queries of attention and indexer.

    Without state rings, a C4 decode of V4's sizes, with FP8 caches, is one op (``insert_c4_step``).
    """
    spec, kind = layer.spec, layer.kind
    fp8 = (spec.layout, spec.indexer_layout) == (MainLayout.tag, IndexerLayout.tag)
    fused = kind == "c4" and schedule == "decode" and not state_rings
    if fused and fp8 and has_v4_sizes(spec, layer.inputs.q):
        return _insert_c4(layer, save_first)
    q = insert_window(layer)
    if kind != "window":
        insert_compressed(layer, state_rings, save_first)
    if kind != "c4":
        return q, None
    insert_compressed(layer, state_rings, save_first, indexer=True)
    return q, indexer_query(layer)


def _insert_c4(layer: LayerCall, save_first: bool) -> tuple[Tensor, IndexerQuery]:
    spec, _, inputs, weights, caches, step = layer
    projected = (inputs.q, inputs.kv, inputs.kv_score)
    of_indexer = (inputs.indexer_q, inputs.indexer_weights, inputs.indexer_kv_score)
    window = (caches.swa, step.slot_mapping)
    rows = (weights.ape, weights.norm_weight, caches.states, caches.compressed)
    keys = (weights.indexer_ape, weights.indexer_norm_weight, caches.indexer_states, caches.indexer)
    slots = (step.c4.state_block_table, step.c4.state_slot_mapping, step.c4.slot_mapping)
    tokens = (step.positions, step.req_indices, weights.cos_sin_cache)
    tensors = (*projected, *of_indexer, *window, *rows, *keys, *slots, *tokens)
    q, *query = insert_c4_step(
        *(cast(Tensor, tensor) for tensor in tensors),
        eps=spec.eps,
        softmax_scale=_index_scale(layer),
        compress_ratio=spec.ratio("c4"),
        state_block_size=spec.state_block_size("c4"),
        swa_block_size=spec.attention.swa_block_size,
        block_size=spec.block_size("c4"),
        save_first=save_first,
    )
    return q, IndexerQuery(*query)


def insert_window(layer: LayerCall) -> Tensor:
    """Apply norm and RoPE to the queries; rotate the keys and insert them."""
    spec, _, inputs, weights, caches, step = layer
    q, kv, table = inputs.q, inputs.kv, weights.cos_sin_cache
    if has_v4_sizes(spec, q):
        rows = (q, kv, caches.swa, step.slot_mapping, step.positions, table)
        size = spec.attention.swa_block_size
        return qnorm_rope_kv_insert(*rows, eps=spec.eps, block_size=size, layout=spec.layout)
    insert_k_cache(apply_rope(kv, step.positions, table), caches.swa, step.slot_mapping)
    values = q.to(torch.float32)
    normed = values * torch.rsqrt((values * values).mean(-1, keepdim=True) + spec.eps)
    return apply_rope(normed, step.positions, table).to(q.dtype)


def insert_compressed(
    layer: LayerCall, state_rings: bool, save_first: bool = False, *, indexer: bool = False
) -> None:
    """Insert the compressed rows (or the ``indexer``'s keys) that the step completes, and save the
    compressor's states. With state rings, save only after all states are read."""
    spec, kind, inputs, weights, caches, step = layer
    group = step.c4 if kind == "c4" else step.c128
    layout = spec.indexer_layout if indexer else spec.layout
    tensors = (inputs.kv_score, weights.ape, weights.norm_weight, caches.states, caches.compressed)
    if indexer:
        tensors = (
            inputs.indexer_kv_score,
            weights.indexer_ape,
            weights.indexer_norm_weight,
            caches.indexer_states,
            caches.indexer,
        )
    kv_score, ape, norm_weight, states, cache = (cast(Tensor, tensor) for tensor in tensors)
    ratio, state_block_size = spec.ratio(kind), spec.state_block_size(kind)
    source, state_slots = (kv_score, ape, states, group.state_block_table), group.state_slot_mapping
    norm = (norm_weight, weights.cos_sin_cache)
    target = (step.positions, step.req_indices, *norm, cache, group.slot_mapping)
    settings: dict[str, Any] = {"compress_ratio": ratio, "overlap": kind == "c4", "eps": spec.eps}
    settings |= {"state_block_size": state_block_size, "block_size": spec.block_size(kind)}
    settings["layout"] = layout
    if not state_rings:
        save_and_compress(*source, state_slots, *target, **settings, save_first=save_first)
        return
    compress_and_insert(*source, *target, **settings)
    rows = (kv_score, ape, states, state_slots, step.positions)
    save_compressor_states(*rows, compress_ratio=ratio, block_size=state_block_size)


def indexer_query(layer: LayerCall) -> IndexerQuery:
    """Return the indexer's rotated queries, in FP8 if its keys are in FP8, and its head weights."""
    spec, _, inputs, weights, _, step = layer
    q, head_weights = cast(Tensor, inputs.indexer_q), cast(Tensor, inputs.indexer_weights)
    table = weights.cos_sin_cache
    if spec.indexer_layout == IndexerLayout.tag:
        scale = _index_scale(layer)
        return indexer_quantize_q(q, head_weights, step.positions, table, softmax_scale=scale)
    q = apply_rope(q, step.positions, table)
    return IndexerQuery(q, head_weights.to(torch.float32))  # a common scale would not change top-k


def _index_scale(layer: LayerCall) -> float | None:
    """Return the scale of the indexer's scores if ranks share the indexer's heads; otherwise None,
    for the op's default."""
    ranks = layer.spec.ranks
    parts = 1 if ranks is None else ranks.index_head_parts
    heads = cast(Tensor, layer.inputs.indexer_q).shape[1] * parts
    return None if parts == 1 else IndexerLayout.head_dim**-0.5 * heads**-0.5


def select(layer: LayerCall, query: IndexerQuery, *, slots: bool) -> Tensor:
    """Select the top-k rows of every token, int32 [num_tokens, index_topk].

    With ``slots``, the result holds cache slots, for ``attend_decode``; otherwise row numbers
    within the request, for ``attend_prefill``.
    """
    spec, step = layer.spec, layer.step
    tokens = (step.positions, step.req_indices, step.c4.block_table)
    return indexer_select(
        *query,
        cast(Tensor, layer.caches.indexer),
        *tokens,
        step.c4.schedule,
        block_size=spec.block_size("c4"),
        compress_ratio=spec.attention.c4_ratio,
        topk=spec.attention.index_topk,
        layout=spec.indexer_layout,
        slots=slots,
        impl=indexer_impl(spec, query.q),
    )


def _check(layer: LayerCall) -> None:
    """Raise errors that an op would otherwise raise after another op has written to a cache."""
    spec, kind, inputs, weights, caches, step = layer
    check_kind("attention_layer", kind)
    checks = Checks("attention_layer")
    fp8 = spec.layout == MainLayout.tag or spec.scale_layout is not None
    dtype = torch.bfloat16 if fp8 else spec.dtype
    head_dim = MainLayout.head_dim if fp8 else spec.head_dim
    checks.tensor("inputs.q", inputs.q, dtype, "num_tokens", "num_heads", head_dim)
    checks.tensor("inputs.kv", inputs.kv, dtype, "num_tokens", head_dim)
    checks.divides("num_groups", spec.num_groups, "num_heads", inputs.q.shape[1])
    checks.tensor("step.positions", step.positions, torch.int64, "num_tokens")
    table, rope_dim = weights.cos_sin_cache, ROPE_DIM if fp8 else spec.rope_dim
    checks.tensor("weights.cos_sin_cache", table, torch.float32, "num_positions", rope_dim)
    checks.tensor("weights.attn_sink", weights.attn_sink, torch.float32, "num_heads")
    if kind != "window":
        _check_compressor(checks, layer, "", spec.head_dim)
    if kind == "c4":
        _check_compressor(checks, layer, "indexer_", IndexerLayout.head_dim)
        _check_indexer(checks, spec, inputs)
    for name, layout in spec.layouts(kind).items():
        cache, blocks = getattr(caches, name), f"num_{name}_blocks"
        if isinstance(layout, PlainLayout):
            dims = (blocks, f"{name}_block_size", f"{name}_width")
            checks.rows(f"caches.{name}", cache, layout.block_size, dims)
            checks.apart(f"caches.{name}", cache)
            shape = (blocks, layout.block_size, layout.width)
            checks.tensor(f"caches.{name}", cache, layout.dtype, *shape)
        else:
            checks.pages(f"caches.{name}", cache, layout, (blocks, f"{name}_page"))


def _check_compressor(checks: Checks, layer: LayerCall, prefix: str, head_dim: int) -> None:
    spec, kind, inputs, weights, *_ = layer
    width = spec.compressor_width(kind, head_dim)
    for owner, name, weight, dims in (
        ("inputs", "kv_score", inputs, ("num_tokens", 2 * width)),
        ("weights", "ape", weights, (spec.ratio(kind), width)),
        ("weights", "norm_weight", weights, (head_dim,)),
    ):
        value = getattr(weight, prefix + name)
        checks.tensor(f"{owner}.{prefix}{name}", value, torch.float32, *dims)


def _check_indexer(checks: Checks, spec: LayerSpec, inputs: LayerInputs) -> None:
    dtype = torch.bfloat16 if spec.indexer_layout == IndexerLayout.tag else spec.dtype
    q, weights = cast(Tensor, inputs.indexer_q), cast(Tensor, inputs.indexer_weights)
    dims = ("num_tokens", "num_index_heads")
    checks.tensor("inputs.indexer_q", q, dtype, *dims, IndexerLayout.head_dim)
    checks.tensor("inputs.indexer_weights", weights, (torch.bfloat16, torch.float32), *dims)
