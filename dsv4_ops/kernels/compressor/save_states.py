"""Kernel and launcher of the compressor's states: a copy of rows, with a bias on their second half;
and which programs save them beside those that look for windows."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import StateLayout
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.paging import place_slots
from dsv4_ops.kernels.launcher import Launcher

TOKENS = 4
"""Tokens per program."""

COLUMNS = 512
"""Most values of a row per program."""

WARPS = 4


@triton.jit
def find_role(
    program, part, programs, num_tokens, num_saved,
    SAVE: tl.constexpr, LOOK_PARTS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """What the program number ``program`` of ``programs`` does: the tile of states that it saves,
    or -1; the first token that it looks at, if any; which part of its windows it reads; how many
    programs look, for each part.

    Without states to save, ``part`` is its index on a second axis. With them there is one axis, on
    which a program that looks comes every APART programs (1: all of them first; 0: as far apart
    as they all fit), and the others have the tiles."""
    SAVE_TOKENS: tl.constexpr = SAVE[0]
    SAVE_PARTS: tl.constexpr = SAVE[2]
    if SAVE_TOKENS == 0:
        return -1, program, part, programs
    else:
        looking = programs - (num_saved + SAVE_TOKENS - 1) // SAVE_TOKENS * SAVE_PARTS
        if APART == 1:
            before = tl.minimum(program, looking)
            looks = program < looking
        else:
            apart = programs // looking
            if APART > 0:
                apart = tl.minimum(apart, APART)
            before = tl.minimum((program + apart - 1) // apart, looking)
            looks = (program % apart == 0) & (before < looking)
        tile = tl.where(looks, -1, program - before)
        block = tl.where(tile >= 0, num_tokens, before // LOOK_PARTS)
        return tile, block, before % LOOK_PARTS, looking // LOOK_PARTS


@triton.jit
def save_tile(
    first_token, part, num_tokens, scores, ape, states, slots, positions,
    STATE: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Save columns of the states of some tokens: one tile of a launch.

    Args:
        first_token: First of SAVE[0] tokens, of those below ``num_tokens``.
        part: Which SAVE[1] columns.
        scores: ``kv_score``, its stride and that of its columns.
        ape: Bias of the second half.
        states: The cache, the stride of its blocks and their number.
        slots: Slot mapping and its stride.
        positions: Positions and their stride.
        STATE: Rows of a block, compression ratio, and columns of half a row.
        SAVE: Tokens and columns of a tile, and tiles of a row.
    """
    WIDTH: tl.constexpr = STATE[2]
    TOKENS: tl.constexpr = SAVE[0]
    COLUMNS: tl.constexpr = SAVE[1]
    token = first_token + tl.arange(0, TOKENS)
    column = (part * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    given, each = token < num_tokens, token.to(tl.int64)
    slot = tl.load(slots[0] + each * slots[1], mask=given, other=-1)
    position = tl.load(positions[0] + each * positions[1], mask=given, other=-1)
    source = scores[0] + each[:, None] * scores[1]
    values = tl.load(
        source + column.to(tl.int64) * scores[2],
        mask=given[:, None] & (column < 2 * WIDTH),
        other=0.0,
    )
    page, row, exists = place_slots(slot, states[2], STATE[0])
    exists = exists & (position >= 0)
    offset = (tl.where(exists, position, 0) % STATE[1]).to(tl.int32)
    scored = (column >= WIDTH) & (column < 2 * WIDTH)
    bias = tl.load(
        ape + offset[:, None] * WIDTH + (column - WIDTH), mask=exists[:, None] & scored, other=0.0
    )
    # not for all: a sum would change the sign of a zero and the payload of a NaN
    values = tl.where(scored, values + bias, values)
    target = states[0] + (page * states[1] + row * (2 * WIDTH))[:, None] + column
    # for a later step: what stays in the cache is kv_score, for the windows of this one
    there = exists[:, None] & (column < 2 * WIDTH)
    tl.store(target, values, mask=there, cache_modifier=".cs")


@triton.jit
def save_role(
    tile, first_token, num_tokens, scores, ape, states, slots, positions,
    STATE: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """What a program does that ``find_role`` has given a tile of the tokens from ``first_token``
    on."""
    if SAVE[0] > 0:
        if tile >= 0:
            save_tile(
                first_token + tile // SAVE[2] * SAVE[0], tile % SAVE[2], num_tokens,
                scores, ape, states, slots, positions, STATE, SAVE,
            )  # fmt: skip


@triton.jit
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
