"""Cases of sparse MLA over gathered bf16 rows, the input of FlashMLA's sparse prefill."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.baselines import flash_mla
from benchmarks.cases.attention_calls import SCALE, gathered
from benchmarks.cases.attention_draws import AttentionDraw
from benchmarks.cases.token_check import ByToken
from benchmarks.harness.batches import rotating_sets
from benchmarks.harness.work import Args, Case, Work
from dsv4_ops.core.layout import MainLayout

ROWS = 8192
"""Workspace rows of an input set: as many as a C4 request of about 30k tokens needs."""


_CHECK = ByToken(
    "sparse_mla_gathered", {"softmax_scale": SCALE}, (0, 2, 3), lambda args: args[2].shape[1]
)


def gathered_cases(
    tokens: Sequence[int], models: Sequence[tuple[int, int]], rows: int = ROWS
) -> list[Case]:
    """Make cases with full lists of distinct rows, for pairs (heads, keys per token)."""
    return [_case(count, heads, keys, rows) for heads, keys in models for count in tokens]


def _case(tokens: int, heads: int, keys: int, rows: int) -> Case:
    return Case(
        "gathered", f"{tokens} x {heads} heads, {keys} keys",
        functools.partial(gathered_work, tokens, heads, keys, rows), rows=tokens,
        labels={"heads": heads, "keys": str(keys)},
    )  # fmt: skip


def cost(heads: int, listed: Tensor) -> tuple[int, int]:
    """Return bytes and FLOP of a call that reads each listed row once and writes the output."""
    queries, width = listed.shape[0] * heads * MainLayout.head_dim, MainLayout.head_dim
    moved = 2 * int(listed.unique().numel()) * width + 2 * 2 * queries + listed.nbytes
    return moved, 2 * heads * listed.numel() * (width + width)


def gathered_work(tokens: int, heads: int, keys: int, rows: int, device: torch.device) -> Work:
    """Build a case in which every token lists random rows of the input set's workspace."""
    draw = AttentionDraw(device, tokens)
    listed = draw.rows(tokens, keys, rows).int()
    moved, flop = cost(heads, listed)
    lens, sink = draw.ints(*(keys,) * tokens), draw.normal(heads)
    sets: list[Args] = []
    for _ in range(rotating_sets(moved, device)):
        q, kv = draw.queries(tokens, heads), draw.values(rows, MainLayout.head_dim)
        sets.append((q, kv, listed, lens, sink))
        listed = draw.rows(tokens, keys, rows).int()
    rest = [(q, kv[:, None], listed[:, None], *rest) for q, kv, listed, *rest in sets]
    baseline = functools.partial(flash_mla.prefill_call, SCALE)
    return _CHECK.work(gathered, sets, (moved, flop), baseline=baseline, baseline_sets=rest)
