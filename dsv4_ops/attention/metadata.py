"""Step metadata builders for decode and prefill.

``build_decode_metadata`` and ``build_prefill_metadata`` are stateless and never synchronise with
the host. Call them in the model's ``torch.compile(fullgraph=True)`` graph, or compile, capture or
export them on their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dsv4_ops.attention import pytrees
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.ints import INT64_MAX
from dsv4_ops.core.types import ABSENT, PrefillChunks, TokenMap
from dsv4_ops.ops.batch import split_decodes_and_prefills, token_map
from dsv4_ops.ops.chunking import max_prefill_chunks, prefill_row_bounds, split_prefill_chunks
from dsv4_ops.ops.indices import dense_compressed_indices, prefill_gather_lens, swa_indices_and_lens
from dsv4_ops.ops.slot_mapping import compressed_slot_mapping
from dsv4_ops.reference.common import gather_rows, quotient

COMPILE_OPTIONS = {"triton.autotune_pointwise": False, "triton.enable_pdl": True}
"""Inductor options with the most stable GPU latency up to 512 tokens.

By default, Inductor times the first batch to choose one of two block sizes. If that batch is small,
noise may choose the block size that is 2x slower on large batches. Programmatic dependent launch
(Hopper and later) overlaps consecutive kernels.
"""

_ROW_MULTIPLE = 128
"""FlashMLA requires index matrices whose width is a multiple of this number."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The part of a model's attention configuration that step metadata depends on.

    All layers attend to a sliding window. C4 layers (CSA) also attend to the compressed rows that
    their indexer selects. C128 layers (HCA) also attend to every compressed row.

    Args:
        window_size: Keys in the sliding window, including the token itself.
        c4_ratio: Positions per compressed row of C4 layers.
        c128_ratio: Positions per compressed row of C128 layers.
        block_tokens: Positions per block of a compressed cache; a block has block_tokens // ratio
            rows.
        swa_block_size: Rows per block of the window cache.
        index_topk: Rows that the indexer selects.
        next_n: Maximum tokens of a decode request: 1 + speculative tokens.
        max_model_len: Maximum request length in tokens.
        indexer_workspace: Key rows of the indexer's prefill workspace; at least max_model_len //
            c4_ratio.
        max_logits_bytes: Maximum bytes of indexer logits per prefill chunk.
    """

    window_size: int = 128
    c4_ratio: int = 4
    c128_ratio: int = 128
    block_tokens: int = 256
    swa_block_size: int = 64
    index_topk: int = 512
    next_n: int = 1
    max_model_len: int = 1048576
    indexer_workspace: int = 1048576
    max_logits_bytes: int = 512 * 2**20

    def __post_init__(self) -> None:
        checks = Checks("AttentionSpec")
        sizes = dict(vars(self))
        logits = sizes.pop("max_logits_bytes")
        checks.at_least(4, most=INT64_MAX, max_logits_bytes=logits)
        checks.at_least(1, **sizes)
        ratios = math.lcm(self.c4_ratio, self.c128_ratio)
        checks.divides("lcm(c4_ratio, c128_ratio)", ratios, "block_tokens", self.block_tokens)
        rows, workspace = self.max_model_len // self.c4_ratio, self.indexer_workspace
        if workspace < rows:
            raise argument_error(
                "AttentionSpec",
                "indexer_workspace",
                must=f"be at least max_model_len // c4_ratio = {rows}",
                got=workspace,
                do="Raise it, or lower max_model_len: a chunk holds all keys of a request",
            )

    @classmethod
    def deepseek_v4_flash(cls, *, next_n: int = 1, max_model_len: int = 1048576) -> AttentionSpec:
        """Return the spec of DeepSeek-V4-Flash, with top-512."""
        return cls(index_topk=512, next_n=next_n, max_model_len=max_model_len)

    @classmethod
    def deepseek_v4_pro(cls, *, next_n: int = 1, max_model_len: int = 1048576) -> AttentionSpec:
        """Return the spec of DeepSeek-V4-Pro, with top-1024."""
        return cls(index_topk=1024, next_n=next_n, max_model_len=max_model_len)

    @property
    def c4_block_size(self) -> int:
        """Rows per block of the C4 cache."""
        return self.block_tokens // self.c4_ratio

    @property
    def c128_block_size(self) -> int:
        """Rows per block of the C128 cache."""
        return self.block_tokens // self.c128_ratio

    @property
    def max_c128_rows(self) -> int:
        """Width of ``c128_indices``: compressed rows of the longest request, padded."""
        rows = -(-self.max_model_len // self.c128_ratio)
        return rows + -rows % _ROW_MULTIPLE

    def max_chunks(self, *, num_reqs: int, num_tokens: int) -> int:
        """Return an upper bound on the number of indexer chunks of a batch with these sizes."""
        return max_prefill_chunks(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_seq_len=self.max_model_len // self.c4_ratio,
            max_logits_bytes=self.max_logits_bytes,
        )


@dataclass(frozen=True)
class BlockTables:
    """Hold the block tables of the cache groups.

    Each table is int32 [num_reqs, max_blocks of the group].

    A block of ``swa`` covers ``swa_block_size`` positions. A block of ``c4`` or ``c128`` covers
    ``block_tokens`` positions.
    """

    swa: Tensor
    c4: Tensor
    c128: Tensor


@dataclass(frozen=True)
class _Tensors:
    def as_tuple(self) -> tuple[Tensor, ...]:
        """Return the tensors in field order, as an AOTInductor package does."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class DecodeMetadata(_Tensors):
    """Metadata of a decode step; every field is [num_tokens, ...].

    Rows of padding tokens have defined values too.

    Attributes:
        req_indices: Request of the token, int32; -1 for padding.
        positions: Position of the token, int64; -1 for padding.
        seq_lens, c4_lens, c128_lens: Numbers of visible positions, C4 rows and C128 rows, int32.
        swa_indices: Slots of the sliding window, [num_tokens, window_size], int32.
        swa_lens: Number of valid entries of ``swa_indices``, int32.
        c128_indices: Slots of all visible C128 rows, [num_tokens, max_c128_rows], int32.
        c4_slot_mapping, c128_slot_mapping: Slot of the compressed row that the token completes, or
            -1, int64.
        is_valid_token: False for padding, bool.
    """

    req_indices: Tensor
    positions: Tensor
    seq_lens: Tensor
    c4_lens: Tensor
    c128_lens: Tensor
    swa_indices: Tensor
    swa_lens: Tensor
    c128_indices: Tensor
    c4_slot_mapping: Tensor
    c128_slot_mapping: Tensor
    is_valid_token: Tensor


