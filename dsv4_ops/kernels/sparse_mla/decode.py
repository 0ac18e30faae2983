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
    AT_ONCE,
    FURTHER_SHARE,
    HEAD_TILE,
    JOIN_COLUMNS,
    KEY_TILE,
    LEAST_CUT,
    MOST_CUT,
    PROGRAMS,
    head_tiles,
    programs_per_tile,
)
from dsv4_ops.core.types import SparseMla, SparseMlaGathered
from dsv4_ops.dispatch.choice import not_ours
from dsv4_ops.dispatch.crossovers import positive
from dsv4_ops.kernels import opaque_op
from dsv4_ops.kernels.launcher import EMULATE, Launch, at_once, traced
from dsv4_ops.kernels.sparse_mla import combine
from dsv4_ops.kernels.sparse_mla.gathered import gathered_keys
from dsv4_ops.kernels.sparse_mla.hopper import support
from dsv4_ops.kernels.sparse_mla.triton.decode_kernel import split_keys_kernel
from dsv4_ops.reference import sparse_mla as reference

WARPS = 8
"""Warps of a program of the kernel in Triton."""

LEAST_LANES = 32
"""Lanes of programs that cut a batch, of which each has a token, if there are no more tokens: of
more than needed, programs start up to 0.7 us later."""


class Cut(NamedTuple):
    """A batch that is cut by its lens on Hopper.

    Args:
        by_lens: 1, or 0 for as many splits of each token as are said, or a symbol.
        programs: Programs for each tile of heads.
        at_once: How many of them run at once.
        joins: int32 [1 + tokens, JOIN_COLUMNS], where the kernel lists tokens of several pieces.
    """

    by_lens: Any
    programs: Any
    at_once: int
    joins: Tensor


def partial_results(q: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of so many splits the values, the logarithm of their sum, what values are multiples of."""
    heads, width = int(q.shape[1]), int(q.shape[2])
    parts = q.new_empty((room, heads, width), dtype=torch.float16)
    return parts, *(q.new_empty((room, heads), dtype=torch.float32) for _ in range(2))


def _results(q: Tensor, room: int) -> combine.Splits:
    lse = q.new_empty((q.shape[0], int(q.shape[1])), dtype=torch.float32)
    return q.new_empty(q.shape), lse, *partial_results(q, room)


def launch_split_keys(
    launch: Launch,
    on_hopper: bool,
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    extra_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_lens: Tensor | None,
    req_indices: Tensor | None,
    attn_sink: Tensor | None,
    plan: Tensor | None,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int,
    coded: bool,
    unit: int,
    splits: int,
    programs: int,
    room: int,
    *,
    cut: Cut | None,
) -> combine.Splits:
    """``programs`` programs for each tile of heads, of ``splits`` splits a token or as the plan or
    the cut says; ``extra_indices`` is a block table with ``req_indices``, ``room`` the number of
    partial results."""
    num_tokens, num_heads, head_dim = q.shape[0], int(q.shape[1]), int(q.shape[2])
    if on_hopper and q.stride(2) != 1:
        q = q.contiguous()
    results = _results(q, room)
    lens = swa_lens if extra_lens is None else extra_lens
    cache = swa_cache if extra_cache is None else extra_cache
    indices = swa_indices if extra_indices is None else extra_indices
    request = lens if req_indices is None else req_indices
    work = lens if plan is None else plan
    strides = (0, 0) if plan is None else plan.stride()
    rotation: tuple[Any, ...] = (lens, 0, lens, 0)
    if positions is not None and cos_sin_cache is not None:
        table = cos_sin_cache.contiguous()
        rotation = (positions, positions.stride(0), table, table.shape[0])
    main = MainLayout(swa_block_size)
    tensors = (
        q,
        *q.stride(),
        *results,
        results[1] if attn_sink is None else attn_sink.contiguous(),
        swa_cache,
        swa_cache.stride(0),
        swa_cache.shape[0],
        swa_indices,
        *swa_indices.stride(),
        swa_lens,
        swa_lens.stride(0),
        swa_indices.shape[1],
        cache,
        cache.stride(0),
        cache.shape[0],
        indices,
        *indices.stride(),
        lens,
        lens.stride(0),
        indices.shape[1] * (1 if req_indices is None else extra_block_size),
        request,
        request.stride(0),
        indices.shape[0],
        work,
        *strides,
        *rotation,
        room,
        num_tokens,
        num_heads,
        splits,
    )
    constants = {
        "SOFTMAX_SCALE": float(softmax_scale),  # Inductor would pass it as a float64
        "SWA_BLOCK_SIZE": swa_block_size,
        "EXTRA_BLOCK_SIZE": extra_block_size,
        "HAS_EXTRA": extra_cache is not None,
        "PAGED": req_indices is not None,
        "HAS_SINK": attn_sink is not None,
        "HAS_PLAN": plan is not None,
        "TURNED": positions is not None,
        "ROW": main.data_bytes if coded else head_dim,
        "SCALE_BYTES": main.scale_bytes if coded else 0,
    }
    grid = (programs, head_tiles(num_heads))
    if on_hopper:
        kernels = support.kernels()
        assert kernels is not None  # ``hopper.runs`` has asked
        cuts = (lens, 0, 0) if cut is None else (cut.joins, cut.by_lens, cut.at_once)
        constants |= {
            "CUTS": cut is not None,
            "LANES": LEAST_LANES if cut is None else _lanes(num_tokens),
        }
        launch(kernels.split)[grid](*tensors, *cuts, **constants, num_warps=support.WARPS)
        return results
    launch(split_keys_kernel)[grid](
        *tensors,
        **constants,
        UNIT=unit,
        HEAD_DIM=head_dim,
        ROW_BYTES=main.data_bytes if coded else 2 * head_dim,
        CODE_DIM=main.code_dim if coded else head_dim,
        QUANT_BLOCK=main.quant_block,
        HEADS=HEAD_TILE,
        KEYS=KEY_TILE,
        EMULATE=EMULATE,
        num_warps=WARPS,
    )
    return results


def _lanes(num_tokens: int) -> int:
    """A power of two that is no less; of a symbolic number nothing is known."""
    if not isinstance(num_tokens, int):
        return MOST_CUT
    return min(max(triton.next_power_of_2(num_tokens), LEAST_LANES), MOST_CUT)


WIDTH = MainLayout.head_dim
"""Values per row, which the kernel's tiles are made for."""

KEYS = KEY_TILE
"""Keys per block."""

HALF_BLOCK_TIME = 0.6
"""Time of half a block of keys over that of a block. Measured: 0.55, and more splits to join."""

LEAST_UNITS = 4
"""Key blocks of all lists of a token from which on a batch is cut by its lens."""

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
    launch: Launch,
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
    launch: Launch,
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
    launch: Launch,
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
    """Whether the kernel rotates as many values back: those of its last tile, or none."""
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
    saved = units - longest  # a join takes as long as a block
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
    launch: Launch,
    op: str,
    q: Tensor,
    swa: tuple[Tensor, Tensor, Tensor],
    extra: tuple[Tensor, Tensor, Tensor] | None,
    *rest: Tensor | None,
    **settings: Any,
) -> SparseMla:
    """``rest`` and ``settings`` are those of ``_split_and_join``."""
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
    if launch is traced and support.runs(launch, q, coded):
        return SparseMla(*hopper_split_keys(*args, **settings))
    return SparseMla(*_split_and_join(launch, *args, **settings))


