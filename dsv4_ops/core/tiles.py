"""Tile sizes, schedules and cost constants that kernels and other layers share."""

from __future__ import annotations

KEY_TILE = 64
"""Keys per iteration of a program."""

HEAD_TILE = 64
"""Heads per program: the rows of one Hopper MMA."""

PROGRAMS = 132
"""Number of work tiles that a small batch is split into: one for each SM of an H200."""

SCHEDULE_KEYS = 256
"""Keys per split in DeepGEMM's schedule."""

METADATA_COLUMNS = 8
"""Columns of FlashMLA's tile scheduler metadata, which has a row per SM part: first token, last
token, first block, end block (exclusive), first split, whether the first token is split, whether
the last token is split, unused."""

PART_OVERHEAD = 5
"""Fixed cost of a token in FlashMLA's scheduler, in key blocks."""

LARGEST_TOPK = 4096
"""Largest top-k of our selection kernel. The reference runs for a larger top-k."""

START_TILES = 4
"""Fixed cost of a program, in key tiles (H200: about 10 us, at 2 to 3 us per tile)."""

PLAN_COLUMNS = 4
"""Columns of a plan: token, split index, number of splits of the token, first partial result."""

CLASSES = 16
"""Number of length classes. Tokens with several splits are one class; other tokens are classed by
their length in fourteenths of the split size."""


MIN_SCHEDULED_TILES, MAX_SCHEDULED_TOKENS = 32, 256
"""Without a plan, Hopper's kernel schedules a batch by its lengths if the number of tokens times
head tiles is at least the first number, and the number of tokens is at most the second number."""

ONE_WAVE_TILES = 120
"""If the number of tokens times head tiles is at most this, all work tiles run in one wave. If the
number is larger, too few SMs are free for extra splits, and the longest tokens are scheduled first.
"""

EXTRA_SPLIT_SHARE = 4
"""Beyond one wave, the number of extra splits is at most the number of programs of a wave, divided
by this number. More splits would add a wave, because a split can be as long as a token that is not
split."""

SPLIT_SIZES, SPLIT_STEPS = 16, 4
"""Number of split sizes that a plan or the tile scheduler tries, and number of sizes per factor of
two."""

COMBINE_TILES, EXTRA_SPLIT_TILES = 2, 1
"""Costs in key tiles: what a launch of combines costs each program, and what an extra split
costs."""

COMBINE_COLUMNS = 4
"""Columns of the list of tokens to combine: token, splits, first partial result, unused. The first
row holds the number of the other rows."""


def head_tiles(num_heads: int, tile: int = HEAD_TILE) -> int:
    """Return the number of programs that share the keys of one token."""
    return (num_heads + tile - 1) // tile


def programs_per_tile(num_heads: int, num_programs: int) -> int:
    """Return the number of programs per head tile, at least one."""
    return max(1, num_programs // head_tiles(num_heads))
