"""Step metadata shared by all dense MLA layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from dsv4_ops.attention import pytrees
from dsv4_ops.attention.metadata import token_slots
from dsv4_ops.attention.mla_spec import MlaSpec
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.types import ABSENT, ContextChunks, TokenMap
from dsv4_ops.ops.batch import split_decodes_and_prefills, token_map
from dsv4_ops.ops.context_parallel import cp_row_indices, cp_seq_lens, cp_slot_mapping
from dsv4_ops.ops.mla_context import context_chunks


@dataclass(frozen=True)
class MlaStep:
    """Metadata of a step for all dense MLA layers.

    Rows of padding tokens have defined values too.

    With the context "absorbed", every token counts as a decode token: max_decode_tokens is
    num_tokens, and the fields from ``counts`` to ``chunk_rows`` are None. If max_decode_tokens of
    the spec is 0, no token counts as a decode token: layers do not read the fields of decode
    tokens, and ``counts`` is None.

    Attributes:
        req_indices: Request of the token, [num_tokens], int32; -1 for padding.
        positions: Position of the token, [num_tokens], int64; -1 for padding.
        slot_mapping: Slot in the cache, [num_tokens], int64; -1 for tokens that write nothing on
            this rank, such as those that other ranks store.
        decode_lens: Number of rows of this rank that each decode token sees, [max_decode_tokens],
            int32; 0 for padding.
        decode_req_indices: Request of each decode token, [max_decode_tokens], int32.
        block_table: Block table of the cache, [num_reqs, max_blocks], int32.
        decode_start_loc: First decode token of every request and one past the last, [num_reqs + 1],
            int32, which lets decode tokens of a request share reads of its rows. May be None if no
            request has several decode tokens.
        counts: Numbers of decodes, prefills, decode tokens and prefill tokens, [4], int32; at most
            max_decode_tokens tokens are decode tokens.
        prefill_start_loc: First prefill token of every request and one past the last, [num_reqs +
            1], int32; decodes have no prefill tokens.
        chunks: The chunk plan of the contexts, or None if the step has no contexts.
        chunk_slots: Slot of each row that this rank gathers for a chunk, [max_chunks, num_rows],
            int64; -1 for unused rows. num_rows is workspace_rows, divided among the ranks if they
            share the cache.
        chunk_rows: Index of each row of a chunk among the rows that the ranks gathered,
            [max_chunks, workspace_rows], int64; -1 for unused rows. None if there is one rank.
        cp_rank: This rank, [1], int32. None if there is one rank.
    """

    req_indices: Tensor
    positions: Tensor
    slot_mapping: Tensor
    decode_lens: Tensor
    decode_req_indices: Tensor
    block_table: Tensor
    decode_start_loc: Tensor | None = None
    counts: Tensor | None = None
    prefill_start_loc: Tensor | None = None
    chunks: ContextChunks | None = None
    chunk_slots: Tensor | None = None
    chunk_rows: Tensor | None = None
    cp_rank: Tensor | None = None


pytrees.register(MlaStep)


def build_mla_step(
    spec: MlaSpec,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    is_valid_token: Tensor | None = None,
    cp_rank: Tensor | None = None,
    *,
    num_tokens: int,
) -> MlaStep:
    """Build step metadata for all dense MLA layers, for decodes and prefills.

    Args:
        spec: The model's attention configuration.
        query_start_loc: First token of every request and one past the last token, [num_reqs + 1],
            int32. Decodes should come first: a decode after a prefill is computed as a prefill.
        seq_lens: Length of every request including this step's tokens, [num_reqs], int32. 0 marks a
            padding request.
        block_table: Block table of the cache, [num_reqs, max_blocks], int32.
        is_valid_token: False for tokens to treat as padding, [num_tokens], bool. If None, only
            tokens after the last request are padding.
        cp_rank: This rank, [1], int32, if ranks share the cache: ``ContextParallel.rank``.
        num_tokens: Tokens of the padded batch.

    Returns:
        ``MlaStep`` with num_tokens rows.

    Raises:
        ValueError, TypeError: as the underlying ops.

    Example:
        >>> import torch
        >>> from dsv4_ops.attention import MlaSpec, build_mla_step
        >>> step = build_mla_step(
        ...     MlaSpec.deepseek_v3(block_size=4),
        ...     torch.tensor([0, 1, 3], dtype=torch.int32),
        ...     torch.tensor([5, 4], dtype=torch.int32),
        ...     torch.tensor([[2, 7], [5, 0]], dtype=torch.int32),
        ...     num_tokens=4,
        ... )
        >>> step.slot_mapping.tolist(), step.decode_lens.tolist()
        ([28, 22, 23, -1], [5, 3, 4, 0])
    """
    tokens = token_map(query_start_loc, seq_lens, num_tokens=num_tokens)
    if is_valid_token is not None:
        Checks("build_mla_step").tensor("is_valid_token", is_valid_token, torch.bool, "num_tokens")
        tokens = TokenMap(*(torch.where(is_valid_token, each, ABSENT) for each in tokens))
    return mla_step_of_tokens(spec, tokens, block_table, query_start_loc, seq_lens, cp_rank)


def mla_step_of_tokens(
    spec: MlaSpec,
    tokens: TokenMap,
    block_table: Tensor,
    query_start_loc: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cp_rank: Tensor | None = None,
) -> MlaStep:
    """Build the metadata of ``build_mla_step`` from a token map.

    Args:
        spec: The model's attention configuration.
        tokens: Request (row of the block table) and position of every token, -1 for padding.
        block_table: As for ``build_mla_step``.
        query_start_loc: As for ``build_mla_step``. May be None with the context "absorbed"; then
            tokens of a request do not share reads of its rows.
        seq_lens: As for ``build_mla_step``; "absorbed" does not read it.
        cp_rank: As for ``build_mla_step``.

    Returns:
        ``MlaStep`` with num_tokens rows.

    Raises:
        ValueError, TypeError: as ``build_mla_step``; or the context is "chunked", and
            ``query_start_loc`` or ``seq_lens`` is None.
    """
    lens = (tokens.positions + 1).to(torch.int32)
    if spec.cp_world_size == 1:
        slots = token_slots(tokens, block_table, spec.block_size)
    else:
        if cp_rank is None:
            raise argument_error(
                "mla_step_of_tokens",
                "cp_rank",
                must="be given if ranks share the cache",
                got="None",
                do="Pass spec.parallel.rank(device)",
            )
        ranks = {"cp_world_size": spec.cp_world_size, "cp_interleave": spec.cp_interleave}
        slots = cp_slot_mapping(
            tokens.positions,
            tokens.req_indices,
            block_table,
            cp_rank,
            block_size=spec.block_size,
            **ranks,
        )
        # one call for all tokens: a rank's count does not grow by 1 per token
        lens = cp_seq_lens(lens, cp_rank, **ranks)
    step = MlaStep(
        req_indices=tokens.req_indices,
        positions=tokens.positions,
        slot_mapping=slots,
        decode_lens=lens,
        decode_req_indices=tokens.req_indices,
        block_table=block_table,
        decode_start_loc=query_start_loc,
        cp_rank=None if spec.cp_world_size == 1 else cp_rank,
    )
    if spec.context == "absorbed":
        return step
    if query_start_loc is None or seq_lens is None:
        raise argument_error(
            "mla_step_of_tokens",
            "query_start_loc" if query_start_loc is None else "seq_lens",
            must="be given for chunked contexts",
            got="None",
            do="Pass the bounds of the requests",
        )
    return _with_prefills(spec, step, query_start_loc, seq_lens)


def _with_prefills(
    spec: MlaSpec, step: MlaStep, query_start_loc: Tensor, seq_lens: Tensor
) -> MlaStep:
    """Separate the decodes, and plan the chunks of the other requests' contexts."""
    if spec.max_decode_tokens == 0:
        return _with_chunks(spec, replace(step, prefill_start_loc=query_start_loc), seq_lens)
    num_tokens = step.positions.shape[0]
    counts = split_decodes_and_prefills(query_start_loc, decode_threshold=spec.next_n)
    num_decode_tokens = counts[2].clamp(max=spec.max_decode_tokens)
    decode = torch.arange(spec.max_decode_tokens, device=counts.device)
    is_decode = (decode < num_decode_tokens) & (decode < num_tokens)
    lens, requests = step.decode_lens, step.decode_req_indices
    if num_tokens > 0:
        # an index, not a slice, so that the size does not depend on num_tokens
        first = decode.clamp(max=num_tokens - 1)
        lens, requests = lens.index_select(0, first), requests.index_select(0, first)
    else:
        lens, requests = (each.new_zeros(spec.max_decode_tokens) for each in (lens, requests))
    several = spec.next_n > 1
    step = replace(
        step,
        decode_lens=torch.where(is_decode, lens, 0),
        decode_req_indices=torch.where(is_decode, requests, ABSENT),
        decode_start_loc=torch.minimum(query_start_loc, num_decode_tokens) if several else None,
        counts=torch.cat((counts[:2], num_decode_tokens[None], counts[3:])),
        prefill_start_loc=torch.maximum(query_start_loc, num_decode_tokens),
    )
    return _with_chunks(spec, step, seq_lens)


