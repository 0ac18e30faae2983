"""Step metadata shared by all attention layers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import cast

import torch
from torch import Tensor

from dsv4_ops.attention import pytrees
from dsv4_ops.attention.metadata import (
    BlockTables,
    DecodeMetadata,
    PrefillMetadata,
    rows_of_tokens,
    token_rows,
    token_slots,
)
from dsv4_ops.attention.parallel import ContextParallel
from dsv4_ops.attention.spec import LayerSpec
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.ints import single
from dsv4_ops.core.types import ABSENT, TokenMap
from dsv4_ops.ops.context_parallel import cp_seq_lens, cp_slot_mapping
from dsv4_ops.ops.indexer import paged_mqa_logits_metadata
from dsv4_ops.ops.indices import swa_indices_and_lens
from dsv4_ops.ops.sparse_mla import flash_mla_metadata, sparse_mla_plan


@dataclass(frozen=True)
class StateTables:
    """Hold the block tables of the compressors' states.

    Each table is int32 [num_reqs, max_state_blocks].

    A block of ``c4`` covers ``c4_state_block_size`` positions (and serves the indexer's states
    too). A block of ``c128`` covers ``c128_state_block_size`` positions. Layers read at most the
    last two windows of 4 or the last window of 128, so earlier entries may be stale. The step
    writes the state of a token to the block of the token's position, or nowhere if the block is -1.
    If a step never overwrites states that it also reads, pass ``state_rings=False`` to
    ``attention_layer``; if requests share blocks that one request fills in the step, pass
    ``save_first=True`` too.
    """

    c4: Tensor
    c128: Tensor


@dataclass(frozen=True)
class CompressedStep:
    """Metadata of a step for layers with one compression ratio.

    Attributes:
        lens: Number of compressed rows that each token sees, [num_tokens], int32.
        slot_mapping: Slot of the compressed row that a token completes, or -1, [num_tokens], int64.
        block_table: Block table of the compressed rows, and of the indexer keys.
        state_slot_mapping: Slot of every token's compressor state, [num_tokens], int64.
        state_block_table: Block table of the compressor states.
        plan: Split-KV plan of "c128" layers for the schedule "decode", from ``sparse_mla_plan``
            with its default num_programs, or None.
        schedule: DeepGEMM's schedule for the indexer of "c4" layers, [num_sms + 1, 2], int32, from
            ``paged_mqa_logits_metadata``, or None. The schedule must match ``lens``: if the lengths
            differ, DeepGEMM writes out of bounds.
        flash_mla_plan: ``flash_mla_metadata`` for the schedule "decode" with impl "flash_mla", or
            None.
    """

    lens: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    state_slot_mapping: Tensor
    state_block_table: Tensor
    plan: Tensor | None = None
    schedule: Tensor | None = None
    flash_mla_plan: Tensor | None = None


@dataclass(frozen=True)
class RankShare:
    """A rank's share of the sliding windows, which every rank stores in full.

    Attributes:
        cp_rank: The rank, [1], int32.
        swa_indices: This rank's columns of ``AttentionStep.swa_indices``, [num_tokens, columns].
        swa_lens: Number of valid entries of ``swa_indices``, int32.
    """

    cp_rank: Tensor
    swa_indices: Tensor
    swa_lens: Tensor


@dataclass(frozen=True)
class AttentionStep:
    """Hold the metadata of one step for all attention layers.

    Fields are [num_tokens] unless a shape is given. Rows of padding tokens have defined values too.

    Attributes:
        req_indices: Request of the token, int32; -1 for padding.
        positions: Position of the token, int64; -1 for padding.
        slot_mapping: Slot in the window cache, int64; -1 for tokens that write to no cache.
        swa_indices: Slots of the sliding window, [num_tokens, window_size], int32.
        swa_lens: Number of valid entries of ``swa_indices``, int32.
        c4, c128: Metadata for the layers with a compressor.
        swa_block_table: Block table of the window cache, [num_reqs, max_blocks], int32; only the
            schedule "prefill" reads it.
        is_valid_token: False for padding, bool; no layer reads it.
        flash_mla_plan: ``flash_mla_metadata`` for window layers, or None. The metadata must match
            ``swa_lens``: if the lengths differ, FlashMLA skips keys or reads out of bounds.
        share: The rank's share of the windows, if several ranks share the compressed rows; ``c4``
            and ``c128`` then describe the rows of this rank.
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
    flash_mla_plan: Tensor | None = None
    share: RankShare | None = None

    def with_window(
        self, spec: LayerSpec, block_table: Tensor, slot_mapping: Tensor
    ) -> AttentionStep:
        """Return the step for layers whose window caches are in another group of blocks.

        Only the slots of the windows are computed; all other metadata is shared.

        Args:
            spec: The spec of ``build_attention_step``.
            block_table: Block table of the group, [num_reqs, max_blocks], int32.
            slot_mapping: Slot of every token in the group's caches, [num_tokens], int64, as for
                ``build_attention_step``; a token without a slot here attends but writes no window
                key.

        Raises:
            ValueError, TypeError: a shape or dtype is not that of the step.

        Example:
            >>> import torch
            >>> from dsv4_ops.attention import LayerSpec, StateTables, build_attention_step
            >>> from dsv4_ops.attention.metadata import BlockTables
            >>> spec, table = LayerSpec.deepseek_v4_flash(), torch.tensor([[0, 1]]).int()
            >>> step = build_attention_step(
            ...     spec,
            ...     torch.tensor([0, 2], dtype=torch.int32),
            ...     torch.tensor([66], dtype=torch.int32),
            ...     torch.tensor([64, 65]),
            ...     BlockTables(swa=table, c4=table, c128=table),
            ...     StateTables(c4=table, c128=table),
            ... )
            >>> table, slots = torch.tensor([[7, 3]]).int(), torch.tensor([192, 193])
            >>> other = step.with_window(spec, table, slots)
            >>> other.swa_indices[1, 62:67].tolist(), other.c4 is step.c4
            ([510, 511, 192, 193, -1], True)
        """
        checks = Checks("with_window")
        checks.tensor("step.positions", self.positions, torch.int64, "num_tokens")
        rows = (torch.int32, "num_reqs", "max_blocks")
        checks.tensor("step.c4.block_table", self.c4.block_table, *rows)
        checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_tokens")
        checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_swa_blocks")
        window = swa_indices_and_lens(
            self.positions,
            self.req_indices,
            block_table,
            block_size=spec.attention.swa_block_size,
            window_size=spec.attention.window_size,
        )
        share = self.share
        if share is not None:
            windows = {"swa_indices": window.indices, "swa_lens": self.swa_lens}
            share = _share(cast(ContextParallel, spec.ranks), windows, share.cp_rank)
        return replace(
            self,
            slot_mapping=torch.where(self.positions >= 0, slot_mapping, ABSENT),
            swa_indices=window.indices,
            swa_block_table=block_table,
            share=share,
        )


