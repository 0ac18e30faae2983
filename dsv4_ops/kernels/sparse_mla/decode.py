"""Launch decode: split the keys of each token over programs, then combine."""

from __future__ import annotations

from collections.abc import Sequence
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
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.launcher import EAGER, Launcher
from dsv4_ops.kernels.sparse_mla import combine
from dsv4_ops.kernels.sparse_mla.gathered import gathered_keys
from dsv4_ops.kernels.sparse_mla.hopper import support
from dsv4_ops.kernels.sparse_mla.triton.decode_kernel import split_keys_kernel
from dsv4_ops.reference import sparse_mla as reference

WARPS = 8
"""Warps of a program of the kernel in Triton."""

LEAST_LANES = 32
"""Lanes of the tile scheduler, of which each has a token, if there are no more tokens: of more than
needed, programs start up to 0.7 us later."""


class Call(NamedTuple):
    """The tensors of a call; ``extra_indices`` is a block table with ``req_indices``."""

    q: Tensor
    swa_cache: Tensor
    swa_indices: Tensor
    swa_lens: Tensor
    extra_cache: Tensor | None
    extra_indices: Tensor | None
    extra_lens: Tensor | None
    req_indices: Tensor | None
    attn_sink: Tensor | None
    plan: Tensor | None
    positions: Tensor | None
    cos_sin_cache: Tensor | None

    def widths(self, extra_block_size: int) -> list[int]:
        """Most keys of a token in each of its lists."""
        widths = [self.swa_indices.shape[1]]
        if self.extra_indices is not None:
            paged = self.req_indices is not None
            widths.append(self.extra_indices.shape[1] * (extra_block_size if paged else 1))
        return widths


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


def launch_split_keys(
    launch: Launcher,
    call: Call,
    work: Work,
    *,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int,
    coded: bool,
) -> combine.Splits:
    """Attend to the splits of every token: results of tokens of one, partial results of others."""
    q, plan = call.q, call.plan
    num_tokens, num_heads, head_dim = q.shape[0], int(q.shape[1]), int(q.shape[2])
    if work.on_hopper and q.stride(2) != 1:
        q = q.contiguous()
    lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
    results = (q.new_empty(q.shape), lse, *partial_results(q, work.capacity, head_dim))
    lens = call.swa_lens if call.extra_lens is None else call.extra_lens
    cache = call.swa_cache if call.extra_cache is None else call.extra_cache
    indices = call.swa_indices if call.extra_indices is None else call.extra_indices
    requests = lens if call.req_indices is None else call.req_indices
    main = MainLayout(swa_block_size)
    tensors = (
        *strided(q),
        *results,
        lse if call.attn_sink is None else call.attn_sink.contiguous(),
        *_source(call.swa_cache, call.swa_indices, call.swa_lens),
        call.swa_indices.shape[1],
        *_source(cache, indices, lens),
        call.widths(extra_block_size)[-1],
        *strided(requests),
        indices.shape[0],
        lens if plan is None else plan,
        *((0, 0) if plan is None else plan.stride()),
        *combine.rotation_of(lens, call.positions, call.cos_sin_cache),
        work.capacity,
        num_tokens,
        num_heads,
        work.splits,
    )
    constants = {
        "SOFTMAX_SCALE": float(softmax_scale),  # Inductor would pass it as a float64
        "SWA_BLOCK_SIZE": swa_block_size,
        "EXTRA_BLOCK_SIZE": extra_block_size,
        "HAS_EXTRA": call.extra_cache is not None,
        "PAGED": call.req_indices is not None,
        "HAS_SINK": call.attn_sink is not None,
        "HAS_PLAN": plan is not None,
        "INVERSE_ROPE": call.positions is not None,
        "ROW": main.data_bytes if coded else head_dim,
        "SCALE_BYTES": main.scale_bytes if coded else 0,
    }
    grid = (work.programs, head_tiles(num_heads))
    if work.on_hopper:
        kernels = support.kernels()
        assert kernels is not None  # ``support.runs`` has asked
        schedule = work.schedule
        scheduled = (lens, 0, 0)
        if schedule is not None:
            scheduled = (schedule.combine_list, schedule.by_lengths, schedule.wave)
        constants |= {
            "SCHEDULED": schedule is not None,
            "LANES": LEAST_LANES if schedule is None else lanes_of(num_tokens),
        }
        launch(kernels.split)[grid](*tensors, *scheduled, **constants, num_warps=support.WARPS)
        return results
    launch(split_keys_kernel)[grid](
        *tensors, **constants, UNIT=work.unit, HEAD_DIM=head_dim,
        ROW_BYTES=main.data_bytes if coded else 2 * head_dim,
        CODE_DIM=main.code_dim if coded else head_dim, QUANT_BLOCK=main.quant_block,
        HEADS=HEAD_TILE, KEYS=KEY_TILE, num_warps=WARPS,
    )  # fmt: skip
    return results


