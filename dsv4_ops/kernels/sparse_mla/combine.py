"""Combine the partial results of splits."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.tiles import JOIN_COLUMNS
from dsv4_ops.kernels.common.fp8 import round_to_bf16
from dsv4_ops.kernels.common.rope import load_tail_angles, rotate_tail
from dsv4_ops.kernels.launcher import EMULATE, Launch
from dsv4_ops.kernels.sparse_mla.triton.mainloop import (  # by name: Inductor copies kernels
    denominator,
    log2_sum,
)

_LOG2_E = tl.constexpr(1.4426950408889634)


Splits = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""``out``, ``lse``, and of every partial result its values, the logarithm of its sum, and what its
values are multiples of."""


@triton.jit
def _join(
    out,
    lse,
    partial,
    partial_lse,
    partial_peak,
    attn_sink,
    positions,
    positions_stride,
    cos_sin_cache,
    num_positions,
    token,
    place,
    pieces,
    head,
    num_heads,
    HAS_SINK: tl.constexpr,
    TURNED: tl.constexpr,
    ROPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Partial results of a token and a head from ``place`` on, weighed by their sums,
    SPLITS at a time. With TURNED the result is rounded and its last ROPE values are rotated
    back."""
    sink = float("-inf")
    if HAS_SINK:  # ahead of what takes as long to arrive
        sink = tl.load(attn_sink + head) * _LOG2_E
    if TURNED:
        position = tl.load(positions + token * positions_stride)
        position = tl.where(position >= 0, position, num_positions)
        known, cos, sin = load_tail_angles(
            cos_sin_cache, position, num_positions, HEAD_DIM, HEAD_DIM, ROPE
        )
    dim = tl.arange(0, HEAD_DIM)
    summed = tl.zeros((HEAD_DIM,), dtype=tl.float32)
    largest = tl.full((), float("-inf"), dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    first = 0
    while first < pieces:
        part = first + tl.arange(0, SPLITS)
        there = part < pieces
        row = (place + part) * num_heads + head
        logs = tl.load(partial_lse + row, mask=there, other=float("-inf"))
        parts = partial + row[:, None] * HEAD_DIM + dim[None, :]
        loaded = tl.load(parts, mask=there[:, None], other=0.0).to(tl.float32)
        peaks = tl.load(partial_peak + row, mask=there, other=0.0)
        highest = tl.maximum(largest, tl.max(logs, axis=0))
        origin = tl.where(highest == float("-inf"), 0.0, highest)
        factor, weights = tl.exp2(largest - origin), tl.exp2(logs - origin)
        total = total * factor + tl.sum(weights, axis=0)
        summed = summed * factor + tl.sum(loaded * (weights * peaks)[:, None], axis=0)
        largest = highest
        first += SPLITS
    below = denominator(largest, total, sink)
    dst = token * num_heads + head
    values = round_to_bf16(summed / below, EMULATE)
    if TURNED:
        turned = rotate_tail(values.to(tl.float32), known, cos, sin, HEAD_DIM, EMULATE, True)
        values = round_to_bf16(turned, EMULATE)
    tl.store(out + dst * HEAD_DIM + dim, values)
    tl.store(lse + dst, log2_sum(largest, total) / _LOG2_E)


@triton.jit
def _join_pieces(
    out,
    lse,
    partial,
    partial_lse,
    partial_peak,
    attn_sink,
    positions,
    positions_stride,
    cos_sin_cache,
    num_positions,
    token,
    place,
    pieces,
    head,
    num_heads,
    HAS_SINK: tl.constexpr,
    TURNED: tl.constexpr,
    ROPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FEW: tl.constexpr,
    SPLITS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """The same in steps of FEW if there are no more pieces: loads of none take time too."""
    if FEW == SPLITS:
        _join(
            out, lse, partial, partial_lse, partial_peak, attn_sink,
            positions, positions_stride, cos_sin_cache, num_positions,
            token, place, pieces, head, num_heads,
            HAS_SINK, TURNED, ROPE, HEAD_DIM, SPLITS, EMULATE,
        )  # fmt: skip
    elif pieces <= FEW:
        _join(
            out, lse, partial, partial_lse, partial_peak, attn_sink,
            positions, positions_stride, cos_sin_cache, num_positions,
            token, place, pieces, head, num_heads,
            HAS_SINK, TURNED, ROPE, HEAD_DIM, FEW, EMULATE,
        )  # fmt: skip
    else:
        _join(
            out, lse, partial, partial_lse, partial_peak, attn_sink,
            positions, positions_stride, cos_sin_cache, num_positions,
            token, place, pieces, head, num_heads,
            HAS_SINK, TURNED, ROPE, HEAD_DIM, SPLITS, EMULATE,
        )  # fmt: skip


@triton.jit
def join_splits_kernel(
    out,
    lse,
    partial,
    partial_lse,
    partial_peak,
    attn_sink,
    plan,
    plan_stride,
    plan_column_stride,
    positions,
    positions_stride,
    cos_sin_cache,
    num_positions,
    room,
    num_tokens,
    joins,
    num_heads,
    splits,
    HAS_SINK: tl.constexpr,
    HAS_PLAN: tl.constexpr,
    TURNED: tl.constexpr,
    ROPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FEW: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """The splits of a token and a head; nothing to do for tokens of one split. With HAS_PLAN those
    of the tokens whose first pieces are in up to GROUP of the first ``joins`` rows: most are one
    piece, and programs that find nothing to join take time."""
    head = tl.program_id(1)
    if HAS_PLAN:
        lane = tl.arange(0, GROUP)
        every = tl.program_id(0) + lane * tl.num_programs(0)
        offset = plan + every.to(tl.int64) * plan_stride + 2 * plan_column_stride
        several = tl.load(offset, mask=every < joins, other=1) > 1
        each = tl.min(tl.where(several, lane, GROUP), 0)
        while each < GROUP:
            number = tl.program_id(0) + each * tl.num_programs(0)
            piece = plan + number.to(tl.int64) * plan_stride
            token = tl.load(piece).to(tl.int64)
            split = tl.load(piece + plan_column_stride)
            pieces = tl.load(piece + 2 * plan_column_stride)
            place = tl.load(piece + 3 * plan_column_stride).to(tl.int64)
            real = (token >= 0) & (token < num_tokens) & (split == 0)
            real &= (place >= 0) & (place <= room - pieces)
            if real:
                _join_pieces(
                    out, lse, partial, partial_lse, partial_peak, attn_sink,
                    positions, positions_stride, cos_sin_cache, num_positions,
                    token, place, pieces, head, num_heads,
                    HAS_SINK, TURNED, ROPE, HEAD_DIM, FEW, SPLITS, EMULATE,
                )  # fmt: skip
            each = tl.min(tl.where(several & (lane > each), lane, GROUP), 0)
    elif splits > 1:
        token = tl.program_id(0).to(tl.int64)
        _join_pieces(
            out, lse, partial, partial_lse, partial_peak, attn_sink,
            positions, positions_stride, cos_sin_cache, num_positions,
            token, token * splits, splits, head, num_heads,
            HAS_SINK, TURNED, ROPE, HEAD_DIM, FEW, SPLITS, EMULATE,
        )  # fmt: skip


@triton.jit
def join_listed_kernel(
    out,
    lse,
    partial,
    partial_lse,
    partial_peak,
    attn_sink,
    joins,
    positions,
    positions_stride,
    cos_sin_cache,
    num_positions,
    num_heads,
    HAS_SINK: tl.constexpr,
    TURNED: tl.constexpr,
    ROPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FEW: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """The splits of the tokens in a list, which programs of a head share."""
    head = tl.program_id(1)
    number = tl.program_id(0)
    stop = tl.load(joins)
    while number < stop:
        row = joins + (number + 1) * COLUMNS
        token = tl.load(row).to(tl.int64)
        pieces = tl.load(row + 1)
        place = tl.load(row + 2).to(tl.int64)
        _join_pieces(
            out, lse, partial, partial_lse, partial_peak, attn_sink,
            positions, positions_stride, cos_sin_cache, num_positions,
            token, place, pieces, head, num_heads,
            HAS_SINK, TURNED, ROPE, HEAD_DIM, FEW, SPLITS, EMULATE,
        )  # fmt: skip
        number += tl.num_programs(0)


ROPE = MainLayout.head_dim - MainLayout.code_dim
"""Values per row that are rotated back: the last of the tiles."""

FEW_JOINED, JOINED, MOST_JOINED = 4, 8, 16
"""Splits that are joined at a time: of lists and plans the first where there are no more, the last
where a call knows that there are more than the second."""

JOINING, GROUPED = 2048, 32
"""About as many programs join by a plan, none of which looks at more of its rows; no more than
there are tokens if those are enough."""

LISTED = 1024
"""Programs that join what a list says, if there are as many heads of tokens: more of them take
longer to find that nothing is to be joined."""

JOIN_WARPS = 2
"""Warps of a program that joins, each thread of which then reads 8 values of a split; whatever the
batch, so that it decides no bit."""


def join(
    launch: Launch,
    results: Splits,
    attn_sink: Tensor | None,
    plan: Tensor | None,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    splits: int,
) -> None:
    """Write the results of the tokens that have several splits."""
    out, lse, partial, partial_lse, partial_peak = results
    num_tokens, num_heads, head_dim = out.shape[0], int(out.shape[1]), int(out.shape[2])
    rotation = _rotation(lse, positions, cos_sin_cache)
    if plan is None:  # of a symbolic number: nothing to join if it turns out to be 1
        joins = programs = 1 + (num_tokens - 1) * torch.sym_min(splits - 1, 1)
    else:  # of a plan for more tokens too, whose other rows are no fewer than tokens to be joined
        joins = plan.shape[0] - num_tokens
        most = torch.sym_min(num_tokens, max(JOINING // num_heads, 1))
        programs = torch.sym_max(most, (joins + GROUPED - 1) // GROUPED)
    few, step = (FEW_JOINED, JOINED) if plan is not None else _steps(splits)
    launch(join_splits_kernel)[(programs, num_heads)](
        out,
        lse,
        partial,
        partial_lse,
        partial_peak,
        lse if attn_sink is None else attn_sink.contiguous(),
        lse if plan is None else plan,
        *((0, 0) if plan is None else plan.stride()),
        *rotation,
        partial.shape[0],
        num_tokens,
        joins,
        num_heads,
        splits,
        HAS_SINK=attn_sink is not None,
        HAS_PLAN=plan is not None,
        TURNED=positions is not None,
        ROPE=ROPE,
        HEAD_DIM=head_dim,
        FEW=few,
        SPLITS=step,
        GROUP=GROUPED,
        EMULATE=EMULATE,
        num_warps=JOIN_WARPS,
    )


def join_listed(
    launch: Launch,
    results: Splits,
    attn_sink: Tensor | None,
    joins: Tensor,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
) -> None:
    """The same for the tokens that the kernel of the splits has listed."""
    out, lse, partial, partial_lse, partial_peak = results
    num_tokens, num_heads, head_dim = out.shape[0], int(out.shape[1]), int(out.shape[2])
    programs = torch.sym_min(num_tokens, max(LISTED // num_heads, 1))
    launch(join_listed_kernel)[(programs, num_heads)](
        out,
        lse,
        partial,
        partial_lse,
        partial_peak,
        lse if attn_sink is None else attn_sink.contiguous(),
        joins,
        *_rotation(lse, positions, cos_sin_cache),
        num_heads,
        HAS_SINK=attn_sink is not None,
        TURNED=positions is not None,
        ROPE=ROPE,
        HEAD_DIM=head_dim,
        FEW=FEW_JOINED,
        SPLITS=JOINED,
        COLUMNS=JOIN_COLUMNS,
        EMULATE=EMULATE,
        num_warps=JOIN_WARPS,
    )


def _rotation(
    lse: Tensor, positions: Tensor | None, cos_sin_cache: Tensor | None
) -> tuple[Any, ...]:
    """Positions, their stride, the table of angles and how many it has; anything for none."""
    if positions is None or cos_sin_cache is None:
        return (lse, 0, lse, 0)
    table = cos_sin_cache.contiguous()
    return (positions, positions.stride(0), table, table.shape[0])


def _steps(splits: int) -> tuple[int, int]:
    """Splits that are joined at a time, twice as they are not told apart by their number: it is
    known, or a symbol, and then the kernel is not to decide."""
    step = JOINED
    if isinstance(splits, int):
        step = min(max(triton.next_power_of_2(splits), 2), MOST_JOINED)
    return step, step
