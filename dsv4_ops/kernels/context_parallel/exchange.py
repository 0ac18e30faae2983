"""How programs of ranks that map each other's memory write to each other, whatever they send.

A kernel divides its work into tiles, the same on all ranks. Program p takes each tile
p + i * programs and, for each: writes its part of the tile to the memory of all other ranks; raises
its flags there; waits for their flags here; reads what came. Every rank must make the same calls in
the same order on one stream, as for any collective.

Why no rank reads too early: a flag holds the number of the tile that it is for, counted by each
program over all tiles and calls in its own memory, so a replayed graph goes on counting. It is
raised by a release for the system after the barrier that all writes of the program lie before, and
awaited by an acquire. A flag only grows, and who waits for t is content with t + 1.

Why no rank overwrites what another has yet to read: each program has two buffers a sender, which
tiles take in turns, and no program shares its own with another, whatever the shapes of calls. A
sender writes tile t + 2 after its tile t + 1 got this rank's flag of t + 1, which this rank's
program raises behind its last read of tile t. So kernels and layers of all shapes may share a
workspace.

Why ranks that wait do not stop each other: programs send before they wait, and GPUs start programs
in the order of their numbers. Of the programs that have not ended on any rank take the lowest tile
of the lowest; on every other rank that program runs too, or will as all lower ones have ended, and
it sends without waiting for anyone. Besides, the GPUs that have NVLink hold all programs at once,
two on an SM.

Why a rank that dies stops the others: they trap after the group's timeout. A NaN would be sampled
from; a trap is an error of the next call of the process, as NCCL's watchdog makes it, and nothing
was given on.
"""

import struct

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
TILE = tl.constexpr(16384)
"""Bytes of a tile at most."""
PART = tl.constexpr(16384 + 128)
"""Bytes of a buffer: a tile, and what belongs to its rows."""
FLAG = tl.constexpr(32)
"""Bytes from flag to flag: a sector, as each is polled."""


def workspace_bytes(world: int) -> int:
    """Bytes of each rank's workspace: the same for all kernels and shapes."""
    return int(DATA + PROGRAMS * (world - 1) * (FLAG + 2 * PART))


def workspace_header(addresses: list[int]) -> bytes:
    """What a rank's workspace begins with: where those of all ranks are. The rest is zeros."""
    return struct.pack(f"<{len(addresses)}q", *addresses)


@triton.jit
def count_of(workspace, program):
    """Where a program counts its tiles."""
    return (workspace + COUNTS).to(tl.pointer_type(tl.int32)) + program


@triton.jit
def workspace_of(workspace, rank):
    """The workspace of another rank."""
    addresses = workspace.to(tl.pointer_type(tl.int64))
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def buffer_of(base, program, count, sender, WORLD: tl.constexpr):
    """Buffer of a program in a rank's workspace for what ``sender`` + 1 ranks behind it sends."""
    index = (program * (WORLD - 1) + sender) * 2 + (count & 1)
    return base + DATA + index.to(tl.int64) * PART


@triton.jit
def raise_flags(workspace, program, count, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Tell all other ranks that this program has written its tile to them: all at once, as each
    waits until what was written has arrived."""
    tl.debug_barrier()  # every write before any flag
    ahead = tl.arange(1, 1 + triton.next_power_of_2(WORLD - 1))
    other = (RANK + ahead) % WORLD
    base = tl.load(workspace.to(tl.pointer_type(tl.int64)) + other).to(tl.pointer_type(tl.uint8))
    flags = _flags(base, program, ahead - 1, WORLD)
    counts = tl.zeros_like(ahead) + count
    tl.atomic_xchg(flags, counts, mask=ahead < WORLD, sem="release", scope="sys")


@triton.jit
def await_flags(workspace, program, count, timeout_ns, WORLD: tl.constexpr):
    """Wait until all other ranks have written this program's tile here."""
    sender = tl.arange(0, triton.next_power_of_2(WORLD - 1))
    flags = _flags(workspace, program, sender, WORLD)
    start = _now()
    while _behind(flags, count, sender < WORLD - 1):
        if _now() - start > timeout_ns:
            _trap()
    tl.debug_barrier()


@triton.jit
def _flags(base, program, sender, WORLD: tl.constexpr):
    index = program * (WORLD - 1) + sender
    at = base + (DATA + PROGRAMS * (WORLD - 1) * 2 * PART + index * FLAG)
    return at.to(tl.pointer_type(tl.int32))


@triton.jit
def _behind(flags, count, live):
    """Whether a flag is yet to come: by a difference, as counts wrap."""
    found = tl.atomic_add(flags, 0, mask=live, sem="acquire", scope="sys")
    return tl.min(tl.where(live, found - count, 0), 0) < 0


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
