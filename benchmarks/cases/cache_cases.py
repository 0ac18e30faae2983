"""Cases of the cache ops: inserts and gathers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dsv4_ops
from benchmarks.harness.batches import rotating_sets
from benchmarks.harness.work import Case, Work
from dsv4_ops.core.layout import IndexerLayout, Layout, MainLayout, QuantizedLayout

BLOCK_SIZE = 64
MAIN, INDEXER = MainLayout(BLOCK_SIZE), IndexerLayout(BLOCK_SIZE)

_POOL_PAGES = 4096
_SMOKE_PAGES = 64
_FILLED_PAGES = 512  # blocks filled at a time, to bound the reference's memory
_CONSECUTIVE_FROM = 2048
_EDGE_TOKENS = 37
_EDGE_PAGES = 19
_RAGGED_ROWS = (2733, 100, 32768, 1195, 229, 14300, 523, 6250)


def insert_main(k: Tensor, k_cache: Tensor, slots: Tensor) -> None:
    dsv4_ops.quantize_and_insert_k_cache(k, k_cache, slots, block_size=BLOCK_SIZE)


def insert_indexer(k: Tensor, k_cache: Tensor, slots: Tensor) -> None:
    dsv4_ops.quantize_and_insert_indexer_k(k, k_cache, slots, block_size=BLOCK_SIZE)


def gather_into(out: Tensor, k_cache: Tensor, seq_lens: Tensor, block_table: Tensor) -> None:
    dsv4_ops.dequantize_and_gather_k_cache(
        out, k_cache, seq_lens, None, block_table, block_size=BLOCK_SIZE
    )


def _baseline_insert(modules: Any) -> Callable[..., Any]:
    return functools.partial(modules.cache.quantize_and_insert_k_cache, block_size=BLOCK_SIZE)


def _baseline_gather(modules: Any) -> Callable[..., Any]:
    gather = modules.cache.dequantize_and_gather_k_cache_triton
    return lambda out, k_cache, seq_lens, block_table: gather(
        out, k_cache, seq_lens, None, block_table, BLOCK_SIZE, 0
    )


def insert_cases(tokens: tuple[int, ...], *, smoke: bool) -> list[Case]:
    """Make absent slots, then random slots, then consecutive slots for many tokens."""
    pages = _SMOKE_PAGES if smoke else _POOL_PAGES
    cases = [
        Case("insert", "slots that do not exist", _insert_edges, rows=_EDGE_TOKENS, timed=False)
    ]
    for variant in ("random", "consecutive"):
        for count in tokens:
            if variant == "consecutive" and count < _CONSECUTIVE_FROM:
                continue
            build = functools.partial(
                _insert_work, count, pages, consecutive=variant == "consecutive"
            )
            shape = f"{count} token{'s' * (count > 1)}"
            cases.append(Case("insert", shape, build, rows=count, variant=variant))
    return cases


def _insert(sets: list[tuple[Any, ...]], tokens: int) -> Work:
    moved = tokens * (MAIN.head_dim * 2 + MAIN.row_bytes + 8)
    return Work(insert_main, sets, moved, written=(1,), baseline=_baseline_insert)


def _insert_work(tokens: int, pages: int, device: torch.device, *, consecutive: bool) -> Work:
    generator = torch.Generator(device).manual_seed(tokens)
    cache = junk_pages(MAIN, pages, device, generator)
    slots_in_all = pages * BLOCK_SIZE
    sets: list[tuple[Any, ...]] = []
    for place in range(rotating_sets(_insert([], tokens).moved_bytes, device)):
        if consecutive:
            start = place * tokens % (slots_in_all - tokens + 1)
            slots = torch.arange(start, start + tokens, device=device)
        else:
            slots = torch.randperm(slots_in_all, generator=generator, device=device)
            slots = slots[:tokens].clone()
        sets.append((random_keys(tokens, MAIN.head_dim, device, generator), cache, slots))
    return _insert(sets, tokens)


def _insert_edges(device: torch.device) -> Work:
    """Sample slots below 0 and past the cache among valid ones."""
    generator = torch.Generator(device).manual_seed(1)
    cache = junk_pages(MAIN, _EDGE_PAGES, device, generator)
    slots_in_all = _EDGE_PAGES * BLOCK_SIZE
    slots = torch.randperm(slots_in_all, generator=generator, device=device)[:_EDGE_TOKENS].clone()
    absent = (-1, -7, -(2**63), slots_in_all, slots_in_all + 5, 2**40, 2**63 - 1, -1)
    slots[: 4 * len(absent) : 4] = torch.tensor(absent, device=device)
    keys = random_keys(_EDGE_TOKENS, MAIN.head_dim, device, generator)
    return _insert([(keys, cache, slots)], _EDGE_TOKENS)


def gather_cases(shapes: tuple[tuple[int, int], ...], *, smoke: bool) -> list[Case]:
    """Make gathers into a workspace: with absent blocks, of requests of equal length, of a ragged
    batch."""
    cases = [Case("gather", "pages that do not exist", _gather_edges, rows=150, timed=False)]
    for requests, rows in shapes:
        build = functools.partial(_gather_work, (rows,) * requests, rows, smoke=smoke)
        shape = f"{requests}x{rows} rows"
        cases.append(Case("gather", shape, build, rows=rows, requests=requests))
    lens = tuple(-(-length // 64) for length in _RAGGED_ROWS) if smoke else _RAGGED_ROWS
    build = functools.partial(_gather_work, lens, max(lens), smoke=smoke)
    shape = f"8 x {min(lens)}..{max(lens)} rows"
    cases.append(Case("gather", shape, build, rows=sum(lens), requests=8, variant="ragged"))
    return cases


def _gather_work(
    lens: tuple[int, ...], num_rows: int, device: torch.device, *, smoke: bool
) -> Work:
    generator = torch.Generator(device).manual_seed(sum(lens))
    columns = -(-max(lens) // BLOCK_SIZE)
    moved = sum(lens) * (MAIN.row_bytes + MAIN.head_dim * 2) + 4 * len(lens) * (columns + 1)
    count = rotating_sets(moved, device)
    cache, tables = paged(MAIN, count, len(lens), columns, device, generator, smoke=smoke)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    sets: list[tuple[Any, ...]] = [
        (_workspace(len(lens), num_rows, device), cache, seq_lens.clone(), table)
        for table in tables
    ]
    return Work(gather_into, sets, moved, written=(0,), baseline=_baseline_gather)


def _gather_edges(device: torch.device) -> Work:
    """Make absent blocks, an empty request, and a request longer than its table and the
    workspace."""
    generator = torch.Generator(device).manual_seed(1)
    cache = filled_pages(MAIN, insert_main, _EDGE_PAGES, device, generator)
    table = torch.tensor(
        [[3, -1], [0, 1], [_EDGE_PAGES, 7], [2**31 - 1, _EDGE_PAGES - 1], [5, -(2**31)]],
        dtype=torch.int32,
        device=device,
    )
    seq_lens = torch.tensor([100, 0, 128, 90, 1000], dtype=torch.int32, device=device)
    return Work(
        gather_into, [(_workspace(5, 150, device), cache, seq_lens, table)], 0, written=(0,)
    )


def paged(
    layout: QuantizedLayout,
    count: int,
    requests: int,
    columns: int,
    device: torch.device,
    generator: torch.Generator,
    *,
    smoke: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Make a full cache, and ``count`` block tables of random blocks, each of which is in one table
    only."""
    needed = requests * columns
    pages = max(_SMOKE_PAGES if smoke else _POOL_PAGES, count * needed)
    insert = insert_main if layout is MAIN else insert_indexer
    cache = filled_pages(layout, insert, pages, device, generator)
    order = torch.randperm(pages, generator=generator, device=device, dtype=torch.int32)
    tables = [
        order[place * needed : (place + 1) * needed].view(requests, columns).clone()
        for place in range(count)
    ]
    return cache, tables


