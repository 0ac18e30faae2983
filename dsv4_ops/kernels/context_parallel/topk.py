"""Select the top k among the candidates of all ranks, one program per token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.common.topk import ABSENT_KEY, find_threshold, sortable
from dsv4_ops.kernels.launcher import Launcher

NO_ROW = tl.constexpr(2**31 - 1)


@triton.jit
def _find_bound(row, mask, count):
    """Return the ``count``-th smallest of the rows that ``mask`` selects."""
    low, high = tl.full((), 0, tl.int32), tl.full((), NO_ROW - 1, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        enough = tl.sum((mask & (row <= middle)).to(tl.int32), axis=0) >= count
        low = tl.where(enough, low, middle + 1)
        high = tl.where(enough, middle, high)
    return low


@triton.jit(do_not_specialize=SIZES)
def cp_topk_kernel(
    scores, score_rank_stride, score_token_stride, score_stride,
    rows, row_rank_stride, row_token_stride, row_stride,
    out, topk, interleave,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Select the top k rows of one token, sorted by row number. WIDTH is the number of candidates
    per rank. CANDIDATES is the number of candidates of all ranks, rounded up to a power of two;
    BLOCK is ``topk``, rounded up to a power of two."""
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, CANDIDATES)
    rank, column = candidate // WIDTH, candidate % WIDTH
    mask = candidate < RANKS * WIDTH
    offset = rank.to(tl.int64) * row_rank_stride + column.to(tl.int64) * row_stride
    rank_row = tl.load(rows + token * row_token_stride + offset, mask=mask, other=-1)
    offset = rank.to(tl.int64) * score_rank_stride + column.to(tl.int64) * score_stride
    score = tl.load(scores + token * score_token_stride + offset, mask=mask, other=0.0)
    chunk = (rank_row // interleave).to(tl.int64) * RANKS + rank
    global_row = chunk * interleave + rank_row % interleave
    valid = (rank_row >= 0) & (global_row < NO_ROW)
    row = tl.where(valid, global_row, NO_ROW).to(tl.int32)
    key = tl.where(valid, sortable(score), ABSENT_KEY)
    min_key = tl.full((), ABSENT_KEY + 1, tl.int32)
    num_valid = tl.sum(valid.to(tl.int32), axis=0)
    num_selected = tl.minimum(num_valid, topk)
    threshold, num_above = min_key - 1, num_valid
    if num_valid > topk:
        threshold, num_above = find_threshold(key, min_key, num_valid, topk, topk)
    is_tie = key == threshold
    num_ties = num_selected - num_above
    selected = key > threshold
    if num_ties > 0:
        bound = _find_bound(row, is_tie, num_ties)
        below = is_tie & (row < bound)
        # a rank may list a row twice
        at_bound = is_tie & (row == bound)
        ordinal = tl.cumsum(at_bound.to(tl.int32), axis=0)
        missing = num_ties - tl.sum(below.to(tl.int32), axis=0)
        selected = selected | below | (at_bound & (ordinal <= missing))
    out += token * topk
    count = tl.cumsum(selected.to(tl.int32), axis=0)
    tl.store(out + count - 1, row, mask=selected)
    tl.debug_barrier()  # all stores before the load
    slot = tl.arange(0, BLOCK)
    result = tl.load(out + slot, mask=slot < num_selected, other=NO_ROW)
    result = tl.sort(result)
    tl.debug_barrier()  # all loads before the store
    tl.store(out + slot, tl.where(result == NO_ROW, -1, result), mask=slot < topk)


def cp_topk(
    launch: Launcher, scores: Tensor, rows: Tensor, *, topk: int, cp_interleave: int
) -> Tensor:
    ranks, num_tokens, width = int(rows.shape[0]), rows.shape[1], int(rows.shape[2])
    candidates = triton.next_power_of_2(max(ranks * width, 1))
    out = rows.new_empty((num_tokens, topk), dtype=torch.int32)
    if num_tokens == 0:
        return out
    launch(cp_topk_kernel)[num_tokens,](
        *strided(scores, rows),
        out, topk, cp_interleave,
        RANKS=ranks, WIDTH=width, CANDIDATES=candidates, BLOCK=triton.next_power_of_2(topk),
        num_warps=4 if candidates <= 1024 else 8,
    )  # fmt: skip
    return out
