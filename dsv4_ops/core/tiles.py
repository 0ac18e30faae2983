"""Sizes of kernels that others than their launchers know."""

from __future__ import annotations

from torch import Tensor

KEY_TILE = 64
"""Keys that a program takes at a time."""

HEAD_TILE = 64
"""Heads per program: what Hopper's matrix unit takes at a time."""

PROGRAMS = 132
"""Programs that a small batch is cut into: the SMs of an H200."""

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
"""Tiles of keys in the time that a program takes before its first and behind its last one. Measured
on an H200: 10 us, of 2 to 3 a tile."""

PLAN_SIZES, PLAN_STEPS = 33, 8
"""Sizes of pieces that a plan looks at, and into how many steps it cuts their mean."""

PLAN_FURTHER_TILES = 3
"""Tiles of keys in the time that joins take if further pieces are as many as the programs, as a
plan reckons it."""

PLAN_COLUMNS = 4
"""Columns of a plan: token, piece of the token, pieces of the token, first partial result."""

CLASSES = 16
"""Classes of tokens by their length: those of several pieces, and of so many fourteenths of one."""


LEAST_CUT, MOST_CUT = 32, 256
"""Tokens times tiles of heads from which on, and tokens up to which, Hopper's kernel cuts a batch
by its lens where no plan is given."""

AT_ONCE = 120
"""Tokens times tiles of heads up to which pieces are no more than the SMs. Beyond, too few SMs are
left for further pieces, and programs take the longest tokens first."""

FURTHER_SHARE = 4
"""Of more pieces than run at once no more are further ones than the programs over this: a token in
two that are as long as others in one makes another round."""

CUT_SIZES, CUT_STEPS = 16, 4
"""Sizes of pieces that it looks at, and how many from a size to twice that."""

JOIN_TILES, FURTHER_TILES = 2, 1
"""Tiles of keys in the time of a join, and how many more if further pieces are as many as the
programs."""

JOIN_COLUMNS = 4
"""Columns of a list of joins: token, pieces, first partial result, and one that is not used; the
first row is the number of the others."""


def is_of_ours(plan: Tensor | None) -> bool:
    """Whether a plan is one of ``sparse_mla_plan``: FlashMLA's have one dimension if they are for
    sizes, and more columns if they are for lens."""
    return plan is not None and plan.dim() == 2 and int(plan.shape[1]) == PLAN_COLUMNS


def is_metadata(plan: Tensor | None) -> bool:
    """Whether a plan is one of ``flash_mla_metadata``."""
    return plan is not None and plan.dim() == 2 and int(plan.shape[1]) == METADATA_COLUMNS


def head_tiles(num_heads: int) -> int:
    """Programs that share the keys of one token."""
    return (num_heads + HEAD_TILE - 1) // HEAD_TILE


def programs_per_tile(num_heads: int, num_programs: int) -> int:
    """Programs there are for each tile of heads, at least one."""
    return max(1, num_programs // head_tiles(num_heads))
