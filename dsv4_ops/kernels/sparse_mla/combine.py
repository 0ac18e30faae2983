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
from dsv4_ops.kernels.common.fp8 import round_to, round_to_bf16
from dsv4_ops.kernels.common.rope import load_tail_angles, rotate_tail
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.kernels.sparse_mla.triton.mainloop import (  # by name: Inductor copies kernels
    denominator,
    log2_sum,
)

_LOG2_E = tl.constexpr(1.4426950408889634)


Splits = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""``out``, ``lse``, and of every partial result its values, the logarithm of its sum, and what its
values are multiples of."""


@triton.jit
def _combine(
    tensors, token, first_split, splits, head, num_heads,
    FLAGS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a token and a head, STEP at a time.

    Args:
        tensors: ``out`` and ``lse``; normalised values, logarithms of their sums, and what the
            values are multiples of; a sink per head; positions, their stride, the table of angles
            and its rows.
        token, first_split, splits, head, num_heads: Which ones.
        FLAGS: HAS_SINK, INVERSE_ROPE (the result is rounded, and its last ROPE values are rotated
            back), ROPE, HEAD_DIM, and WIDTH: how many of the values a program combines.
        STEP: Splits that are loaded together.
    """
    INVERSE_ROPE: tl.constexpr = FLAGS[1]
    HEAD_DIM: tl.constexpr = FLAGS[3]
    WIDTH: tl.constexpr = FLAGS[4]
    out, lse = tensors[0]
    partial, partial_lse, partial_scale = tensors[1]
    attn_sink = tensors[2]
    positions, positions_stride, cos_sin_cache, num_positions = tensors[3]
    sink = float("-inf")
    if FLAGS[0]:  # ahead of what takes as long to arrive
        sink = tl.load(attn_sink + head) * _LOG2_E
    if INVERSE_ROPE:
        position = tl.load(positions + token * positions_stride)
        position = tl.where(position >= 0, position, num_positions)
        angles = (cos_sin_cache, num_positions)
        rotated = load_tail_angles(angles, position, HEAD_DIM, HEAD_DIM, FLAGS[2])
    dim = tl.arange(0, WIDTH)
    if WIDTH < HEAD_DIM:
        dim += tl.program_id(2) * WIDTH
    summed = tl.zeros((WIDTH,), dtype=tl.float32)
    row_max = tl.full((), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((), dtype=tl.float32)
    first = 0
    while first < splits:
        part = first + tl.arange(0, STEP)
        there = part < splits
        row = (first_split + part) * num_heads + head
        logs = tl.load(partial_lse + row, mask=there, other=float("-inf"))
        parts = partial + row[:, None] * HEAD_DIM + dim[None, :]
        loaded = tl.load(parts, mask=there[:, None], other=0.0).to(tl.float32)
        scales = tl.load(partial_scale + row, mask=there, other=0.0)
        highest = tl.maximum(row_max, tl.max(logs, axis=0))
        origin = tl.where(highest == float("-inf"), 0.0, highest)
        factor, weights = tl.exp2(row_max - origin), tl.exp2(logs - origin)
        row_sum = row_sum * factor + tl.sum(weights, axis=0)
        summed = summed * factor + tl.sum(loaded * (weights * scales)[:, None], axis=0)
        row_max = highest
        first += STEP
    below = denominator(row_max, row_sum, sink)
    dst = token * num_heads + head
    values = round_to(summed / below, out.dtype.element_ty)
    if INVERSE_ROPE:
        values = rotate_tail(values.to(tl.float32), rotated, HEAD_DIM, True)
        values = round_to_bf16(values)
    tl.store(out + dst * HEAD_DIM + dim, values)
    tl.store(lse + dst, log2_sum(row_max, row_sum) / _LOG2_E)


@triton.jit
def _combine_few(
    tensors, token, first_split, splits, head, num_heads,
    FLAGS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The same in the smaller of STEPS if there are no more splits: masked loads are not free."""
    FEW: tl.constexpr = STEPS[0]
    STEP: tl.constexpr = STEPS[1]
    if FEW == STEP:
        _combine(tensors, token, first_split, splits, head, num_heads, FLAGS, STEP)
    elif splits <= FEW:
        _combine(tensors, token, first_split, splits, head, num_heads, FLAGS, FEW)
    else:
        _combine(tensors, token, first_split, splits, head, num_heads, FLAGS, STEP)


@triton.jit
def combine_splits_kernel(
    out, lse, partial, partial_lse, partial_scale, attn_sink,
    plan, plan_stride, plan_column_stride,
    positions, positions_stride,
    cos_sin_cache, num_positions,
    capacity, num_tokens, num_rows, num_heads, splits,
    FLAGS: tl.constexpr, STEPS: tl.constexpr, HAS_PLAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The splits of a token and a head; nothing to do for tokens of one split. With HAS_PLAN those
    of the tokens whose first splits are in up to GROUP of the first ``num_rows`` rows: most tokens
    have one, and programs that find nothing to combine take time."""
    head = tl.program_id(1)
    parts = (partial, partial_lse, partial_scale)
    rotation = (positions, positions_stride, cos_sin_cache, num_positions)
    tensors = ((out, lse), parts, attn_sink, rotation)
    if HAS_PLAN:
        lane = tl.arange(0, GROUP)
        every = tl.program_id(0) + lane * tl.num_programs(0)
        offset = plan + every.to(tl.int64) * plan_stride + 2 * plan_column_stride
        several = tl.load(offset, mask=every < num_rows, other=1) > 1
        each = tl.min(tl.where(several, lane, GROUP), 0)
        while each < GROUP:
            number = tl.program_id(0) + each * tl.num_programs(0)
            tile = plan + number.to(tl.int64) * plan_stride
            token = tl.load(tile).to(tl.int64)
            split = tl.load(tile + plan_column_stride)
            count = tl.load(tile + 2 * plan_column_stride)
            first_split = tl.load(tile + 3 * plan_column_stride).to(tl.int64)
            real = (token >= 0) & (token < num_tokens) & (split == 0)
            real &= (first_split >= 0) & (first_split <= capacity - count)
            if real:
                _combine_few(tensors, token, first_split, count, head, num_heads, FLAGS, STEPS)
            each = tl.min(tl.where(several & (lane > each), lane, GROUP), 0)
    elif splits > 1:
        token = tl.program_id(0).to(tl.int64)
        first_split = token * splits
        _combine_few(tensors, token, first_split, splits, head, num_heads, FLAGS, STEPS)


@triton.jit
def combine_listed_kernel(
    out, lse, partial, partial_lse, partial_scale, attn_sink, combine_list,
    positions, positions_stride,
    cos_sin_cache, num_positions,
    num_heads,
    FLAGS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The splits of the tokens in a list, which programs of a head share."""
    parts = (partial, partial_lse, partial_scale)
    rotation = (positions, positions_stride, cos_sin_cache, num_positions)
    tensors = ((out, lse), parts, attn_sink, rotation)
    head = tl.program_id(1)
    number = tl.program_id(0)
    stop = tl.load(combine_list)
    while number < stop:
        row = combine_list + (number + 1) * COLUMNS
        token = tl.load(row).to(tl.int64)
        splits = tl.load(row + 1)
        first_split = tl.load(row + 2).to(tl.int64)
        _combine_few(tensors, token, first_split, splits, head, num_heads, FLAGS, STEPS)
        number += tl.num_programs(0)


ROPE = MainLayout.head_dim - MainLayout.code_dim
"""Values per row that inverse RoPE rotates: the last of the tiles."""

FEW_SPLITS, STEP, MOST_SPLITS = 4, 8, 16
"""Splits that are loaded together: of lists and plans the first where there are no more, the last
where a call knows that there are more than the second."""

PROGRAMS, ROWS = 2048, 32
"""About as many programs combine by a plan, none of which looks at more of its rows; no more than
there are tokens if those are enough."""

LISTED = 1024
"""Programs that combine what a list says, if there are as many heads of tokens: more of them take
longer to find nothing to do."""

WARPS = 2
"""Warps of a program, each thread of which then reads 8 values of a split; whatever the batch, so
that it decides no bit."""


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
    """Write the results of the tokens that have several splits, those of a head in so many
    parts."""
    out, lse = results[:2]
    num_tokens, num_heads = out.shape[0], int(out.shape[1])
    if plan is None:  # of a symbolic number: an empty grid but for one if it turns out to be 1
        rows = programs = 1 + (num_tokens - 1) * torch.sym_min(splits - 1, 1)
        steps = (_step(splits, MOST_SPLITS * parts),) * 2
    else:  # a plan may be for more tokens: no fewer rows than tokens of several splits
        rows = plan.shape[0] - num_tokens
        most = torch.sym_min(num_tokens, max(PROGRAMS // num_heads, 1))
        programs = torch.sym_max(most, (rows + ROWS - 1) // ROWS)
        steps = (FEW_SPLITS, STEP)
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
    """The same for the tokens that the kernel of the splits has listed."""
    out, lse = results[:2]
    num_tokens, num_heads = out.shape[0], int(out.shape[1])
    programs = torch.sym_min(num_tokens, max(LISTED // num_heads, 1))
    launch(combine_listed_kernel)[(programs, num_heads)](
        *results, lse if attn_sink is None else attn_sink.contiguous(), combine_list,
        *rotation(lse, positions, cos_sin_cache), num_heads,
        FLAGS=_flags(out, attn_sink, positions), STEPS=(FEW_SPLITS, STEP), COLUMNS=COMBINE_COLUMNS,
        num_warps=WARPS,
    )  # fmt: skip


def _flags(
    out: Tensor, attn_sink: Tensor | None, positions: Tensor | None, parts: int = 1
) -> tuple[Any, ...]:
    """``FLAGS`` of ``_combine``."""
    head_dim = int(out.shape[2])
    return attn_sink is not None, positions is not None, ROPE, head_dim, head_dim // parts


def _step(splits: int, most: int) -> int:
    """Splits that are loaded together: a symbol must not decide the kernel."""
    if not isinstance(splits, int):
        return STEP
    return min(max(triton.next_power_of_2(splits), 2), most)