def filled_pages(
    layout: QuantizedLayout,
    insert: Callable[..., Any],
    pages: int,
    device: torch.device,
    generator: torch.Generator,
) -> Tensor:
    """Make a cache whose rows are ordinary keys."""
    cache = layout.allocate(pages, device)
    for start in range(0, pages, _FILLED_PAGES):
        part = cache[start : start + _FILLED_PAGES]
        slots = torch.arange(part.shape[0] * layout.block_size, device=device)
        insert(random_keys(slots.shape[0], layout.head_dim, device, generator), part, slots)
    return cache


def junk_pages(
    layout: Layout, pages: int, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Make a cache of random bytes, so that a write to any other byte shows."""
    cache = layout.allocate(pages, device)
    junk = torch.randint(0, 256, (cache.nbytes,), dtype=torch.uint8, device=device,
                         generator=generator)  # fmt: skip
    cache.view(torch.uint8).view(-1).copy_(junk)
    return cache


def random_keys(
    tokens: int, width: int, device: torch.device, generator: torch.Generator
) -> Tensor:
    return (torch.randn(tokens, width, device=device, generator=generator) * 0.3).bfloat16()


def _workspace(requests: int, rows: int, device: torch.device) -> Tensor:
    """Make a result full of one value, which a gather must overwrite in its rows and keep
    elsewhere."""
    shape = (requests, rows, MAIN.head_dim)
    return torch.full(shape, -7.0, dtype=torch.bfloat16, device=device)