def _split_and_join(
    launch: Launch,
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    extra_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_lens: Tensor | None,
    req_indices: Tensor | None,
    attn_sink: Tensor | None,
    plan: Tensor | None,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    *,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """``extra_indices`` is a block table with ``req_indices``."""
    num_tokens, coded = q.shape[0], layout == MainLayout.tag
    widths = [swa_indices.shape[1]]
    if extra_indices is not None:
        widths.append(extra_indices.shape[1] * (1 if req_indices is None else extra_block_size))
    wide = head_tiles(int(q.shape[1]))
    unit, on_hopper = KEYS, support.runs(launch, q, coded)
    if plan is None and num_splits == 0 and not batch_invariant and not on_hopper:
        unit = unit_of_splits(num_tokens * wide, widths)
    units = _units(widths, unit)
    splits = num_splits_of(num_tokens * wide, units, unit, num_splits, batch_invariant)
    room, programs, cut = 0, num_tokens * splits, None
    if plan is not None:
        splits, programs = 1, plan.shape[0]
    elif on_hopper and req_indices is not None and num_splits == 0 and not batch_invariant:
        cut = _cut(q, units, wide)
    joined = plan is not None or not (isinstance(splits, int) and splits == 1)
    if cut is not None:
        room, programs = PROGRAMS, programs + cut.by_lens * (cut.programs - programs)
    elif joined:
        # more than one split, and the batch decides: then no more programs than PROGRAMS
        room = programs if num_splits > 0 or batch_invariant else PROGRAMS
        if plan is not None:
            # a token of several pieces has fewer than twice as many as its share of the programs
            room = 2 * (programs - num_tokens)
    turned = positions is not None and cos_sin_cache is not None
    angles = (positions, cos_sin_cache) if turned else (None, None)
    sizes = (softmax_scale, swa_block_size, extra_block_size, coded, unit, splits, programs, room)
    results = launch_split_keys(
        launch,
        on_hopper,
        q,
        swa_cache,
        swa_indices,
        swa_lens,
        extra_cache,
        extra_indices,
        extra_lens,
        req_indices,
        attn_sink,
        plan,
        *angles,
        *sizes,
        cut=cut,
    )
    if cut is not None:
        combine.join_listed(launch, results, attn_sink, cut.joins, *angles)
    elif joined:
        combine.join(launch, results, attn_sink, plan, *angles, splits)
    return results[0], results[1]


def _cut(q: Tensor, units: int, wide: int) -> Cut | None:
    """How a batch with block tables is cut by its lens, None if it is not: few tokens are cut by
    the tables' widths alone, which takes no time. Of symbolic sizes a symbol says which."""
    if isinstance(units, int) and units < LEAST_UNITS:
        return None
    num_tokens = q.shape[0]
    by_lens = (
        positive(num_tokens * wide + 1 - LEAST_CUT)
        * positive(MOST_CUT + 1 - num_tokens)
        * positive(units + 1 - LEAST_UNITS)
    )
    if isinstance(by_lens, int) and by_lens == 0:
        return None
    at_once = programs_per_tile(int(q.shape[1]), PROGRAMS)
    beyond = positive(num_tokens * wide - AT_ONCE)
    programs = at_once + beyond * (num_tokens + at_once // FURTHER_SHARE - at_once)
    joins = q.new_empty((num_tokens + 1, JOIN_COLUMNS), dtype=torch.int32)
    return Cut(by_lens, programs, at_once, joins)


def _call(*args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(args[0]):
        return _split_and_join(at_once, *args, **settings)


def _fake(q: Tensor, *_: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    rows = (q.shape[0], int(q.shape[1]))
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32)


hopper_split_keys = opaque_op.define("_hopper_split_keys", _SCHEMA, _call, _fake)
"""All launches of a call, which then know its sizes, also in a graph for any number of tokens."""
