"""Launches of the kernels that join the splits of sparse attention."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.tiles import JOIN_COLUMNS
from dsv4_ops.kernels.join_splits import join_listed_kernel, join_splits_kernel
from dsv4_ops.kernels.launch import EMULATE, Launch
from dsv4_ops.kernels.split_launch import Splits

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