def _source(cache: Tensor, indices: Tensor, lens: Tensor) -> tuple[Any, ...]:
    """A cache and the lists of its keys, with their strides."""
    lists = (indices, *indices.stride(), lens, lens.stride(0))
    return (cache, cache.stride(0), cache.shape[0], *lists)


def lanes_of(num_tokens: int) -> int:
    """A power of two that is no less; of a symbolic number nothing is known."""
    if not isinstance(num_tokens, int):
        return MAX_SCHEDULED_TOKENS
    return min(max(triton.next_power_of_2(num_tokens), LEAST_LANES), MAX_SCHEDULED_TOKENS)


WIDTH = MainLayout.head_dim
"""Values per row, which the kernel's tiles are made for."""

KEYS = KEY_TILE
"""Keys per block."""

HALF_BLOCK_TIME = 0.6
"""Time of half a block of keys over that of a block. Measured: 0.55, and more splits to combine."""

LEAST_UNITS = 4
"""Key blocks of all lists of a token from which on a batch is scheduled by its lengths."""

FIXED_SPLIT = 4
"""Key blocks per split of a batch-invariant call."""

_WHAT = "with such queries, caches or angles"

_SCHEMA = (
    "(Tensor q, Tensor swa_cache, Tensor swa_indices, Tensor swa_lens, Tensor? extra_cache, "
    "Tensor? extra_indices, Tensor? extra_lens, Tensor? req_indices, Tensor? attn_sink, "
    "Tensor? plan, Tensor? positions, Tensor? cos_sin_cache, *, float softmax_scale, "
    "int swa_block_size, int extra_block_size, str layout, int num_splits, bool batch_invariant) "
    "-> (Tensor, Tensor)"
)


def sparse_mla_decode(
    launch: Launcher,
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    extra_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_lens: Tensor | None,
    attn_sink: Tensor | None,
    plan: Tensor | None,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    *,
    impl: str = AUTO,
    **settings: Any,
) -> SparseMla:
    swa = (swa_cache, swa_indices, swa_lens)
    rest = (attn_sink, plan, positions, cos_sin_cache)
    caches, extra = [swa_cache], None
    if extra_cache is not None and extra_indices is not None and extra_lens is not None:
        caches, extra = [swa_cache, extra_cache], (extra_cache, extra_indices, extra_lens)
    if not (supported(q, *caches) and turns(cos_sin_cache)):
        not_ours("sparse_mla_decode", impl, _WHAT)
        listed = (extra_cache, extra_indices, extra_lens)
        return reference.sparse_mla_decode(q, *swa, *listed, *rest, **settings)
    return _attend(launch, "sparse_mla_decode", q, swa, extra, None, *rest, **settings)


def sparse_mla_decode_paged(
    launch: Launcher,
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    extra_cache: Tensor,
    extra_lens: Tensor,
    req_indices: Tensor,
    extra_block_table: Tensor,
    attn_sink: Tensor | None,
    plan: Tensor | None,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    *,
    impl: str = AUTO,
    **settings: Any,
) -> SparseMla:
    swa = (swa_cache, swa_indices, swa_lens)
    rest = (attn_sink, plan, positions, cos_sin_cache)
    if not (supported(q, swa_cache, extra_cache) and turns(cos_sin_cache)):
        not_ours("sparse_mla_decode_paged", impl, _WHAT)
        paged = (extra_cache, extra_lens, req_indices, extra_block_table)
        return reference.sparse_mla_decode_paged(q, *swa, *paged, *rest, **settings)
    extra = (extra_cache, extra_block_table, extra_lens)
    op = "sparse_mla_decode_paged"
    return _attend(launch, op, q, swa, extra, req_indices, *rest, **settings)


def sparse_mla_gathered(
    launch: Launcher,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lens: Tensor,
    attn_sink: Tensor | None,
    *,
    softmax_scale: float,
    impl: str = AUTO,
) -> SparseMlaGathered:
    rows = (q, kv, indices, lens, attn_sink)
    if not (supported(q) and support.runs(launch, q, True)):
        not_ours("sparse_mla_gathered", impl, "off Hopper, or with such queries")
        return reference.sparse_mla_gathered(*rows, softmax_scale=softmax_scale)
    return SparseMlaGathered(*gathered_keys(launch, *rows, softmax_scale))


def supported(q: Tensor, *caches: Tensor) -> bool:
    """Whether the kernel takes rows of this dtype and width, without gaps between them; others go
    to the reference."""
    dense = all(cache.dim() == 2 or cache.stride(1) == WIDTH for cache in caches)
    return q.dtype == torch.bfloat16 and dense and int(q.shape[2]) == WIDTH


