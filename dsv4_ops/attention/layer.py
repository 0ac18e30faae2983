"""One attention layer between its linear projections."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dsv4_ops.attention.impl import check_layer_impl, selector
from dsv4_ops.attention.output import attend, attend_whole, grouped, model_sizes, turns_back
from dsv4_ops.attention.spec import LayerSpec, check_kind
from dsv4_ops.attention.step import AttentionStep, CompressedStep
from dsv4_ops.attention.tensors import LayerCaches, LayerInputs, LayerWeights, without_gradients
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
) -> Tensor | QuantizedGroups:
    """Write the keys of a step's tokens to the layer's caches, and attend to them and to those of
    the steps before.

    Args:
        spec: The model's attention configuration.
        kind: "window", "c4" or "c128".
        inputs: Projections of every token of the step.
        weights: Parameters of the layer.
        caches: Caches of the layer. The tensors of a kind of layer it is not may be None, here and
            in ``inputs`` and ``weights``.
        step: From ``build_attention_step``. A plan in it decides how programs share the keys of a
            "c128" layer in the schedule "decode", and nothing else: that of another step of as many
            tokens gives the same attention, less evenly spread.
        schedule: "decode" splits the keys of few tokens over the GPU (``sparse_mla_decode``);
            "prefill" is for many tokens, and reads the block tables themselves
            (``sparse_mla_prefill``). Both take any batch, and their results agree up to rounding.
            The kernels of "decode" undo the rotation of a bfloat16 output of the model's sizes
            themselves; in FP8, and of "prefill", that is a kernel behind them.
        state_rings: Whether a token may keep its states where a window of the step reads older
            ones, as in short rings. States are then saved behind the windows, by another kernel;
            False saves that launch, and in a decode of "c4" with FP8 caches all but one of those
            before the selection (``insert_c4_step``).

    Returns:
        The attention output as the grouped output projection takes it, [num_tokens, num_groups,
        num_heads / num_groups * head_dim], dense, of the dtype of q, with the rotation undone; or
        ``QuantizedGroups``, if ``spec.scale_layout`` says so. 0 for padding tokens.

    Mutates: ``caches``, at the slots of the step. Keys that a step writes are read in the same
        step: by their own token and by those after it that may see them.

    Raises:
        ValueError, TypeError: a tensor that is missing, or of another shape or dtype than the
            configuration says; a plan of another number of tokens or heads, with
            ``batch_invariant`` or for impl "flash_mla"; as the ops it is made of. Nothing is
            written then.
        NotImplementedError, ImportError, RuntimeError: a ``spec.impl`` that does not take the
            layer, or does not run here. Nothing is written then either. NotImplementedError in
            backward, too: an input or a weight may require gradients, but none is computed.

    Example:
        >>> import torch
        >>> from dsv4_ops.attention import *
        >>> from dsv4_ops.attention.metadata import BlockTables
        >>> spec = LayerSpec.deepseek_v4_flash(num_groups=1)
        >>> pages, none = torch.arange(4, dtype=torch.int32)[None], torch.zeros(1, 0).int()
        >>> step = build_attention_step(
        ...     spec,
        ...     torch.tensor([0, 3], dtype=torch.int32),  # a prefill of three tokens
        ...     torch.tensor([3], dtype=torch.int32),
        ...     torch.tensor([0, 1, 2]),
        ...     BlockTables(swa=pages, c4=none, c128=none),
        ...     StateTables(c4=none, c128=none),
        ... )
        >>> caches = LayerCaches.allocate(spec, "window", swa_blocks=4)
        >>> weights = LayerWeights(spec.rope_table("window", 16), torch.zeros(2))
        >>> q, kv = torch.ones(3, 2, 512).bfloat16(), torch.ones(3, 512).bfloat16()
        >>> out = attention_layer(spec, "window", LayerInputs(q, kv), weights, caches, step)
        >>> out.shape, int(caches.swa.count_nonzero(1)[0]) > 3 * 512
        (torch.Size([3, 1, 1024]), True)
    """
    _check(spec, kind, inputs, weights, caches, step)
    checks = Checks("attention_layer")
    checks.one_of("schedule", schedule, "decode", "prefill")
    checks.flag("state_rings", state_rings)
    if schedule == "prefill":
        pages: Any = step.swa_block_table
        checks.tensor("step.swa_block_table", pages, torch.int32, "num_reqs", "max_swa_blocks")
    check_layer_impl(spec, kind, inputs, step, schedule)
    decode = schedule == "decode"
    q, query = insert(spec, kind, inputs, weights, caches, step, schedule, state_rings)
    selected = None if query is None else select(spec, query, caches, step, slots=decode)
    turned = decode and turns_back(spec, q)
    if decode:
        out = attend(spec, kind, q, selected, weights, caches, step, turned=turned)
    else:
        out = attend_whole(spec, kind, q, selected, weights, caches, step)
    return grouped(spec, out, weights, step, turned=turned)


def insert(
    spec: LayerSpec,
    kind: str,
    inputs: LayerInputs,
    weights: LayerWeights,
    caches: LayerCaches,
    step: AttentionStep,
    schedule: str,
    state_rings: bool,
) -> tuple[Tensor, IndexerQuery | None]:
    """Store what the layer keeps of the step; its queries, and those of an indexer. A decode of C4
    does so in one launch, where that has its sizes and no window reads what the step overwrites."""
    fp8 = (spec.layout, spec.indexer_layout) == (MainLayout.tag, IndexerLayout.tag)
    together = kind == "c4" and schedule == "decode" and not state_rings
    if together and fp8 and model_sizes(spec, inputs.q):
        return _insert_c4(spec, inputs, weights, caches, step)
    q = insert_window(spec, inputs, weights, caches, step)
    if kind != "window":
        insert_compressed(spec, kind, inputs, weights, caches, step, state_rings)
    if kind != "c4":
        return q, None
    insert_indexer_keys(spec, inputs, weights, caches, step, state_rings)
    return q, indexer_query(spec, inputs, weights, step)


def _insert_c4(
    spec: LayerSpec,
    inputs: LayerInputs,
    weights: LayerWeights,
    caches: LayerCaches,
    step: AttentionStep,
) -> tuple[Tensor, IndexerQuery]:
    tensors = (
        inputs.q,
        inputs.kv,
        inputs.kv_score,
        inputs.indexer_q,
        inputs.indexer_weights,
        inputs.indexer_kv_score,
        caches.swa,
        step.slot_mapping,
        weights.ape,
        weights.norm_weight,
        caches.states,
        caches.compressed,
        weights.indexer_ape,
        weights.indexer_norm_weight,
        caches.indexer_states,
        caches.indexer,
        step.c4.state_block_table,
        step.c4.state_slot_mapping,
        step.c4.slot_mapping,
        step.positions,
        step.req_indices,
        weights.cos_sin_cache,
    )
    q, *query = insert_c4_step(
        *(cast(Tensor, tensor) for tensor in tensors),
        eps=spec.eps,
        compress_ratio=spec.ratio("c4"),
        state_block_size=spec.state_block_size("c4"),
        swa_block_size=spec.attention.swa_block_size,
        block_size=spec.block_size("c4"),
    )
    return q, IndexerQuery(*query)


def insert_window(
    spec: LayerSpec,
    inputs: LayerInputs,
    weights: LayerWeights,
    caches: LayerCaches,
    step: AttentionStep,
) -> Tensor:
    """Normalise and rotate the queries; rotate the keys and store them."""
    q, kv, table = inputs.q, inputs.kv, weights.cos_sin_cache
    if model_sizes(spec, q):
        return qnorm_rope_kv_insert(
            q,
            kv,
            caches.swa,
            step.slot_mapping,
            step.positions,
            table,
            eps=spec.eps,
            block_size=spec.attention.swa_block_size,
            layout=spec.layout,
        )
    insert_k_cache(apply_rope(kv, step.positions, table), caches.swa, step.slot_mapping)
    values = q.to(torch.float32)
    normed = values * torch.rsqrt((values * values).mean(-1, keepdim=True) + spec.eps)
    return apply_rope(normed, step.positions, table).to(q.dtype)


def insert_compressed(
    spec: LayerSpec,
    kind: str,
    inputs: LayerInputs,
    weights: LayerWeights,
    caches: LayerCaches,
    step: AttentionStep,
    state_rings: bool,
) -> None:
    """Store the compressed rows that the step finishes, and its states."""
    tensors = (
        inputs.kv_score,
        weights.ape,
        weights.norm_weight,
        caches.states,
        caches.compressed,
    )
    group = step.c4 if kind == "c4" else step.c128
    _compress(spec, kind, tensors, weights, step, group, spec.layout, state_rings)


def insert_indexer_keys(
    spec: LayerSpec,
    inputs: LayerInputs,
    weights: LayerWeights,
    caches: LayerCaches,
    step: AttentionStep,
    state_rings: bool,
) -> None:
    """The same for the indexer."""
    tensors = (
        inputs.indexer_kv_score,
        weights.indexer_ape,
        weights.indexer_norm_weight,
        caches.indexer_states,
        caches.indexer,
    )
    _compress(spec, "c4", tensors, weights, step, step.c4, spec.indexer_layout, state_rings)


def _compress(
    spec: LayerSpec,
    kind: str,
    tensors: tuple[Tensor | None, ...],
    weights: LayerWeights,
    step: AttentionStep,
    group: CompressedStep,
    layout: str,
    state_rings: bool,
) -> None:
    """Store the rows that the step finishes, and what later steps need to finish theirs: in rings
    when the states that it overwrites have been read."""
    kv_score, ape, norm_weight, states, cache = (cast(Tensor, tensor) for tensor in tensors)
    ratio, state_block_size = spec.ratio(kind), spec.state_block_size(kind)
    before, own = (kv_score, ape, states, group.state_block_table), group.state_slot_mapping
    norm = (norm_weight, weights.cos_sin_cache)
    behind = (step.positions, step.req_indices, *norm, cache, group.slot_mapping)
    settings: dict[str, Any] = {
        "compress_ratio": ratio,
        "overlap": kind == "c4",
        "eps": spec.eps,
        "state_block_size": state_block_size,
        "block_size": spec.block_size(kind),
        "layout": layout,
    }
    if not state_rings:
        save_and_compress(*before, own, *behind, **settings)
        return
    compress_and_insert(*before, *behind, **settings)
    save_compressor_states(
        kv_score,
        ape,
        states,
        own,
        step.positions,
        compress_ratio=ratio,
        block_size=state_block_size,
    )


def indexer_query(
    spec: LayerSpec, inputs: LayerInputs, weights: LayerWeights, step: AttentionStep
) -> IndexerQuery:
    """The indexer's queries, rotated and in FP8 if its keys are, and the weights of their heads."""
    q, head_weights = cast(Tensor, inputs.indexer_q), cast(Tensor, inputs.indexer_weights)
    table = weights.cos_sin_cache
    if spec.indexer_layout == IndexerLayout.tag:
        return indexer_quantize_q(q, head_weights, step.positions, table)
    q = apply_rope(q, step.positions, table)
    return IndexerQuery(q, head_weights.to(torch.float32))  # a scale of all would change no choice


