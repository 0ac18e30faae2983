"""Merge, in one kernel, attention results of ranks that have different keys.

The ranks map each other's memory. In the end, each rank has the merged results of its own heads. A
row is a token and a head, and a tile is some rows of each rank's heads. A program writes its
partial results for the heads of another rank to the memory of that rank, and merges the partial
results that it receives. ``exchange`` says why no rank reads too early or overwrites unread data.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.context_parallel.exchange import (
    TILE,
    await_flags,
    buffer_address,
    count_address,
    load_workspace,
    raise_flags,
)

LSE_OFFSET = TILE
"""Offset in bytes of the log-sum-exps in a buffer."""


@triton.jit
def merge_ranks(
    out, lse, workspace, merged, merged_lse,
    num_rows, own_heads, timeout_ns,
    out_token_stride, out_head_stride, lse_token_stride, lse_head_stride,
    RANK: tl.constexpr, WORLD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Exchange and merge tiles. NATURAL: log-sum-exps are in base e; otherwise in base 2."""
    wait_for_previous_kernel()
    program = tl.program_id(0)
    element = out.dtype.element_ty
    lane = tl.arange(0, TILE_ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    offset = lane[:, None] * BLOCK + column
    count_ptr = count_address(workspace, program)
    count = tl.load(count_ptr)
    bases = ()  # load early: after the first store, the loads would wait for the store
    for distance in tl.static_range(1, WORLD):
        bases += (load_workspace(workspace, (RANK + distance) % WORLD),)
    for tile in range(program, tl.cdiv(num_rows, TILE_ROWS), tl.num_programs(0)):
        count += 1
        row = tile * TILE_ROWS + lane
        token, head = (row // own_heads).to(tl.int64), row % own_heads
        row_valid = row < num_rows
        mask = row_valid[:, None] & (column < WIDTH)
        src = out + (token * out_token_stride)[:, None] + column
        src_lse = lse + token * lse_token_stride
        for distance in tl.static_range(1, WORLD):
            heads = (RANK + distance) % WORLD * own_heads + head
            part = tl.load(src + (heads.to(tl.int64) * out_head_stride)[:, None], mask=mask)
            part_lse = tl.load(src_lse + heads * lse_head_stride, mask=row_valid)
            buffer = buffer_address(bases[distance - 1], program, count, distance - 1, WORLD)
            dst = buffer.to(tl.pointer_type(element))
            tl.store(dst + offset, part, mask=mask)
            dst_lse = (buffer + LSE_OFFSET).to(tl.pointer_type(tl.float32))
            tl.store(dst_lse + lane, part_lse, mask=row_valid)
        raise_flags(workspace, program, count, RANK, WORLD)

        heads = RANK * own_heads + head
        own_part = tl.load(src + (heads.to(tl.int64) * out_head_stride)[:, None], mask=mask)
        own_lse = _finite_lse(tl.load(src_lse + heads * lse_head_stride, mask=row_valid))
        await_flags(workspace, program, count, timeout_ns, WORLD)
        row_max = own_lse
        for distance in tl.static_range(1, WORLD):
            buffer = buffer_address(workspace, program, count, distance - 1, WORLD)
            row_max = tl.maximum(row_max, _load_received_lse(buffer, lane, row_valid))
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
        acc = tl.zeros((TILE_ROWS, BLOCK), tl.float32)
        row_sum = tl.zeros((TILE_ROWS,), tl.float32)
        for sender in tl.static_range(WORLD):  # all ranks add in the same order
            if sender == RANK:
                part, part_lse = own_part, own_lse
            else:
                sender_distance = (RANK - sender + WORLD) % WORLD
                buffer = buffer_address(workspace, program, count, sender_distance - 1, WORLD)
                received = buffer.to(tl.pointer_type(element))
                part = tl.load(received + offset, mask=mask, cache_modifier=".cg")
                part_lse = _load_received_lse(buffer, lane, row_valid)
            difference = part_lse - shift
            p = tl.exp(difference) if NATURAL else tl.exp2(difference)
            row_sum += p
            acc += tl.where(p[:, None] > 0, p[:, None] * part.to(tl.float32), 0.0)
        result = tl.where(row_sum[:, None] > 0, acc / row_sum[:, None], 0.0)
        dst = merged + row.to(tl.int64)[:, None] * WIDTH + column
        tl.store(dst, result.to(element), mask=mask)
        log_sum = tl.log(row_sum) if NATURAL else tl.log2(row_sum)
        tl.store(merged_lse + row, shift + log_sum, mask=row_valid)
        tl.store(count_ptr, count)  # if stored after the loop, count_ptr spills (Triton 3.9)


@triton.jit
def _finite_lse(lse):
    """Replace inf and NaN by -inf, the lse of rows without keys."""
    return tl.where(lse < float("inf"), lse, float("-inf"))


@triton.jit
def _load_received_lse(buffer, lane, mask):
    src = (buffer + LSE_OFFSET).to(tl.pointer_type(tl.float32)) + lane
    return _finite_lse(tl.load(src, mask=mask, cache_modifier=".cg"))
