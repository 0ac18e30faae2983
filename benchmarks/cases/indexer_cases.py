"""Cases of the lightning indexer in decode: logits, and a selection of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import dsv4_ops
from benchmarks.baselines import deep_gemm
from benchmarks.cases.cache_cases import BLOCK_SIZE, INDEXER, paged
from benchmarks.cases.token_check import ByToken
from benchmarks.harness.batches import rotating_sets
from benchmarks.harness.draw import Draw
from benchmarks.harness.work import Args, Case, Work, ours_on

HEADS = 64
TOPK, _RATIO = 512, 4
V32 = "select_v32"
"""The group of DeepSeek-V3.2's selection: 2048 of all tokens."""
SELECTIONS = {"select": (TOPK, _RATIO), V32: (2048, 1)}
"""Number of selected rows, and tokens per row, by group."""
_EDGE_TOKENS, _EDGE_CONTEXT = 12, 8192
_BY_TOKEN = (0, 1, 3, 4)
_PAGES = {"block_size": BLOCK_SIZE, "layout": INDEXER.tag}


def logits(*args: Tensor, impl: str | None = None) -> Tensor:
    num_rows = args[-1].shape[1] * BLOCK_SIZE
    return dsv4_ops.indexer_logits(
        *args, block_size=BLOCK_SIZE, num_rows=num_rows, impl=impl or ours_on(args[0])
    )


def select(*args: Tensor, topk: int, compress_ratio: int, impl: str | None = None) -> Tensor:
    return dsv4_ops.indexer_select(
        *args, block_size=BLOCK_SIZE, compress_ratio=compress_ratio, topk=topk,
        impl=impl or ours_on(args[0]),
    )  # fmt: skip


def selection(group: str) -> dict[str, int]:
    """Return the settings that ``indexer_select`` takes and ``indexer_logits`` does not."""
    topk, ratio = SELECTIONS[group]
    return {"topk": topk, "compress_ratio": ratio}


def indexer_cases(
    group: str, batches: Sequence[int], contexts: Sequence[int], *, smoke: bool
) -> list[Case]:
    """Make a case with absent tokens, requests and blocks, then cases with equal contexts."""
    edges = functools.partial(_edge_work, group, smoke=smoke)
    context = _EDGE_CONTEXT // (4 if smoke else 1)
    cases = [_case(group, _EDGE_TOKENS, context, edges, "adversarial")]
    for tokens in batches:
        for context in contexts:
            build = functools.partial(indexer_work, group, tokens, context, smoke=smoke)
            cases.append(_case(group, tokens, context, build))
    return cases


def _case(
    group: str, tokens: int, context: int, build: Callable[[torch.device], Work], variant: str = ""
) -> Case:
    return Case(
        group, f"{tokens} x {context} tokens", build, rows=tokens, requests=tokens,
        variant=variant, timed=not variant, labels={"context": context},
    )  # fmt: skip


def cost(group: str, tokens: int, rows: int) -> tuple[int, int]:
    """Return bytes and FLOP of a call. It moves keys, block ids, queries, weights and results."""
    result = 4 * (rows if group == "logits" else SELECTIONS[group][0])
    vectors = HEADS * (INDEXER.head_dim + 4) + 8
    moved = rows * INDEXER.row_bytes + -(-rows // BLOCK_SIZE) * 4 + vectors + result
    return tokens * moved, 2 * tokens * rows * HEADS * INDEXER.head_dim


def indexer_work(
    group: str, tokens: int, context: int, device: torch.device, *, smoke: bool
) -> Work:
    topk, ratio = SELECTIONS.get(group, (TOPK, _RATIO))
    rows = context // ratio
    moved, flop = cost(group, tokens, rows)
    draw, count = Draw(device, context), rotating_sets(moved, device)
    columns = -(-rows // BLOCK_SIZE)
    cache, tables = paged(INDEXER, count, tokens, columns, draw, smoke=smoke)
    lens = torch.full((tokens,), rows, dtype=torch.int32, device=device)
    where = lens if group == "logits" else lens.long() * ratio - 1
    requests = torch.arange(tokens, dtype=torch.int32, device=device)
    sets: list[Args] = []
    of_baseline: list[Args] = []
    for table in tables:
        q, weights = draw.normal(tokens, HEADS, INDEXER.head_dim), draw.normal(tokens, HEADS)
        query = (q.to(torch.float8_e4m3fn), weights)
        sets.append((*query, cache, where, requests, table))
        of_baseline.append(deep_gemm.arguments(*query, cache, lens, table, block_size=BLOCK_SIZE))
    baseline: Callable[..., Any] = functools.partial(deep_gemm.logits_call, of_baseline, BLOCK_SIZE)
    if group in SELECTIONS:
        baseline = functools.partial(deep_gemm.select_call, of_baseline, BLOCK_SIZE, topk)
    return _work(group, sets, (moved, flop), baseline=baseline, baseline_sets=of_baseline)


def _work(group: str, sets: Sequence[Args], cost: tuple[int, int], **more: Any) -> Work:
    rows = sets[0][5].shape[1] * BLOCK_SIZE
    of_group = selection(group) if group in SELECTIONS else {"num_rows": rows}
    op = "logits" if group == "logits" else "select"
    keys = rows // 4  # ByToken counts keys of 512 values; the indexer's keys have 128
    check = ByToken(f"indexer_{op}", {**_PAGES, **of_group}, _BY_TOKEN, lambda args: keys)
    call = functools.partial(select, **of_group) if op == "select" else logits
    return check.work(call, sets, cost, **more)


def _edge_work(group: str, device: torch.device, *, smoke: bool) -> Work:
    """Build tokens that see no rows, few rows, or too many, and absent requests and blocks."""
    context = _EDGE_CONTEXT // (4 if smoke else 1)
    work = indexer_work(group, _EDGE_TOKENS, context, device, smoke=smoke)
    q, weights, cache, where, requests, table = work.sets[0]
    topk, ratio = SELECTIONS.get(group, (TOPK, _RATIO))
    seen = [0, 1, topk - 1, topk + 1, 2**28, -1] * (_EDGE_TOKENS // 6)
    lens = torch.tensor(seen, device=device)
    where.copy_(lens if group == "logits" else lens * ratio - 1)
    requests[2], requests[9] = -1, _EDGE_TOKENS  # tokens of absent requests that would see rows
    table[3, ::2], table[4, 1::3] = -1, 2**30
    return _work(group, [(q, weights, cache, where, requests, table)], (0, 0))
