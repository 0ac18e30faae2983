"""Cases of the cache ops: inserts and gathers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dsv4_ops
from benchmarks.harness.batches import rotating_sets
from benchmarks.harness.draw import Draw
from benchmarks.harness.work import Case, Work
from dsv4_ops.core.layout import IndexerLayout, MainLayout, QuantizedLayout

BLOCK_SIZE = 64
MAIN, INDEXER = MainLayout(BLOCK_SIZE), IndexerLayout(BLOCK_SIZE)

_POOL_PAGES = 4096
_SMOKE_PAGES = 64
_CONSECUTIVE_FROM = 2048
_EDGE_TOKENS = 37
_EDGE_PAGES = 19
_RAGGED_ROWS = (2733, 100, 32768, 1195, 229, 14300, 523, 6250)


def insert_main(k: Tensor, k_cache: Tensor, slots: Tensor) -> None:
    dsv4_ops.quantize_and_insert_k_cache(k, k_cache, slots, block_size=BLOCK_SIZE)


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
    """Make inserts with absent slots, with random slots, and with consecutive slots."""
    pages = _SMOKE_PAGES if smoke else _POOL_PAGES
    edges = "slots that do not exist"
    cases = [Case("insert", edges, _insert_edges, rows=_EDGE_TOKENS, timed=False)]
    sizes = [("random", count) for count in tokens]
    sizes += [("consecutive", count) for count in tokens if count >= _CONSECUTIVE_FROM]
    for variant, count in sizes:
        build = functools.partial(_insert_work, count, pages, consecutive=variant == "consecutive")
        shape = f"{count} token{'s' * (count > 1)}"
        cases.append(Case("insert", shape, build, rows=count, variant=variant))
    return cases


def _insert(sets: list[tuple[Any, ...]], tokens: int) -> Work:
    moved = tokens * (MAIN.head_dim * 2 + MAIN.row_bytes + 8)
    return Work(insert_main, sets, moved, written=(1,), baseline=_baseline_insert)


def _insert_work(tokens: int, pages: int, device: torch.device, *, consecutive: bool) -> Work:
    draw, slots_in_all = Draw(device, tokens), pages * BLOCK_SIZE
    cache = draw.junk(MAIN, pages)
    sets: list[tuple[Any, ...]] = []
    for place in range(rotating_sets(_insert([], tokens).moved_bytes, device)):
        if consecutive:
            start = place * tokens % (slots_in_all - tokens + 1)
            slots = torch.arange(start, start + tokens, device=device)
        else:
            slots = draw.order(slots_in_all, torch.int64)[:tokens].clone()
        sets.append((draw.keys(tokens, MAIN.head_dim), cache, slots))
    return _insert(sets, tokens)


def _insert_edges(device: torch.device) -> Work:
    """Sample valid slots, slots below 0, and slots past the end of the cache."""
    draw, slots_in_all = Draw(device, 1), _EDGE_PAGES * BLOCK_SIZE
    slots = draw.order(slots_in_all, torch.int64)[:_EDGE_TOKENS].clone()
    absent = (-1, -7, -(2**63), slots_in_all, slots_in_all + 5, 2**40, 2**63 - 1, -1)
    slots[: 4 * len(absent) : 4] = torch.tensor(absent, device=device)
    keys = draw.keys(_EDGE_TOKENS, MAIN.head_dim)
    return _insert([(keys, draw.junk(MAIN, _EDGE_PAGES), slots)], _EDGE_TOKENS)


def gather_cases(shapes: tuple[tuple[int, int], ...], *, smoke: bool) -> list[Case]:
    """Make gathers with absent blocks, for requests of equal length, and for a ragged batch."""
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
    columns = -(-max(lens) // BLOCK_SIZE)
    moved = sum(lens) * (MAIN.row_bytes + MAIN.head_dim * 2) + 4 * len(lens) * (columns + 1)
    draw, count = Draw(device, sum(lens)), rotating_sets(moved, device)
    cache, tables = paged(MAIN, count, len(lens), columns, draw, smoke=smoke)
    sets: list[tuple[Any, ...]] = [
        (_workspace(len(lens), num_rows, device), cache, draw.ints(*lens), table)
        for table in tables
    ]
    return Work(gather_into, sets, moved, written=(0,), baseline=_baseline_gather)


def _gather_edges(device: torch.device) -> Work:
    """Make absent blocks, an empty request, and a request too long for table and workspace."""
    draw, last = Draw(device, 1), _EDGE_PAGES - 1
    table = draw.ints(3, -1, 0, 1, last + 1, 7, 2**31 - 1, last, 5, -(2**31)).view(5, 2)
    seq_lens = draw.ints(100, 0, 128, 90, 1000)
    args = (_workspace(5, 150, device), draw.full(MAIN, _EDGE_PAGES), seq_lens, table)
    return Work(gather_into, [args], 0, written=(0,))


def paged(
    layout: QuantizedLayout, count: int, requests: int, columns: int, draw: Draw, *, smoke: bool
) -> tuple[Tensor, list[Tensor]]:
    """Make a full cache, and ``count`` tables of random blocks; no tables share a block."""
    needed = requests * columns
    pages = max(_SMOKE_PAGES if smoke else _POOL_PAGES, count * needed)
    cache, order = draw.full(layout, pages), draw.order(pages)
    tables = order[: count * needed].view(count, requests, columns)
    return cache, [table.clone() for table in tables]


def _workspace(requests: int, rows: int, device: torch.device) -> Tensor:
    """Make a workspace filled with one value, which must remain in rows that are not gathered."""
    shape = (requests, rows, MAIN.head_dim)
    return torch.full(shape, -7.0, dtype=torch.bfloat16, device=device)
