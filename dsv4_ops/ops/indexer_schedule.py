"""DeepGEMM's schedule of paged logits, as a tensor that a step makes once."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.registry import OpSpec, define_op
from dsv4_ops.core.tiles import SCHEDULE_KEYS
from dsv4_ops.meta import indexer_schedule as meta
from dsv4_ops.reference import indexer_schedule as reference

_paged_mqa_logits_metadata = define_op(
    OpSpec(
        stem="indexer_schedule",
        schema="paged_mqa_logits_metadata(Tensor seq_lens, *, int block_size, int num_sms) "
        "-> Tensor",
        meta=meta.paged_mqa_logits_metadata,
        reference=reference.paged_mqa_logits_metadata,
        lowering={"cpu": "decompose", "cuda": "decompose"},
        dynamic=("num_reqs",),
        source="DeepGEMM's get_paged_mqa_logits_metadata for one query per row",
        gradient=INTEGERS,
    )
)


def paged_mqa_logits_metadata(seq_lens: Tensor, *, block_size: int, num_sms: int) -> Tensor:
    """Share the keys of a step's indexer among SMs as DeepGEMM does.

    A row of keys is cut into splits of 256. All splits of all rows, one row after the other, are
    dealt out in runs that differ by no more than one split; the longer ones come first. DeepGEMM's
    paged logits go by such a schedule; ours need none.

    Args:
        seq_lens: Keys that every row of queries may see, [num_reqs], int32; below 0 counts as 0. In
            a step whose tokens are scored one by one, as ``indexer_logits`` does, a row is a token.
            Of lens [num_reqs, next_n] with next_n up to 2 DeepGEMM takes the last column.
        block_size: Rows of a page: 64, or another divisor of 256. The schedule does not depend on
            it.
        num_sms: SMs that the logits run on, DeepGEMM's ``get_num_sms()``. At least 1.

    Returns:
        int32 [num_sms + 1, 2], dense: row and split at which every SM begins, and, last, (num_reqs,
        0). An SM ends where the next one begins, so that one without work begins where it ends.
        A run begins in a row that has keys, or behind all rows.

        These are the integers of DeepGEMM's ``get_paged_mqa_logits_metadata`` as vLLM 0.22 brings
        it. Later versions give the longer runs to the last SMs; their logits take this schedule
        too. Where DeepGEMM adds in 32 bits, this adds in 64.

    Mutates: nothing.

    Raises:
        ValueError: wrong shape, numbers out of range, a ``block_size`` that does not divide 256, or
            more than 16383 rows.
        TypeError: a dtype other than int32, or a number that is no int.

    Compile: decomposes to a prefix sum and one reduction; dynamic in num_reqs; CUDA graphs and
        export: yes. No host synchronisation: a captured graph makes the schedule of the lens that
        it finds.

    Source: DeepGEMM's ``get_paged_mqa_logits_metadata``; semantics only.

    Example:
        >>> import torch, dsv4_ops
        >>> lens = torch.tensor([1000, 300, 0, 600], dtype=torch.int32)  # 4, 2, 0 and 3 splits
        >>> dsv4_ops.paged_mqa_logits_metadata(lens, block_size=64, num_sms=4).tolist()
        [[0, 0], [0, 3], [1, 1], [3, 1], [4, 0]]
    """
    checks = Checks("paged_mqa_logits_metadata")
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_reqs")
    checks.at_least(1, block_size=block_size, num_sms=num_sms)
    checks.divisor("block_size", block_size, "the keys of a split", SCHEDULE_KEYS)
    checks.request_limit()
    schedule: Tensor = _paged_mqa_logits_metadata(seq_lens, block_size=block_size, num_sms=num_sms)
    return schedule
