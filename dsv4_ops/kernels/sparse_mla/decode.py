"""Launch decode: split the keys of each token over programs, then combine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import AUTO
from dsv4_ops.core.tiles import (
    COMBINE_COLUMNS,
    EXTRA_SPLIT_SHARE,
    HEAD_TILE,
    KEY_TILE,
    MAX_SCHEDULED_TOKENS,
    MIN_SCHEDULED_TILES,
    ONE_WAVE_TILES,
    PROGRAMS,
    head_tiles,
    programs_per_tile,
)
from dsv4_ops.core.types import SparseMla, SparseMlaGathered
from dsv4_ops.dispatch.choice import not_ours
from dsv4_ops.dispatch.prefill import positive
from dsv4_ops.kernels import opaque_op
from dsv4_ops.kernels.arguments import paged, rotation, strided
from dsv4_ops.kernels.calls import DecodeCall, GatheredCall, PrefillCall, empty_results
from dsv4_ops.kernels.launcher import EAGER, Launcher
from dsv4_ops.kernels.sparse_mla import combine
from dsv4_ops.kernels.sparse_mla.gathered import hopper_gathered_keys, launch_gathered_keys
from dsv4_ops.kernels.sparse_mla.hopper import support
from dsv4_ops.kernels.sparse_mla.triton.decode_kernel import split_keys_kernel
from dsv4_ops.reference import sparse_mla as reference

WARPS = 8
"""Warps of a program of the kernel in Triton."""

LEAST_LANES = 32
"""Lanes of the tile scheduler, of which each has a token, if there are no more tokens: of more than
needed, programs start up to 0.7 us later."""


class TileSchedule(NamedTuple):
    """A batch whose splits Hopper's kernel finds by itself.

    Args:
        by_lengths: 1, or 0 for as many splits of each token as are said, or a symbol.
        programs: Programs for each tile of heads.
        wave: How many of them run at once.
        combine_list: int32 [1 + tokens, COMBINE_COLUMNS], where the kernel lists tokens of several
            splits.
    """

    by_lengths: Any
    programs: Any
    wave: int
    combine_list: Tensor


class Work(NamedTuple):
    """How a call is split.

    Args:
        on_hopper: Whether the kernel in Gluon runs it.
        unit: Keys that splits are multiples of.
        splits: Splits of every token, if neither a plan nor a schedule says them.
        programs: Programs for each tile of heads.
        capacity: How many partial results there may be; 0 if every token has one split.
        schedule: How the kernel finds splits by the lengths, if it does.
    """

    on_hopper: bool
    unit: int
    splits: int
    programs: int
    capacity: int
    schedule: TileSchedule | None


def partial_results(q: Tensor, capacity: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of so many splits the values, the logarithm of their sum, what values are multiples of."""
    heads, dtype = int(q.shape[1]), torch.float32 if q.dtype == torch.float32 else torch.float16
    parts = q.new_empty((capacity, heads, width), dtype=dtype)
    return parts, *(q.new_empty((capacity, heads), dtype=torch.float32) for _ in range(2))


