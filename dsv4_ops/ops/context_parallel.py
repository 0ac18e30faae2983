"""Sequences whose keys lie on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.registry import OpSpec
from dsv4_ops.core.types import MergedStates
from dsv4_ops.dispatch.define import define_op
from dsv4_ops.meta import context_parallel as meta
from dsv4_ops.ops.mla_context import LSE_BASES, MERGED_DTYPES
from dsv4_ops.reference import context_parallel as reference

_LOWERING = {"cpu": "decompose", "cuda": "decompose"}

_cp_seq_lens = define_op(
    OpSpec(
        stem="context_parallel",
        schema="cp_seq_lens(Tensor seq_lens, Tensor? cp_rank, *, int cp_world_size, "
        "int cp_interleave) -> Tensor",
        meta=meta.cp_seq_lens,
        reference=reference.cp_seq_lens,
        dynamic=("num_seqs",),
        source="vLLM 0.33 get_dcp_local_seq_lens; semantics re-derived",
        gradient=INTEGERS,
    )
)


def cp_seq_lens(
    seq_lens: Tensor,
    cp_rank: Tensor | None = None,
    *,
    cp_world_size: int,
    cp_interleave: int = 1,
) -> Tensor:
    """Count the keys of every sequence that lie on a rank.

    Ranks take positions in turns.

    Rank r owns the turns r, r + cp_world_size, .. of ``cp_interleave`` positions, as
    ``compressed_slot_mapping`` has it. Give it the lengths of every token, not of every request,
    where a request has several new tokens: what a token sees on a rank is no shift of what the last
    one sees.

    Args:
        seq_lens: Keys of every sequence on all ranks, [num_seqs], int32, such as those of
            ``flatten_decode``; below 0 counts as 0.
        cp_rank: The rank, [1], int32, so that one graph serves all ranks; of a rank that does not
            exist the lengths are 0. None for all ranks.
        cp_world_size: Ranks that share a sequence. At least 1.
        cp_interleave: Consecutive positions on one rank. At least 1.

    Returns:
        int32 [num_seqs], or [num_seqs, cp_world_size] without a rank, which sum to ``seq_lens``. 0
        is possible for a sequence that has keys on other ranks.

    Mutates: nothing.

    Raises:
        ValueError: wrong shapes, numbers out of range, or several devices.
        TypeError: a dtype other than int32, or a number that is no int.

    Compile: decomposes to one pointwise kernel; dynamic in num_seqs; CUDA graphs and export: yes.

    Source: vLLM 0.33 ``get_dcp_local_seq_lens``.

    Example:
        >>> import torch, dsv4_ops
        >>> lens = torch.tensor([5, 10, 13], dtype=torch.int32)
        >>> dsv4_ops.cp_seq_lens(lens, cp_world_size=2, cp_interleave=4).tolist()
        [[4, 1], [6, 4], [8, 5]]
    """
    checks = Checks("cp_seq_lens")
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_seqs")
    if cp_rank is not None:
        checks.tensor("cp_rank", cp_rank, torch.int32, 1)
    checks.at_least(1, cp_world_size=cp_world_size, cp_interleave=cp_interleave)
    lens: Tensor = _cp_seq_lens(
        seq_lens, cp_rank, cp_world_size=cp_world_size, cp_interleave=cp_interleave
    )
    return lens


_cp_slot_mapping = define_op(
    OpSpec(
        stem="context_parallel",
        schema="cp_slot_mapping(Tensor positions, Tensor req_indices, Tensor block_table, "
        "Tensor cp_rank, *, int block_size, int cp_world_size, int cp_interleave) -> Tensor",
        meta=meta.cp_slot_mapping,
        reference=reference.cp_slot_mapping,
        lowering=_LOWERING,
        dynamic=("num_tokens", "num_reqs", "max_blocks"),
        source="vLLM 0.33 BlockTable.compute_slot_mapping under decode context parallelism",
        gradient=INTEGERS,
    )
)


def cp_slot_mapping(
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    cp_rank: Tensor,
    *,
    block_size: int,
    cp_world_size: int,
    cp_interleave: int = 1,
) -> Tensor:
    """Find the slots of tokens in a rank's cache; ranks take positions in turns.

    All ranks have the same block table; a block holds ``block_size`` rows of each rank, so
    block_size * cp_world_size positions.

    Args:
        positions: Position of each token in its sequence, [num_tokens], int64; -1 is padding.
        req_indices: Request of each token, [num_tokens], int32; -1 is padding.
        block_table: Blocks of each request, [num_reqs, max_blocks], int32.
        cp_rank: The rank, [1], int32, so that one graph serves all ranks; of no account on one
            rank.
        block_size: Rows of a block. At least 1.
        cp_world_size: Ranks that share a sequence. At least 1.
        cp_interleave: Consecutive positions on one rank. At least 1.

    Returns:
        int64 [num_tokens]; -1 for padding, for tokens of other ranks, and where the block table has
        no block.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, numbers out of range, or several devices.
        TypeError: a dtype other than the ones above, or a number that is no int.

    Compile: decomposes to one pointwise kernel; dynamic in num_tokens, num_reqs and max_blocks;
        CUDA graphs and export: yes.

    Source: vLLM 0.33 ``BlockTable.compute_slot_mapping``.

    Example:
        >>> import torch, dsv4_ops
        >>> positions, requests = torch.arange(6), torch.zeros(6, dtype=torch.int32)
        >>> table, rank = torch.tensor([[3, 5]]).int(), torch.tensor([1]).int()
        >>> dsv4_ops.cp_slot_mapping(
        ...     positions, requests, table, rank, block_size=2, cp_world_size=2
        ... ).tolist()
        [-1, 6, -1, 7, -1, 10]
    """
    checks = Checks("cp_slot_mapping")
    checks.tensor("positions", positions, torch.int64, "num_tokens")
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_blocks")
    checks.tensor("cp_rank", cp_rank, torch.int32, 1)
    checks.at_least(1, block_size=block_size)
    checks.at_least(1, cp_world_size=cp_world_size, cp_interleave=cp_interleave)
    slots: Tensor = _cp_slot_mapping(
        positions,
        req_indices,
        block_table,
        cp_rank,
        block_size=block_size,
        cp_world_size=cp_world_size,
        cp_interleave=cp_interleave,
    )
    return slots


_cp_row_indices = define_op(
    OpSpec(
        stem="context_parallel",
        schema="cp_row_indices(Tensor req_indices, Tensor positions, Tensor local_starts, "
        "Tensor local_cu_seq_lens, *, int num_local_rows, int cp_world_size, "
        "int cp_interleave) -> Tensor",
        meta=meta.cp_row_indices,
        reference=reference.cp_row_indices,
        lowering=_LOWERING,
        dynamic=("num_rows", "num_reqs"),
        source="takes the place of vLLM 0.22 reorg_kvcache; rows in the order of positions",
        gradient=INTEGERS,
    )
)


def cp_row_indices(
    req_indices: Tensor,
    positions: Tensor,
    local_starts: Tensor,
    local_cu_seq_lens: Tensor,
    *,
    num_local_rows: int,
    cp_world_size: int,
    cp_interleave: int = 1,
) -> Tensor:
    """Find where the rows of a chunk lie among those that all ranks gathered.

    Each rank gathers ``num_local_rows`` rows of a chunk of ``context_chunks``, and an all-gather
    lays them one rank behind the other. Selecting the result's rows gives the positions of each
    request in their order.

    Args:
        req_indices: Request of each row of the chunk, [num_rows], int32; -1 is padding.
        positions: Its position in the sequence, [num_rows], int64; -1 is padding. ``token_map`` of
            the chunk's ``cu_seq_lens`` has both.
        local_starts: First row that a rank gathered of each request, [num_reqs], int32.
        local_cu_seq_lens: Where a rank's rows of each request begin, [num_reqs + 1], int32.
        num_local_rows: Rows that a rank gathers, padding included. At least 1.
        cp_world_size: Ranks that share a sequence. At least 1.
        cp_interleave: Consecutive positions on one rank. At least 1.

    Returns:
        int64 [num_rows], below cp_world_size * num_local_rows; -1 for padding and for rows that no
        rank gathered.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, numbers out of range, or several devices.
        TypeError: a dtype other than the ones above, or a number that is no int.

    Compile: decomposes to one pointwise kernel; dynamic in num_rows and num_reqs; CUDA graphs and
        export: yes.

    Source: takes the place of vLLM 0.22 ``reorg_kvcache``.

    Example:
        >>> import torch, dsv4_ops
        >>> ranks = {"cp_world_size": 2}  # 5 and 3 positions, on 3 and 2 of 4 rows of each rank
        >>> lens = torch.tensor([5, 3], dtype=torch.int32)
        >>> chunks = dsv4_ops.context_chunks(lens, workspace_rows=8, max_chunks=1, **ranks)
        >>> starts, whole, local = (each[0] for each in chunks[:3])
        >>> rows = dsv4_ops.token_map(whole, starts * 2 + whole.diff(), num_tokens=8)
        >>> dsv4_ops.cp_row_indices(*rows, starts, local, num_local_rows=4, **ranks).tolist()
        [0, 4, 1, 5, 2, 3, 7, -1]
    """
    checks = Checks("cp_row_indices")
    checks.tensor("req_indices", req_indices, torch.int32, "num_rows")
    checks.tensor("positions", positions, torch.int64, "num_rows")
    checks.tensor("local_starts", local_starts, torch.int32, "num_reqs")
    checks.tensor("local_cu_seq_lens", local_cu_seq_lens, torch.int32, "num_reqs + 1")
    checks.at_least(1, num_local_rows=num_local_rows)
    checks.at_least(1, cp_world_size=cp_world_size, cp_interleave=cp_interleave)
    indices: Tensor = _cp_row_indices(
        req_indices,
        positions,
        local_starts,
        local_cu_seq_lens,
        num_local_rows=num_local_rows,
        cp_world_size=cp_world_size,
        cp_interleave=cp_interleave,
    )
    return indices


_cp_correct_out = define_op(
    OpSpec(
        stem="context_parallel",
        schema="cp_correct_out(Tensor out, Tensor lse, Tensor lses, *, str lse_base) "
        "-> (Tensor out, Tensor lse)",
        meta=meta.cp_correct_out,
        reference=reference.cp_correct_out,
        lowering=_LOWERING,
        dynamic=("num_tokens",),
        source="vLLM 0.22 correct_attn_out; ranks without keys never count",
    )
)


def cp_correct_out(out: Tensor, lse: Tensor, lses: Tensor, *, lse_base: str = "e") -> MergedStates:
    """Weight a rank's attention output so that ranks sum to that of all keys.

    Args:
        out: Output over the keys of this rank, [num_tokens, num_heads, width], bfloat16, float16 or
            float32.
        lse: Its log-sum-exp, [num_tokens, num_heads], float32.
        lses: Log-sum-exps of all ranks, [cp_world_size, num_tokens, num_heads], float32. A rank
            where it is -inf, +inf or NaN has no keys, and its output may hold anything.
        lse_base: "e", or "2" for log-sum-exps to base 2.

    Returns:
        out: The output times this rank's share, [num_tokens, num_heads, width], the dtype of
            ``out``; 0 where the rank has no keys.
        lse: Log-sum-exp of all ranks' keys, [num_tokens, num_heads], float32, to the base of the
            inputs; -inf where no rank has keys.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, several devices, or another base.
        TypeError: a dtype other than the ones above.

    Compile: decomposes to reductions over the ranks; dynamic in num_tokens; CUDA graphs and export:
        yes.

    Source: vLLM 0.22 ``correct_attn_out``.

    Example:
        >>> import torch, dsv4_ops
        >>> lses = torch.tensor([2.0, 8.0]).log().view(2, 1, 1)
        >>> dsv4_ops.cp_correct_out(torch.full((1, 1, 1), 10.0), lses[1], lses)
        MergedStates(out=tensor([[[8.]]]), lse=tensor([[2.3026]]))
    """
    checks = Checks("cp_correct_out")
    checks.one_of("lse_base", lse_base, *LSE_BASES, belongs_to="the log-sum-exps have")
    checks.floats("out", out, *MERGED_DTYPES)
    checks.tensor("out", out, out.dtype, "num_tokens", "num_heads", "width")
    checks.tensor("lse", lse, torch.float32, "num_tokens", "num_heads")
    checks.tensor("lses", lses, torch.float32, "cp_world_size", "num_tokens", "num_heads")
    checks.at_least(1, cp_world_size=lses.shape[0])
    return MergedStates(*_cp_correct_out(out, lse, lses, lse_base=lse_base))
