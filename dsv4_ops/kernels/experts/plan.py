"""Sort the rows of all experts into blocks: a program for each expert, in one launch, or two."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.tiles import plan_blocks
from dsv4_ops.core.types import ExpertPlan
from dsv4_ops.kernels.launcher import Launcher

PAIR = tl.constexpr(2**24)
"""Added to the expert of a block whose program has the next one, too."""

ROWS, MOST_ROWS = 512, 2048
"""Rows that a program looks at at a time: of a symbol, and at most."""

COUNTED_ROWS = 512
"""Rows above which a launch of its own counts those of every expert. Up to it, every program counts
all of them."""


@triton.jit
def expert_counts_kernel(
    topk_ids, token_stride, choice_stride, topk, num_rows, counts, ROWS: tl.constexpr
):
    """How many rows each expert has, by a program for each."""
    found = tl.zeros((ROWS,), tl.int32)
    for start in range(0, num_rows, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        at = topk_ids + row // topk * token_stride + row % topk * choice_stride
        mine = tl.load(at, mask=row < num_rows, other=-1) == tl.program_id(0)
        found += mine.to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(found))


@triton.jit
def expert_plan_kernel(
    topk_ids, token_stride, choice_stride,
    topk, num_rows,
    counts,
    sorted_rows, expert_of_block, num_blocks,
    capacity, num_experts,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr,
    COUNTED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    bins, lane = tl.arange(0, BINS), tl.arange(0, ROWS)
    if COUNTED:
        of_experts = tl.load(counts + bins, mask=bins < num_experts, other=0)
    else:
        of_experts = tl.zeros((BINS,), tl.int32)
        for start in range(0, num_rows, ROWS):
            row = (start + lane).to(tl.int64)
            at = topk_ids + row // topk * token_stride + row % topk * choice_stride
            ids = tl.load(at, mask=row < num_rows, other=-1)
            present = (ids >= 0) & (ids < num_experts)
            # more bins than experts
            of_experts += tl.histogram(tl.where(present, ids, BINS - 1), BINS)
    blocks = tl.where(bins < num_experts, (of_experts + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
    first_block = tl.sum(tl.where(bins < expert, blocks, 0))
    my_blocks = tl.sum(tl.where(bins == expert, blocks, 0))
    used = tl.sum(blocks)
    first = first_block.to(tl.int64) * BLOCK_SIZE
    found = tl.zeros((), tl.int32)
    for start in range(0, num_rows, ROWS):
        row = (start + lane).to(tl.int64)
        at = topk_ids + row // topk * token_stride + row % topk * choice_stride
        mine = tl.load(at, mask=row < num_rows, other=-1) == expert
        ones = mine.to(tl.int32)
        place = first + found + tl.cumsum(ones) - 1
        tl.store(sorted_rows + place, row.to(tl.int32), mask=mine)
        found += tl.sum(ones)
    inside = tl.arange(0, BLOCK)
    rest = found + inside
    tl.store(sorted_rows + first + rest, -1, mask=rest < my_blocks * BLOCK_SIZE)
    for block in range(first_block, first_block + my_blocks):
        entry = expert
        if PAIRS:
            is_second = (block - first_block) % 2 == 1
            has_next = block + 1 < first_block + my_blocks
            entry = tl.where(is_second, -1, tl.where(has_next, expert + PAIR, expert))
        tl.store(expert_of_block + block, entry)
    for block in range(used + expert, capacity, num_experts):
        tl.store(expert_of_block + block, -1)
        row = tl.cast(block, tl.int64) * BLOCK_SIZE + inside
        tl.store(sorted_rows + row, -1, mask=inside < BLOCK_SIZE)
    if expert == 0:
        tl.store(num_blocks, used)


def expert_plan(
    launch: Launcher,
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    block_size: int,
    pairs: bool = False,
) -> ExpertPlan:
    """With ``pairs`` the first of two blocks of an expert stands for both, and the second is of
    none."""
    num_tokens, topk = topk_ids.shape
    num_rows = num_tokens * topk
    capacity = plan_blocks(num_rows, num_experts, block_size)
    sorted_rows = topk_ids.new_empty((capacity * block_size,))
    expert_of_block = topk_ids.new_empty((capacity,))
    num_blocks = topk_ids.new_empty((1,))
    known = isinstance(num_rows, int)
    rows = min(max(triton.next_power_of_2(num_rows), 32), MOST_ROWS) if known else ROWS
    warps, counted = max(4, rows // 256), known and num_rows > COUNTED_ROWS
    counts = topk_ids.new_empty((num_experts if counted else 0,))
    if counted:
        launch(expert_counts_kernel)[num_experts,](
            topk_ids, *topk_ids.stride(), topk, num_rows, counts, ROWS=rows, num_warps=warps
        )
    launch(expert_plan_kernel)[num_experts,](
        topk_ids, *topk_ids.stride(),
        topk, num_rows,
        counts,
        sorted_rows, expert_of_block, num_blocks,
        capacity, num_experts,
        BLOCK_SIZE=block_size, BLOCK=triton.next_power_of_2(block_size),
        BINS=triton.next_power_of_2(num_experts + 1),
        ROWS=rows, COUNTED=counted, PAIRS=pairs, num_warps=warps,
    )  # fmt: skip
    return ExpertPlan(sorted_rows, expert_of_block, num_blocks)
