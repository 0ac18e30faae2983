"""Sort rows into blocks by expert, with one program per expert, in one or two launches. For a small
batch, the launch also reorders the activations, which saves a launch."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.types import ExpertPlan, max_expert_blocks
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.reorder import (  # by name: Inductor copies no modules
    reorder_chunk,
    reorder_sizes,
    reordered,
)
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

PAIR = tl.constexpr(2**24)
"""This number is added to a block's entry in ``expert_of_block`` if the programs of the block also
compute the next block."""

ROWS, MAX_STEP_ROWS = 512, 2048
"""Rows per loop step if the number of rows is symbolic, and maximum number of rows per loop
step."""

FUSED_COUNT_ROWS = 512
"""If the batch has up to this many rows, every program of the plan counts the rows of all experts.
If the batch has more rows, a separate launch counts the rows."""

REORDERED = 512
"""Number of activation values that a program of the plan reorders at a time."""


@triton.jit(do_not_specialize=SIZES)
def expert_counts_kernel(
    topk_ids, token_stride, choice_stride, topk, num_rows, counts, ROWS: tl.constexpr
):
    """Count the rows of one expert."""
    wait_for_previous_kernel()
    count = tl.zeros((ROWS,), tl.int32)
    for start in range(0, num_rows, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        src = topk_ids + row // topk * token_stride + row % topk * choice_stride
        is_member = tl.load(src, mask=row < num_rows, other=-1) == tl.program_id(0)
        count += is_member.to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(count))


@triton.jit(do_not_specialize=SIZES)
def expert_plan_kernel(
    topk_ids, token_stride, choice_stride,
    topk, num_rows,
    counts,
    sorted_rows, expert_of_block, num_blocks,
    x, x_token_stride, x_stride, num_tokens, x_reordered,
    capacity, num_experts,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr,
    HAS_COUNTS: tl.constexpr, PAIRS: tl.constexpr, REORDER: tl.constexpr,
):  # fmt: skip
    """Write the blocks of one expert, and this program's share of the unused blocks. BLOCK is
    BLOCK_SIZE, rounded up to a power of two. REORDER is None or ``reorder_sizes``."""
    wait_for_previous_kernel()
    expert = tl.program_id(0)
    if REORDER is not None:
        PADDED: tl.constexpr = REORDER[1]
        VALUES: tl.constexpr = REORDER[4]
        source = (x, x_token_stride, 0, x_stride)
        for chunk in range(expert, tl.cdiv(num_tokens * PADDED, VALUES), num_experts):
            reorder_chunk(source, x_reordered, tl.cast(chunk, tl.int64), num_tokens, REORDER)
    bins, lane = tl.arange(0, BINS), tl.arange(0, ROWS)
    if HAS_COUNTS:
        expert_rows = tl.load(counts + bins, mask=bins < num_experts, other=0)
    else:
        expert_rows = tl.zeros((BINS,), tl.int32)
        for start in range(0, num_rows, ROWS):
            row = (start + lane).to(tl.int64)
            src = topk_ids + row // topk * token_stride + row % topk * choice_stride
            ids = tl.load(src, mask=row < num_rows, other=-1)
            valid = (ids >= 0) & (ids < num_experts)
            # the last bin belongs to no expert
            expert_rows += tl.histogram(tl.where(valid, ids, BINS - 1), BINS)
    blocks = tl.where(bins < num_experts, (expert_rows + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
    first_block = tl.sum(tl.where(bins < expert, blocks, 0))
    own_blocks = tl.sum(tl.where(bins == expert, blocks, 0))
    used_blocks = tl.sum(blocks)
    first_slot = first_block.to(tl.int64) * BLOCK_SIZE
    count = tl.zeros((), tl.int32)
    for start in range(0, num_rows, ROWS):
        row = (start + lane).to(tl.int64)
        src = topk_ids + row // topk * token_stride + row % topk * choice_stride
        is_member = tl.load(src, mask=row < num_rows, other=-1) == expert
        ones = is_member.to(tl.int32)
        slot = first_slot + count + tl.cumsum(ones) - 1
        tl.store(sorted_rows + slot, row.to(tl.int32), mask=is_member)
        count += tl.sum(ones)
    offset = tl.arange(0, BLOCK)
    padding = count + offset
    tl.store(sorted_rows + first_slot + padding, -1, mask=padding < own_blocks * BLOCK_SIZE)
    for block in range(first_block, first_block + own_blocks):
        entry = expert
        if PAIRS:
            is_second = (block - first_block) % 2 == 1
            has_next = block + 1 < first_block + own_blocks
            entry = tl.where(is_second, -1, tl.where(has_next, expert + PAIR, expert))
        tl.store(expert_of_block + block, entry)
    for block in range(used_blocks + expert, capacity, num_experts):
        tl.store(expert_of_block + block, -1)
        slot = tl.cast(block, tl.int64) * BLOCK_SIZE + offset
        tl.store(sorted_rows + slot, -1, mask=offset < BLOCK_SIZE)
    if expert == 0:
        tl.store(num_blocks, used_blocks)


def expert_plan(
    launch: Launcher,
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    block_size: int,
    pairs: bool = False,
) -> ExpertPlan:
    """Compute the plan. With ``pairs``, an expert's blocks form pairs: in ``expert_of_block``, the
    entry of the first block of a pair is the expert plus PAIR, and the entry of the second is
    -1."""
    return _plan(launch, topk_ids, num_experts, block_size, pairs, None, False)[0]


def plan_and_reorder(
    launch: Launcher,
    topk_ids: torch.Tensor,
    x: torch.Tensor,
    *,
    num_experts: int,
    block_size: int,
    pairs: bool,
    fp4: bool,
) -> tuple[ExpertPlan, torch.Tensor]:
    """Return the plan, and the activations ``x`` in the order of ``reordered``."""
    num_rows = topk_ids.shape[0] * topk_ids.shape[1]
    is_small = isinstance(num_rows, int) and num_rows <= FUSED_COUNT_ROWS
    source = x if is_small else None
    plan, found = _plan(launch, topk_ids, num_experts, block_size, pairs, source, fp4)
    return plan, found if is_small else reordered(launch, x, fp4)


def _plan(
    launch: Launcher,
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    pairs: bool,
    x: torch.Tensor | None,
    fp4: bool,
) -> tuple[ExpertPlan, torch.Tensor]:
    num_tokens, topk = topk_ids.shape
    num_rows = num_tokens * topk
    capacity = max_expert_blocks(num_rows, num_experts, block_size)
    sorted_rows = topk_ids.new_empty((capacity * block_size,))
    expert_of_block = topk_ids.new_empty((capacity,))
    num_blocks = topk_ids.new_empty((1,))
    is_static = isinstance(num_rows, int)
    rows = min(max(triton.next_power_of_2(num_rows), 32), MAX_STEP_ROWS) if is_static else ROWS
    warps, has_counts = max(4, rows // 256), is_static and num_rows > FUSED_COUNT_ROWS
    counts = topk_ids.new_empty((num_experts if has_counts else 0,))
    source, x_reordered, reorder = (topk_ids, 0, 0), topk_ids, None
    if x is not None:
        reorder = reorder_sizes(x, fp4, REORDERED)
        x_reordered = x.new_empty((num_tokens, reorder[1]))
        source = strided(x)
    if has_counts:
        launch(expert_counts_kernel)[num_experts,](
            topk_ids, *topk_ids.stride(), topk, num_rows, counts, ROWS=rows, num_warps=warps
        )
    launch(expert_plan_kernel)[num_experts,](
        topk_ids, *topk_ids.stride(),
        topk, num_rows,
        counts,
        sorted_rows, expert_of_block, num_blocks,
        *source, num_tokens, x_reordered,
        capacity, num_experts,
        BLOCK_SIZE=block_size, BLOCK=triton.next_power_of_2(block_size),
        BINS=triton.next_power_of_2(num_experts + 1),
        ROWS=rows, HAS_COUNTS=has_counts, PAIRS=pairs, REORDER=reorder, num_warps=warps,
    )  # fmt: skip
    return ExpertPlan(sorted_rows, expert_of_block, num_blocks), x_reordered