pytrees.register(StateTables, CompressedStep, RankShare, AttentionStep)


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
    cp_rank: Tensor | None = None,
) -> AttentionStep:
    """Build one step's metadata for all attention layers.

    The batch may be any mix of decodes and prefills.

    Args:
        spec: The model's attention configuration.
        query_start_loc: First token of every request and one past the last token, [num_reqs + 1],
            int32.
        seq_lens: Length of every request including this step's tokens, [num_reqs], int32. 0 marks a
            padding request.
        slot_mapping: Slot of every token in the window cache, [num_tokens], int64; -1 for tokens
            that write nothing. Slots must be distinct, and must not overwrite keys that are still
            in the window of a token of the step: all keys are written before any window is read.
        block_tables: Block tables of the window and compressed caches. For a layer kind that the
            model lacks, pass any table, [num_reqs, 0] included. If layers have window caches in
            several groups of blocks, pass the table of one group here, and make the steps of the
            other layers with ``AttentionStep.with_window``.
        state_tables: Block tables of the compressor states.
        is_valid_token: False for tokens to treat as padding, [num_tokens], bool, for example the
            padding of a captured step of fixed size. Such tokens write nothing, whatever their
            slot. If None, tokens without a slot are padding (vLLM's rule, ``slot_mapping >= 0``). A
            valid token without a slot attends, but writes nothing.
        plan_heads: Query heads of the C128 layers, to build one split-KV plan
            (``sparse_mla_plan``) that these layers share; 0 for no plan. The plan balances requests
            of very different lengths: on an H200, a C128 layer of 64 heads takes 79 us instead of
            106 us for 512 requests of 100 to 128k tokens, and the plan takes 7 to 8 us per step for
            up to 128 requests. A plan costs more than it saves for few, short or nearly equal
            contexts. It saves little for 32 to 256 requests on Hopper, where the kernel has its own
            tile scheduler. ``attention_layer`` refuses a plan that ``batch_invariant`` or impl
            "flash_mla" would ignore.
        cp_rank: The rank, [1], int32, a tensor so that one graph serves all ranks. Required if
            ``spec.parallel`` has several ranks, otherwise ignored. Block tables and slots of the
            compressed rows then refer to this rank's cache. A block has as many rows as without
            ranks, so it covers ``block_tokens`` positions times the number of ranks.

    Returns:
        ``AttentionStep`` with num_tokens rows.

    Raises:
        ValueError, TypeError: as the underlying ops; also if a step with a plan or a schedule has
            more than 16383 tokens.

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
    if is_valid_token is not None:
        slot_mapping = torch.where(is_valid_token, slot_mapping, ABSENT)
    return _step(op, spec, rows, slot_mapping, block_tables, state_tables, plan_heads, cp_rank)


def attention_step(
    spec: LayerSpec,
    metadata: DecodeMetadata | PrefillMetadata,
    slot_mapping: Tensor,
    block_tables: BlockTables,
    state_tables: StateTables,
    *,
    plan_heads: int = 0,
    cp_rank: Tensor | None = None,
) -> AttentionStep:
    """Build the metadata of ``build_attention_step`` from existing step metadata.

    Args:
        spec: The model's attention configuration.
        metadata: From ``build_decode_metadata`` or ``build_prefill_metadata``, built with
            ``spec.attention``.
        slot_mapping: As for ``build_attention_step``.
        block_tables: As for ``build_attention_step``.
        state_tables: As for ``build_attention_step``.
        plan_heads: As for ``build_attention_step``.
        cp_rank: As for ``build_attention_step``.

    Returns:
        ``AttentionStep`` with num_tokens rows.

    Raises:
        ValueError, TypeError: as ``build_attention_step``.
    """
    op = "attention_step"
    rows = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
    slot_mapping = torch.where(metadata.is_valid_token, slot_mapping, ABSENT)
    return _step(op, spec, rows, slot_mapping, block_tables, state_tables, plan_heads, cp_rank)


def attention_step_of_tokens(
    spec: LayerSpec,
    tokens: TokenMap,
    slot_mapping: Tensor,
    block_tables: BlockTables,
    state_tables: StateTables,
    *,
    plan_heads: int = 0,
    cp_rank: Tensor | None = None,
) -> AttentionStep:
    """Build the metadata of ``build_attention_step`` from a token map.

    This function is for batches without a ``query_start_loc``, such as padded [batch, length]
    inputs.

    Args:
        spec: The model's attention configuration.
        tokens: Request (row of the block tables) and position of every token, -1 for padding. The
            tokens of a request must be adjacent and in the order of their positions.
        slot_mapping: As for ``build_attention_step``; a token with a position but without a slot
            attends, and writes nothing.
        block_tables: As for ``build_attention_step``.
        state_tables: As for ``build_attention_step``.
        plan_heads: As for ``build_attention_step``.
        cp_rank: As for ``build_attention_step``.

    Returns:
        ``AttentionStep`` with num_tokens rows.

    Raises:
        ValueError, TypeError: as ``build_attention_step``.
    """
    op = "attention_step_of_tokens"
    rows = rows_of_tokens(spec.attention, tokens, slot_mapping, block_tables)
    return _step(op, spec, rows, slot_mapping, block_tables, state_tables, plan_heads, cp_rank)


def _plan(op: str, spec: LayerSpec, rows: dict[str, Tensor], num_heads: int) -> Tensor | None:
    """Plan the C128 layers only: in other layers, tokens have nearly the same number of keys."""
    Checks(op).at_least(0, plan_heads=num_heads)
    if num_heads and spec.sm_parts:
        raise argument_error(
            op,
            "plan_heads",
            must="be 0 with sm_parts",
            got=num_heads,
            do="FlashMLA uses its own metadata",
        )
    if num_heads == 0 or "c128" not in spec.kinds:
        return None
    return sparse_mla_plan(rows["swa_lens"], rows["c128_lens"], num_heads=num_heads)


def _metadata(
    spec: LayerSpec, rows: dict[str, Tensor], kind: str, table: Tensor | None = None
) -> Tensor | None:
    """Make FlashMLA's tile scheduler metadata for layers of this kind."""
    if spec.sm_parts == 0 or kind not in spec.kinds:
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
    """Make DeepGEMM's schedule; lengths are masked, and at most the rows of the block table."""
    if spec.schedule_sms == 0 or "c4" not in spec.kinds:
        return None
    block_size, request = spec.block_size("c4"), rows["req_indices"]
    valid = (request >= 0) & (request < table.shape[0])
    lens = torch.where(valid, rows["c4_lens"], 0).clamp(max=table.shape[1] * block_size)
    return paged_mqa_logits_metadata(lens, block_size=block_size, num_sms=spec.schedule_sms)


