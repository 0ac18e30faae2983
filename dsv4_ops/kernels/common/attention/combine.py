"""Combine the partial results of splits."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.tiles import COMBINE_COLUMNS
from dsv4_ops.kernels.arguments import rotation, strided
from dsv4_ops.kernels.common.attention.mainloop import (  # by name: Inductor copies no modules
    denominator,
    log2_sum,
)
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import round_to, round_to_bf16
from dsv4_ops.kernels.common.rope import load_tail_angles, rotate_tail
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

_LOG2_E = tl.constexpr(1.4426950408889634)


Splits = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""``out`` and ``lse``; then values, log-sum-exps in base 2, and scales of the partial results."""


@triton.jit
def _combine(
    tensors, token, first_split, splits, head, num_heads,
    FLAGS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a token and a head, STEP at a time.

    Args:
        tensors: ``out`` and ``lse``; normalised values, log-sum-exps and scales of the splits; a
            sink per head; positions, their stride, the table of angles and its number of rows.
        token, head: The token and head to combine.
        first_split, splits: Index of the token's first partial result, and number of the token's
            splits.
        num_heads: Number of heads.
        FLAGS: HAS_SINK; INVERSE_ROPE, to round the result and rotate its last ROPE values back;
            ROPE; HEAD_DIM; and WIDTH, the number of values that a program combines.
        STEP: Splits that are loaded together.
    """
    HAS_SINK: tl.constexpr = FLAGS[0]
    INVERSE_ROPE: tl.constexpr = FLAGS[1]
    ROPE: tl.constexpr = FLAGS[2]
    HEAD_DIM: tl.constexpr = FLAGS[3]
    WIDTH: tl.constexpr = FLAGS[4]
    out, lse = tensors[0]
    partial, partial_lse, partial_scale = tensors[1]
    attn_sink = tensors[2]
    positions, positions_stride, cos_sin_cache, num_positions = tensors[3]
    sink = float("-inf")
    if HAS_SINK:  # load the sink early, so that this load overlaps other loads
        sink = tl.load(attn_sink + head) * _LOG2_E
    if INVERSE_ROPE:
        position = tl.load(positions + token * positions_stride)
        position = tl.where(position >= 0, position, num_positions)
        angles = (cos_sin_cache, num_positions)
        rotation = load_tail_angles(angles, position, HEAD_DIM, HEAD_DIM, ROPE)
    dim = tl.arange(0, WIDTH)
    if WIDTH < HEAD_DIM:
        dim += tl.program_id(2) * WIDTH
    acc = tl.zeros((WIDTH,), dtype=tl.float32)
    row_max = tl.full((), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((), dtype=tl.float32)
    first = 0
    while first < splits:
        split = first + tl.arange(0, STEP)
        mask = split < splits
        row = (first_split + split) * num_heads + head
        split_lse = tl.load(partial_lse + row, mask=mask, other=float("-inf"))
        rows = partial + row[:, None] * HEAD_DIM + dim[None, :]
        split_values = tl.load(rows, mask=mask[:, None], other=0.0).to(tl.float32)
        scales = tl.load(partial_scale + row, mask=mask, other=0.0)
        new_max = tl.maximum(row_max, tl.max(split_lse, axis=0))
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha, p = tl.exp2(row_max - finite_max), tl.exp2(split_lse - finite_max)
        row_sum = row_sum * alpha + tl.sum(p, axis=0)
        acc = acc * alpha + tl.sum(split_values * (p * scales)[:, None], axis=0)
        row_max = new_max
        first += STEP
    divisor = denominator(row_max, row_sum, sink)
    dst = token * num_heads + head
    values = round_to(acc / divisor, out.dtype.element_ty)
    if INVERSE_ROPE:
        values = rotate_tail(values.to(tl.float32), rotation, HEAD_DIM, True)
        values = round_to_bf16(values)
    tl.store(out + dst * HEAD_DIM + dim, values)
    tl.store(lse + dst, log2_sum(row_max, row_sum) / _LOG2_E)


@triton.jit
def _combine_in_steps(
    tensors, token, first_split, splits, head, num_heads,
    FLAGS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Combine the splits in steps. STEPS holds a small and a large step size. If all splits fit
    into one small step, the small size is used, because masked loads cost time."""
    SMALL: tl.constexpr = STEPS[0]
    STEP: tl.constexpr = STEPS[1]
    if SMALL == STEP:
        _combine(tensors, token, first_split, splits, head, num_heads, FLAGS, STEP)
    elif splits <= SMALL:
        _combine(tensors, token, first_split, splits, head, num_heads, FLAGS, SMALL)
    else:
        _combine(tensors, token, first_split, splits, head, num_heads, FLAGS, STEP)


@triton.jit(do_not_specialize=SIZES)
def combine_splits_kernel(
    out, lse, partial, partial_lse, partial_scale, attn_sink,
    plan, plan_stride, plan_column_stride,
    positions, positions_stride,
    cos_sin_cache, num_positions,
    capacity, num_tokens, num_rows, num_heads, splits,
    FLAGS: tl.constexpr, STEPS: tl.constexpr, HAS_PLAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a token and a head; skip tokens with one split. With HAS_PLAN, a
    program reads up to GROUP of the plan's first ``num_rows`` rows, and combines the tokens whose
    first split is in these rows. Most tokens have one split, so with a program per row, most
    programs would idle."""
    wait_for_previous_kernel()
    head = tl.program_id(1)
    partials = (partial, partial_lse, partial_scale)
    rotation = (positions, positions_stride, cos_sin_cache, num_positions)
    tensors = ((out, lse), partials, attn_sink, rotation)
    if HAS_PLAN:
        lane = tl.arange(0, GROUP)
        rows = tl.program_id(0) + lane * tl.num_programs(0)
        row_split = plan + rows.to(tl.int64) * plan_stride + plan_column_stride
        is_first = tl.load(row_split, mask=rows < num_rows, other=1) == 0
        row_count = tl.load(row_split + plan_column_stride, mask=rows < num_rows, other=1)
        has_splits = is_first & (row_count > 1)
        member = tl.min(tl.where(has_splits, lane, GROUP), 0)
        while member < GROUP:
            row = tl.program_id(0) + member * tl.num_programs(0)
            plan_row = plan + row.to(tl.int64) * plan_stride
            token = tl.load(plan_row).to(tl.int64)
            count = tl.load(plan_row + 2 * plan_column_stride)
            first_split = tl.load(plan_row + 3 * plan_column_stride).to(tl.int64)
            valid = (token >= 0) & (token < num_tokens)
            valid &= (first_split >= 0) & (first_split <= capacity - count)
            if valid:
                _combine_in_steps(tensors, token, first_split, count, head, num_heads, FLAGS, STEPS)
            member = tl.min(tl.where(has_splits & (lane > member), lane, GROUP), 0)
    elif splits > 1:
        token = tl.program_id(0).to(tl.int64)
        first_split = token * splits
        _combine_in_steps(tensors, token, first_split, splits, head, num_heads, FLAGS, STEPS)


@triton.jit(do_not_specialize=SIZES)
def combine_listed_kernel(
    out, lse, partial, partial_lse, partial_scale, attn_sink, combine_list,
    positions, positions_stride,
    cos_sin_cache, num_positions,
    num_heads,
    FLAGS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of the tokens in ``combine_list``. The programs of a head share the list
    round-robin."""
    wait_for_previous_kernel()
    partials = (partial, partial_lse, partial_scale)
    rotation = (positions, positions_stride, cos_sin_cache, num_positions)
    tensors = ((out, lse), partials, attn_sink, rotation)
    head = tl.program_id(1)
    entry = tl.program_id(0)
    stop = tl.load(combine_list)
    while entry < stop:
        list_row = combine_list + (entry + 1) * COLUMNS
        token = tl.load(list_row).to(tl.int64)
        splits = tl.load(list_row + 1)
        first_split = tl.load(list_row + 2).to(tl.int64)
        _combine_in_steps(tensors, token, first_split, splits, head, num_heads, FLAGS, STEPS)
        entry += tl.num_programs(0)


ROPE = MainLayout.head_dim - MainLayout.code_dim
"""Number of values that inverse RoPE rotates, at the end of each row."""

SMALL_STEP, STEP, MAX_STEP = 4, 8, 16
"""Splits that are loaded together. With a combine list or a plan: SMALL_STEP for a token with at
most SMALL_STEP splits, else STEP. Without them: enough for all splits of a token, up to MAX_STEP
times ``parts``, or STEP if the number of splits is symbolic."""

PROGRAMS, ROWS = 2048, 32
"""With a plan: target for the number of programs (of all heads), and maximum rows of the plan per
program. Each head has at most as many programs as there are tokens, unless the rows need more
programs."""

LIST_PROGRAMS = 1024
"""With a combine list: maximum number of programs (of all heads). Programs without work cost
time."""

WARPS = 2
"""Warps of a program: each thread reads 8 values of a split. All batches have the same number of
warps, because the bits of a result must not depend on the batch."""


def combine(
    launch: Launcher,
    results: Splits,
    attn_sink: Tensor | None,
    plan: Tensor | None,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    splits: int,
    parts: int = 1,
) -> None:
    """Combine the splits of each token that has several splits. ``parts`` programs share a head of
    a token: each program combines some of the head's values."""
    out, lse = results[:2]
    num_tokens, num_heads = out.shape[0], int(out.shape[1])
    if plan is None:  # a symbolic ``splits`` may be 1: then one program per head does nothing
        rows = programs = 1 + (num_tokens - 1) * torch.sym_min(splits - 1, 1)
        steps = (_step(splits, MAX_STEP * parts),) * 2
    else:  # a plan begins with a row per split token; each such token also has an extra row
        rows = plan.shape[0] - num_tokens
        max_programs = torch.sym_min(num_tokens, max(PROGRAMS // num_heads, 1))
        programs = torch.sym_max(max_programs, (rows + ROWS - 1) // ROWS)
        steps = (SMALL_STEP, STEP)
    launch(combine_splits_kernel)[(programs, num_heads, parts)](
        *results, lse if attn_sink is None else attn_sink.contiguous(),
        *((lse, 0, 0) if plan is None else strided(plan)),
        *rotation(lse, positions, cos_sin_cache),
        results[2].shape[0], num_tokens, rows, num_heads, splits,
        FLAGS=_flags(out, attn_sink, positions, parts), STEPS=steps, HAS_PLAN=plan is not None,
        GROUP=ROWS, num_warps=WARPS,
    )  # fmt: skip


def combine_listed(
    launch: Launcher,
    results: Splits,
    attn_sink: Tensor | None,
    combine_list: Tensor,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
) -> None:
    """Combine the splits of the tokens that the split kernel listed."""
    out, lse = results[:2]
    num_tokens, num_heads = out.shape[0], int(out.shape[1])
    programs = torch.sym_min(num_tokens, max(LIST_PROGRAMS // num_heads, 1))
    launch(combine_listed_kernel)[(programs, num_heads)](
        *results, lse if attn_sink is None else attn_sink.contiguous(), combine_list,
        *rotation(lse, positions, cos_sin_cache), num_heads,
        FLAGS=_flags(out, attn_sink, positions), STEPS=(SMALL_STEP, STEP), COLUMNS=COMBINE_COLUMNS,
        num_warps=WARPS,
    )  # fmt: skip


def _flags(
    out: Tensor, attn_sink: Tensor | None, positions: Tensor | None, parts: int = 1
) -> tuple[Any, ...]:
    """Return ``FLAGS`` of ``_combine``."""
    head_dim = int(out.shape[2])
    return attn_sink is not None, positions is not None, ROPE, head_dim, head_dim // parts


def _step(splits: int, max_step: int) -> int:
    """Return the number of splits per load; a constant if ``splits`` is symbolic."""
    if not isinstance(splits, int):
        return STEP
    return min(max(triton.next_power_of_2(splits), 2), max_step)