def select(
    spec: LayerSpec,
    query: IndexerQuery,
    caches: LayerCaches,
    step: AttentionStep,
    *,
    slots: bool,
) -> Tensor:
    """Rows that every token attends to, int32 [num_tokens, index_topk]: their ``slots``, as
    ``attend`` takes them, or their places in the request, as ``attend_whole`` does."""
    q, head_weights = query
    return indexer_select(
        q,
        head_weights,
        cast(Tensor, caches.indexer),
        step.positions,
        step.req_indices,
        step.c4.block_table,
        step.c4.schedule,
        block_size=spec.block_size("c4"),
        compress_ratio=spec.attention.c4_ratio,
        topk=spec.attention.index_topk,
        layout=spec.indexer_layout,
        slots=slots,
        impl=selector(spec, q),
    )


def _check(
    spec: LayerSpec,
    kind: str,
    inputs: LayerInputs,
    weights: LayerWeights,
    caches: LayerCaches,
    step: AttentionStep,
) -> None:
    """Everything that an op would refuse after another one has written."""
    check_kind("attention_layer", kind)
    checks = Checks("attention_layer")
    fp8 = spec.layout == MainLayout.tag or spec.scale_layout is not None
    dtype = torch.bfloat16 if fp8 else spec.dtype
    head_dim = MainLayout.head_dim if fp8 else spec.head_dim
    checks.tensor("inputs.q", inputs.q, dtype, "num_tokens", "num_heads", head_dim)
    checks.tensor("inputs.kv", inputs.kv, dtype, "num_tokens", head_dim)
    checks.divides("num_groups", spec.num_groups, "num_heads", inputs.q.shape[1])
    checks.tensor("step.positions", step.positions, torch.int64, "num_tokens")
    checks.tensor(
        "weights.cos_sin_cache",
        weights.cos_sin_cache,
        torch.float32,
        "num_positions",
        ROPE_DIM if fp8 else spec.rope_dim,
    )
    checks.tensor("weights.attn_sink", weights.attn_sink, torch.float32, "num_heads")
    if kind != "window":
        _check_compressor(checks, spec, kind, inputs, weights, "", spec.head_dim)
    if kind == "c4":
        _check_compressor(checks, spec, kind, inputs, weights, "indexer_", IndexerLayout.head_dim)
        _check_indexer(checks, spec, inputs)
    for name, layout in spec.layouts(kind).items():
        cache, blocks = getattr(caches, name), f"num_{name}_blocks"
        if isinstance(layout, PlainLayout):
            dims = (blocks, f"{name}_block_size", f"{name}_width")
            checks.rows(f"caches.{name}", cache, layout.block_size, dims)
            shape = (blocks, layout.block_size, layout.width)
            checks.tensor(f"caches.{name}", cache, layout.dtype, *shape)
        else:
            checks.pages(f"caches.{name}", cache, layout, (blocks, f"{name}_page"))


