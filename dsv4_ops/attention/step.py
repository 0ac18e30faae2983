"""What all attention layers of a step share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4_ops.attention.metadata import (
    BlockTables,
    DecodeMetadata,
    PrefillMetadata,
    rows_of_tokens,
    token_rows,
)
from dsv4_ops.attention.spec import LayerSpec
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.types import ABSENT, TokenMap
from dsv4_ops.ops.indexer import paged_mqa_logits_metadata
from dsv4_ops.ops.slot_mapping import compressed_slot_mapping
from dsv4_ops.ops.sparse_mla import flash_mla_metadata, sparse_mla_plan


@dataclass(frozen=True)
class StateTables:
    """Block tables of the compressors' states, int32 [num_reqs, max_state_blocks] each.

    ``c4`` counts pages of ``c4_state_page_size`` positions, for the states of the indexer too;
    ``c128`` pages of ``c128_state_page_size``. A layer reads no further back than its last two
    windows of 4 or its last window of 128, so that earlier entries may be stale. Entries that hold
    positions of the step are written to; -1 keeps none of those states. If the step never reads
    older states there, ``attention_layer`` may be told (``state_rings=False``).
    """

    c4: Tensor
    c128: Tensor


@dataclass(frozen=True)
class CompressedStep:
    """What layers with one kind of compressor share in a step.

    ``lens`` int32 [num_tokens]: visible rows of every token. ``slot_mapping`` int64 [num_tokens]:
    slot of the row that a token completes, or -1; ``block_table``: pages of the compressed rows,
    and of the indexer's keys. ``state_slot_mapping`` int64 [num_tokens] and ``state_block_table``:
    the same for the states of every token. ``plan`` int32 [num_tokens + programs, 4]: how the keys
    of all tokens are shared among programs, from ``sparse_mla_plan`` with the default of
    num_programs, or None. Only layers of kind "c128" go by it, in the schedule "decode". Or, with
    the impl "flash_mla", that of ``flash_mla_metadata``, which layers of kind "c4" go by as well.
    ``schedule`` int32 [num_sms + 1, 2]: how DeepGEMM shares the indexer's keys, from
    ``paged_mqa_logits_metadata``, or None. Only layers of kind "c4" go by it; of another step, or
    with other lens than these, it has DeepGEMM write where it must not.
    """

    lens: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    state_slot_mapping: Tensor
    state_block_table: Tensor
    plan: Tensor | None = None
    schedule: Tensor | None = None


@dataclass(frozen=True)
class AttentionStep:
    """What all attention layers of a step share; [num_tokens, ...], padding rows defined.

    ``req_indices`` int32 and ``positions`` int64: request and position, -1 for padding.
    ``slot_mapping`` int64: slot in the window cache, -1 for tokens that write nothing to any cache.
    ``swa_indices`` int32 [num_tokens, window_size] and ``swa_lens``: slots of the window.
    ``swa_block_table`` int32 [num_reqs, max_blocks]: pages of the window cache, which only the
    schedule "prefill" reads. ``is_valid_token`` bool: whether the token is one of a request, and no
    padding; no layer reads it. ``plan``: that of ``flash_mla_metadata`` for layers of kind
    "window", or None; of other lens than these, FlashMLA leaves out keys or reads behind lists.
    """

    req_indices: Tensor
    positions: Tensor
    slot_mapping: Tensor
    swa_indices: Tensor
    swa_lens: Tensor
    c4: CompressedStep
    c128: CompressedStep
    swa_block_table: Tensor | None = None
    is_valid_token: Tensor | None = None
    plan: Tensor | None = None


for _pytree_class in (StateTables, CompressedStep, AttentionStep):
    pytree.register_dataclass(
        _pytree_class, serialized_type_name=f"dsv4_ops.{_pytree_class.__name__}"
    )


def build_attention_step(
    spec: LayerSpec,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: BlockTables,
    state_tables: StateTables,
    is_valid_token: Tensor | None = None,
    *,
    plan_heads: int = 0,
) -> AttentionStep:
    """Build what the attention layers of a step need: decodes, prefills and mixtures alike.

    Args:
        spec: The model's attention configuration.
        query_start_loc: First token of every request and one past the last, [num_reqs + 1], int32.
        seq_lens: Tokens of every request, those of the step included, [num_reqs], int32. 0 marks a
            padding request.
        slot_mapping: Slot of every token in the window cache, [num_tokens], int64; -1 for tokens
            that write nothing. No two tokens of a step share a slot, nor does a token share that of
            one that it is still in the window of: the window of the first token of a chunk is read
            after the last one was written.
        block_tables: Pages of every request in the window and compressed caches. Of a kind of layer
            that the model does not have: any table, [num_reqs, 0] too.
        state_tables: Pages of every request in the states.
        is_valid_token: False for tokens to be taken for padding wherever they lie, [num_tokens],
            bool, as captured steps of a fixed number of tokens have them; they write nothing,
            whatever their slot. None for those behind the last request only.
        plan_heads: Query heads of the C128 layers, to make them a plan (``sparse_mla_plan``); 0
            for none. They attend to all rows of a request, so that without one a long context
            among short ones can be what all wait for: 512 requests of 100 to 128k tokens take each
            such layer of 64 heads 106 us on an H200, with a plan 79. A step makes it once for all
            of them, in 7 to 8 us of up to 128 requests. Not worth it where all contexts are nearly
            equal, or short, or few, and worth little for 32 to 256 requests on Hopper, whose kernel
            then cuts the batch by itself. With
            ``batch_invariant`` and impl "flash_mla" nothing goes by a plan, and
            ``attention_layer`` refuses it.

    Returns:
        ``AttentionStep`` of num_tokens rows.

    Raises:
        ValueError, TypeError: as the ops it is made of; with a plan or a schedule more than 16383
            tokens.

    Example:
        >>> import torch
        >>> from dsv4_ops.attention import LayerSpec, StateTables, build_attention_step
        >>> from dsv4_ops.attention.metadata import BlockTables
        >>> table = torch.arange(64, dtype=torch.int32)[None]
        >>> step = build_attention_step(
        ...     LayerSpec.deepseek_v4_flash(),
        ...     torch.tensor([0, 2], dtype=torch.int32),
        ...     torch.tensor([200], dtype=torch.int32),
        ...     torch.tensor([198, 199]),
        ...     BlockTables(swa=table, c4=table, c128=table),
        ...     StateTables(c4=table, c128=table),
        ... )
        >>> step.c4.lens.tolist(), step.c4.slot_mapping.tolist(), step.c128.lens.tolist()
        ([49, 50], [-1, 49], [1, 1])
    """
    op, batch = "build_attention_step", (query_start_loc, seq_lens, slot_mapping, block_tables)
    rows = token_rows(op, spec.attention, *batch, is_valid_token)
    plan = _plan(op, spec, rows, plan_heads)
    if is_valid_token is not None:
        slot_mapping = torch.where(is_valid_token, slot_mapping, ABSENT)
    return _step(spec, rows, slot_mapping, block_tables, state_tables, plan)


def attention_step(
    spec: LayerSpec,
    metadata: DecodeMetadata | PrefillMetadata,
    slot_mapping: Tensor,
    block_tables: BlockTables,
    state_tables: StateTables,
    *,
    plan_heads: int = 0,
) -> AttentionStep:
    """``build_attention_step`` from metadata that is there already.

    Args:
        spec: The model's attention configuration; ``metadata`` was built with its ``attention``.
        metadata: From ``build_decode_metadata`` or ``build_prefill_metadata``.
        slot_mapping: Slot of every token in the window cache, [num_tokens], int64.
        block_tables: Pages of every request in the window and compressed caches.
        state_tables: Pages of every request in the states.
        plan_heads: As for ``build_attention_step``.

    Returns:
        ``AttentionStep`` of num_tokens rows.

    Raises:
        ValueError, TypeError: as the ops it is made of.
    """
    rows = {name: getattr(metadata, name) for name in _ROWS}
    plan = _plan("attention_step", spec, rows, plan_heads)
    slot_mapping = torch.where(metadata.is_valid_token, slot_mapping, ABSENT)
    return _step(spec, rows, slot_mapping, block_tables, state_tables, plan)


def attention_step_of_tokens(
    spec: LayerSpec,
    tokens: TokenMap,
    slot_mapping: Tensor,
    block_tables: BlockTables,
    state_tables: StateTables,
    *,
    plan_heads: int = 0,
) -> AttentionStep:
    """``build_attention_step`` where request and position of every token are known: batches that no
    ``query_start_loc`` describes, such as padded [requests, tokens] inputs.

    Args:
        spec: The model's attention configuration.
        tokens: Row of the tables and position of every token, -1 for padding. Tokens of a request
            follow each other in the order of their positions.
        slot_mapping: Slot of every token in the window cache, [num_tokens], int64.
        block_tables: Pages of every request in the window and compressed caches.
        state_tables: Pages of every request in the states.
        plan_heads: As for ``build_attention_step``.

    Returns:
        ``AttentionStep`` of num_tokens rows.

    Raises:
        ValueError, TypeError: as the ops it is made of.
    """
    rows = rows_of_tokens(spec.attention, tokens, slot_mapping, block_tables)
    plan = _plan("attention_step_of_tokens", spec, rows, plan_heads)
    return _step(spec, rows, slot_mapping, block_tables, state_tables, plan)


_ROWS = (
    "req_indices",
    "positions",
    "swa_indices",
    "swa_lens",
    "c4_lens",
    "c128_lens",
    "c4_slot_mapping",
    "c128_slot_mapping",
    "is_valid_token",
)


def _plan(op: str, spec: LayerSpec, rows: dict[str, Tensor], num_heads: int) -> Tensor | None:
    """Of the C128 layers; the others attend to about as many keys in every token."""
    Checks(op).at_least(0, plan_heads=num_heads)
    if num_heads and spec.sm_parts:
        rule, advice = "be 0 with sm_parts", "FlashMLA goes by its metadata, not by a plan of ours"
        raise refusal(ValueError, op, "plan_heads", rule, num_heads, advice)
    if num_heads == 0:
        return None
    return sparse_mla_plan(rows["swa_lens"], rows["c128_lens"], num_heads=num_heads)


def _metadata(
    spec: LayerSpec, rows: dict[str, Tensor], kind: str, table: Tensor | None = None
) -> Tensor | None:
    """FlashMLA's, of the lens that it gets from a layer of such a kind."""
    if spec.sm_parts == 0:
        return None
    width = 0
    if table is not None:
        selected = spec.attention.index_topk
        width = selected if kind == "c4" else table.shape[1] * spec.block_size(kind)
    return flash_mla_metadata(
        rows["swa_lens"],
        rows[f"{kind}_lens"] if width else None,
        swa_width=rows["swa_indices"].shape[1],
        extra_width=width,
        num_sm_parts=spec.sm_parts,
    )