def turns(cos_sin_cache: Tensor | None) -> bool:
    """Whether the kernel's inverse RoPE is of so many values: those of its last tile, or none."""
    return cos_sin_cache is None or int(cos_sin_cache.shape[1]) == combine.ROPE


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
    return 1 + (splits - 1) * torch.sym_min(1, torch.sym_max(0, saved - KEYS // unit))


def unit_of_splits(programs: int, widths: Sequence[int]) -> int:
    """Keys that splits are multiples of: half a block if the longest split then takes less time
    with the kernel in Triton; with that for Hopper half a block takes as long as a whole one. Of
    symbolic sizes nothing is known, and asking would make them numbers: then too, as it costs many
    tokens less than it gains few."""
    if not all(isinstance(size, int) for size in (programs, *widths)):
        return KEYS // 2
    whole, halves = (_longest_split(programs, widths, unit) for unit in (KEYS, KEYS // 2))
    return KEYS // 2 if halves // 2 + halves % 2 * HALF_BLOCK_TIME < whole else KEYS


def _longest_split(programs: int, widths: Sequence[int], unit: int) -> int:
    units = _units(widths, unit)
    splits = num_splits_of(programs, units, unit, 0, False)
    return (units + splits - 1) // splits


def _units(widths: Sequence[int], unit: int) -> int:
    """Units in a row: those of the window, then those of the extra cache."""
    return sum((width + unit - 1) // unit for width in widths)


def _attend(
    launch: Launcher,
    op: str,
    q: Tensor,
    swa: tuple[Tensor, Tensor, Tensor],
    extra: tuple[Tensor, Tensor, Tensor] | None,
    *rest: Tensor | None,
    **settings: Any,
) -> SparseMla:
    """``rest`` and ``settings`` are those of ``_split_and_combine``."""
    num_tokens, num_heads = q.shape[0], int(q.shape[1])
    if num_tokens == 0 or num_heads == 0:
        lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
        return SparseMla(q.new_empty(q.shape), lse)
    coded = settings["layout"] == MainLayout.tag
    if coded:
        main = MainLayout(settings["swa_block_size"])
        Checks(op).page_start("swa_cache", swa[0], main)
        Checks(op).page_start("extra_cache", (extra or swa)[0], main)
    args = (q, *swa, *(extra or (None, None, None)), *rest)
    if launch.opaque_gluon and support.runs(launch, q, coded):
        return SparseMla(*hopper_split_keys(*args, **settings))
    return SparseMla(*_split_and_combine(launch, *args, **settings))


def _split_and_combine(
    launch: Launcher,
    *tensors: Tensor | None,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """``tensors`` are those of ``Call``."""
    call = Call(*tensors)  # type: ignore[arg-type]  # the first are never None
    if call.positions is None or call.cos_sin_cache is None:
        call = call._replace(positions=None, cos_sin_cache=None)
    coded = layout == MainLayout.tag
    on_hopper = support.runs(launch, call.q, coded)
    work = _split(call, on_hopper, call.widths(extra_block_size), num_splits, batch_invariant)
    results = launch_split_keys(
        launch,
        call,
        work,
        softmax_scale=softmax_scale,
        swa_block_size=swa_block_size,
        extra_block_size=extra_block_size,
        coded=coded,
    )
    rest = (call.positions, call.cos_sin_cache)
    if work.schedule is not None:
        written = work.schedule.combine_list
        combine.combine_listed(launch, results, call.attn_sink, written, *rest)
    elif call.plan is not None or not (isinstance(work.splits, int) and work.splits == 1):
        combine.combine(launch, results, call.attn_sink, call.plan, *rest, work.splits)
    return results[0], results[1]


def _split(
    call: Call, on_hopper: bool, widths: Sequence[int], num_splits: int, batch_invariant: bool
) -> Work:
    """Choose splits: by a plan, by the lengths, or as many of every token as fill the GPU."""
    num_tokens, wide = call.q.shape[0], head_tiles(int(call.q.shape[1]))
    if call.plan is not None:
        programs = call.plan.shape[0]
        # a token of several splits has fewer than twice as many as its share of the programs
        return Work(on_hopper, KEYS, 1, programs, 2 * (programs - num_tokens), None)
    free = num_splits == 0 and not batch_invariant
    unit = KEYS if on_hopper or not free else unit_of_splits(num_tokens * wide, widths)
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


def _call(*args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(args[0]):
        return _split_and_combine(EAGER, *args, **settings)


def _fake(q: Tensor, *_: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    rows = (q.shape[0], int(q.shape[1]))
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32)


hopper_split_keys = opaque_op.define("_hopper_split_keys", _SCHEMA, _call, _fake)
"""All launches of a call, which then know its sizes, also in a graph for any number of tokens."""
