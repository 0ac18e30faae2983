"""Sequences whose keys lie on several ranks."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.ints import single
from dsv4_ops.core.registry import KERNEL_ON_CUDA
from dsv4_ops.core.torch_compat import (
    group_rank,
    group_size,
    guard_or_false,
    process_group,
    symmetric_workspace,
    timeout_of,
)
from dsv4_ops.core.types import LocalRows, MergedStates
from dsv4_ops.dispatch import kernel_requests
from dsv4_ops.dispatch.define import define_op
from dsv4_ops.meta import context_parallel as meta
from dsv4_ops.ops.mla_context import LSE_BASES, MERGED_DTYPES, merge_states

COMBINES = ("reduce_scatter", "all_to_all", "symmetric_memory")
"""Values of ``via`` for ``cp_combine``."""

GATHERS = ("all_gather", "symmetric_memory")
"""Values of ``via`` for ``cp_gather_heads`` and ``cp_gather_rows``."""

SYMMETRIC_ROW_BYTES = 16384
"""Maximum bytes of a row (token, head) that "symmetric_memory" can send."""


_cp_seq_lens = define_op(
    "context_parallel",
    "cp_seq_lens(Tensor seq_lens, Tensor? cp_rank, *, int cp_world_size, "
    "int cp_interleave) -> Tensor",
    dynamic=("num_seqs",),
    source="vLLM 0.33 get_dcp_local_seq_lens; semantics re-derived",
    gradient=INTEGERS,
)


def cp_seq_lens(
    seq_lens: Tensor,
    cp_rank: Tensor | None = None,
    *,
    cp_world_size: int,
    cp_interleave: int = 1,
) -> Tensor:
    """Count how many keys of each sequence a rank holds.

    Ranks take turns of ``cp_interleave`` consecutive positions: rank r owns the turns r, r +
    cp_world_size, and so on, as in ``compressed_slot_mapping``. If a request has several new
    tokens, pass a length for every token, not for every request, because a rank's count does not
    grow by 1 per token.

    Args:
        seq_lens: Number of keys of each sequence on all ranks together, [num_seqs], int32, such as
            the ``seq_lens`` of ``flatten_decode``; negative values count as 0.
        cp_rank: The rank, a tensor [1], int32, so that one graph serves all ranks. A rank that does
            not exist has no keys. With None, the op returns the counts of all ranks.
        cp_world_size: Ranks that share a sequence. At least 1.
        cp_interleave: Consecutive positions on one rank. At least 1.

    Returns:
        int32 [num_seqs], or [num_seqs, cp_world_size] if ``cp_rank`` is None; the counts of all
        ranks sum to ``seq_lens``. A count is 0 if all keys of the sequence are on other ranks.

    Mutates: nothing.

    Raises:
        ValueError: wrong shapes, numbers out of range, or several devices.
        TypeError: a dtype other than int32, or a number that is not an int.

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
    checks.optional("cp_rank", cp_rank, torch.int32, 1)
    checks.at_least(1, cp_world_size=cp_world_size, cp_interleave=cp_interleave)
    return _cp_seq_lens(seq_lens, cp_rank, cp_world_size=cp_world_size, cp_interleave=cp_interleave)


