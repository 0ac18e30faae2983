"""Tile sizes, schedules and cost constants that kernels and other layers share."""

from __future__ import annotations

KEY_TILE = 64
"""Keys per iteration of a program."""

HEAD_TILE = 64
"""Heads per program: the rows of one Hopper MMA."""

PROGRAMS = 132
"""Work tiles that a small batch is split into: the SMs of an H200."""

SCHEDULE_KEYS = 256
"""Keys per split in DeepGEMM's schedule."""

METADATA_COLUMNS = 8
"""Columns of FlashMLA's tile scheduler metadata, per part: first token, last token, first block,
end block (exclusive), first split, whether the first and the last token are split, unused."""

PART_OVERHEAD = 5
"""Fixed cost of a token in FlashMLA's scheduler, in key blocks."""

LARGEST_TOPK = 4096
"""Largest top-k of our selection kernel. Beyond it the reference sorts, with the same result."""

START_TILES = 4
"""Fixed cost of a program, in key tiles (H200: about 10 us, at 2 to 3 us per tile)."""

PLAN_COLUMNS = 4
"""Columns of a plan: token, split index, number of splits of the token, first partial result."""

CLASSES = 16
"""Length classes of tokens: several splits, or fourteenths of one split."""


MIN_SCHEDULED_TILES, MAX_SCHEDULED_TOKENS = 32, 256
"""Without a plan, Hopper's kernel schedules a batch by its lengths from this many tokens times head
tiles, up to this many tokens."""

ONE_WAVE_TILES = 120
"""Up to this many tokens times head tiles, all work tiles run in one wave. Above it, too few SMs
are free for extra splits, and the longest tokens are scheduled first."""

EXTRA_SPLIT_SHARE = 4
"""Beyond one wave, cap extra splits at the number of programs divided by this: two splits as long
as other tokens' single split would add a wave."""

SPLIT_SIZES, SPLIT_STEPS = 16, 4
"""Split sizes that a plan or the tile scheduler considers, and how many per doubling of the
size."""

COMBINE_TILES, EXTRA_SPLIT_TILES = 2, 1
"""Cost of a combine per program, and of one extra split, in key tiles."""

COMBINE_COLUMNS = 4
"""Columns of the list of tokens to combine: token, splits, first partial result, unused. The first
row holds the number of the other rows."""


def head_tiles(num_heads: int, tile: int = HEAD_TILE) -> int:
    """Return the number of programs that share the keys of one token."""
    return (num_heads + tile - 1) // tile


def programs_per_tile(num_heads: int, num_programs: int) -> int:
    """Return the number of programs per head tile, at least one."""
    return max(1, num_programs // head_tiles(num_heads))
