"""The launch of a kernel that attends to the splits of tokens: in Triton, or on Hopper in Gluon."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.tiles import HEAD_TILE, KEY_TILE, MOST_CUT, head_tiles
from dsv4_ops.kernels import hopper
from dsv4_ops.kernels.launch import EMULATE, Launch
from dsv4_ops.kernels.split_keys import split_keys_kernel

WARPS = 8
"""Warps of a program of the kernel in Triton."""

LEAST_LANES = 32
"""Lanes of programs that cut a batch, of which each has a token, if there are no more tokens: of
more than needed, programs start up to 0.7 us later."""

Splits = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""``out``, ``lse``, and of every partial result its values, the logarithm of its sum, and what its
values are multiples of."""


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


def _results(q: Tensor, room: int) -> Splits:
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
) -> Splits:
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
        kernels = hopper.kernels()
        assert kernels is not None  # ``hopper.runs`` has asked
        cuts = (lens, 0, 0) if cut is None else (cut.joins, cut.by_lens, cut.at_once)
        constants |= {
            "CUTS": cut is not None,
            "LANES": LEAST_LANES if cut is None else _lanes(num_tokens),
        }
        launch(kernels.split)[grid](*tensors, *cuts, **constants, num_warps=hopper.WARPS)
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