def launch_split_keys(launch: Launcher, call: DecodeCall, work: Work) -> combine.Splits:
    """Attend to the splits of every token: results of tokens of one, partial results of others."""
    q, plan = call.q, call.plan
    num_tokens, num_heads, head_dim = q.shape[0], int(q.shape[1]), int(q.shape[2])
    if work.on_hopper and q.stride(2) != 1:
        q = q.contiguous()
    out, lse = empty_results(q)
    results = (out, lse, *partial_results(q, work.capacity, head_dim))
    window, (swa_cache, extra_cache) = call.window, call.caches
    extra = call.extra or window
    lens = extra.lens
    tensors = (
        *strided(q),
        *results,
        lse if call.attn_sink is None else call.attn_sink.contiguous(),
        *paged(swa_cache),
        *strided(window.indices, window.lens),
        window.width(),
        *paged(extra_cache),
        *strided(extra.indices, lens),
        extra.width(),
        *strided(lens if call.req_indices is None else call.req_indices),
        extra.indices.shape[0],
        *((lens, 0, 0) if plan is None else strided(plan)),
        *rotation(lens, call.positions, call.cos_sin_cache),
        *(work.capacity, num_tokens, num_heads, work.splits),
    )
    constants = {
        "SOFTMAX_SCALE": float(call.softmax_scale),  # Inductor would pass it as a float64
        "SWA_BLOCK_SIZE": call.swa_block_size,
        "EXTRA_BLOCK_SIZE": call.extra_block_size,
        "HAS_EXTRA": call.extra is not None,
        "PAGED": call.req_indices is not None,
        "HAS_SINK": call.attn_sink is not None,
        "HAS_PLAN": plan is not None,
        "INVERSE_ROPE": call.positions is not None,
    }
    grid, row = (work.programs, head_tiles(num_heads)), row_format(call)
    if work.on_hopper:
        scheduled, of_schedule = scheduled_by(work, lens, num_tokens)
        launch(support.kernel("split"))[grid](
            *tensors, *scheduled, **constants, **of_schedule, ROW=row[0], SCALE_BYTES=row[4],
            num_warps=support.WARPS,
        )  # fmt: skip
        return results
    launch(split_keys_kernel)[grid](
        *tensors, **constants, HEAD_DIM=head_dim, FORMAT=row,
        HEADS=HEAD_TILE, KEYS=KEY_TILE, UNIT=work.unit, num_warps=WARPS,
    )  # fmt: skip
    return results


def row_format(call: DecodeCall | PrefillCall) -> tuple[int, ...]:
    """``FORMAT`` of ``load_keys``."""
    main, width = MainLayout(call.swa_block_size), int(call.q.shape[2])
    if not call.coded:
        return width, 2 * width, width, main.quant_block, 0
    return main.data_bytes, main.data_bytes, main.code_dim, main.quant_block, main.scale_bytes


