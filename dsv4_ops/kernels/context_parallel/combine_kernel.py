"""Merges attention over the keys of ranks that map each other's memory, in one kernel.

A tile is some rows (token, head) of each rank's heads. A program writes its part of the tile to the
memory of the rank whose heads it is of, for all other ranks, and merges what came. ``exchange``
says why no rank reads too early or overwrites what another has yet to read.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.context_parallel.exchange import (
    TILE,
    await_flags,
    buffer_of,
    count_of,
    raise_flags,
    workspace_of,
)

LSES = TILE
"""Where log-sum-exps begin in a buffer."""


@triton.jit
def merge_ranks(
    out, lse, workspace, merged, merged_lse,
    num_rows, own_heads, timeout_ns,
    out_token_stride, out_head_stride, lse_token_stride, lse_head_stride,
    RANK: tl.constexpr, WORLD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    element = out.dtype.element_ty
    lane = tl.arange(0, TILE_ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    in_part = lane[:, None] * BLOCK + column
    count_at = count_of(workspace, program)
    count = tl.load(count_at)
    bases = ()  # loads behind stores wait for them
    for ahead in tl.static_range(1, WORLD):
        bases += (workspace_of(workspace, (RANK + ahead) % WORLD),)
    for tile in range(program, tl.cdiv(num_rows, TILE_ROWS), tl.num_programs(0)):
        count += 1
        row = tile * TILE_ROWS + lane
        token, head = (row // own_heads).to(tl.int64), row % own_heads
        live = row < num_rows
        inside = live[:, None] & (column < WIDTH)
        out_at = out + (token * out_token_stride)[:, None] + column
        lse_at = lse + token * lse_token_stride
        for ahead in tl.static_range(1, WORLD):
            heads = (RANK + ahead) % WORLD * own_heads + head
            part = tl.load(out_at + (heads.to(tl.int64) * out_head_stride)[:, None], mask=inside)
            its_lse = tl.load(lse_at + heads * lse_head_stride, mask=live)
            buffer = buffer_of(bases[ahead - 1], program, count, ahead - 1, WORLD)
            at = buffer.to(tl.pointer_type(element))
            tl.store(at + in_part, part, mask=inside)
            tl.store((buffer + LSES).to(tl.pointer_type(tl.float32)) + lane, its_lse, mask=live)
        raise_flags(workspace, program, count, RANK, WORLD)

        heads = RANK * own_heads + head
        mine = tl.load(out_at + (heads.to(tl.int64) * out_head_stride)[:, None], mask=inside)
        my_lse = _existing(tl.load(lse_at + heads * lse_head_stride, mask=live))
        await_flags(workspace, program, count, timeout_ns, WORLD)
        row_max = my_lse
        for ahead in tl.static_range(1, WORLD):
            buffer = buffer_of(workspace, program, count, ahead - 1, WORLD)
            row_max = tl.maximum(row_max, _arrived_lse(buffer, lane, live))
        origin = tl.where(row_max == float("-inf"), 0.0, row_max)
        summed = tl.zeros((TILE_ROWS, BLOCK), tl.float32)
        total = tl.zeros((TILE_ROWS,), tl.float32)
        for sender in tl.static_range(WORLD):  # the same order on all ranks
            if sender == RANK:
                part, part_lse = mine, my_lse
            else:
                sent_ahead = (RANK - sender + WORLD) % WORLD
                buffer = buffer_of(workspace, program, count, sent_ahead - 1, WORLD)
                at = buffer.to(tl.pointer_type(element))
                part = tl.load(at + in_part, mask=inside, cache_modifier=".cg")
                part_lse = _arrived_lse(buffer, lane, live)
            difference = part_lse - origin
            weight = tl.exp(difference) if NATURAL else tl.exp2(difference)
            total += weight
            summed += tl.where(weight[:, None] > 0, weight[:, None] * part.to(tl.float32), 0.0)
        result = tl.where(total[:, None] > 0, summed / total[:, None], 0.0)
        merged_at = merged + row.to(tl.int64)[:, None] * WIDTH + column
        tl.store(merged_at, result.to(element), mask=inside)
        log = tl.log(total) if NATURAL else tl.log2(total)
        tl.store(merged_lse + row, origin + log, mask=live)
        tl.store(count_at, count)  # after the loop, its address would spill on Triton 3.9


@triton.jit
def _existing(lse):
    return tl.where(lse < float("inf"), lse, float("-inf"))


@triton.jit
def _arrived_lse(buffer, lane, live):
    at = (buffer + LSES).to(tl.pointer_type(tl.float32)) + lane
    return _existing(tl.load(at, mask=live, cache_modifier=".cg"))