_cp_slot_mapping = define_op(
    "context_parallel",
    "cp_slot_mapping(Tensor positions, Tensor req_indices, Tensor block_table, "
    "Tensor cp_rank, *, int block_size, int cp_world_size, int cp_interleave) -> Tensor",
    dynamic=("num_tokens", "num_reqs", "max_blocks"),
    source="vLLM 0.33 BlockTable.compute_slot_mapping under decode context parallelism",
    gradient=INTEGERS,
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
    """Find the slot of every token in a rank's cache.

    Ranks take turns of ``cp_interleave`` consecutive positions. All ranks have the same block
    table. A block holds ``block_size`` rows of each rank, so it covers block_size * cp_world_size
    positions.

    Args:
        positions: Position of each token in its sequence, [num_tokens], int64; -1 is padding.
        req_indices: Request of each token, [num_tokens], int32; -1 is padding.
        block_table: Blocks of each request, [num_reqs, max_blocks], int32.
        cp_rank: The rank, a tensor [1], int32, so that one graph serves all ranks; not read if
            ``cp_world_size`` is 1.
        block_size: Rows of a block. At least 1.
        cp_world_size: Ranks that share a sequence. At least 1.
        cp_interleave: Consecutive positions on one rank. At least 1.

    Returns:
        int64 [num_tokens]; -1 for padding, for tokens of other ranks, and for positions without a
        block in the block table.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, numbers out of range, or several devices.
        TypeError: a dtype other than those above, or a number that is not an int.

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
    checks.tokens(positions, req_indices, block_table)
    checks.tensor("cp_rank", cp_rank, torch.int32, 1)
    turns = {"cp_world_size": cp_world_size, "cp_interleave": cp_interleave}
    checks.at_least(1, block_size=block_size, **turns)
    rows = (positions, req_indices, block_table, cp_rank)
    return _cp_slot_mapping(*rows, block_size=block_size, **turns)


_cp_row_indices = define_op(
    "context_parallel",
    "cp_row_indices(Tensor req_indices, Tensor positions, Tensor local_starts, "
    "Tensor local_cu_seq_lens, *, int num_local_rows, int cp_world_size, "
    "int cp_interleave) -> Tensor",
    dynamic=("num_rows", "num_reqs"),
    source="takes the place of vLLM 0.22 reorg_kvcache; rows in the order of positions",
    gradient=INTEGERS,
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
    """Find the rows of a chunk among the rows that all ranks gathered.

    Each rank gathers ``num_local_rows`` rows of a chunk that ``context_chunks`` planned, and an
    all-gather concatenates the rows of all ranks. Indexing the concatenated rows with the result
    puts the chunk's rows in the order of requests and positions.

    Args:
        req_indices: Request of each row of the chunk, [num_rows], int32; -1 is padding.
        positions: Position of each row in its sequence, [num_rows], int64; -1 is padding.
            ``token_map``, called with the chunk's ``cu_seq_lens``, returns ``req_indices`` and
            ``positions``.
        local_starts: For each request, the first row that each rank gathers, numbered among the
            request's rows on that rank, [num_reqs], int32.
        local_cu_seq_lens: Start of each request among the rows that a rank gathers, [num_reqs + 1],
            int32.
        num_local_rows: Rows that a rank gathers, padding included. At least 1.
        cp_world_size: Ranks that share a sequence. At least 1.
        cp_interleave: Consecutive positions on one rank. At least 1.

    Returns:
        int64 [num_rows]: indices into the concatenated rows; -1 for padding and for rows that no
        rank gathered.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, numbers out of range, or several devices.
        TypeError: a dtype other than those above, or a number that is not an int.

    Compile: decomposes to one pointwise kernel; dynamic in num_rows and num_reqs; CUDA graphs and
        export: yes.

    Source: replaces vLLM 0.22 ``reorg_kvcache``.

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
    turns = {"cp_world_size": cp_world_size, "cp_interleave": cp_interleave}
    checks.at_least(1, num_local_rows=num_local_rows, **turns)
    rows = (req_indices, positions, local_starts, local_cu_seq_lens)
    return _cp_row_indices(*rows, num_local_rows=num_local_rows, **turns)


_cp_topk = define_op(
    "context_parallel",
    "cp_topk(Tensor scores, Tensor rows, *, int topk, int cp_interleave) -> Tensor",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens",),
    source="the indexer's selection over rows of several ranks; ties as in indexer_topk",
)


def cp_topk(scores: Tensor, rows: Tensor, *, topk: int, cp_interleave: int = 1) -> Tensor:
    """Select the best compressed rows among the candidates of all ranks.

    If each rank passes its best ``topk`` rows, or all its rows, the result equals the selection
    that ``indexer_topk`` makes on one GPU, ties included.

    Args:
        scores: Scores of each rank's candidates, [cp_world_size, num_tokens, num_candidates],
            float32.
        rows: Row of each candidate on its rank, [cp_world_size, num_tokens, num_candidates], int32,
            such as the result of ``indexer_topk`` for the rank's logits; a negative row is no
            candidate.
        topk: Columns of the result. At least 0.
        cp_interleave: Consecutive rows of a request on one rank. At least 1.

    Returns:
        int32 [num_tokens, topk], dense: the numbers of the rows with the highest scores, sorted by
        row number; unused columns are -1. Row numbers count all rows of the request, on all ranks.
        The lower of two rows with equal scores is selected first. -0 equals 0, and NaN is below
        every number, -inf included.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, numbers out of range, or several devices.
        TypeError: a dtype other than those above, or a number that is not an int.

    Compile: on a GPU one kernel if a token has at most 8192 candidates; otherwise a pointwise
        kernel, and torch's topk and sort. Dynamic in num_tokens; CUDA graphs and export: yes.

    Source: DeepSeek-V4's lightning indexer, with its rows split over ranks.

    Example:
        >>> import torch, dsv4_ops
        >>> scores = torch.tensor([[[1.0, 2.0]], [[2.0, 2.0]]])  # rank 0: rows 0, 5; rank 1: 3, 6
        >>> rows = torch.tensor([[[0, 3]], [[1, 2]]], dtype=torch.int32)
        >>> dsv4_ops.cp_topk(scores, rows, topk=2, cp_interleave=2).tolist()
        [[3, 5]]
    """
    checks = Checks("cp_topk")
    dims = ("cp_world_size", "num_tokens", "num_candidates")
    checks.tensor("scores", scores, torch.float32, *dims)
    checks.tensor("rows", rows, torch.int32, *dims)
    checks.at_least(0, topk=topk)
    checks.at_least(1, cp_world_size=rows.shape[0], cp_interleave=cp_interleave)
    return _cp_topk(scores, rows, topk=topk, cp_interleave=cp_interleave)


_cp_local_rows = define_op(
    "context_parallel",
    "cp_local_rows(Tensor rows, Tensor cp_rank, *, int cp_world_size, "
    "int cp_interleave) -> (Tensor, Tensor)",
    dynamic=("num_tokens",),
    source="a rank's part of the indexer's selection",
    gradient=INTEGERS,
)


def cp_local_rows(
    rows: Tensor, cp_rank: Tensor, *, cp_world_size: int, cp_interleave: int = 1
) -> LocalRows:
    """Keep the selected rows that a rank owns.

    Args:
        rows: Selected rows of each token, numbered over all ranks, [num_tokens, topk], int32, from
            ``cp_topk``; negative entries are no rows.
        cp_rank: The rank, a tensor [1], int32, so that one graph serves all ranks. A rank that does
            not exist owns no rows.
        cp_world_size: Ranks that share a sequence. At least 1.
        cp_interleave: Consecutive rows of a request on one rank. At least 1.

    Returns:
        rows: The entries of ``rows`` that the rank owns, as row numbers on the rank, in unchanged
            order, then -1, [num_tokens, topk], int32, dense.
        lens: Number of owned rows, [num_tokens], int32.

    Mutates: nothing.

    Raises:
        ValueError: wrong shapes, numbers out of range, or several devices.
        TypeError: a dtype other than those above, or a number that is not an int.

    Compile: decomposes to a cumulative sum and a scatter; dynamic in num_tokens; CUDA graphs and
        export: yes.

    Source: one rank's part of the indexer's selection; no other library has it.

    Example:
        >>> import torch, dsv4_ops
        >>> rows, rank = torch.tensor([[0, 3, 5, -1]]).int(), torch.tensor([0]).int()
        >>> own = dsv4_ops.cp_local_rows(rows, rank, cp_world_size=2, cp_interleave=2)
        >>> own.rows.tolist(), own.lens.tolist()  # turns of rank 0: rows 0, 1 and 4, 5
        ([[0, 3, -1, -1]], [2])
    """
    checks = Checks("cp_local_rows")
    checks.tensor("rows", rows, torch.int32, "num_tokens", "topk")
    checks.tensor("cp_rank", cp_rank, torch.int32, 1)
    checks.at_least(1, cp_world_size=cp_world_size, cp_interleave=cp_interleave)
    own = _cp_local_rows(rows, cp_rank, cp_world_size=cp_world_size, cp_interleave=cp_interleave)
    return LocalRows(*own)


_cp_correct_out = define_op(
    "context_parallel",
    "cp_correct_out(Tensor out, Tensor lse, Tensor lses, *, str lse_base) "
    "-> (Tensor out, Tensor lse)",
    dynamic=("num_tokens",),
    source="vLLM 0.22 correct_attn_out; ranks without keys never count",
)


def cp_correct_out(out: Tensor, lse: Tensor, lses: Tensor, *, lse_base: str = "e") -> MergedStates:
    """Weight a rank's output so that the sum over ranks is attention over all keys.

    Args:
        out: Output over the keys of this rank, [num_tokens, num_heads, width], bfloat16, float16 or
            float32.
        lse: Log-sum-exp of this rank, [num_tokens, num_heads], float32.
        lses: Log-sum-exps of all ranks, [cp_world_size, num_tokens, num_heads], float32. A rank
            whose log-sum-exp is -inf, +inf or NaN has no keys, and its output may have any value.
        lse_base: Base of the log-sum-exps, "e" or "2".

    Returns:
        out: The output times this rank's weight, [num_tokens, num_heads, width], the dtype of
            ``out``; 0 if the rank has no keys.
        lse: Log-sum-exp of all ranks' keys, [num_tokens, num_heads], float32, in the base of the
            inputs; -inf if no rank has keys.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, several devices, or an unknown base.
        TypeError: a dtype other than those above.

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
    checks.tensor("out", out, MERGED_DTYPES, "num_tokens", "num_heads", "width")
    checks.tensor("lse", lse, torch.float32, "num_tokens", "num_heads")
    checks.tensor("lses", lses, torch.float32, "cp_world_size", "num_tokens", "num_heads")
    checks.at_least(1, cp_world_size=lses.shape[0])
    return MergedStates(*_cp_correct_out(out, lse, lses, lse_base=lse_base))


def cp_gather_heads(x: Tensor, group: str, *, via: str = "all_gather") -> Tensor:
    """Gather the heads of all ranks, in the order of the ranks.

    Args:
        x: Values of this rank's heads, such as queries, [num_tokens, num_heads, width], any dtype.
            All ranks must have the same shape.
        group: Name of the process group, ``ProcessGroup.group_name``.
        via: "all_gather" calls ``torch.distributed``. "symmetric_memory" is one kernel that writes
            to the memory of the host's other GPUs, without NVLink multicast. It takes tensors of
            any size, and sends those above 4 MiB in several rounds. It shares the workspace of
            ``cp_combine(via="symmetric_memory")``. On a CPU, "symmetric_memory" calls
            ``torch.distributed``, too. Both values of ``via`` give the same bytes.

    Returns:
        [num_tokens, cp_world_size * num_heads, width]: contiguous with "symmetric_memory",
        otherwise with the heads as the outermost dimension in memory. On one rank the result is
        ``x`` itself.

    Mutates: nothing.

    Raises:
        ValueError: a wrong shape, an unknown ``via``, or no process group of this name.
        TypeError: ``x`` is not a tensor, or ``group`` is not a name.
        RuntimeError: ``via`` is "symmetric_memory", and the first call is in a CUDA graph capture.
            If a kernel waits for another rank longer than the group's timeout, the kernel traps,
            and the next CUDA call of its process raises.
        ImportError: ``via`` is "symmetric_memory", and Triton is not installed.

    Compile: one all-gather, or one kernel that a graph calls; nothing on one rank. Dynamic in
        num_tokens. CUDA graphs: yes; "symmetric_memory" needs one call outside of a capture first,
        and all its calls, including those of ``cp_combine``, must be ordered, for example on one
        stream. Export: yes, except for "symmetric_memory", which C++ packages cannot call. A
        package needs a process group of this name when it runs.

    Source: vLLM 0.33's decode context parallelism, which gathers the queries before attention.

    Example:
        >>> import torch, torch.distributed as dist, dsv4_ops
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> dsv4_ops.cp_gather_heads(torch.ones(3, 2, 4), dist.group.WORLD.group_name).shape
        torch.Size([3, 2, 4])
        >>> dist.destroy_process_group()
    """
    checks = Checks("cp_gather_heads")
    checks.rows_of("x", x, "num_tokens", "num_heads", "width")
    checks.tensor("x", x, x.dtype, "num_tokens", "num_heads", "width")
    return gather_each("cp_gather_heads", (x,), group, dim=1, via=via)[0]


def cp_gather_rows(rows: Tensor, group: str, *, via: str = "all_gather") -> Tensor:
    """Gather the rows of all ranks, in the order of the ranks.

    Args:
        rows: This rank's rows, [num_rows, ...], any dtype; FP8 is gathered as bytes. All ranks must
            have the same shape.
        group: Name of the process group, ``ProcessGroup.group_name``.
        via: "all_gather" or "symmetric_memory", as for ``cp_gather_heads``.

    Returns:
        [cp_world_size * num_rows, ...]; ``cp_row_indices`` returns indices into the result. On one
        rank the result is ``rows`` itself.

    Mutates: nothing.

    Raises:
        ValueError: ``rows`` has no dimension, an unknown ``via``, or no process group of this name.
        TypeError: ``rows`` is not a tensor, or ``group`` is not a name.
        RuntimeError, ImportError: as for ``cp_gather_heads``.

    Compile: as ``cp_gather_heads``; dynamic in num_rows.

    Source: vLLM 0.33, prefill with context under decode context parallelism.

    Example:
        >>> import torch, torch.distributed as dist, dsv4_ops
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> dsv4_ops.cp_gather_rows(torch.ones(3, 4), dist.group.WORLD.group_name).shape
        torch.Size([3, 4])
        >>> dist.destroy_process_group()
    """
    Checks("cp_gather_rows").rows_of("rows", rows, "num_rows")
    return gather_each("cp_gather_rows", (rows,), group, dim=0, via=via)[0]


def gather_each(
    op: str, parts: Sequence[Tensor], group: str, *, dim: int, via: str
) -> Sequence[Tensor]:
    """Gather one or two tensors along ``dim``, 0 or 1. "symmetric_memory" takes one kernel for two
    tensors."""
    Checks(op).one_of("via", via, *GATHERS, belongs_to="ranks shall gather by")
    world = process_group_size(op, group)
    if world == 1:
        return parts
    if via == "symmetric_memory" and parts[0].device.type == "cuda":
        gathered: list[Tensor] = _gather_ranks(list(parts), group, world, dim)
        return gathered
    if dim == 0:
        return [_gather(part, world, group) for part in parts]
    return [_gather(_heads_first(part), world, group).transpose(0, 1) for part in parts]


def cp_combine(
    out: Tensor,
    lse: Tensor,
    group: str,
    cp_rank: Tensor | None = None,
    *,
    via: str = "reduce_scatter",
    lse_base: str = "e",
) -> MergedStates:
    """Combine the outputs that the ranks computed over their own keys.

    Each rank gets the combined output of its own heads.

    Args:
        out: Output of all heads over this rank's keys, [num_tokens, num_heads, width], bfloat16,
            float16 or float32. All ranks must have the same shape; num_heads is a multiple of
            cp_world_size.
        lse: Log-sum-exp of ``out``, [num_tokens, num_heads], float32. Where ``lse`` is -inf, +inf
            or NaN, this rank has no keys, and ``out`` may have any value.
        group: Name of the process group, ``ProcessGroup.group_name``.
        cp_rank: The rank, [1], int32. Only "reduce_scatter" reads ``cp_rank``, to return ``lse``.
            With None, a graph that returns ``lse`` serves only the rank that traced it.
        via: "reduce_scatter" gathers ``lse``, then sums weighted outputs in the dtype of ``out``.
            "all_to_all" exchanges outputs and log-sum-exps once, merges them in float32 and rounds
            once. "symmetric_memory" does the same as "all_to_all" in one kernel that writes to the
            memory of the host's other GPUs, without NVLink multicast; rows have at most 16384
            bytes. The workspace takes 8 MiB for each other rank, and serves all shapes.
        lse_base: Base of the log-sum-exps, "e" or "2".

    Returns:
        out: Output of this rank's heads over all keys, [num_tokens, num_heads / cp_world_size,
            width], the dtype of ``out``; 0 if no rank has keys.
        lse: Log-sum-exp of this output, [num_tokens, num_heads / cp_world_size], float32, in the
            base of the inputs; -inf if no rank has keys. On one rank the results are the arguments
            ``out`` and ``lse`` themselves.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, several devices, heads that the ranks cannot share evenly,
            rows too wide for ``via``, an unknown ``via`` or base, or no process group of this name.
        TypeError: a dtype other than those above, or ``group`` is not a name.
        RuntimeError: ``via`` is "symmetric_memory", and the device is not a GPU or the first call
            is in a CUDA graph capture. If a kernel waits for another rank longer than the group's
            timeout, the kernel traps, and the next CUDA call of its process raises.
        ImportError: ``via`` is "symmetric_memory", and Triton is not installed.

    Compile: collectives of ``torch.distributed`` between fused kernels, or one kernel that a graph
        calls; nothing on one rank. Dynamic in num_tokens. CUDA graphs: yes, after one call outside
        of a capture, if all calls are ordered (for example on one stream), as for any collective.
        Export: yes, except for "symmetric_memory", which C++ packages cannot call.

    Source: vLLM 0.33 ``cp_lse_ag_out_rs`` and ``dcp_a2a_lse_reduce``; only the semantics are the
        same.

    Example:
        >>> import torch, torch.distributed as dist, dsv4_ops
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> out, lse = torch.ones(1, 2, 1), torch.zeros(1, 2)
        >>> dsv4_ops.cp_combine(out, lse, dist.group.WORLD.group_name)
        MergedStates(out=tensor([[[1.],
                 [1.]]]), lse=tensor([[0., 0.]]))
        >>> dist.destroy_process_group()
    """
    op = "cp_combine"
    checks = Checks(op)
    checks.one_of("via", via, *COMBINES, belongs_to="ranks shall combine")
    checks.one_of("lse_base", lse_base, *LSE_BASES, belongs_to="the log-sum-exps have")
    checks.tensor("out", out, MERGED_DTYPES, "num_tokens", "num_heads", "width")
    checks.tensor("lse", lse, torch.float32, "num_tokens", "num_heads")
    checks.optional("cp_rank", cp_rank, torch.int32, 1)
    world = process_group_size(op, group)
    num_tokens, num_heads, width = out.shape
    own = num_heads // world
    if num_heads % world:
        raise argument_error(
            op,
            "out",
            must=f"have a multiple of {world} heads, one part a rank",
            got=num_heads,
            do="Pad the heads",
        )
    check_combines(op, "via", via, width * out.element_size(), out.device)
    if world == 1:
        return MergedStates(out, lse)
    if guard_or_false(num_tokens == 0):  # an empty batch sends nothing
        return MergedStates(out[:, :own], lse[:, :own])
    if via == "reduce_scatter":
        lses = _gather(lse[None], world, group)
        share = cp_correct_out(out, lse, lses, lse_base=lse_base)
        sent_heads = _heads_first(share.out).flatten()
        summed = torch.ops._c10d_functional.reduce_scatter_tensor(sent_heads, "sum", world, group)
        merged = share.lse.view(num_tokens, world, own)
        if cp_rank is None:
            merged = merged[:, group_rank(group)]
        else:  # an invalid rank must not read out of bounds
            merged = merged.index_select(1, single(cp_rank).clamp(0, world - 1)).squeeze(1)
        outs = _arrived(summed).view(own, num_tokens, width)
        return MergedStates(outs.transpose(0, 1), merged)
    if via == "symmetric_memory":
        return MergedStates(*_combine_ranks(out, lse, group, world, lse_base))
    # each rank gets one block: outputs, then log-sum-exps, viewed as integers as wide as an output
    lanes = torch.int32 if out.dtype == torch.float32 else torch.int16
    sent = [
        each.unflatten(1, (world, own)).transpose(0, 1).flatten(1)
        for each in (out.view(lanes), _as_lanes(lse, lanes))
    ]
    blocks = torch.cat(sent, 1).view(torch.uint8)
    each = [1] * world
    sends = torch.ops._c10d_functional.all_to_all_single(blocks, each, each, group)
    exchanged = _arrived(sends).view(lanes)
    length = num_tokens * own * width
    outs = exchanged[:, :length].unflatten(1, (num_tokens, own, width))
    lses = exchanged[:, length:].unflatten(1, (num_tokens, own, 4 // lanes.itemsize))
    return merge_states(outs.view(out.dtype), _as_lse(lses), lse_base=lse_base)


def check_combines(op: str, name: str, via: str, row_bytes: int, device: torch.device) -> None:
    """Raise an error that names ``op`` if ``cp_combine`` with this ``via`` cannot merge rows of
    ``row_bytes`` bytes on ``device``.

    ``name`` is the name of the argument that holds ``via``."""
    if via != "symmetric_memory":
        return
    if row_bytes > SYMMETRIC_ROW_BYTES:
        raise argument_error(
            op,
            name,
            must=f"be another than {via!r} for rows of more than {SYMMETRIC_ROW_BYTES} bytes",
            got=f"{via!r} for {row_bytes}",
            do="Pass 'all_to_all'",
        )
    if device.type != "cuda":
        raise argument_error(
            op,
            name,
            must=f"be another than {via!r} on {device.type}",
            got=repr(via),
            do="Pass 'all_to_all'",
            kind=RuntimeError,
        )


def process_group_size(op: str, group: str) -> int:
    """Return the number of ranks of a group; raise an error that names ``op`` if there is no such
    group."""
    if not isinstance(group, str):
        raise argument_error(
            op,
            "group",
            must="be the name of a process group",
            got=type(group).__name__,
            do="Pass ProcessGroup.group_name",
            kind=TypeError,
        )
    try:
        return group_size(group)
    except RuntimeError as error:
        raise argument_error(
            op,
            "group",
            must="be the name of an initialised process group",
            got=repr(group),
            do="Pass torch.distributed.group.WORLD.group_name after init_process_group",
        ) from error


def _heads_first(x: Tensor) -> Tensor:
    """Copy [num_tokens, num_heads, ...] to [num_heads, num_tokens, ...].

    ``contiguous`` copies nothing for one token, so it would add a guard on num_tokens to a graph.
    """
    return x.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def _gather(x: Tensor, world: int, group: str) -> Tensor:
    """Concatenate ``x`` of all ranks in the first dimension; FP8 is sent as bytes."""
    contiguous = x.contiguous()
    sent = (
        contiguous.view(torch.uint8)
        if contiguous.dtype.is_floating_point and contiguous.itemsize == 1
        else contiguous
    )
    gather = torch.ops._c10d_functional.all_gather_into_tensor
    shape = (world * x.shape[0], *x.shape[1:])
    return _arrived(gather(sent.flatten(), world, group)).view(x.dtype).view(shape)


def _arrived(sent: Tensor) -> Tensor:
    """Wait for a collective's result, which must have one dimension: with several, Inductor raises,
    because it does not know the order of strides if a symbolic size may be 1."""
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return arrived


# the number of ranks is an argument, so that it is part of Inductor's cache keys: result shapes
# depend on this number, and groups of different sizes may have the same name
@torch.library.custom_op("dsv4_ops::_combine_ranks", mutates_args=())
def _combine_ranks(
    out: Tensor, lse: Tensor, group: str, world: int, lse_base: str
) -> tuple[Tensor, Tensor]:
    launches, launch = _kernels("cp_combine", "combine")
    workspace = _workspace("cp_combine", group, world, out.device)
    of_group = workspace.memory, workspace.rank, world, lse_base, workspace.timeout_ns
    with torch.cuda.device_of(out):
        merged: tuple[Tensor, Tensor] = launches.combine_ranks(launch, out, lse, *of_group)
    return merged


@_combine_ranks.register_fake
def _(out: Tensor, lse: Tensor, group: str, world: int, lse_base: str) -> tuple[Tensor, Tensor]:
    def launch(launcher: Any) -> None:
        launches, _ = _kernels("cp_combine", "combine")
        memory, rank, timeout_ns = _like_workspace(group, out)
        launches.combine_ranks(launcher, out, lse, memory, rank, world, lse_base, timeout_ns)

    kernel_requests.ask("cp_combine", launch)
    num_tokens, num_heads, width = out.shape
    own = num_heads // world
    return out.new_empty((num_tokens, own, width)), lse.new_empty((num_tokens, own))


@torch.library.custom_op("dsv4_ops::_gather_ranks", mutates_args=())
def _gather_ranks(parts: list[Tensor], group: str, world: int, dim: int) -> list[Tensor]:
    op = ("cp_gather_rows", "cp_gather_heads")[dim]
    launches, launch = _kernels(op, "gather")
    workspace = _workspace(op, group, world, parts[0].device)
    of_group = workspace.memory, workspace.rank, world, dim, workspace.timeout_ns
    with torch.cuda.device_of(parts[0]):
        gathered: list[Tensor] = launches.gather(launch, parts, *of_group)
    return gathered


@_gather_ranks.register_fake
def _(parts: list[Tensor], group: str, world: int, dim: int) -> list[Tensor]:
    def launch(launcher: Any) -> None:
        launches, _ = _kernels("cp_gather_rows", "gather")
        memory, rank, timeout_ns = _like_workspace(group, parts[0])
        launches.gather(launcher, parts, memory, rank, world, dim, timeout_ns)

    kernel_requests.ask("cp_gather_rows", launch)
    return [meta.gathered(part, world, dim) for part in parts]


def _kernels(op: str, module: str) -> tuple[Any, Any]:
    """Return a module of launch functions, and the eager launcher."""
    kernels = "dsv4_ops.kernels"
    try:
        launches = importlib.import_module(f"{kernels}.context_parallel.{module}")
    except ModuleNotFoundError as error:
        raise argument_error(
            op,
            "via",
            must="be another than 'symmetric_memory' without triton",
            got="'symmetric_memory'",
            do="Pass 'all_to_all'" if op == "cp_combine" else "Pass 'all_gather'",
            kind=ImportError,
        ) from error
    return launches, importlib.import_module(f"{kernels}.launcher").EAGER


class _Workspace(NamedTuple):
    """Memory of this rank that all ranks of a process group map."""

    of: Any
    memory: Tensor
    handle: Any
    rank: int
    timeout_ns: int


_workspaces: dict[tuple[str, torch.device], _Workspace] = {}


def _workspace(op: str, group: str, world: int, device: torch.device) -> _Workspace:
    """Return the workspace of a group of ``world`` ranks.

    The first call allocates the workspace; all ranks must take part in it, as in any collective."""
    current, workspace = process_group(group), _workspaces.get((group, device))
    if group_size(group) != world:
        raise argument_error(
            op,
            "group",
            must=f"be of {world} ranks, for which the call was compiled",
            got=group_size(group),
            do="Call torch._dynamo.reset() and compile it again",
        )
    # the workspace of an earlier group with the same name must not be used
    if workspace is not None and workspace.of is current:
        return workspace
    if torch.cuda.is_current_stream_capturing():
        raise argument_error(
            op,
            "via",
            must="have been called before it is captured",
            got="its first call",
            do="Call it once on all ranks",
            kind=RuntimeError,
        )
    exchange, _ = _kernels(op, "exchange")
    memory, handle = symmetric_workspace(group, exchange.workspace_bytes(world), device)
    header = exchange.workspace_header(list(handle.buffer_ptrs))
    memory[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    timeout_ns = _timeout_ns(group, device)
    _workspaces[group, device] = workspace = _Workspace(
        current, memory, handle, handle.rank, timeout_ns
    )
    return workspace


def _like_workspace(group: str, like: Tensor) -> tuple[Tensor, int, int]:
    """Return memory, rank and timeout as a launch has them, but allocate no workspace."""
    memory = like.new_empty(0, dtype=torch.uint8)
    return memory, group_rank(group), _timeout_ns(group, like.device)


def _timeout_ns(group: str, device: torch.device) -> int:
    return timeout_of(group, device) // timedelta(microseconds=1) * 1000


def _as_lanes(lse: Tensor, lanes: torch.dtype) -> Tensor:
    """View log-sum-exps as integers as wide as an output value, [..., 1 or 2].

    Compilers may change the bits of a NaN in a float tensor, but not integers.
    """
    bits = lse.view(torch.int32)
    if lanes == torch.int32:
        return bits[..., None]
    return torch.stack(((bits << 16) >> 16, bits >> 16), -1).to(lanes)


def _as_lse(lanes: Tensor) -> Tensor:
    if lanes.dtype == torch.int32:
        return lanes.squeeze(-1).view(torch.float32)
    low, high = lanes.to(torch.int32).unbind(-1)
    return (high << 16 | (low & 0xFFFF)).view(torch.float32)
