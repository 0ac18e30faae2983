"""Gathers tensors of ranks that map each other's memory, in one kernel.

A tile is some bytes of a rank's part of one of two tensors. A program writes it to all other ranks
and to its own result, then copies there what they sent. ``exchange`` says why no rank reads too
early or overwrites what another has yet to read.

A part is [rows, inner] in integers of a size that divides it, and a result [rows, WORLD, inner].
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.context_parallel.exchange import (
    await_flags,
    buffer_of,
    count_of,
    raise_flags,
    workspace_of,
)


@triton.jit
def gather_ranks(
    first, second, first_gathered, second_gathered, workspace,
    first_size, second_size, first_inner, second_inner, first_stride, second_stride, timeout_ns,
    RANK: tl.constexpr, WORLD: tl.constexpr, PAIR: tl.constexpr, ONE_ROW: tl.constexpr,
    FIRST_BYTES: tl.constexpr, SECOND_BYTES: tl.constexpr, TILE_BYTES: tl.constexpr,
):  # fmt: skip
    FIRST: tl.constexpr = (ONE_ROW, FIRST_BYTES, TILE_BYTES // FIRST_BYTES)
    SECOND: tl.constexpr = (ONE_ROW, SECOND_BYTES, TILE_BYTES // SECOND_BYTES)
    of_first = (first, first_stride, first_gathered, first_size, first_inner)
    of_second = (second, second_stride, second_gathered, second_size, second_inner)
    program = tl.program_id(0)
    first_tiles = tl.cdiv(first_size, FIRST[2])
    tiles = first_tiles + tl.cdiv(second_size, SECOND[2]) if PAIR else first_tiles
    count_at = count_of(workspace, program)
    count = tl.load(count_at)
    for tile in range(program, tiles, tl.num_programs(0)):
        count += 1
        if PAIR and tile >= first_tiles:
            _send(of_second, workspace, program, count, tile - first_tiles, RANK, WORLD, SECOND)
        else:
            _send(of_first, workspace, program, count, tile, RANK, WORLD, FIRST)
        raise_flags(workspace, program, count, RANK, WORLD)
        await_flags(workspace, program, count, timeout_ns, WORLD)
        if PAIR and tile >= first_tiles:
            _receive(of_second, workspace, program, count, tile - first_tiles, RANK, WORLD, SECOND)
        else:
            _receive(of_first, workspace, program, count, tile, RANK, WORLD, FIRST)
    tl.store(count_at, count)


@triton.jit
def _send(
    part, workspace, program, count, tile,
    RANK: tl.constexpr, WORLD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``part``: what a rank sends, the stride of its rows, the result, and the integers of both in
    all and in a row. TILE: ONE_ROW, the bytes of an integer, and integers of a tile."""
    BYTES: tl.constexpr = TILE[1]
    source, stride, gathered, _size, inner = part
    row, column, lane, live = _elements(tile, part, TILE)
    values = tl.load(_integers(source, BYTES) + row * stride + column, mask=live)
    for ahead in tl.static_range(1, WORLD):
        base = workspace_of(workspace, (RANK + ahead) % WORLD)
        buffer = buffer_of(base, program, count, ahead - 1, WORLD)
        tl.store(_integers(buffer, BYTES) + lane, values, mask=live)
    own_at = _integers(gathered, BYTES) + (row * WORLD + RANK) * inner + column
    tl.store(own_at, values, mask=live)


@triton.jit
def _receive(
    part, workspace, program, count, tile,
    RANK: tl.constexpr, WORLD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = TILE[1]
    _source, _stride, gathered, _size, inner = part
    row, column, lane, live = _elements(tile, part, TILE)
    for behind in tl.static_range(1, WORLD):
        buffer = buffer_of(workspace, program, count, behind - 1, WORLD)
        at = _integers(buffer, BYTES) + lane
        values = tl.load(at, mask=live, cache_modifier=".cg")
        sender = (RANK - behind + WORLD) % WORLD
        sent_at = _integers(gathered, BYTES) + (row * WORLD + sender) * inner + column
        tl.store(sent_at, values, mask=live)


@triton.jit
def _elements(tile, part, TILE: tl.constexpr):
    """Rows and columns of a tile's integers, where they lie in a buffer, and which exist."""
    ONE_ROW: tl.constexpr = TILE[0]
    LENGTH: tl.constexpr = TILE[2]
    _source, _stride, _gathered, size, inner = part
    lane = tl.arange(0, LENGTH)
    start = tl.cast(tile, tl.int64) * LENGTH
    live = lane < size - start
    if ONE_ROW:
        row, column = tl.zeros((), tl.int64), start + lane
    else:
        first = start // inner
        in_row = (start - first * inner).to(tl.int32) + lane  # not a remainder: loads stay vectors
        row, column = first + in_row // inner, in_row % inner
    return row, column, lane, live


@triton.jit
def _integers(address, BYTES: tl.constexpr):
    if BYTES == 8:
        return address.to(tl.pointer_type(tl.int64))
    elif BYTES == 4:
        return address.to(tl.pointer_type(tl.int32))
    elif BYTES == 2:
        return address.to(tl.pointer_type(tl.int16))
    else:
        return address.to(tl.pointer_type(tl.uint8))