@dataclass(frozen=True)
class PrefillMetadata(_Tensors):
    """Metadata of a step with prefills; decodes come first in the batch.

    It has the fields of ``DecodeMetadata`` except ``c128_indices``, which would take gigabytes for
    a long prefill: kernels walk the block table instead. The fields below are added, all int32.

    Attributes:
        split: Numbers of decodes, prefills, decode tokens and prefill tokens, [4].
        gather_lens: Number of last positions of each request that its tokens' windows cover,
            [num_reqs].
        c4_cu_seq_lens: Offsets of the requests in the gathered indexer keys, [num_reqs + 1].
        c4_row_start, c4_row_stop: First visible row of the gathered indexer keys, and one past the
            last, [num_tokens].
        chunks: The indexer's chunk plan for the requests after the decodes, [max_chunks, 4].
        num_chunks: Number of valid rows of ``chunks``, [1].
    """

    req_indices: Tensor
    positions: Tensor
    seq_lens: Tensor
    c4_lens: Tensor
    c128_lens: Tensor
    swa_indices: Tensor
    swa_lens: Tensor
    c4_slot_mapping: Tensor
    c128_slot_mapping: Tensor
    split: Tensor
    gather_lens: Tensor
    c4_cu_seq_lens: Tensor
    c4_row_start: Tensor
    c4_row_stop: Tensor
    chunks: Tensor
    num_chunks: Tensor
    is_valid_token: Tensor


pytrees.register(BlockTables, DecodeMetadata, PrefillMetadata)


