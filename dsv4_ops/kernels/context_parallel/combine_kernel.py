"""Merges attention over the keys of ranks that map each other's memory, in one kernel.

A tile is some rows (token, head) of each rank's heads. Program p takes each tile p + i * programs
and, for each: writes its part of the tile to the memory of the rank whose heads it is of, for all
other ranks; raises its flag there; waits for the flags here; merges. Every rank must make the same
calls in the same order on one stream, as for any collective.

Why no rank reads too early: a flag holds the number of the tile that it is for, counted by each
program over all tiles and calls in its own memory, so a replayed graph goes on counting. It is
raised by a release for the system after the barrier that all writes of the program lie before, and
awaited by an acquire. A flag only grows, and who waits for t is content with t + 1.

Why no rank overwrites what another has yet to read: each program has two buffers a sender, which
tiles take in turns, and no program shares its own with another, whatever the shapes of calls. A
sender writes tile t + 2 after its tile t + 1 got this rank's flag of t + 1, which this rank's
program raises behind its last read of tile t. So layers of all shapes may share a workspace.

Why ranks that wait do not stop each other: programs send before they wait, and GPUs start programs
in the order of their numbers. Of the programs that have not ended on any rank take the lowest tile
of the lowest; on every other rank that program runs too, or will as all lower ones have ended, and
it sends without waiting for anyone. Besides, the GPUs that have NVLink hold all programs at once,
two on an SM.

Why a rank that dies stops the others: they trap after the group's timeout. A NaN would be sampled
from; a trap is an error of the next call of the process, as NCCL's watchdog makes it, and nothing
was given on.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from dsv4_ops.kernels.common.triton_compat import EMULATE

PROGRAMS = tl.constexpr(256)
"""At most; an SM holds two."""
COUNTS = tl.constexpr(1024)
"""Where, behind the addresses of 128 ranks, programs count their tiles."""
DATA = tl.constexpr(2048)
"""Where buffers begin, behind the counts; flags lie behind all buffers."""
LSES = tl.constexpr(16384)
"""Where log-sum-exps begin in a buffer."""
PART = tl.constexpr(16384 + 128)
"""Bytes of a buffer."""
FLAG = tl.constexpr(32)
"""Bytes from flag to flag: a sector, as each is polled."""


@triton.jit
def merge_ranks(
    out,
    lse,
    workspace,
    merged,
    merged_lse,
    num_rows,
    own_heads,
    timeout_ns,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    NATURAL: tl.constexpr,
):
    program = tl.program_id(0)
    element = out.dtype.element_ty
    lane = tl.arange(0, TILE_ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    in_part = lane[:, None] * BLOCK + column
    addresses = workspace.to(tl.pointer_type(tl.int64))
    count_at = (workspace + COUNTS).to(tl.pointer_type(tl.int32)) + program
    count = tl.load(count_at)
    for tile in range(program, tl.cdiv(num_rows, TILE_ROWS), tl.num_programs(0)):
        count += 1
        row = tile * TILE_ROWS + lane
        token, head = (row // own_heads).to(tl.int64), row % own_heads
        live = row < num_rows
        inside = live[:, None] & (column < WIDTH)
        out_at = out + (token * out_token_stride)[:, None] + column
        lse_at = lse + token * lse_token_stride
        for ahead in tl.static_range(1, WORLD):
            other = (RANK + ahead) % WORLD
            heads = other * own_heads + head
            part = tl.load(out_at + (heads.to(tl.int64) * out_head_stride)[:, None], mask=inside)
            its_lse = tl.load(lse_at + heads * lse_head_stride, mask=live)
            base = tl.load(addresses + other).to(tl.pointer_type(tl.uint8))
            buffer = _buffer(base, program, count, ahead - 1, WORLD)
            at = tl.multiple_of(buffer.to(tl.pointer_type(element)), 16)
            tl.store(at + in_part, part, mask=inside)
            tl.store((buffer + LSES).to(tl.pointer_type(tl.float32)) + lane, its_lse, mask=live)
        tl.debug_barrier()  # every write before any flag
        for ahead in tl.static_range(1, WORLD):
            base = tl.load(addresses + (RANK + ahead) % WORLD).to(tl.pointer_type(tl.uint8))
            flag = _flag(base, program, ahead - 1, WORLD)
            tl.atomic_xchg(flag, count, sem="release", scope="sys")

        heads = RANK * own_heads + head
        mine = tl.load(out_at + (heads.to(tl.int64) * out_head_stride)[:, None], mask=inside)
        my_lse = _existing(tl.load(lse_at + heads * lse_head_stride, mask=live))
        for ahead in tl.static_range(1, WORLD):
            _await(_flag(workspace, program, ahead - 1, WORLD), count, timeout_ns)
        tl.debug_barrier()
        row_max = my_lse
        for ahead in tl.static_range(1, WORLD):
            buffer = _buffer(workspace, program, count, ahead - 1, WORLD)
            row_max = tl.maximum(row_max, _arrived_lse(buffer, lane, live))
        origin = tl.where(row_max == float("-inf"), 0.0, row_max)
        summed = tl.zeros((TILE_ROWS, BLOCK), tl.float32)
        total = tl.zeros((TILE_ROWS,), tl.float32)
        for sender in tl.static_range(WORLD):  # the same order on all ranks
            if sender == RANK:
                part, part_lse = mine, my_lse
            else:
                sent_ahead = (RANK - sender + WORLD) % WORLD
                buffer = _buffer(workspace, program, count, sent_ahead - 1, WORLD)
                at = tl.multiple_of(buffer.to(tl.pointer_type(element)), 16)
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
    tl.store(count_at, count)


@triton.jit
def _buffer(base, program, count, sender, WORLD: tl.constexpr):
    """Buffer of a program in a rank's workspace for what ``sender`` + 1 ranks behind it sends."""
    index = (program * (WORLD - 1) + sender) * 2 + (count & 1)
    return base + DATA + index.to(tl.int64) * PART


@triton.jit
def _flag(base, program, sender, WORLD: tl.constexpr):
    index = program * (WORLD - 1) + sender
    at = base + DATA + PROGRAMS * (WORLD - 1) * 2 * PART + index * FLAG
    return at.to(tl.pointer_type(tl.int32))


@triton.jit
def _await(flag, count, timeout_ns):
    start = _now()
    # a difference, as counts wrap
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - count < 0:
        if _now() - start > timeout_ns:
            _trap()


@triton.jit
def _now():
    if EMULATE:
        return tl.full((), 0, tl.int64)
    else:
        return globaltimer()


@triton.jit
def _trap():
    if not EMULATE:
        tl.inline_asm_elementwise(
            "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _existing(lse):
    return tl.where(lse < float("inf"), lse, float("-inf"))


@triton.jit
def _arrived_lse(buffer, lane, live):
    at = (buffer + LSES).to(tl.pointer_type(tl.float32)) + lane
    return _existing(tl.load(at, mask=live, cache_modifier=".cg"))