def scheduled_by(
    work: Work, stand_in: Tensor, num_tokens: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What Hopper's kernels of decode are given of a schedule: arguments and constants."""
    schedule = work.schedule
    if schedule is None:
        return (stand_in, 0, 0), {"SCHEDULED": False, "LANES": LEAST_LANES}
    arguments = (schedule.combine_list, schedule.by_lengths, schedule.wave)
    return arguments, {"SCHEDULED": True, "LANES": lanes_of(num_tokens)}


def lanes_of(num_tokens: int) -> int:
    """A power of two that is no less; of a symbolic number nothing is known."""
    if not isinstance(num_tokens, int):
        return MAX_SCHEDULED_TOKENS
    return min(max(triton.next_power_of_2(num_tokens), LEAST_LANES), MAX_SCHEDULED_TOKENS)


WIDTH = MainLayout.head_dim
"""Values per row, which the kernel's tiles are made for."""

HALF_BLOCK_TIME = 0.6
"""Time of half a block of keys over that of a block. Measured: 0.55, and more splits to combine."""

LEAST_UNITS = 4
"""Key blocks of all lists of a token from which on a batch is scheduled by its lengths."""

FIXED_SPLIT = 4
"""Key blocks per split of a batch-invariant call."""


def sparse_mla_gathered(
    launch: Launcher, *args: Any, impl: str = AUTO, **named: Any
) -> SparseMlaGathered:
    call = GatheredCall(*args, **named)
    if not (supported(call.q) and support.runs(launch, call.q, True)):
        not_ours("sparse_mla_gathered", impl, "off Hopper, or with such queries")
        return reference.sparse_mla_gathered(*args, **named)
    if launch.opaque_gluon:
        return SparseMlaGathered(*hopper_gathered_keys(*call))
    return SparseMlaGathered(*launch_gathered_keys(launch, *call))


def supported(q: Tensor, *caches: Tensor) -> bool:
    """Whether the kernel takes rows of this dtype and width, without gaps between them; others go
    to the reference."""
    dense = all(cache.dim() == 2 or cache.stride(1) == WIDTH for cache in caches)
    return q.dtype == torch.bfloat16 and dense and int(q.shape[2]) == WIDTH


def _takes(call: DecodeCall) -> bool:
    """Whether the kernels take the call: their inverse RoPE is of so many values as those of their
    last tile, or of none."""
    table = call.cos_sin_cache
    turns = table is None or int(table.shape[1]) == combine.ROPE
    return turns and supported(call.q, *call.caches)


def check_pages(op: str, call: DecodeCall | PrefillCall) -> None:
    """Refuse FP8 blocks that begin where the kernels cannot read them."""
    for name, cache in zip(("swa_cache", "extra_cache"), call.caches, strict=True):
        Checks(op).page_start(name, cache, MainLayout(call.swa_block_size))


def num_splits_of(
    programs: int, units: int, unit: int, num_splits: int, batch_invariant: bool
) -> int:
    """Splits of every token: as many as fill the GPU, or a number that no other token decides."""
    if num_splits > 0:
        return num_splits
    if batch_invariant:
        return (units + FIXED_SPLIT - 1) // FIXED_SPLIT
    most = torch.sym_max(1, torch.sym_min(units, PROGRAMS // torch.sym_max(programs, 1)))
    longest = (units + most - 1) // most
    splits = (units + longest - 1) // longest  # no more than the longest of them makes worthwhile
    saved = units - longest  # a combine takes as long as a block
    return 1 + (splits - 1) * torch.sym_min(1, torch.sym_max(0, saved - KEY_TILE // unit))


def unit_of_splits(programs: int, widths: Sequence[int]) -> int:
    """Keys that splits are multiples of: half a block if the longest split then takes less time
    with the kernel in Triton; with that for Hopper half a block takes as long as a whole one. Of
    symbolic sizes nothing is known, and asking would make them numbers: then too, as it costs many
    tokens less than it gains few."""
    if not all(isinstance(size, int) for size in (programs, *widths)):
        return KEY_TILE // 2
    whole, halves = (_longest_split(programs, widths, unit) for unit in (KEY_TILE, KEY_TILE // 2))
    return KEY_TILE // 2 if halves // 2 + halves % 2 * HALF_BLOCK_TIME < whole else KEY_TILE


def _longest_split(programs: int, widths: Sequence[int], unit: int) -> int:
    units = _units(widths, unit)
    splits = num_splits_of(programs, units, unit, 0, False)
    return (units + splits - 1) // splits


def _units(widths: Sequence[int], unit: int) -> int:
    """Units in a row: those of the window, then those of the extra cache."""
    return sum((width + unit - 1) // unit for width in widths)


def _decode(
    op: str,
    make: Callable[..., DecodeCall],
    launch: Launcher,
    *args: Any,
    impl: str = AUTO,
    **named: Any,
) -> SparseMla:
    call = make(*args, **named)
    if not _takes(call):
        not_ours(op, impl, "with such queries, caches or angles")
        return getattr(reference, op)(*args, **named)
    if call.q.shape[0] == 0 or int(call.q.shape[1]) == 0:
        return SparseMla(*empty_results(call.q))
    if call.coded:
        check_pages(op, call)
    if launch.opaque_gluon and support.runs(launch, call.q, call.coded):
        return SparseMla(*hopper_split_keys(*call))
    return SparseMla(*split_and_combine(launch, call))


sparse_mla_decode = partial(_decode, "sparse_mla_decode", DecodeCall)
sparse_mla_decode_paged = partial(_decode, "sparse_mla_decode_paged", DecodeCall.of_pages)


def split_and_combine(launch: Launcher, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """All launches of a call."""
    if call.positions is None or call.cos_sin_cache is None:
        call = call._replace(positions=None, cos_sin_cache=None)
    work = _split(call, support.runs(launch, call.q, call.coded))
    results = launch_split_keys(launch, call, work)
    angles = (call.positions, call.cos_sin_cache)
    combine_splits(launch, results, work, call.plan, call.attn_sink, *angles)
    return results[0], results[1]


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
    """Of the tokens that have several splits, if any can."""
    angles = (positions, cos_sin_cache)
    if work.schedule is not None:
        combine.combine_listed(launch, results, attn_sink, work.schedule.combine_list, *angles)
    elif plan is not None or not (isinstance(work.splits, int) and work.splits == 1):
        combine.combine(launch, results, attn_sink, plan, *angles, work.splits, parts)


def _split(call: DecodeCall, on_hopper: bool) -> Work:
    """Choose splits: by a plan, by the lengths, or as many of every token as fill the GPU."""
    num_tokens, wide = call.q.shape[0], head_tiles(int(call.q.shape[1]))
    if call.plan is not None:
        programs = call.plan.shape[0]
        # a token of several splits has fewer than twice as many as its share of the programs
        return Work(on_hopper, KEY_TILE, 1, programs, 2 * (programs - num_tokens), None)
    num_splits, batch_invariant = call.num_splits, call.batch_invariant
    free = num_splits == 0 and not batch_invariant
    widths = [lists.width() for lists in (call.window, call.extra) if lists is not None]
    unit = KEY_TILE if on_hopper or not free else unit_of_splits(num_tokens * wide, widths)
    units = _units(widths, unit)
    splits = num_splits_of(num_tokens * wide, units, unit, num_splits, batch_invariant)
    programs = num_tokens * splits
    schedule = None
    if on_hopper and free and call.req_indices is not None:
        schedule = schedule_of(call.q, units, wide)
    if schedule is not None:
        programs += schedule.by_lengths * (schedule.programs - programs)
        return Work(on_hopper, unit, splits, programs, PROGRAMS, schedule)
    # of more than one split, where the batch decides, no more programs than PROGRAMS
    capacity = PROGRAMS if free else programs
    if isinstance(splits, int) and splits == 1:
        capacity = 0
    return Work(on_hopper, unit, splits, programs, capacity, None)


def schedule_of(q: Tensor, units: int, wide: int) -> TileSchedule | None:
    """How a batch with block tables is scheduled by its lengths, None if it is not.

    Few tokens are split by the widths of the tables alone, which takes no time. Of symbolic sizes a
    symbol says which.
    """
    if isinstance(units, int) and units < LEAST_UNITS:
        return None
    num_tokens = q.shape[0]
    by_lengths = (
        positive(num_tokens * wide + 1 - MIN_SCHEDULED_TILES)
        * positive(MAX_SCHEDULED_TOKENS + 1 - num_tokens)
        * positive(units + 1 - LEAST_UNITS)
    )
    if isinstance(by_lengths, int) and by_lengths == 0:
        return None
    wave = programs_per_tile(int(q.shape[1]), PROGRAMS)
    beyond = positive(num_tokens * wide - ONE_WAVE_TILES)
    programs = wave + beyond * (num_tokens + wave // EXTRA_SPLIT_SHARE - wave)
    combine_list = q.new_empty((num_tokens + 1, COMBINE_COLUMNS), dtype=torch.int32)
    return TileSchedule(by_lengths, programs, wave, combine_list)


def _call(*args: Any) -> tuple[Tensor, Tensor]:
    call = DecodeCall(*args)
    with torch.cuda.device_of(call.q):
        return split_and_combine(EAGER, call)


hopper_split_keys = opaque_op.define(
    "_hopper_split_keys",
    f"({opaque_op.fields(DecodeCall)}) -> (Tensor, Tensor)",
    _call,
    lambda *args: empty_results(args[0]),
)
"""All launches of a call, which then know its sizes, also in a graph for any number of tokens."""