def build_decode_metadata(
    spec: AttentionSpec,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: BlockTables,
    is_valid_token: Tensor | None = None,
) -> DecodeMetadata:
    """Build the metadata of a decode step, whose requests may differ in length.

    Args:
        spec: The model's attention configuration.
        query_start_loc: First token of every request and one past the last token, [num_reqs + 1],
            int32.
        seq_lens: Length of every request including this step's tokens, [num_reqs], int32. 0 marks a
            padding request.
        slot_mapping: Slot of every token in the window cache, [num_tokens], int64; -1 for tokens
            that write nothing.
        block_tables: Block tables of every cache group.
        is_valid_token: False for tokens to treat as padding, [num_tokens], bool. If None, tokens
            without a slot are padding (vLLM's rule, ``slot_mapping >= 0``). A valid token without a
            slot attends, but writes nothing.

    Returns:
        ``DecodeMetadata`` with num_tokens rows.

    Raises:
        ValueError, TypeError: as the underlying ops.

    Example:
        >>> import torch
        >>> from dsv4_ops.attention.metadata import AttentionSpec, BlockTables
        >>> from dsv4_ops.attention.metadata import build_decode_metadata
        >>> spec = AttentionSpec.deepseek_v4_flash(max_model_len=16384)
        >>> table = torch.arange(256, dtype=torch.int32)[None]
        >>> metadata = build_decode_metadata(
        ...     spec,
        ...     torch.tensor([0, 1], dtype=torch.int32),
        ...     torch.tensor([200], dtype=torch.int32),
        ...     torch.tensor([199]),
        ...     BlockTables(swa=table, c4=table[:, :64], c128=table[:, :64]),
        ... )
        >>> metadata.c4_lens.tolist(), metadata.c128_indices.shape
        ([50], torch.Size([1, 128]))
    """
    op, batch = "build_decode_metadata", (query_start_loc, seq_lens, slot_mapping, block_tables)
    rows = token_rows(op, spec, *batch, is_valid_token)
    dense = dense_compressed_indices(
        rows["positions"],
        rows["req_indices"],
        block_tables.c128,
        block_size=spec.c128_block_size,
        compress_ratio=spec.c128_ratio,
        max_compressed=spec.max_c128_rows,
    )
    return DecodeMetadata(**rows, c128_indices=dense.indices)


def build_prefill_metadata(
    spec: AttentionSpec,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: BlockTables,
    is_valid_token: Tensor | None = None,
    *,
    max_chunks: int,
    num_decodes: int | Tensor | None = None,
) -> PrefillMetadata:
    """Build the metadata of a step with prefills; decodes, if any, come first.

    Args:
        spec: As for ``build_decode_metadata``.
        query_start_loc: As for ``build_decode_metadata``.
        seq_lens: As for ``build_decode_metadata``.
        slot_mapping: As for ``build_decode_metadata``.
        block_tables: As for ``build_decode_metadata``.
        is_valid_token: As for ``build_decode_metadata``.
        max_chunks: Capacity of the chunk plan, from ``AttentionSpec.max_chunks``.
        num_decodes: Number of leading requests that the chunk plan skips. None skips the batch's
            decodes, as counted in ``split`` of the result. To skip another number, pass an int or
            an int32 tensor whose first entry is the number, such as the result of
            ``split_decodes_and_prefills`` with another threshold.

    Returns:
        ``PrefillMetadata`` with num_tokens rows.

    Raises:
        ValueError, TypeError: as the underlying ops.
    """
    op, batch = "build_prefill_metadata", (query_start_loc, seq_lens, slot_mapping, block_tables)
    rows = token_rows(op, spec, *batch, is_valid_token)
    bounds = prefill_row_bounds(
        rows["positions"], rows["req_indices"], seq_lens, compress_ratio=spec.c4_ratio
    )
    split = split_decodes_and_prefills(query_start_loc, decode_threshold=spec.next_n)
    skipped = split if num_decodes is None else num_decodes
    plan = _plan_chunks(op, spec, query_start_loc, seq_lens, max_chunks, skipped)
    return PrefillMetadata(
        **rows,
        split=split,
        gather_lens=prefill_gather_lens(query_start_loc, seq_lens, window_size=spec.window_size),
        c4_cu_seq_lens=bounds.cu_seq_lens,
        c4_row_start=bounds.row_start,
        c4_row_stop=bounds.row_stop,
        chunks=plan.chunks,
        num_chunks=plan.num_chunks,
    )


