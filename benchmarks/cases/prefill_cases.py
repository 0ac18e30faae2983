"""Cases of sparse MLA's prefill: a request selects compressed rows (C4) or sees all (C128)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import dsv4_ops
from benchmarks.baselines import flash_mla
from benchmarks.baselines.prefill import Context
from benchmarks.cases.attention_calls import PREFILLS, SCALE, prefill_settings
from benchmarks.cases.attention_cases import Shape, shape_case, uniform
from benchmarks.cases.attention_draws import C4, C128, PAGE, PAGES, WINDOW, AttentionDraw
from benchmarks.cases.token_check import ByToken
from benchmarks.harness.batches import rotating_sets
from benchmarks.harness.work import Args, Case, Work
from dsv4_ops.core.layout import round_up

PREFIX, LONG_PREFIX = 16384, 131072
"""Tokens of a request before the step."""

_TILE = 128
"""The width of FlashMLA's lists is a multiple of this number."""


def _keys(args: Args) -> int:
    """Return the number of a token's keys: selected rows, or rows of C128's block table."""
    table, selected = args[6], args[7]
    return int(WINDOW + (table.shape[1] * PAGES[C128] if selected is None else selected.shape[1]))


def selecting_cases(
    tokens: Sequence[int], models: Sequence[tuple[int, int]], prefix: int = PREFIX
) -> list[Case]:
    """Make C4 layers for models, as pairs (heads, top-k)."""
    return [
        _case(uniform(count, heads, width), _context(count, prefix, C4), prefix, "")
        for heads, width in models
        for count in tokens
    ]


def dense_cases(
    tokens: Sequence[int], heads: Sequence[int], prefix: int = LONG_PREFIX, table_rows: int = 0
) -> list[Case]:
    """Make C128 layers, whose tokens see all complete rows; ``table_rows`` widens the tables."""
    return [_dense(count, each, prefix, table_rows) for each in heads for count in tokens]


def _dense(tokens: int, heads: int, prefix: int, table_rows: int) -> Case:
    context = _context(tokens, prefix, C128)
    first = context.length - tokens
    seen = tuple((first + token + 1) // C128 for token in range(tokens))
    shape = Shape(heads, context.compressed, (WINDOW,) * tokens, seen)
    variant = "C128" if prefix == LONG_PREFIX else f"C128, behind {prefix} tokens"
    if table_rows:
        variant = f"{variant}, table of {table_rows} rows"
    return _case(shape, context, prefix, variant, table_rows)


def _context(tokens: int, prefix: int, ratio: int) -> Context:
    """Return a context of the prefix in whole blocks, a window less one token, and ``tokens``."""
    return Context(tokens, round_up(prefix, PAGE) + WINDOW - 1 + tokens, ratio)


def _case(shape: Shape, context: Context, prefix: int, variant: str, table_rows: int = 0) -> Case:
    build = functools.partial(prefill_work, shape, context, prefix, table_rows)
    case = shape_case("prefill", shape, build, variant)
    gathered = context.compressed + context.window
    labels = {**case.labels, "context": context.length, "gathered_rows": gathered}
    return dataclasses.replace(case, requests=1, labels=labels)


class _Rows(NamedTuple):
    """Rows of a request, how many of them FlashMLA gets, and the rows of each token (-1: none)."""

    cache: Tensor
    table: Tensor
    block_size: int
    held: int
    listed: Tensor

    def dense(self) -> Tensor:
        """Return the rows in bf16."""
        length = torch.tensor([self.held], dtype=torch.int32, device=self.table.device)
        size = self.block_size
        return dsv4_ops.gather_k_cache(
            self.cache, length, None, self.table, block_size=size, num_rows=self.held
        )[0]


def prefill_work(
    shape: Shape, context: Context, prefix: int, table_rows: int, device: torch.device
) -> Work:
    """Build tokens of a request after a prefix. The baseline gets gathered bf16 rows."""
    draw, tokens, ratio = AttentionDraw(device, shape.tokens), shape.tokens, context.ratio
    lens = draw.ints(*shape.swa_lens) + draw.ints(*shape.extra_lens)
    sink, step = draw.normal(shape.heads), torch.arange(tokens, device=device)
    before = round_up(prefix, PAGE) // PAGE  # blocks that the window cache has freed
    selectable = prefix // ratio if ratio == C4 else context.compressed

    def one_set() -> tuple[Args, Args]:
        """Return the arguments of our op and of the baseline."""
        request = torch.zeros(tokens, dtype=torch.int32, device=device)
        q = draw.queries(tokens, shape.heads)
        listed = step[:, None] + torch.arange(WINDOW, device=device)
        cache, last = draw.cache(PAGE, (1, -(-context.window // PAGE)))
        swa = _Rows(cache, last, PAGE, context.window, listed)
        extra = _compressed(draw, shape, context, selectable, table_rows)
        pages = torch.cat([last.new_full((1, before), -1), last], 1)
        selected = extra.listed.int() if ratio == C4 else None
        window = (swa.cache, context.length - tokens + step, request, pages)
        ours = (q, *window, extra.cache, extra.table, selected, sink)
        return ours, (q, *_gathered(swa, extra), lens, sink)

    pairs = [one_set()]
    selected = pairs[0][0][7]
    seen = context.compressed if selected is None else int(selected.unique().numel())
    entries = None if ratio == C4 else 0  # bytes of the lists (None: 4 per key); C128 has no lists
    cost = shape.cost(entries, seen + context.window)
    pairs += [one_set() for _ in range(rotating_sets(cost[0], device) - 1)]
    check = ByToken("sparse_mla_prefill", prefill_settings(ratio), (0, 2, 3, 7), _keys)
    return check.work(
        PREFILLS[ratio], [ours for ours, _ in pairs], cost,
        baseline=functools.partial(flash_mla.prefill_call, SCALE),
        baseline_sets=[second for _, second in pairs], baseline_note=context.note, details=context,
    )  # fmt: skip


def _compressed(
    draw: AttentionDraw, shape: Shape, context: Context, selectable: int, table_rows: int
) -> _Rows:
    """Make the compressed rows of the request. A C4 token lists some of the first ``selectable``
    rows, a C128 token all rows that it sees. ``table_rows`` widens the table beyond the request."""
    size = PAGES[context.ratio]
    cache, table = draw.cache(size, (1, -(-context.compressed // size)))
    table = pad(table, (0, max(0, table_rows // size - table.shape[1])), value=-1)
    if context.ratio == C4:
        listed = draw.rows(shape.tokens, shape.width, selectable)
    else:
        row = torch.arange(shape.width, device=draw.device)
        listed = torch.where(row < draw.ints(*shape.extra_lens)[:, None], row, -1)
    return _Rows(cache, table, size, selectable, listed)


def _gathered(swa: _Rows, extra: _Rows) -> tuple[Tensor, Tensor]:
    """Return bf16 rows [num_rows, 1, 512], compressed rows first, and the list of each token."""
    rows = torch.cat([extra.dense(), swa.dense()])
    indices = torch.cat([swa.listed + extra.held, extra.listed], 1)
    width = indices.shape[1]
    indices = pad(indices, (0, round_up(width, _TILE) - width), value=-1).to(torch.int32)
    return rows[:, None].contiguous(), indices[:, None].contiguous()
