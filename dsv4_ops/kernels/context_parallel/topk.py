"""The best of the candidates of all ranks: a program for each token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.indexer.score_tile import ABSENT_KEY, sortable
from dsv4_ops.kernels.indexer.topk_merge import find_threshold
from dsv4_ops.kernels.launcher import Launcher

NO_ROW = tl.constexpr(2**31 - 1)


@triton.jit
def _bound(row, wanted, needed):
    """The lowest row that ``needed`` of the ``wanted`` ones do not lie behind."""
    first, last = tl.full((), 0, tl.int32), tl.full((), NO_ROW - 1, tl.int32)
    while first < last:
        middle = first + (last - first) // 2
        enough = tl.sum((wanted & (row <= middle)).to(tl.int32), axis=0) >= needed
        first = tl.where(enough, first, middle + 1)
        last = tl.where(enough, middle, last)
    return first


@triton.jit
def cp_topk_kernel(
    scores, score_rank_stride, score_token_stride, score_stride,
    rows, row_rank_stride, row_token_stride, row_stride,
    out, topk, interleave,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, CANDIDATES)
    rank, place = slot // WIDTH, slot % WIDTH
    inside = slot < RANKS * WIDTH
    at = rank.to(tl.int64) * row_rank_stride + place.to(tl.int64) * row_stride
    own = tl.load(rows + token * row_token_stride + at, mask=inside, other=-1)
    at = rank.to(tl.int64) * score_rank_stride + place.to(tl.int64) * score_stride
    score = tl.load(scores + token * score_token_stride + at, mask=inside, other=0.0)
    turn = (own // interleave).to(tl.int64) * RANKS + rank
    whole = turn * interleave + own % interleave
    exists = (own >= 0) & (whole < NO_ROW)
    row = tl.where(exists, whole, NO_ROW).to(tl.int32)
    key = tl.where(exists, sortable(score), ABSENT_KEY)
    low = tl.full((), ABSENT_KEY + 1, tl.int32)
    total = tl.sum(exists.to(tl.int32), axis=0)
    kept = tl.minimum(total, topk)
    value, above_it = low - 1, total
    if total > topk:
        value, above_it = find_threshold(key, low, total, topk, topk)
    equal = key == value
    needed = kept - above_it
    taken = key > value
    if needed > 0:
        bound = _bound(row, equal, needed)
        before = equal & (row < bound)
        # a rank may bring a row twice
        last = equal & (row == bound)
        seen = tl.cumsum(last.to(tl.int32), axis=0)
        missing = needed - tl.sum(before.to(tl.int32), axis=0)
        taken = taken | before | (last & (seen <= missing))
    out += token * topk
    count = tl.cumsum(taken.to(tl.int32), axis=0)
    tl.store(out + count - 1, row, mask=taken)
    tl.debug_barrier()  # all was written
    slot = tl.arange(0, BLOCK)
    chosen = tl.load(out + slot, mask=slot < kept, other=NO_ROW)
    chosen = tl.sort(chosen)
    tl.debug_barrier()  # all was read
    tl.store(out + slot, tl.where(chosen == NO_ROW, -1, chosen), mask=slot < topk)


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
