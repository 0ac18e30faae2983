"""Launch MLA over all rows or over selected rows: split the keys of each token over programs, then
combine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dsv4_ops.core.layout import MlaDsFp8Layout, MlaFp8Layout, PlainLayout
from dsv4_ops.core.registry import AUTO
from dsv4_ops.core.tiles import HEAD_TILE, KEY_TILE, PROGRAMS, head_tiles
from dsv4_ops.core.types import MlaAttention
from dsv4_ops.kernels import opaque_op
from dsv4_ops.kernels.arguments import copied, listed, paged, row_strides, strided
from dsv4_ops.kernels.common.attention import combine
from dsv4_ops.kernels.common.attention.splits import (
    TileSchedule,
    Work,
    combine_splits,
    empty_partials,
    num_splits_of,
    schedule_arguments_of,
    schedule_of,
)
from dsv4_ops.kernels.common.hopper import support
from dsv4_ops.kernels.launcher import EAGER, Launcher
from dsv4_ops.kernels.mla.hopper.decode_kernel import hopper_mla_decode_kernel
from dsv4_ops.kernels.mla.triton.decode_kernel import mla_decode_kernel
from dsv4_ops.reference.quantization import e4m3_values

OP = "mla_decode"

WARPS = 8
"""Warps of a program of the Triton kernel."""

MIN_TILE = 16
"""Minimum rows and columns of a matrix product."""

FORMATS = {PlainLayout.tag: 0, MlaFp8Layout.tag: 1, MlaDsFp8Layout.tag: 2}
"""The number that stands for each layout in the kernels."""

WIDTH, RANK = 576, 512
"""Width of a row, and width of the row's leading part, which is the value vector. Hopper's kernel
supports only these widths."""

PAIR = 2 * KEY_TILE
"""Keys of a pair of blocks; a split of Hopper's kernel is a whole number of pairs."""

INVARIANT_KEYS, INVARIANT_SPLITS = 2048, 16
"""In batch-invariant calls: keys per split, counted over the whole width of the block table, and
maximum number of splits."""

PARTS, MAX_ROWS_IN_PARTS = 4, 1024
"""A row is a token and a head. If a call has up to MAX_ROWS_IN_PARTS rows, PARTS programs combine
each row; each program combines some of the row's values."""


class Call(NamedTuple):
    """The tensors of a call; optional tensors come last. With the setting ``slots``,
    ``block_table`` has the slots of each token, and ``req_indices`` is not read."""

    q: Tensor
    kv_cache: Tensor
    seq_lens: Tensor
    req_indices: Tensor
    block_table: Tensor
    query_start_loc: Tensor | None
    plan: Tensor | None
    q_scale: Tensor | None = None
    kv_scale: Tensor | None = None


def mla_decode(
    launch: Launcher,
    q: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor | None = None,
    plan: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    *,
    impl: str = AUTO,
    **settings: Any,
) -> MlaAttention:
    rows = (kv_cache, seq_lens, req_indices, block_table, query_start_loc)
    return _launch(launch, Call(q, *rows, plan, q_scale, kv_scale), {**settings, "slots": False})


def mla_sparse(
    launch: Launcher,
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    *,
    impl: str = AUTO,
    **settings: Any,
) -> MlaAttention:
    call = Call(q, kv_cache, lens, lens, indices, None, None)
    return _launch(launch, call, {**settings, "slots": True})


def _launch(launch: Launcher, call: Call, settings: Mapping[str, Any]) -> MlaAttention:
    q = call.q
    if q.shape[0] == 0 or int(q.shape[1]) == 0:
        return MlaAttention(*_results(q, int(settings["kv_lora_rank"])))
    if runs_on_hopper(launch, call, settings):
        hopper_settings = {name: settings[name] for name in _HOPPER_SETTINGS}
        if launch.opaque_gluon:
            return MlaAttention(*hopper_mla_decode(*call, **hopper_settings))
        return MlaAttention(*_attend_on_hopper(launch, *call, **hopper_settings))
    return MlaAttention(*_attend(launch, call, settings))


_HOPPER_SETTINGS = (
    *("softmax_scale", "block_size", "layout", "num_splits", "batch_invariant"),
    "slots",
)


def runs_on_hopper(launch: Launcher, call: Call, settings: Mapping[str, Any]) -> bool:
    """Return whether Hopper's kernel supports the call: aligned rows of 576 values, bf16 or FP8."""
    q, cache = call.q, call.kv_cache
    is_plain = settings["layout"] == PlainLayout.tag
    dtype_fits = q.dtype == torch.bfloat16 or not is_plain
    sizes_fit = int(q.shape[2]) == WIDTH and int(settings["kv_lora_rank"]) == RANK
    # a trace has no addresses, so the op checks the address when it runs
    aligned = launch.opaque_gluon or launch.is_aligned(cache)
    aligned = aligned and cache.stride(0) % MIN_TILE == 0
    return dtype_fits and sizes_fit and aligned and support.runs(launch, q, True)


