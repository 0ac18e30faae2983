"""Launch prefill: over FP8 pages, or over a bfloat16 copy of the rows in reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import AUTO
from dsv4_ops.core.tiles import HEAD_TILE, KEY_TILE, PROGRAMS, head_tiles, programs_per_tile
from dsv4_ops.core.types import SparseMla
from dsv4_ops.dispatch.choice import not_ours
from dsv4_ops.dispatch.prefill import gathers, prefilled
from dsv4_ops.kernels import opaque_op
from dsv4_ops.kernels.arguments import listed, strided
from dsv4_ops.kernels.launcher import EAGER, Launcher
from dsv4_ops.kernels.sparse_mla.bf16_workspace import gather_rows
from dsv4_ops.kernels.sparse_mla.combine import combine
from dsv4_ops.kernels.sparse_mla.decode import num_splits_of, partial_results, supported
from dsv4_ops.kernels.sparse_mla.gathered import Results, launch_gathered_keys
from dsv4_ops.kernels.sparse_mla.hopper import support
from dsv4_ops.kernels.sparse_mla.triton.prefill_kernel import prefill_keys_kernel
from dsv4_ops.reference import sparse_mla as reference
from dsv4_ops.reference.bf16_workspace import Prefill, Source

WARPS = 8
"""Warps of a program of the kernel in Triton."""

LISTED = 512
"""Selected rows that are looked through at a time for the last one that counts."""

_SCHEMA = (
    "(bool by_size, Tensor q, Tensor swa_cache, Tensor positions, Tensor req_indices, "
    "Tensor swa_block_table, Tensor? extra_cache, Tensor? extra_block_table, "
    "Tensor? topk_indices, Tensor? attn_sink, float softmax_scale, int window_size, "
    "int compress_ratio, int swa_block_size, int extra_block_size, bool coded) -> (Tensor, Tensor)"
)


def prefill_keys(launch: Launcher, by_size: bool, *args: Any) -> tuple[Tensor, Tensor]:
    """Attend with the kernel that is made for the device; see ``_launch_prefill``. Where sizes may
    decide, Hopper's may read a copy of the rows, and bits depend on how many tokens there are."""
    q, coded = args[0], args[14]
    on_hopper = support.runs(launch, q, coded)
    if on_hopper and launch.opaque_gluon:
        results: tuple[Tensor, Tensor] = hopper_prefill_keys(by_size, *args)
        return results
    if on_hopper and by_size:
        return _launch_by_size(launch, *args)
    return _launch_prefill(launch, on_hopper, *args)


_NAMES = (
    "q",
    "swa_cache",
    "positions",
    "req_indices",
    "swa_block_table",
    "extra_cache",
    "extra_block_table",
    "topk_indices",
    "attn_sink",
    "softmax_scale",
    "window_size",
    "compress_ratio",
    "swa_block_size",
    "extra_block_size",
)


def _launch_by_size(launch: Launcher, *args: Any) -> tuple[Tensor, Tensor]:
    """From the cache, or from a bfloat16 copy of its rows, as ``dispatch/prefill.py`` decides.

    Of symbolic sizes that is a symbol: both variants are there, one without programs."""
    values = dict(zip(_NAMES, args, strict=False))
    wanted = gathers(values)
    if isinstance(wanted, int) and wanted:
        return attend_to_copy(launch, wanted, values, None)
    splits = _splits(values)
    if isinstance(wanted, int):
        return _launch_prefill(launch, True, *args, splits=splits)
    out, lse = _launch_prefill(launch.predicated(1 - wanted), True, *args, splits=splits)
    return attend_to_copy(launch, wanted, values, (out, torch.empty_like(lse), lse))


def _splits(values: Mapping[str, Any]) -> Any:
    """Splits of the keys of every token, as a decode of so many has them; a symbol of symbolic
    sizes. Few tokens leave SMs idle otherwise."""
    window, q = values["window_size"], values["q"]
    blocks = -(-window // KEY_TILE) - (window - prefilled(values)) // KEY_TILE
    return num_splits_of(q.shape[0] * head_tiles(int(q.shape[1])), blocks, KEY_TILE, 0, False)


def attend_to_copy(
    launch: Launcher, wanted: int, values: Mapping[str, Any], results: Results | None
) -> tuple[Tensor, Tensor]:
    """Copy the rows, and attend to them."""
    swa = Source(values["swa_cache"], values["swa_block_table"], values["swa_block_size"])
    extra = None
    if values["extra_cache"] is not None:
        extra = Source(
            values["extra_cache"], values["extra_block_table"], values["extra_block_size"]
        )
    tokens = (values["positions"], values["req_indices"])
    numbers = (values["window_size"], values["compress_ratio"])
    call = Prefill(*tokens, swa, extra, values["topk_indices"], *numbers)
    given = gather_rows(launch, call, None, 1, wanted)
    lists = (given.kv, given.slots, given.lens)
    if results is not None:
        launch = launch.predicated(wanted)
    rest = (values["attn_sink"], values["softmax_scale"], results)
    out, _, lse = launch_gathered_keys(launch, values["q"], *lists, *rest)
    return out, lse


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    rows = (q.shape[0], int(q.shape[1]))
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32)


