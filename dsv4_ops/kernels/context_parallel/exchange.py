"""Exchange tiles between programs of ranks that map each other's memory.

A kernel divides its work into the same tiles on all ranks. Program p processes tiles
p + i * programs. For each tile, the program writes its part to the memory of all other ranks,
raises its flags there, waits until the other ranks have raised their flags here, and reads what
they wrote. Every rank must make the same calls in the same order on one stream, as for any
collective.

Why no rank reads too early: a flag holds the number of a tile. Each program counts its tiles over
all calls, in its own memory, so that a replayed graph continues the count. The threads of a program
meet at a barrier after their writes; then the program raises the flag with a release at system
scope. The receiver waits with an acquire. A flag only grows, and a program that waits for tile t
also accepts the flag t + 1.

Why no rank overwrites unread data: each program has two buffers per sender, which alternate from
tile to tile. No other program uses these buffers, whatever the shapes of calls. A sender writes
tile t + 2 only after it has received this rank's flag of tile t + 1, and this rank's program raises
that flag after its last read of tile t. So kernels and layers of all shapes may share a workspace.

Why waiting ranks do not block each other: programs send before they wait, and GPUs start programs
in the order of their numbers. Consider the unfinished program with the lowest number on any rank,
and its first unfinished tile. On every other rank, the program with that number runs, or will run
because all programs before it have ended. That program sends without waiting. Besides, GPUs with
NVLink run all programs at once, two per SM.

Why the failure of a rank stops the other ranks: they trap after the group's timeout. If they
returned NaN instead, the model would sample tokens from NaN. After a trap, the next call of the
process fails, as with NCCL's watchdog, and no result is passed on.
"""

import struct

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from dsv4_ops.kernels.common.triton_compat import EMULATE

PROGRAMS = tl.constexpr(256)
"""Maximum number of programs; an SM runs two at once."""
COUNTS = tl.constexpr(1024)
"""Offset in bytes of the programs' tile counts, which follow the addresses of up to 128 ranks."""
DATA = tl.constexpr(2048)
"""Offset in bytes of the buffers, which follow the tile counts; the flags follow the buffers."""
TILE = tl.constexpr(16384)
"""Maximum bytes of a tile."""
PART = tl.constexpr(16384 + 128)
"""Bytes of a buffer: a tile, and one value per row of the tile."""
FLAG = tl.constexpr(32)
"""Bytes between flags. Each flag has its own sector, because programs poll flags."""


def workspace_bytes(world: int) -> int:
    """Return the bytes of each rank's workspace, the same for all kernels and shapes."""
    return int(DATA + PROGRAMS * (world - 1) * (FLAG + 2 * PART))


def workspace_header(addresses: list[int]) -> bytes:
    """Return the start of a rank's workspace: the addresses of all workspaces. The rest of a
    workspace is zeros."""
    return struct.pack(f"<{len(addresses)}q", *addresses)


@triton.jit
def count_address(workspace, program):
    """Return the address of a program's tile count."""
    return (workspace + COUNTS).to(tl.pointer_type(tl.int32)) + program


@triton.jit
def load_workspace(workspace, rank):
    """Load the address of another rank's workspace."""
    addresses = workspace.to(tl.pointer_type(tl.int64))
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def buffer_address(base, program, count, distance, WORLD: tl.constexpr):
    """Return the address of a program's buffer in the workspace ``base`` of a rank. The buffer
    receives from the sender whose rank is ``distance`` + 1 lower, modulo the number of ranks."""
    index = (program * (WORLD - 1) + distance) * 2 + (count & 1)
    return base + DATA + index.to(tl.int64) * PART


@triton.jit
def raise_flags(workspace, program, count, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Tell all other ranks that this program has written its tile to them. One instruction raises
    all flags, because every release waits until earlier writes have arrived."""
    tl.debug_barrier()  # all writes of the program precede its flags
    distance = tl.arange(1, 1 + triton.next_power_of_2(WORLD - 1))
    receiver = (RANK + distance) % WORLD
    addresses = workspace.to(tl.pointer_type(tl.int64))
    base = tl.load(addresses + receiver).to(tl.pointer_type(tl.uint8))
    flags = _flag_addresses(base, program, distance - 1, WORLD)
    counts = tl.zeros_like(distance) + count
    tl.atomic_xchg(flags, counts, mask=distance < WORLD, sem="release", scope="sys")


@triton.jit
def await_flags(workspace, program, count, timeout_ns, WORLD: tl.constexpr):
    """Wait until all other ranks have written this program's tile here."""
    distance = tl.arange(0, triton.next_power_of_2(WORLD - 1))
    flags = _flag_addresses(workspace, program, distance, WORLD)
    start = _now()
    while _is_pending(flags, count, distance < WORLD - 1):
        if _now() - start > timeout_ns:
            _trap()
    tl.debug_barrier()


@triton.jit
def _flag_addresses(base, program, distance, WORLD: tl.constexpr):
    index = program * (WORLD - 1) + distance
    address = base + (DATA + PROGRAMS * (WORLD - 1) * 2 * PART + index * FLAG)
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def _is_pending(flags, count, mask):
    """Return whether a flag is below ``count``. Compare by the sign of the difference, because
    counts wrap around."""
    value = tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys")
    return tl.min(tl.where(mask, value - count, 0), 0) < 0


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