def _plan_chunks(
    op: str,
    spec: AttentionSpec,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_chunks: int,
    num_decodes: int | Tensor,
) -> PrefillChunks:
    """Plan chunks of the requests after the decodes; request numbers are those of the batch."""
    rows, queries = quotient(seq_lens.clamp(min=0), spec.c4_ratio), query_start_loc.diff()
    budgets = {"workspace_size": spec.indexer_workspace, "max_logits_bytes": spec.max_logits_bytes}
    num_reqs, checks = seq_lens.shape[0], Checks(op)
    if not isinstance(num_decodes, Tensor):
        checks.at_least(0, num_decodes=num_decodes)
        checks.at_most("num_decodes", num_decodes, "num_reqs", num_reqs)
        budgets |= {"max_chunks": max_chunks, "request_offset": num_decodes}
        return split_prefill_chunks(rows[num_decodes:], queries[num_decodes:], **budgets)
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_reqs")
    checks.tensor("num_decodes", num_decodes, torch.int32, "num_rest + 1")
    first = num_decodes[:1].clamp(0, num_reqs)
    # shift prefills to the front; the tail becomes padding requests
    request = first + torch.arange(num_reqs, device=seq_lens.device)
    rows, queries = (gather_rows(each, request, request < num_reqs) for each in (rows, queries))
    plan = split_prefill_chunks(rows, queries, **budgets, max_chunks=max_chunks)
    used = torch.arange(max_chunks, device=seq_lens.device)[:, None] < plan.num_chunks
    numbers = torch.where(used, (plan.chunks[:, :2] + first).clamp(max=num_reqs), 0)
    return PrefillChunks(torch.cat((numbers, plan.chunks[:, 2:]), 1), plan.num_chunks)


def token_slots(
    tokens: TokenMap, block_table: Tensor, block_size: int, slot_mapping: Tensor | None = None
) -> Tensor:
    """Compute the slots of tokens in a cache with one row per token.

    Padding tokens get -1. With ``slot_mapping``, tokens whose entry there is negative get -1, too.
    """
    stored = tokens.positions if slot_mapping is None else slot_mapping
    sizes = {"block_size": block_size, "compress_ratio": 1}
    positions, req_indices = tokens.positions, tokens.req_indices
    return compressed_slot_mapping(positions, req_indices, block_table, stored, **sizes)


def token_rows(
    op: str,
    spec: AttentionSpec,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: BlockTables,
    is_valid_token: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute the fields that decode and prefill metadata share."""
    checks = Checks(op)
    checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_tokens")
    tokens = token_map(query_start_loc, seq_lens, num_tokens=slot_mapping.shape[0])
    if is_valid_token is None:
        is_valid_token = slot_mapping >= 0
    checks.tensor("is_valid_token", is_valid_token, torch.bool, "num_tokens")
    tokens = TokenMap(*(torch.where(is_valid_token, each, ABSENT) for each in tokens))
    return rows_of_tokens(spec, tokens, slot_mapping, block_tables)


def rows_of_tokens(
    spec: AttentionSpec, tokens: TokenMap, slot_mapping: Tensor, block_tables: BlockTables
) -> dict[str, Tensor]:
    """Compute ``token_rows`` from a token map."""
    window = swa_indices_and_lens(
        tokens.positions,
        tokens.req_indices,
        block_tables.swa,
        block_size=spec.swa_block_size,
        window_size=spec.window_size,
    )
    completed = {
        f"{name}_slot_mapping": compressed_slot_mapping(
            tokens.positions,
            tokens.req_indices,
            table,
            slot_mapping,
            block_size=spec.block_tokens // ratio,
            compress_ratio=ratio,
        )
        for name, table, ratio in (
            ("c4", block_tables.c4, spec.c4_ratio),
            ("c128", block_tables.c128, spec.c128_ratio),
        )
    }
    # padding has position -1, hence length 0; lengths fit int32
    length = (tokens.positions + 1).to(torch.int32)
    return {
        "req_indices": tokens.req_indices,
        "positions": tokens.positions,
        "seq_lens": length,
        "c4_lens": quotient(length, spec.c4_ratio),
        "c128_lens": quotient(length, spec.c128_ratio),
        "swa_indices": window.indices,
        "swa_lens": window.lens,
        **completed,
        "is_valid_token": tokens.req_indices >= 0,
    }