def _results(q: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    rows = (q.shape[0], int(q.shape[1]))
    return q.new_empty((*rows, rank), dtype=dtype), q.new_empty(rows, dtype=torch.float32)


def group_of(call: Call, batch_invariant: bool) -> int:
    """Return the size of a group: the maximum number of tokens of a request that share a program.

    The heads of a group's tokens should fill the rows of a program. But if the sizes are known, a
    group has at most the mean number of tokens per request. Every token has a program; the programs
    of all tokens but the group's first do nothing."""
    num_tokens, num_heads = call.q.shape[0], int(call.q.shape[1])
    if call.query_start_loc is None or call.plan is not None or batch_invariant:
        return 1
    max_group = max(HEAD_TILE // num_heads, 1)
    num_reqs = call.block_table.shape[0]
    if not (isinstance(num_tokens, int) and isinstance(num_reqs, int)):
        return max_group
    return max(min(max_group, num_tokens // max(num_reqs, 1)), 1)


def split(call: Call, on_hopper: bool, settings: Mapping[str, Any], group: int) -> Work:
    """Choose how to split the keys of tokens: by the plan, by the lengths, or into equally many
    splits for each token."""
    num_tokens, num_heads = call.q.shape[0], int(call.q.shape[1])
    unit = PAIR if on_hopper else KEY_TILE
    if call.plan is not None:
        programs = call.plan.shape[0]
        return Work(on_hopper, unit, 1, programs, 2 * (programs - num_tokens), None)
    num_splits, batch_invariant = settings["num_splits"], settings["batch_invariant"]
    tiles = head_tiles(group * num_heads)
    keys = call.block_table.shape[1] * (1 if settings["slots"] else settings["block_size"])
    units = torch.sym_max((keys + unit - 1) // unit, 1)
    if batch_invariant and num_splits == 0:
        num_splits = torch.sym_min((keys + INVARIANT_KEYS - 1) // INVARIANT_KEYS, INVARIANT_SPLITS)
        num_splits = torch.sym_max(num_splits, 1)
    programs_per_split = (num_tokens + group - 1) // group * tiles
    if not (isinstance(num_splits, int) and num_splits == 0):
        splits = num_splits
    else:
        splits = num_splits_of(programs_per_split, units, unit, 0, False)
    programs = num_tokens * splits
    schedule: TileSchedule | None = None
    if on_hopper and _batch_decides(settings) and group == 1:
        schedule = schedule_of(call.q, units, tiles)
    if schedule is not None:
        programs += schedule.by_lengths * (schedule.programs - programs)
        return Work(on_hopper, unit, splits, programs, PROGRAMS, schedule)
    capacity = num_tokens * splits
    if isinstance(splits, int) and splits == 1:
        capacity = 0
    return Work(on_hopper, unit, splits, programs, capacity, None)


def _batch_decides(settings: Mapping[str, Any]) -> bool:
    """Return whether the splits may depend on the batch."""
    return settings["num_splits"] == 0 and not settings["batch_invariant"]


def _finish(launch: Launcher, results: combine.Splits, call: Call, work: Work, free: bool) -> None:
    """Combine the splits. If the splits may depend on the batch (``free``), several programs
    combine each row of a small batch."""
    num_tokens, num_heads, rank = results[0].shape
    few = isinstance(num_tokens, int) and num_tokens * num_heads <= MAX_ROWS_IN_PARTS
    parts = PARTS if free and few and rank == RANK else 1
    combine_splits(launch, results, work, call.plan, None, None, None, parts)


def _row_arguments(call: Call) -> tuple[Any, ...]:
    """Return two tuples of arguments that both kernels take: one for rows, tables and scales, and
    one for the plan."""
    lens, plan = call.seq_lens, call.plan
    starts = lens if call.query_start_loc is None else call.query_start_loc
    return (
        *paged(call.kv_cache),
        *strided(lens, call.req_indices),
        *listed(call.block_table),
        call.block_table.shape[0],
        *strided(starts),
        lens if call.q_scale is None else call.q_scale,
        lens if call.kv_scale is None else call.kv_scale,
    ), (lens, 0, 0) if plan is None else strided(plan)


def _constants(call: Call, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants of both kernels."""
    return {
        "SOFTMAX_SCALE": float(settings["softmax_scale"]),  # Inductor passes arguments as float64
        "BLOCK_SIZE": settings["block_size"],
        "FORMAT": FORMATS[settings["layout"]],
        "ROW": int(call.kv_cache.shape[2]),
        "SLOTS": settings["slots"],
        "HAS_PLAN": call.plan is not None,
        "HAS_Q_SCALE": call.q_scale is not None,
        "HAS_KV_SCALE": call.kv_scale is not None,
    }


def _attend(launch: Launcher, call: Call, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Attend with the Triton kernel."""
    q, rank = call.q, int(settings["kv_lora_rank"])
    if q.dtype == torch.float8_e4m3fn:
        converts = launch.target(q.device).converts_codes
        # bf16 represents e4m3 values exactly
        q = (q if converts else e4m3_values(q.view(torch.uint8))).to(torch.bfloat16)
    num_tokens, num_heads = q.shape[0], int(q.shape[1])
    is_float32 = q.dtype == torch.float32
    group = group_of(call, settings["batch_invariant"])
    has_wgmma = launch.target(q.device).is_hopper and not is_float32
    keys = KEY_TILE if has_wgmma else KEY_TILE // 2
    # without wgmma, queries stay in registers, and 32 rows of queries would spill
    rows = triton.next_power_of_2(min(group * num_heads, HEAD_TILE)) if has_wgmma else MIN_TILE
    rows = max(rows, MIN_TILE)
    work = split(call, False, settings, group)
    out, lse = _results(q, rank)
    results = (out, lse, *empty_partials(q, work.capacity, rank))
    rope = int(q.shape[2]) - rank
    row_arguments, plan_arguments = _row_arguments(call)
    tiles = (group * num_heads + rows - 1) // rows
    launch(mla_decode_kernel)[(work.programs * tiles,)](
        *strided(q), *results, *row_arguments, *plan_arguments,
        work.capacity, num_tokens, num_heads, work.splits,
        **_constants(call, settings), LORA=rank, ROPE=rope,
        ROPE_TILE=max(triton.next_power_of_2(rope), MIN_TILE),
        GROUP=group, LANES=triton.next_power_of_2(group), TILES=tiles,
        ROWS=rows, KEYS=MIN_TILE if is_float32 else keys,
        CONVERTS=launch.converts_codes(q.device), num_warps=WARPS,
    )  # fmt: skip
    _finish(launch, results, call, work, _batch_decides(settings))
    return out, lse


def _attend_on_hopper(
    launch: Launcher, *tensors: Tensor | None, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Attend with Hopper's kernel; ``tensors`` are the fields of ``Call``."""
    call = Call(*tensors)  # type: ignore[arg-type]  # the required tensors are not None
    q = call.q.to(torch.bfloat16)  # exact for e4m3 values
    call = call._replace(q=copied(launch, q))
    num_tokens, num_heads = call.q.shape[0], int(call.q.shape[1])
    group = group_of(call, settings["batch_invariant"])
    work = split(call, True, settings, group)
    out, lse = _results(call.q, RANK)
    results = (out, lse, *empty_partials(call.q, work.capacity, RANK))
    schedule_arguments, schedule_constants = schedule_arguments_of(work, lse, num_tokens)
    row_arguments, plan_arguments = _row_arguments(call)
    tiles = head_tiles(group * num_heads)
    launch(hopper_mla_decode_kernel)[(work.programs * tiles,)](
        call.q, *row_strides(call.q), *results, *row_arguments, *plan_arguments,
        work.capacity, num_tokens, num_heads, work.splits, *schedule_arguments,
        **_constants(call, settings), **schedule_constants,
        GROUP=group, TILES=tiles, num_warps=support.WARPS,
    )  # fmt: skip
    _finish(launch, results, call, work, _batch_decides(settings))
    return out, lse


def _call(*tensors: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    call = Call(*tensors)
    with torch.cuda.device_of(call.q):
        if EAGER.is_aligned(call.kv_cache):
            return _attend_on_hopper(EAGER, *tensors, **settings)
        return _attend(EAGER, call, {**settings, "kv_lora_rank": RANK})


def _fake(q: Tensor, *_: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    return _results(q, RANK)


hopper_mla_decode = opaque_op.define(
    "_hopper_mla_decode",
    f"({opaque_op.fields(Call)}, *, float softmax_scale, int block_size, str layout, "
    "int num_splits, bool batch_invariant, bool slots) -> (Tensor, Tensor)",
    _call,
    _fake,
)
"""The op that makes all launches of a call. It gets the real sizes, even in a graph that was
compiled for any number of tokens."""