def _check_compressor(
    checks: Checks,
    spec: LayerSpec,
    kind: str,
    inputs: LayerInputs,
    weights: LayerWeights,
    prefix: str,
    head_dim: int,
) -> None:
    width = spec.compressor_width(kind, head_dim)
    for owner, name, held, dims in (
        ("inputs", "kv_score", inputs, ("num_tokens", 2 * width)),
        ("weights", "ape", weights, (spec.ratio(kind), width)),
        ("weights", "norm_weight", weights, (head_dim,)),
    ):
        value = getattr(held, prefix + name)
        checks.tensor(f"{owner}.{prefix}{name}", value, torch.float32, *dims)


def _check_indexer(checks: Checks, spec: LayerSpec, inputs: LayerInputs) -> None:
    dtype = torch.bfloat16 if spec.indexer_layout == IndexerLayout.tag else spec.dtype
    q, weights = cast(Tensor, inputs.indexer_q), cast(Tensor, inputs.indexer_weights)
    checks.tensor(
        "inputs.indexer_q", q, dtype, "num_tokens", "num_index_heads", IndexerLayout.head_dim
    )
    checks.floats("inputs.indexer_weights", weights, torch.bfloat16, torch.float32)
    checks.tensor("inputs.indexer_weights", weights, weights.dtype, "num_tokens", "num_index_heads")
