"""Save the compressor's states: copies of ``kv_score``, with a bias added to the second half (the
scores). Other programs of the same launch may scan for completed windows."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import StateLayout
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.paging import locate_slots
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

TOKENS = 4
"""Tokens per program."""

COLUMNS = 512
"""Maximum columns of a row per program."""

WARPS = 4


@triton.jit
def assign_role(
    program, part, programs, num_tokens, num_saved,
    SAVE: tl.constexpr, SCAN_PARTS: tl.constexpr, SPACING: tl.constexpr,
):  # fmt: skip
    """Decide whether program number ``program`` of ``programs`` saves a tile of states, or scans
    tokens for completed windows.

    Return four values: the tile to save, or -1; the first token to scan, or ``num_tokens`` for
    none; the part of the channels to pool; and the number of programs that scan for each part.

    If no states are saved, all programs scan, and ``part`` is the program's index on the second
    axis of the grid. Otherwise the grid has one axis. On this axis, programs that scan are SPACING
    apart, and the programs between them save tiles. With SPACING 1 the programs that scan come
    first; with 0 they are as far apart as possible.
    """
    SAVE_TOKENS: tl.constexpr = SAVE[0]
    SAVE_PARTS: tl.constexpr = SAVE[2]
    if SAVE_TOKENS == 0:
        return -1, program, part, programs
    else:
        scanners = programs - (num_saved + SAVE_TOKENS - 1) // SAVE_TOKENS * SAVE_PARTS
        if SPACING == 1:
            scanners_before = tl.minimum(program, scanners)
            scans = program < scanners
        else:
            spacing = programs // scanners
            if SPACING > 0:
                spacing = tl.minimum(spacing, SPACING)
            scanners_before = tl.minimum((program + spacing - 1) // spacing, scanners)
            scans = (program % spacing == 0) & (scanners_before < scanners)
        tile = tl.where(scans, -1, program - scanners_before)
        first_token = tl.where(tile >= 0, num_tokens, scanners_before // SCAN_PARTS)
        return tile, first_token, scanners_before % SCAN_PARTS, scanners // SCAN_PARTS


@triton.jit
def save_tile(
    first_token, part, num_tokens, scores, ape, states, slots, positions,
    STATE: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Save one tile of states.

    Args:
        first_token: First token of the tile; the tile ends before ``num_tokens``.
        part: Index of the tile among the tiles of the same tokens. These tiles save different
            columns.
        scores: ``kv_score``, its row stride and its column stride.
        ape: Bias of the second half of a state.
        states: The cache, its block stride and its number of blocks.
        slots: Slot mapping and its stride.
        positions: Positions and their stride.
        STATE: Rows per block, compression ratio, and columns of half a state: the first entries of
            ``WINDOW``.
        SAVE: Tokens and columns of a tile, and tiles per row.
    """
    BLOCK_SIZE: tl.constexpr = STATE[0]
    RATIO: tl.constexpr = STATE[1]
    WIDTH: tl.constexpr = STATE[2]
    TOKENS: tl.constexpr = SAVE[0]
    COLUMNS: tl.constexpr = SAVE[1]
    kv_score, row_stride, dim_stride = scores
    state_cache, page_stride, num_blocks = states
    slot_mapping, slot_stride = slots
    positions, position_stride = positions
    token = first_token + tl.arange(0, TOKENS)
    column = (part * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    in_range, token = token < num_tokens, token.to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_stride, mask=in_range, other=-1)
    position = tl.load(positions + token * position_stride, mask=in_range, other=-1)
    source = kv_score + token[:, None] * row_stride
    values = tl.load(
        source + column.to(tl.int64) * dim_stride,
        mask=in_range[:, None] & (column < 2 * WIDTH),
        other=0.0,
    )
    page, row, slot_valid = locate_slots(slot, num_blocks, BLOCK_SIZE)
    slot_valid = slot_valid & (position >= 0)
    offset = (tl.where(slot_valid, position, 0) % RATIO).to(tl.int32)
    has_bias = (column >= WIDTH) & (column < 2 * WIDTH)
    bias = tl.load(
        ape + offset[:, None] * WIDTH + (column - WIDTH),
        mask=slot_valid[:, None] & has_bias,
        other=0.0,
    )
    # a sum with 0 would change the sign of -0 and the payload of a NaN in the first half
    values = tl.where(has_bias, values + bias, values)
    target = state_cache + (page * page_stride + row * (2 * WIDTH))[:, None] + column
    # a streaming store leaves the L2 to kv_score, which this step reads; later steps read states
    mask = slot_valid[:, None] & (column < 2 * WIDTH)
    tl.store(target, values, mask=mask, cache_modifier=".cs")


@triton.jit
def save_assigned_tile(
    tile, first_token, num_tokens, scores, ape, states, slots, positions,
    STATE: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Save ``tile``, a result of ``assign_role``, unless it is -1. Tile 0 begins at
    ``first_token``."""
    TOKENS: tl.constexpr = SAVE[0]
    PARTS: tl.constexpr = SAVE[2]
    if TOKENS > 0:
        if tile >= 0:
            save_tile(
                first_token + tile // PARTS * TOKENS, tile % PARTS, num_tokens,
                scores, ape, states, slots, positions, STATE, SAVE,
            )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def save_compressor_states_kernel(
    kv_score, row_stride, dim_stride,
    ape,
    states, page_stride,
    slot_mapping, slot_stride,
    positions, position_stride,
    num_tokens, num_blocks,
    BLOCK_SIZE: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    save_tile(
        tl.program_id(0) * TOKENS, tl.program_id(1), num_tokens,
        (kv_score, row_stride, dim_stride), ape, (states, page_stride, num_blocks),
        (slot_mapping, slot_stride), (positions, position_stride),
        (BLOCK_SIZE, RATIO, WIDTH), (TOKENS, COLUMNS, 1),
    )  # fmt: skip


def save_compressor_states(
    launch: Launcher,
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    states: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    *,
    compress_ratio: int,
    block_size: int,
) -> None:
    num_tokens, width = slot_mapping.shape[0], int(ape.shape[1])
    layout = StateLayout(block_size, max(2 * width, 1))
    Checks("save_compressor_states").page_start("states", states, layout)
    if num_tokens == 0 or states.shape[0] == 0 or width == 0:
        return
    columns = min(COLUMNS, triton.next_power_of_2(2 * width))
    grid = ((num_tokens + TOKENS - 1) // TOKENS, (2 * width + columns - 1) // columns)
    launch(save_compressor_states_kernel)[grid](
        kv_score, int(kv_score.stride(0)), kv_score.stride(1), ape.contiguous(),
        states, int(states.stride(0)),
        *strided(slot_mapping, positions), num_tokens, states.shape[0],
        BLOCK_SIZE=block_size, RATIO=compress_ratio, WIDTH=width, TOKENS=TOKENS, COLUMNS=columns,
        num_warps=WARPS,
    )  # fmt: skip
