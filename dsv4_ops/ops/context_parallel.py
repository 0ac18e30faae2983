"""Sequences whose keys lie on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.registry import OpSpec
from dsv4_ops.dispatch.define import define_op
from dsv4_ops.meta import context_parallel as meta
from dsv4_ops.reference import context_parallel as reference

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