def _with_chunks(spec: MlaSpec, step: MlaStep, seq_lens: Tensor) -> MlaStep:
    """Plan the chunks of the contexts of prefills."""
    if not spec.max_chunks:
        return step
    prefill_lens = cast(Tensor, step.prefill_start_loc).diff()
    context = torch.where(prefill_lens > 0, seq_lens - prefill_lens, 0).clamp(min=0)
    chunks = context_chunks(
        context,
        workspace_rows=spec.workspace_rows,
        max_chunks=spec.max_chunks,
        chunk_plan=spec.chunk_plan,
        block_size=spec.block_size,
        cp_world_size=spec.cp_world_size,
        cp_interleave=spec.cp_interleave,
    )
    slots = _chunk_slots(spec, chunks, step.block_table)
    rows = _chunk_rows(spec, chunks) if spec.cp_world_size > 1 else None
    return replace(step, chunks=chunks, chunk_slots=slots, chunk_rows=rows)


def _chunk_slots(spec: MlaSpec, chunks: ContextChunks, block_table: Tensor) -> Tensor:
    """Compute the slots of this rank's rows. If ranks share the cache, a request's last slots may
    hold unwritten memory."""
    slots = []
    for chunk in range(spec.max_chunks):
        starts, cu_seq_lens = chunks.local_starts[chunk], chunks.local_cu_seq_lens[chunk]
        ends = starts + cu_seq_lens.diff()
        rows = token_map(cu_seq_lens, ends, num_tokens=_local_rows(spec))
        slots.append(token_slots(rows, block_table, spec.block_size))
    return torch.stack(slots)


def _chunk_rows(spec: MlaSpec, chunks: ContextChunks) -> Tensor:
    indices = []
    for chunk in range(spec.max_chunks):
        starts, cu_seq_lens = chunks.local_starts[chunk], chunks.cu_seq_lens[chunk]
        ends = starts * spec.cp_world_size + cu_seq_lens.diff()
        rows = cp_row_indices(
            *token_map(cu_seq_lens, ends, num_tokens=spec.workspace_rows),
            starts,
            chunks.local_cu_seq_lens[chunk],
            num_local_rows=_local_rows(spec),
            cp_world_size=spec.cp_world_size,
            cp_interleave=spec.cp_interleave,
        )
        indices.append(rows)
    return torch.stack(indices)


def _local_rows(spec: MlaSpec) -> int:
    """Return the number of rows of a chunk that each rank gathers."""
    return spec.workspace_rows // spec.cp_world_size // spec.cp_interleave * spec.cp_interleave
