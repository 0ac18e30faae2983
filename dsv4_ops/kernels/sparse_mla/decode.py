"""Launch sparse MLA decode: split the keys of each token over programs, then combine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import AUTO
from dsv4_ops.core.target import Target
from dsv4_ops.core.tiles import HEAD_TILE, KEY_TILE, PROGRAMS, head_tiles
from dsv4_ops.core.types import SparseMla, SparseMlaGathered
from dsv4_ops.kernels import opaque_op
from dsv4_ops.kernels.arguments import paged, rotation, strided
from dsv4_ops.kernels.common.attention import combine
from dsv4_ops.kernels.common.attention.calls import (
    DecodeCall,
    GatheredCall,
    PrefillCall,
    empty_results,
)
from dsv4_ops.kernels.common.attention.splits import (
    Work,
    combine_splits,
    empty_partials,
    num_splits_of,
    schedule_arguments_of,
    schedule_of,
)
from dsv4_ops.kernels.common.hopper import support
from dsv4_ops.kernels.launcher import EAGER, Launcher
from dsv4_ops.kernels.sparse_mla.gathered import hopper_gathered_keys, launch_gathered_keys
from dsv4_ops.kernels.sparse_mla.hopper.decode_kernel import hopper_split_keys_kernel
from dsv4_ops.kernels.sparse_mla.triton.decode_kernel import split_keys_kernel

WARPS = 8
"""Warps of a program of the Triton kernel."""


def launch_split_keys(launch: Launcher, call: DecodeCall, work: Work) -> combine.Splits:
    """Attend to the splits of each token. Write the results of tokens with one split, and the
    partial results of other tokens."""
    q, plan = call.q, call.plan
    num_tokens, num_heads, head_dim = q.shape[0], int(q.shape[1]), int(q.shape[2])
    if work.on_hopper and q.stride(2) != 1:
        q = q.contiguous()
    out, lse = empty_results(q)
    results = (out, lse, *empty_partials(q, work.capacity, head_dim))
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
        "SOFTMAX_SCALE": float(call.softmax_scale),  # Inductor passes arguments as float64
        "SWA_BLOCK_SIZE": call.swa_block_size,
        "EXTRA_BLOCK_SIZE": call.extra_block_size,
        "HAS_EXTRA": call.extra is not None,
        "PAGED": call.req_indices is not None,
        "HAS_SINK": call.attn_sink is not None,
        "HAS_PLAN": plan is not None,
        "INVERSE_ROPE": call.positions is not None,
    }
    target, row = launch.target(q.device), row_format(launch, call)
    if work.on_hopper:
        grid = (work.programs, head_tiles(num_heads))
        schedule_arguments, schedule_constants = schedule_arguments_of(work, lens, num_tokens)
        launch(hopper_split_keys_kernel)[grid](
            *tensors, *schedule_arguments, **constants, **schedule_constants,
            ROW=row[0], SCALE_BYTES=row[4], num_warps=support.WARPS,
        )  # fmt: skip
        return results
    launch(split_keys_kernel)[work.programs, head_tiles(num_heads, target.head_tile)](
        *tensors, **constants, HEAD_DIM=head_dim, FORMAT=row,
        HEADS=target.head_tile, KEYS=KEY_TILE, UNIT=work.unit, MMA_SYNC=target.mma_sync,
        num_warps=WARPS,
    )  # fmt: skip
    return results


def row_format(launch: Launcher, call: DecodeCall | PrefillCall) -> tuple[int, ...]:
    """Return ``FORMAT`` of ``load_keys``."""
    main, width = MainLayout(call.swa_block_size), int(call.q.shape[2])
    if not call.is_fp8:
        return width, 2 * width, width, main.quant_block, 0, False
    sizes = (main.data_bytes, main.data_bytes, main.code_dim, main.quant_block, main.scale_bytes)
    return (*sizes, launch.converts_codes(call.q.device))


WIDTH = MainLayout.head_dim
"""Number of values per row that the tiles of the kernels assume."""

HALF_BLOCK_TIME = 0.6
"""Time of half a block relative to a block: 0.55 as measured, plus the time to combine more
splits."""


def sparse_mla_gathered(
    launch: Launcher, *args: Any, impl: str = AUTO, **named: Any
) -> SparseMlaGathered:
    call = GatheredCall(*args, **named)
    if launch.opaque_gluon:
        return SparseMlaGathered(*hopper_gathered_keys(*call))
    return SparseMlaGathered(*launch_gathered_keys(launch, *call))


def check_pages(op: str, call: DecodeCall | PrefillCall) -> None:
    """Raise if the FP8 blocks of a cache do not start at multiples of 16 bytes."""
    names, sizes = ("swa_cache", "extra_cache"), (call.swa_block_size, call.extra_block_size)
    for name, cache, size in zip(names, call.caches, sizes, strict=True):
        Checks(op).page_start(name, cache, MainLayout(size))


def unit_of_splits(programs: int, widths: Sequence[int]) -> int:
    """Return the number of keys in a unit, for splits of the Triton kernel: half a block if that
    shortens the longest split, else a block. Only the Triton kernel has half blocks: in the Hopper
    kernel, half a block would take as long as a block.

    A comparison of symbolic sizes would add guards to a graph. For symbolic sizes, return half a
    block, because half blocks gain more for small batches than they cost large batches."""
    if not all(isinstance(size, int) for size in (programs, *widths)):
        return KEY_TILE // 2
    whole, halves = (_longest_split(programs, widths, unit) for unit in (KEY_TILE, KEY_TILE // 2))
    return KEY_TILE // 2 if halves // 2 + halves % 2 * HALF_BLOCK_TIME < whole else KEY_TILE


def _longest_split(programs: int, widths: Sequence[int], unit: int) -> int:
    units = _units(widths, unit)
    splits = num_splits_of(programs, units, unit, 0, False)
    return (units + splits - 1) // splits


def _units(widths: Sequence[int], unit: int) -> int:
    """Return the number of units of a token's lists. A unit does not span two lists."""
    return sum((width + unit - 1) // unit for width in widths)


def _decode(
    op: str,
    make: Callable[..., DecodeCall],
    launch: Launcher,
    *args: Any,
    impl: str = AUTO,
    flash_mla_plan: Tensor | None = None,
    **named: Any,
) -> SparseMla:
    call = make(*args, **named)
    if call.q.shape[0] == 0 or int(call.q.shape[1]) == 0:
        return SparseMla(*empty_results(call.q))
    if call.is_fp8:
        check_pages(op, call)
    if launch.opaque_gluon and support.runs(launch, call.q, call.is_fp8):
        return SparseMla(*hopper_split_keys(*call))
    return SparseMla(*split_and_combine(launch, call))


sparse_mla_decode = partial(_decode, "sparse_mla_decode", DecodeCall)
sparse_mla_decode_paged = partial(_decode, "sparse_mla_decode_paged", DecodeCall.of_pages)


def split_and_combine(launch: Launcher, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Launch all kernels of a call."""
    if call.positions is None or call.cos_sin_cache is None:
        call = call._replace(positions=None, cos_sin_cache=None)
    on_hopper = support.runs(launch, call.q, call.is_fp8)
    work = _split(call, on_hopper, launch.target(call.q.device))
    results = launch_split_keys(launch, call, work)
    angles = (call.positions, call.cos_sin_cache)
    combine_splits(launch, results, work, call.plan, call.attn_sink, *angles)
    return results[0], results[1]


def _split(call: DecodeCall, on_hopper: bool, target: Target) -> Work:
    """Choose how to split the keys of tokens: by the plan, by the lengths, or into equally many
    splits for each token."""
    num_tokens, tiles = call.q.shape[0], head_tiles(int(call.q.shape[1]), target.head_tile)
    if call.plan is not None:
        programs = call.plan.shape[0]
        # a token with n > 1 splits has n - 1 extra programs, and n is at most 2 (n - 1)
        return Work(on_hopper, KEY_TILE, 1, programs, 2 * (programs - num_tokens), None)
    num_splits, batch_invariant = call.num_splits, call.batch_invariant
    batch_decides = num_splits == 0 and not batch_invariant
    widths = [lists.width() for lists in (call.window, call.extra) if lists is not None]
    unit = KEY_TILE
    # half blocks were measured only with this head tile
    if batch_decides and not on_hopper and target.head_tile == HEAD_TILE:
        unit = unit_of_splits(num_tokens * tiles, widths)
    units = _units(widths, unit)
    splits = num_splits_of(num_tokens * tiles, units, unit, num_splits, batch_invariant)
    programs = num_tokens * splits
    schedule = None
    if on_hopper and batch_decides and call.req_indices is not None:
        schedule = schedule_of(call.q, units, tiles)
    if schedule is not None:
        programs += schedule.by_lengths * (schedule.programs - programs)
        return Work(on_hopper, unit, splits, programs, PROGRAMS, schedule)
    # if the batch decides, a call with several splits per token has at most PROGRAMS programs
    capacity = PROGRAMS if batch_decides else programs
    if isinstance(splits, int) and splits == 1:
        capacity = 0
    return Work(on_hopper, unit, splits, programs, capacity, None)


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
"""The op that makes all launches of a call. It gets the real sizes, even in a graph that was
compiled for any number of tokens."""
