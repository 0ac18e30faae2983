"""Decide how programs share the keys of a token, and launch the combine of the splits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dsv4_ops.core.ints import positive
from dsv4_ops.core.tiles import (
    COMBINE_COLUMNS,
    EXTRA_SPLIT_SHARE,
    KEY_TILE,
    MAX_SCHEDULED_TOKENS,
    MIN_SCHEDULED_TILES,
    ONE_WAVE_TILES,
    PROGRAMS,
    programs_per_tile,
)
from dsv4_ops.kernels.common.attention import combine
from dsv4_ops.kernels.launcher import Launcher

MIN_LANES = 32
"""Minimum number of lanes of the in-kernel scheduler. A lane holds one token. Unused lanes delay a
program by up to 0.7 us, so ``num_lanes`` depends on the number of tokens."""

MIN_UNITS = 4
"""Tokens are split by their lengths only if a token can have this many units (``Work.unit``)."""

FIXED_SPLIT = 4
"""Number of units per split in a batch-invariant call."""


class TileSchedule(NamedTuple):
    """Arguments of Hopper's in-kernel tile scheduler.

    Args:
        by_lengths: 1 to split tokens by their lengths, 0 to give every token the same number of
            splits; may be a symbol.
        programs: Programs per tile of heads.
        wave: Programs per tile of heads that run at once.
        combine_list: int32 [1 + tokens, COMBINE_COLUMNS], where the kernel lists tokens with
            several splits.
    """

    by_lengths: Any
    programs: Any
    wave: int
    combine_list: Tensor


class Work(NamedTuple):
    """How a call is split.

    Args:
        on_hopper: Whether the Gluon kernel runs the call.
        unit: Keys of a unit; a split is a whole number of units.
        splits: Number of splits of each token, if there is neither a plan nor a schedule.
        programs: Programs per tile of heads.
        capacity: Maximum number of partial results; 0 if every token has one split.
        schedule: Arguments of the in-kernel scheduler, or None.
    """

    on_hopper: bool
    unit: int
    splits: int
    programs: int
    capacity: int
    schedule: TileSchedule | None


def empty_partials(q: Tensor, capacity: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate per-split outputs, log-sum-exps and scales."""
    heads, dtype = int(q.shape[1]), torch.float32 if q.dtype == torch.float32 else torch.float16
    parts = q.new_empty((capacity, heads, width), dtype=dtype)
    return parts, *(q.new_empty((capacity, heads), dtype=torch.float32) for _ in range(2))


def num_splits_of(
    programs: int, units: int, unit: int, num_splits: int, batch_invariant: bool
) -> int:
    """Return the number of splits per token: ``num_splits`` if it is positive. Otherwise the splits
    fill the GPU or, if ``batch_invariant``, their number does not depend on other tokens."""
    if num_splits > 0:
        return num_splits
    if batch_invariant:
        return (units + FIXED_SPLIT - 1) // FIXED_SPLIT
    most = torch.sym_max(1, torch.sym_min(units, PROGRAMS // torch.sym_max(programs, 1)))
    longest = (units + most - 1) // most
    splits = (units + longest - 1) // longest  # more splits would not shorten the longest one
    saved = units - longest  # must exceed the cost of a combine: KEY_TILE keys
    return 1 + (splits - 1) * torch.sym_min(1, torch.sym_max(0, saved - KEY_TILE // unit))


def schedule_of(q: Tensor, units: int, tiles: int) -> TileSchedule | None:
    """Return the in-kernel schedule of a batch with block tables. Return None for a very small or
    very large batch, or for few units: all tokens then have the same number of splits.

    With symbolic sizes, ``by_lengths`` is a symbol.
    """
    if isinstance(units, int) and units < MIN_UNITS:
        return None
    num_tokens = q.shape[0]
    by_lengths = (
        positive(num_tokens * tiles + 1 - MIN_SCHEDULED_TILES)
        * positive(MAX_SCHEDULED_TOKENS + 1 - num_tokens)
        * positive(units + 1 - MIN_UNITS)
    )
    if isinstance(by_lengths, int) and by_lengths == 0:
        return None
    wave = programs_per_tile(int(q.shape[1]), PROGRAMS)
    several_waves = positive(num_tokens * tiles - ONE_WAVE_TILES)
    programs = wave + several_waves * (num_tokens + wave // EXTRA_SPLIT_SHARE - wave)
    combine_list = q.new_empty((num_tokens + 1, COMBINE_COLUMNS), dtype=torch.int32)
    return TileSchedule(by_lengths, programs, wave, combine_list)


def schedule_arguments_of(
    work: Work, stand_in: Tensor, num_tokens: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and constants that describe the schedule to Hopper's decode kernels."""
    schedule = work.schedule
    if schedule is None:
        return (stand_in, 0, 0), {"SCHEDULED": False, "LANES": MIN_LANES}
    arguments = (schedule.combine_list, schedule.by_lengths, schedule.wave)
    return arguments, {"SCHEDULED": True, "LANES": num_lanes(num_tokens)}


def num_lanes(num_tokens: int) -> int:
    """Return the number of lanes of the scheduler: a power of two, at least the number of tokens.
    For a symbolic number of tokens, return the maximum."""
    if not isinstance(num_tokens, int):
        return MAX_SCHEDULED_TOKENS
    return min(max(triton.next_power_of_2(num_tokens), MIN_LANES), MAX_SCHEDULED_TOKENS)


def combine_splits(
    launch: Launcher,
    results: combine.Splits,
    work: Work,
    plan: Tensor | None,
    attn_sink: Tensor | None,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    parts: int = 1,
) -> None:
    """Combine the splits of each token, if a token can have several."""
    angles = (positions, cos_sin_cache)
    if work.schedule is not None:
        combine.combine_listed(launch, results, attn_sink, work.schedule.combine_list, *angles)
    elif plan is not None or not (isinstance(work.splits, int) and work.splits == 1):
        combine.combine(launch, results, attn_sink, plan, *angles, work.splits, parts)
