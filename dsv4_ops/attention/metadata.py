"""Everything one step's attention layers need, as plain functions of tensors over the ops of this
package.

``build_decode_metadata`` and ``build_prefill_metadata`` hold no state and never look at the host:
put them in front of the model inside the same ``torch.compile(fullgraph=True)`` graph, or compile,
capture or export them by themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.ints import INT64_MAX
from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.types import ABSENT, PrefillChunks, TokenMap
from dsv4_ops.ops.batch import split_decodes_and_prefills, token_map
from dsv4_ops.ops.chunking import max_prefill_chunks, prefill_row_bounds, split_prefill_chunks
from dsv4_ops.ops.indices import dense_compressed_indices, prefill_gather_lens, swa_indices_and_lens
from dsv4_ops.ops.slot_mapping import compressed_slot_mapping
from dsv4_ops.reference.common import gather_rows

COMPILE_OPTIONS = {"triton.autotune_pointwise": False, "triton.enable_pdl": True}
"""``torch.compile(build, options=COMPILE_OPTIONS)``: steadiest on a GPU up to 512 tokens.

Inductor's default tries two block sizes on the first batch it sees; for rows of 8192 slots one is
twice as slow on large batches, and on a small first batch the choice is left to noise. Programmatic
dependent launch (Hopper and later) lets a kernel start while the one before it ends. At 2048 tokens
an H200 took 27 us with these options and 22 with the better block size of the default.
"""

_ROW_MULTIPLE = 128
"""Index rows are padded to this many entries, as FlashMLA wants them."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What of a model's attention the metadata depends on: configuration, never a batch.

    C4 layers attend to rows selected by the indexer, C128 layers to every compressed row; all
    layers share the window.

    Args:
        window_size: Keys of the sliding window, the token itself included.
        c4_ratio: Positions per compressed row of the indexed (C4) layers.
        c128_ratio: Positions per compressed row of the dense (C128) layers.
        block_tokens: Positions covered by a page of a compressed cache; its pages hold block_tokens
            // ratio rows.
        swa_block_size: Rows of a page of the window cache.
        index_topk: Rows that the indexer selects.
        next_n: Most tokens of a decode request: 1 + speculative tokens.
        max_model_len: Longest request, in tokens.
        indexer_workspace: Key rows of the indexer's prefill workspace, no fewer than the longest
            request has: max_model_len // c4_ratio.
        max_logits_bytes: Bytes of indexer logits of one prefill chunk.
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
        both = math.lcm(self.c4_ratio, self.c128_ratio)
        checks.divides("lcm(c4_ratio, c128_ratio)", both, "block_tokens", self.block_tokens)
        rows, held = self.max_model_len // self.c4_ratio, self.indexer_workspace
        if held < rows:
            rule = f"be at least max_model_len // c4_ratio = {rows}"
            advice = "Raise it, or lower max_model_len: a chunk has all keys of a request"
            raise refusal(ValueError, "AttentionSpec", "indexer_workspace", rule, held, advice)

    @classmethod
    def deepseek_v4_flash(cls, *, next_n: int = 1, max_model_len: int = 1048576) -> AttentionSpec:
        """DeepSeek-V4-Flash: 512 selected rows."""
        return cls(index_topk=512, next_n=next_n, max_model_len=max_model_len)

    @classmethod
    def deepseek_v4_pro(cls, *, next_n: int = 1, max_model_len: int = 1048576) -> AttentionSpec:
        """DeepSeek-V4-Pro: 1024 selected rows."""
        return cls(index_topk=1024, next_n=next_n, max_model_len=max_model_len)

    @property
    def c4_page_size(self) -> int:
        """Rows of a page of the C4 cache."""
        return self.block_tokens // self.c4_ratio

    @property
    def c128_page_size(self) -> int:
        """Rows of a page of the C128 cache."""
        return self.block_tokens // self.c128_ratio

    @property
    def max_c128_rows(self) -> int:
        """Width of a row of C128 slots: every compressed row of the longest request, padded."""
        rows = -(-self.max_model_len // self.c128_ratio)
        return rows + -rows % _ROW_MULTIPLE

    def max_chunks(self, *, num_reqs: int, num_tokens: int) -> int:
        """Indexer chunks that a batch of this size can need at most."""
        return max_prefill_chunks(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_seq_len=self.max_model_len // self.c4_ratio,
            max_logits_bytes=self.max_logits_bytes,
        )


@dataclass(frozen=True)
class BlockTables:
    """Block tables of the cache groups, int32 [num_reqs, max_blocks of the group] each.

    ``swa`` counts pages of ``swa_block_size`` positions, ``c4`` and ``c128`` pages of
    ``block_tokens`` positions.
    """

    swa: Tensor
    c4: Tensor
    c128: Tensor


class _Tensors:
    """What the metadata dataclasses share."""

    def as_tuple(self) -> tuple[Tensor, ...]:
        """The tensors in the order of the fields: the form for an AOTInductor package, which knows
        no class of ours."""
        return tuple(getattr(self, name) for name in _FIELDS[type(self).__name__])


@dataclass(frozen=True)
class DecodeMetadata(_Tensors):
    """Per-token inputs of every attention layer of a decode step; [num_tokens, ...], padding rows
    defined.

    ``req_indices`` int32 and ``positions`` int64: request and position, -1 for padding.
        ``seq_lens``, ``c4_lens``, ``c128_lens``
    int32: visible rows of ratio 1, 4, 128. ``swa_indices`` int32 [num_tokens, window_size] and
        ``swa_lens``: window slots.
    ``c128_indices`` int32 [num_tokens, max_c128_rows]: slots of all visible C128 rows.
    ``c4_slot_mapping``,
    ``c128_slot_mapping`` int64: slot of the compressed row that the token completes, or -1.
        ``is_valid_token`` bool: whether the token is one of a request, and no padding.
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
    """Inputs of every attention layer of a step with prefills (decodes first, then prefills).

    As ``DecodeMetadata``, without ``c128_indices`` (the rows are 0, 1, .. ``c128_lens`` - 1:
    kernels walk the block table, since a slot matrix of a long prefill would take gigabytes), and
    with: ``split`` int32 [4] (decodes, prefills, decode tokens, prefill tokens); ``gather_lens``
    int32 [num_reqs]: trailing positions whose window keys are needed; ``c4_cu_seq_lens`` int32
    [num_reqs + 1], ``c4_row_start`` and ``c4_row_stop`` int32 [num_tokens]: rows of the gathered
    indexer keys; ``chunks`` int32 [max_chunks, 4] and ``num_chunks`` int32 [1]: the indexer's chunk
    plan over the requests behind the first num_decodes.
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


_FIELDS = {
    cls.__name__: tuple(field.name for field in fields(cls))
    for cls in (DecodeMetadata, PrefillMetadata)
}

for _pytree_class in (BlockTables, DecodeMetadata, PrefillMetadata):
    pytree.register_dataclass(
        _pytree_class, serialized_type_name=f"dsv4_ops.{_pytree_class.__name__}"
    )


def build_decode_metadata(
    spec: AttentionSpec,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: BlockTables,
    is_valid_token: Tensor | None = None,
) -> DecodeMetadata:
    """Build what a decode step's layers need: uniform, ragged and MTP batches alike.

    Args:
        spec: The model's attention configuration.
        query_start_loc: First token of every request and one past the last, [num_reqs + 1], int32.
        seq_lens: Tokens of every request, context included, [num_reqs], int32. 0 marks a padding
            request.
        slot_mapping: Slot of every token in the window cache, [num_tokens], int64; -1 for tokens
            that write nothing.
        block_tables: Pages of every request in every cache group.
        is_valid_token: False for tokens to be taken for padding wherever they lie, [num_tokens],
            bool; None for those behind the last request only.

    Returns:
        ``DecodeMetadata`` of num_tokens rows.

    Raises:
        ValueError, TypeError: as the ops it is made of.

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
        block_size=spec.c128_page_size,
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
    num_decodes: int | Tensor = 0,
) -> PrefillMetadata:
    """Build what the layers of a step with prefills need; decodes, if any, come first in the batch.

    Args:
        spec: The model's attention configuration.
        query_start_loc: First token of every request and one past the last, [num_reqs + 1], int32.
        seq_lens: Tokens of every request, context included, [num_reqs], int32. 0 marks a padding
            request.
        slot_mapping: Slot of every token in the window cache, [num_tokens], int64; -1 for tokens
            that write nothing.
        block_tables: Pages of every request in every cache group.
        is_valid_token: False for tokens to be taken for padding wherever they lie, [num_tokens],
            bool; None for those behind the last request only.
        max_chunks: Capacity of the chunk plan, from ``AttentionSpec.max_chunks``.
        num_decodes: Requests in front that the chunk plan leaves out. An int, where the host knows
            it; or int32, on the device, the result of ``split_decodes_and_prefills`` or its first
            entry, so that one graph plans for any mixture.

    Returns:
        ``PrefillMetadata`` of num_tokens rows.

    Raises:
        ValueError, TypeError: as the ops it is made of.
    """
    op, batch = "build_prefill_metadata", (query_start_loc, seq_lens, slot_mapping, block_tables)
    rows = token_rows(op, spec, *batch, is_valid_token)
    bounds = prefill_row_bounds(
        rows["positions"], rows["req_indices"], seq_lens, compress_ratio=spec.c4_ratio
    )
    plan = _plan_chunks(op, spec, query_start_loc, seq_lens, max_chunks, num_decodes)
    return PrefillMetadata(
        **rows,
        split=split_decodes_and_prefills(query_start_loc, decode_threshold=spec.next_n),
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
    """Of the requests behind the decodes, by their numbers in the batch."""
    rows, queries = seq_lens.clamp(min=0) // spec.c4_ratio, query_start_loc.diff()
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
    # the prefills move to the front; what they leave behind is as empty as a padding request
    request = first + torch.arange(num_reqs, device=seq_lens.device)
    rows, queries = (gather_rows(each, request, request < num_reqs) for each in (rows, queries))
    plan = split_prefill_chunks(rows, queries, **budgets, max_chunks=max_chunks)
    used = torch.arange(max_chunks, device=seq_lens.device)[:, None] < plan.num_chunks
    numbers = torch.where(used, (plan.chunks[:, :2] + first).clamp(max=num_reqs), 0)
    return PrefillChunks(torch.cat((numbers, plan.chunks[:, 2:]), 1), plan.num_chunks)


def token_rows(
    op: str,
    spec: AttentionSpec,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: BlockTables,
    is_valid_token: Tensor | None = None,
) -> dict[str, Tensor]:
    """The fields that decode and prefill share, from one token map."""
    tokens = token_map(query_start_loc, seq_lens, num_tokens=slot_mapping.shape[0])
    if is_valid_token is not None:
        checks = Checks(op)
        checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_tokens")
        checks.tensor("is_valid_token", is_valid_token, torch.bool, "num_tokens")
        tokens = TokenMap(*(torch.where(is_valid_token, each, ABSENT) for each in tokens))
    return rows_of_tokens(spec, tokens, slot_mapping, block_tables)


def rows_of_tokens(
    spec: AttentionSpec, tokens: TokenMap, slot_mapping: Tensor, block_tables: BlockTables
) -> dict[str, Tensor]:
    """The same where request and position of every token are known."""
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
    # padding has position -1, hence length 0; a position is below the int32 length of its request
    length = (tokens.positions + 1).to(torch.int32)
    return {
        "req_indices": tokens.req_indices,
        "positions": tokens.positions,
        "seq_lens": length,
        "c4_lens": length // spec.c4_ratio,
        "c128_lens": length // spec.c128_ratio,
        "swa_indices": window.indices,
        "swa_lens": window.lens,
        **completed,
        "is_valid_token": tokens.req_indices >= 0,
    }