def _schedule(spec: LayerSpec, rows: dict[str, Tensor], table: Tensor) -> Tensor | None:
    """Of the lens that count in a selection: of requests that the table has, and as long as it."""
    if spec.schedule_sms == 0:
        return None
    page, request = spec.block_size("c4"), rows["req_indices"]
    real = (request >= 0) & (request < table.shape[0])
    lens = torch.where(real, rows["c4_lens"], 0).clamp(max=table.shape[1] * page)
    return paged_mqa_logits_metadata(lens, block_size=page, num_sms=spec.schedule_sms)


def _step(
    spec: LayerSpec,
    rows: dict[str, Tensor],
    slot_mapping: Tensor,
    block_tables: BlockTables,
    state_tables: StateTables,
    c128_plan: Tensor | None,
) -> AttentionStep:
    compressed = {}
    for kind, table, states, plan in (
        ("c4", block_tables.c4, state_tables.c4, None),
        ("c128", block_tables.c128, state_tables.c128, c128_plan),
    ):
        # every token has a row of states: a ratio of 1
        state_slots = compressed_slot_mapping(
            rows["positions"],
            rows["req_indices"],
            states,
            slot_mapping,
            block_size=spec.state_block_size(kind),
            compress_ratio=1,
        )
        lens, slots = rows[f"{kind}_lens"], rows[f"{kind}_slot_mapping"]
        schedule = _schedule(spec, rows, table) if kind == "c4" else None
        plan = _metadata(spec, rows, kind, table) if plan is None else plan
        compressed[kind] = CompressedStep(lens, slots, table, state_slots, states, plan, schedule)
    return AttentionStep(
        req_indices=rows["req_indices"],
        positions=rows["positions"],
        slot_mapping=slot_mapping,
        swa_indices=rows["swa_indices"],
        swa_lens=rows["swa_lens"],
        swa_block_table=block_tables.swa,
        is_valid_token=rows["is_valid_token"],
        plan=_metadata(spec, rows, "window"),
        **compressed,
    )