def _own_rows(
    spec: LayerSpec,
    parallel: ContextParallel,
    rows: dict[str, Tensor],
    slot_mapping: Tensor,
    block_tables: BlockTables,
    cp_rank: Tensor,
) -> dict[str, Tensor]:
    """Compute the lengths and slots of a rank's compressed rows, under the same names as in
    ``rows``."""
    turns = {"cp_world_size": parallel.world_size, "cp_interleave": parallel.interleave}
    positions, own = rows["positions"], {}
    for kind, table in (("c4", block_tables.c4), ("c128", block_tables.c128)):
        ratio = spec.ratio(kind)
        completes = (slot_mapping >= 0) & ((positions + 1) % ratio == 0)
        own[f"{kind}_slot_mapping"] = cp_slot_mapping(
            torch.where(completes, positions // ratio, ABSENT),
            rows["req_indices"],
            table,
            cp_rank,
            block_size=spec.block_size(kind),
            **turns,
        )
        own[f"{kind}_lens"] = cp_seq_lens(rows[f"{kind}_lens"], cp_rank, **turns)
    return own


def _share(parallel: ContextParallel, rows: dict[str, Tensor], cp_rank: Tensor) -> RankShare:
    """Return the rank's columns of the windows. No column belongs to two ranks, so no key is
    attended to twice."""
    indices, lens, ranks = rows["swa_indices"], rows["swa_lens"], parallel.world_size
    width = indices.shape[1]
    share = -(-width // ranks)
    first = single(cp_rank).clamp(0, ranks - 1) * share
    columns = first + torch.arange(share, device=first.device)
    own = indices.index_select(1, columns.clamp(max=width - 1))
    return RankShare(cp_rank, own, (lens - first).clamp(0, share))


def _step(
    op: str,
    spec: LayerSpec,
    rows: dict[str, Tensor],
    slot_mapping: Tensor,
    block_tables: BlockTables,
    state_tables: StateTables,
    plan_heads: int,
    cp_rank: Tensor | None,
) -> AttentionStep:
    parallel, share, planned = spec.ranks, None, rows
    if parallel is not None:
        checks = Checks(op)
        rank = cast(Tensor, cp_rank)
        checks.tensor("cp_rank", rank, torch.int32, 1)
        share = _share(parallel, rows, rank)
        rows = rows | _own_rows(spec, parallel, rows, slot_mapping, block_tables, rank)
        planned, plan_heads = rows | {"swa_lens": share.swa_lens}, plan_heads * parallel.head_parts
    c128_plan = _plan(op, spec, planned, plan_heads)
    compressed, tokens = {}, TokenMap(rows["req_indices"], rows["positions"])
    for kind, table, states, plan in (
        ("c4", block_tables.c4, state_tables.c4, None),
        ("c128", block_tables.c128, state_tables.c128, c128_plan),
    ):
        state_slots = token_slots(tokens, states, spec.state_block_size(kind), slot_mapping)
        lens, slots = rows[f"{kind}_lens"], rows[f"{kind}_slot_mapping"]
        schedule = _schedule(spec, rows, table) if kind == "c4" else None
        plans = (plan, schedule, _metadata(spec, rows, kind, table))
        compressed[kind] = CompressedStep(lens, slots, table, state_slots, states, *plans)
    return AttentionStep(
        req_indices=rows["req_indices"],
        positions=rows["positions"],
        slot_mapping=slot_mapping,
        swa_indices=rows["swa_indices"],
        swa_lens=rows["swa_lens"],
        swa_block_table=block_tables.swa,
        is_valid_token=rows["is_valid_token"],
        flash_mla_plan=_metadata(spec, rows, "window"),
        share=share,
        **compressed,
    )
