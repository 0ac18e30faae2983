"""Gather one or two tensors between ranks that map each other's memory, in one kernel.

Each rank has a part of each tensor. A tile is some bytes of a part. A program writes a tile to all
other ranks and to its own result, then copies the tiles that it receives to the result.
``exchange`` says why no rank reads too early or overwrites unread data.

A part is [rows, inner] integers; a result is [rows, WORLD, inner].
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.context_parallel.exchange import (
    await_flags,
    buffer_address,
    count_address,
    load_workspace,
    raise_flags,
)


@triton.jit
def gather_ranks(
    first, second, first_gathered, second_gathered, workspace,
    first_size, second_size, first_inner, second_inner, first_stride, second_stride, timeout_ns,
    RANK: tl.constexpr, WORLD: tl.constexpr, PAIR: tl.constexpr, ONE_ROW: tl.constexpr,
    FIRST_BYTES: tl.constexpr, SECOND_BYTES: tl.constexpr, TILE_BYTES: tl.constexpr,
):  # fmt: skip
    """Exchange tiles of ``first``, then of ``second`` if PAIR. FIRST_BYTES and SECOND_BYTES are the
    bytes of an integer in each tensor. ONE_ROW: each part has one row."""
    wait_for_previous_kernel()
    FIRST_LENGTH: tl.constexpr = TILE_BYTES // FIRST_BYTES
    SECOND_LENGTH: tl.constexpr = TILE_BYTES // SECOND_BYTES
    FIRST: tl.constexpr = (ONE_ROW, FIRST_BYTES, FIRST_LENGTH)
    SECOND: tl.constexpr = (ONE_ROW, SECOND_BYTES, SECOND_LENGTH)
    first_part = (first, first_stride, first_gathered, first_size, first_inner)
    second_part = (second, second_stride, second_gathered, second_size, second_inner)
    program = tl.program_id(0)
    first_tiles = tl.cdiv(first_size, FIRST_LENGTH)
    tiles = first_tiles + tl.cdiv(second_size, SECOND_LENGTH) if PAIR else first_tiles
    count_ptr = count_address(workspace, program)
    count = tl.load(count_ptr)
    for tile in range(program, tiles, tl.num_programs(0)):
        count += 1
        if PAIR and tile >= first_tiles:
            _send(second_part, workspace, program, count, tile - first_tiles, RANK, WORLD, SECOND)
        else:
            _send(first_part, workspace, program, count, tile, RANK, WORLD, FIRST)
        raise_flags(workspace, program, count, RANK, WORLD)
        await_flags(workspace, program, count, timeout_ns, WORLD)
        if PAIR and tile >= first_tiles:
            second_tile = tile - first_tiles
            _receive(second_part, workspace, program, count, second_tile, RANK, WORLD, SECOND)
        else:
            _receive(first_part, workspace, program, count, tile, RANK, WORLD, FIRST)
    tl.store(count_ptr, count)


@triton.jit
def _send(
    part, workspace, program, count, tile,
    RANK: tl.constexpr, WORLD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write a tile to all other ranks, and to the result.

    Args:
        part: A rank's part, the stride of its rows, the result, the number of integers of the part,
            and the number of integers per row.
        TILE: ONE_ROW, the bytes of an integer, and integers per tile.
    """
    BYTES: tl.constexpr = TILE[1]
    source, stride, gathered, _size, inner = part
    row, column, lane, mask = _elements(tile, part, TILE)
    values = tl.load(_as_integers(source, BYTES) + row * stride + column, mask=mask)
    for distance in tl.static_range(1, WORLD):
        base = load_workspace(workspace, (RANK + distance) % WORLD)
        buffer = buffer_address(base, program, count, distance - 1, WORLD)
        tl.store(_as_integers(buffer, BYTES) + lane, values, mask=mask)
    dst = _as_integers(gathered, BYTES) + (row * WORLD + RANK) * inner + column
    tl.store(dst, values, mask=mask)


@triton.jit
def _receive(
    part, workspace, program, count, tile,
    RANK: tl.constexpr, WORLD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy the tiles of all other ranks to the result."""
    BYTES: tl.constexpr = TILE[1]
    _source, _stride, gathered, _size, inner = part
    row, column, lane, mask = _elements(tile, part, TILE)
    for distance in tl.static_range(1, WORLD):
        buffer = buffer_address(workspace, program, count, distance - 1, WORLD)
        src = _as_integers(buffer, BYTES) + lane
        values = tl.load(src, mask=mask, cache_modifier=".cg")
        sender = (RANK - distance + WORLD) % WORLD
        dst = _as_integers(gathered, BYTES) + (row * WORLD + sender) * inner + column
        tl.store(dst, values, mask=mask)


@triton.jit
def _elements(tile, part, TILE: tl.constexpr):
    """For each integer of a tile, return its row, its column, its offset in a buffer, and whether
    it exists."""
    ONE_ROW: tl.constexpr = TILE[0]
    LENGTH: tl.constexpr = TILE[2]
    _source, _stride, _gathered, size, inner = part
    lane = tl.arange(0, LENGTH)
    start = tl.cast(tile, tl.int64) * LENGTH
    mask = lane < size - start
    if ONE_ROW:
        row, column = tl.zeros((), tl.int64), start + lane
    else:
        first_row = start // inner
        # Triton vectorises the loads with a difference, but not with a remainder
        offset = (start - first_row * inner).to(tl.int32) + lane
        row, column = first_row + offset // inner, offset % inner
    return row, column, lane, mask


@triton.jit
def _as_integers(address, BYTES: tl.constexpr):
    if BYTES == 8:
        return address.to(tl.pointer_type(tl.int64))
    elif BYTES == 4:
        return address.to(tl.pointer_type(tl.int32))
    elif BYTES == 2:
        return address.to(tl.pointer_type(tl.int16))
    else:
        return address.to(tl.pointer_type(tl.uint8))