def _launch_prefill(
    launch: Launcher,
    on_hopper: bool,
    q: Tensor,
    swa_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    swa_table: Tensor,
    extra_cache: Tensor | None,
    extra_table: Tensor | None,
    topk_indices: Tensor | None,
    attn_sink: Tensor | None,
    softmax_scale: float,
    window_size: int,
    compress_ratio: int,
    swa_block_size: int,
    extra_block_size: int,
    coded: bool,
    splits: int = 1,
) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse``, by a program for each split of a token and tile of heads."""
    num_tokens, num_heads, head_dim = q.shape[0], int(q.shape[1]), int(q.shape[2])
    if on_hopper and q.stride(2) != 1:
        q = q.contiguous()
    results = _results(q)
    main = MainLayout(swa_block_size)
    cache = swa_cache if extra_cache is None else extra_cache
    table = swa_table if extra_table is None else extra_table
    chosen = table if topk_indices is None else topk_indices
    tensors = (
        *strided(q),
        *results,
        results[1] if attn_sink is None else attn_sink.contiguous(),
        *strided(positions, req_indices),
        *_source(swa_cache, swa_table),
        *_source(cache, table),
        *listed(chosen),
        swa_table.shape[0],
        num_heads,
    )
    constants = {
        "SOFTMAX_SCALE": float(softmax_scale),  # Inductor would pass it as a float64
        "WINDOW_SIZE": window_size,
        "COMPRESS_RATIO": compress_ratio,
        "LISTED": LISTED,
        "SWA_BLOCK_SIZE": swa_block_size,
        "EXTRA_BLOCK_SIZE": extra_block_size,
        "HAS_EXTRA": extra_cache is not None,
        "HAS_TOPK": topk_indices is not None,
        "HAS_SINK": attn_sink is not None,
        "ROW": main.data_bytes if coded else head_dim,
        "SCALE_BYTES": main.scale_bytes if coded else 0,
    }
    grid = (num_tokens, head_tiles(num_heads))
    if on_hopper:
        kernels = support.kernels()
        assert kernels is not None  # ``support.runs`` has asked
        grid = (num_tokens * splits, grid[1])
        several = not (isinstance(splits, int) and splits == 1)
        capacity = programs_per_tile(num_heads, PROGRAMS)
        parts = partial_results(q, capacity, int(q.shape[2])) if several else (results[1],) * 3
        launch(kernels.prefill)[grid](
            *tensors, *parts, splits, **constants, num_warps=support.WARPS
        )
        if several:
            combine(launch, (*results, *parts), attn_sink, None, None, None, splits)
        return results
    launch(prefill_keys_kernel)[grid](
        *tensors, **constants,
        HEAD_DIM=head_dim, ROW_BYTES=main.data_bytes if coded else 2 * head_dim,
        CODE_DIM=main.code_dim if coded else head_dim, QUANT_BLOCK=main.quant_block,
        HEADS=HEAD_TILE, KEYS=KEY_TILE, num_warps=WARPS,
    )  # fmt: skip
    return results


def _source(cache: Tensor, table: Tensor) -> tuple[Any, ...]:
    """A cache and its block table, with their strides."""
    blocks = (cache, cache.stride(0), cache.shape[0])
    return (*blocks, table, *table.stride(), table.shape[1])


def _call(*args: Any) -> tuple[Tensor, Tensor]:
    by_size, q, *_ = args
    with torch.cuda.device_of(q):
        if by_size:
            return _launch_by_size(EAGER, *args[1:])
        return _launch_prefill(EAGER, True, *args[1:])


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _results(args[1])


hopper_prefill_keys = opaque_op.define("_hopper_prefill_keys", _SCHEMA, _call, _fake)


def sparse_mla_prefill(
    launch: Launcher,
    q: Tensor,
    swa_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    swa_block_table: Tensor,
    extra_cache: Tensor | None,
    extra_block_table: Tensor | None,
    topk_indices: Tensor | None,
    attn_sink: Tensor | None,
    *,
    impl: str = AUTO,
    **settings: Any,
) -> SparseMla:
    swa = (swa_cache, positions, req_indices, swa_block_table)
    extra = (extra_cache, extra_block_table, topk_indices)
    caches = (swa_cache,) if extra_cache is None else (swa_cache, extra_cache)
    if not supported(q, *caches):
        not_ours("sparse_mla_prefill", impl, "with such queries or caches")
        return reference.sparse_mla_prefill(q, *swa, *extra, attn_sink, **settings)
    return _attend(launch, impl == AUTO, q, *swa, *extra, attn_sink, **settings)


def _attend(
    launch: Launcher,
    by_size: bool,
    q: Tensor,
    swa_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    swa_table: Tensor,
    extra_cache: Tensor | None,
    extra_table: Tensor | None,
    topk_indices: Tensor | None,
    attn_sink: Tensor | None,
    *,
    softmax_scale: float,
    window_size: int,
    compress_ratio: int,
    swa_block_size: int,
    extra_block_size: int,
    layout: str,
) -> SparseMla:
    num_tokens, num_heads = q.shape[0], int(q.shape[1])
    if num_tokens == 0 or num_heads == 0:
        lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
        return SparseMla(q.new_empty(q.shape), lse)
    main = MainLayout(swa_block_size)
    coded = layout == main.tag
    if coded:
        cache = swa_cache if extra_cache is None else extra_cache
        Checks("sparse_mla_prefill").page_start("swa_cache", swa_cache, main)
        Checks("sparse_mla_prefill").page_start("extra_cache", cache, main)
    swa = (q, swa_cache, positions, req_indices, swa_table)
    extra = (extra_cache, extra_table, topk_indices, attn_sink)
    sizes = (softmax_scale, window_size, compress_ratio, swa_block_size, extra_block_size, coded)
    return SparseMla(*prefill_keys(launch, by_size, *swa, *extra, *sizes))
