"""Sizes of kernels that others than their launchers know."""

from __future__ import annotations

from dsv4_ops.core.torch_compat import sym_min

KEY_TILE = 64
"""Keys that a program takes at a time."""

HEAD_TILE = 64
"""Heads per program: what Hopper's matrix unit takes at a time."""

PROGRAMS = 132
"""Work tiles that a small batch is split into: the SMs of an H200."""

SCHEDULE_KEYS = 256
"""Keys of a split of DeepGEMM's schedule."""

METADATA_COLUMNS = 8
"""Columns of FlashMLA's tile scheduler metadata: first and last token of a part, its first block
and the one behind its last, its first split, whether first and last token are split, and one that
is not used."""

PART_OVERHEAD = 5
"""Blocks of keys in the time that FlashMLA reckons for a token beside its own."""

LARGEST_TOPK = 4096
"""Columns that our selection makes at most. For more the reference sorts, with the same result."""

START_TILES = 4
"""Cost of a program beside its tiles of keys, in tiles of keys: measured on an H200, 10 us of 2 to
3 a tile."""

PLAN_SIZES, PLAN_STEPS = 33, 8
"""Sizes of a split that a plan considers, and how many of them from a mean to twice that."""

PLAN_EXTRA_SPLIT_TILES = 3
"""Cost, in tiles of keys, of as many extra splits as programs, in a plan."""

PLAN_COLUMNS = 4
"""Columns of a plan: token, split of the token, splits of the token, first partial result."""

CLASSES = 16
"""Classes of tokens by their length: those of several splits, and fourteenths of one split."""


MIN_SCHEDULED_TILES, MAX_SCHEDULED_TOKENS = 32, 256
"""Tokens times tiles of heads from which on, and tokens up to which, Hopper's kernel schedules a
batch by its lengths where no plan is given."""

ONE_WAVE_TILES = 120
"""Tokens times tiles of heads up to which all work tiles run in one wave. Beyond, too few SMs are
left for extra splits, and the longest tokens are scheduled first."""

EXTRA_SPLIT_SHARE = 4
"""Beyond one wave, cap extra splits at the number of programs over this: a token in two that are as
long as others in one makes another wave."""

SPLIT_SIZES, SPLIT_STEPS = 16, 4
"""Sizes of a split that the tile scheduler considers, and how many from one to twice that."""

COMBINE_TILES, EXTRA_SPLIT_TILES = 2, 1
"""Cost, in tiles of keys, of a combine, and of as many extra splits as programs."""

COMBINE_COLUMNS = 4
"""Columns of the list of tokens to combine: token, splits, first partial result, and one unused;
the first row is the number of the others."""


def head_tiles(num_heads: int) -> int:
    """Programs that share the keys of one token."""
    return (num_heads + HEAD_TILE - 1) // HEAD_TILE


def programs_per_tile(num_heads: int, num_programs: int) -> int:
    """Programs there are for each tile of heads, at least one."""
    return max(1, num_programs // head_tiles(num_heads))


def plan_blocks(num_rows: int, num_experts: int, block_size: int) -> int:
    """Most blocks that ``num_rows`` rows fill, when no block has rows of two experts."""
    padded = num_rows + sym_min(num_experts, num_rows) * (block_size - 1)
    return padded // block_size
