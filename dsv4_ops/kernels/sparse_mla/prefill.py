"""Launch sparse MLA prefill: over FP8 pages, or over a bf16 copy of the rows that tokens see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.registry import AUTO
from dsv4_ops.core.tiles import KEY_TILE, PROGRAMS, head_tiles, programs_per_tile
from dsv4_ops.core.types import SparseMla
from dsv4_ops.dispatch.prefill import gathers, prefilled
from dsv4_ops.kernels import opaque_op
from dsv4_ops.kernels.arguments import listed, paged, strided
from dsv4_ops.kernels.common.attention.calls import PrefillCall, empty_results
from dsv4_ops.kernels.common.attention.combine import combine
from dsv4_ops.kernels.common.attention.splits import empty_partials, num_splits_of
from dsv4_ops.kernels.common.hopper import support
from dsv4_ops.kernels.launcher import EAGER, Launcher
from dsv4_ops.kernels.sparse_mla.bf16_workspace import gather_rows
from dsv4_ops.kernels.sparse_mla.decode import check_pages, row_format
from dsv4_ops.kernels.sparse_mla.gathered import Results, launch_gathered_keys
from dsv4_ops.kernels.sparse_mla.hopper.prefill_kernel import hopper_prefill_keys_kernel
from dsv4_ops.kernels.sparse_mla.triton.prefill_kernel import prefill_keys_kernel

WARPS = 8
"""Warps of a program of the Triton kernel."""

SMALL_HEAD_TILE = 16
"""Heads of a program of the Triton kernel on GPUs with neither ``large_tiles`` nor ``mma_sync``,
such as datacenter Blackwell, where more heads would spill."""

LISTED = 512
"""Number of selected rows that a program checks at a time to find the last visible row."""


def sparse_mla_prefill(launch: Launcher, *args: Any, impl: str = AUTO, **named: Any) -> SparseMla:
    call = PrefillCall(*args, **named)
    q = call.q
    if q.shape[0] == 0 or int(q.shape[1]) == 0:
        return SparseMla(*empty_results(q))
    if call.is_fp8:
        check_pages("sparse_mla_prefill", call)
    return SparseMla(*_attend(launch, impl == AUTO, call))


def _attend(launch: Launcher, by_size: bool, call: PrefillCall) -> tuple[Tensor, Tensor]:
    """Attend with the kernel for this device. If ``by_size``, Hopper's kernel may read a copy of
    the rows; the bits of the result then depend on the number of tokens."""
    on_hopper = support.runs(launch, call.q, call.is_fp8)
    if on_hopper and launch.opaque_gluon:
        results: tuple[Tensor, Tensor] = hopper_prefill_keys(by_size, *call)
        return results
    if on_hopper and by_size:
        return launch_by_size(launch, call)
    return launch_prefill(launch, on_hopper, call)


def launch_by_size(launch: Launcher, call: PrefillCall) -> tuple[Tensor, Tensor]:
    """Attend to the cache or to a bf16 copy of its rows, as ``dispatch/prefill.py`` decides.

    With symbolic sizes the decision is a symbol. Then both variants are launched, and one of them
    has empty grids.
    """
    use_copy = gathers(call._asdict())
    if isinstance(use_copy, int) and use_copy:
        return attend_to_copy(launch, use_copy, call, None)
    splits = _splits(call)
    if isinstance(use_copy, int):
        return launch_prefill(launch, True, call, splits)
    out, lse = launch_prefill(launch.predicated(1 - use_copy), True, call, splits)
    return attend_to_copy(launch, use_copy, call, (out, torch.empty_like(lse), lse))


def _splits(call: PrefillCall) -> Any:
    """Return the number of splits of each token, as in a decode of this many tokens. For symbolic
    sizes, the number is a symbol. Without splits, few tokens would leave SMs idle."""
    window, q = call.window_size, call.q
    blocks = -(-window // KEY_TILE) - (window - prefilled(call._asdict())) // KEY_TILE
    return num_splits_of(q.shape[0] * head_tiles(int(q.shape[1])), blocks, KEY_TILE, 0, False)


def attend_to_copy(
    launch: Launcher, use_copy: int, call: PrefillCall, results: Results | None
) -> tuple[Tensor, Tensor]:
    """Copy the rows, and attend to the copy."""
    rows = gather_rows(launch, call.seen, None, 1, use_copy)
    lists = (rows.kv, rows.slots, rows.lens)
    if results is not None:
        launch = launch.predicated(use_copy)
    rest = (call.attn_sink, call.softmax_scale)
    out, _, lse = launch_gathered_keys(launch, call.q, *lists, *rest, results=results)
    return out, lse


def launch_prefill(
    launch: Launcher, on_hopper: bool, call: PrefillCall, splits: int = 1
) -> tuple[Tensor, Tensor]:
    """Launch one program per split of each token and tile of heads; return ``out`` and ``lse``."""
    q, attn_sink = call.q, call.attn_sink
    num_tokens, num_heads = q.shape[0], int(q.shape[1])
    if on_hopper and q.stride(2) != 1:
        q = q.contiguous()
    results = empty_results(q)
    swa_table, (swa_cache, extra_cache) = call.swa_block_table, call.caches
    table = swa_table if call.extra_block_table is None else call.extra_block_table
    tensors = (
        *strided(q),
        *results,
        results[1] if attn_sink is None else attn_sink.contiguous(),
        *strided(call.positions, call.req_indices),
        *paged(swa_cache),
        *listed(swa_table),
        *paged(extra_cache),
        *listed(table),
        *listed(table if call.topk_indices is None else call.topk_indices),
        swa_table.shape[0],
        num_heads,
    )
    constants = {
        "SOFTMAX_SCALE": float(call.softmax_scale),  # Inductor passes arguments as float64
        "WINDOW_SIZE": call.window_size,
        "COMPRESS_RATIO": call.compress_ratio,
        "LISTED": LISTED,
        "SWA_BLOCK_SIZE": call.swa_block_size,
        "EXTRA_BLOCK_SIZE": call.extra_block_size,
        "HAS_EXTRA": call.extra_cache is not None,
        "HAS_TOPK": call.topk_indices is not None,
        "HAS_SINK": attn_sink is not None,
    }
    row = row_format(launch, call)
    if on_hopper:
        grid = (num_tokens * splits, head_tiles(num_heads))
        several = not (isinstance(splits, int) and splits == 1)
        capacity = programs_per_tile(num_heads, PROGRAMS)
        parts = empty_partials(q, capacity, int(q.shape[2])) if several else (results[1],) * 3
        launch(hopper_prefill_keys_kernel)[grid](
            *tensors, *parts, splits, **constants, ROW=row[0], SCALE_BYTES=row[4],
            num_warps=support.WARPS,
        )  # fmt: skip
        if several:
            combine(launch, (*results, *parts), attn_sink, None, None, None, splits)
        return results
    target = launch.target(q.device)
    heads = target.head_tile if target.large_tiles or target.mma_sync else SMALL_HEAD_TILE
    launch(prefill_keys_kernel)[num_tokens, head_tiles(num_heads, heads)](
        *tensors, **constants, HEAD_DIM=int(q.shape[2]), FORMAT=row,
        HEADS=heads, KEYS=KEY_TILE, MMA_SYNC=target.mma_sync, num_warps=WARPS,
    )  # fmt: skip
    return results


def _call(by_size: bool, *args: Any) -> tuple[Tensor, Tensor]:
    call = PrefillCall(*args)
    with torch.cuda.device_of(call.q):
        return launch_by_size(EAGER, call) if by_size else launch_prefill(EAGER, True, call)


hopper_prefill_keys = opaque_op.define(
    "_hopper_prefill_keys",
    f"(bool by_size, {opaque_op.fields(PrefillCall)}) -> (Tensor, Tensor)",
    _call,
    lambda by_size, *args: empty_results(args[0]),
)
