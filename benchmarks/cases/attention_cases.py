"""Cases of sparse MLA: decode steps of several shapes, and ragged steps."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import flash_mla
from benchmarks.cases.attention_calls import (
    SCALE,
    decode,
    decode_paged,
    plan_and_decode,
    plan_and_decode_paged,
    plan_of,
    settings,
)
from benchmarks.cases.attention_draws import C4, C128, PAGE, PAGE_128, WINDOW, AttentionDraw, slots
from benchmarks.cases.token_check import ByToken
from benchmarks.harness.batches import mixed_lengths, rotating_sets
from benchmarks.harness.work import Args, Case, Work
from dsv4_ops.core.layout import MainLayout

_SELECTED_FROM = 4  # candidate rows per selected row
_LONGEST = 131072
_EDGE_TOKENS = 24
_BY_TOKEN = (0, 2, 3, 5, 6)  # arguments with a row per token, in both ops
DECODE = ByToken(
    "sparse_mla_decode", settings(PAGE), _BY_TOKEN,
    lambda args: args[2].shape[1] + (0 if args[5] is None else args[5].shape[1]),
)  # fmt: skip
PAGED = ByToken(
    "sparse_mla_decode_paged", settings(PAGE_128), _BY_TOKEN,
    lambda args: args[2].shape[1] + args[7].shape[1] * PAGE_128,
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Tokens, each of which attends to its own rows."""

    heads: int
    width: int  # columns of the list of compressed rows; 0 for a window alone
    swa_lens: tuple[int, ...]  # window rows of every token
    extra_lens: tuple[int, ...]  # compressed rows of every token

    @property
    def tokens(self) -> int:
        return len(self.swa_lens)

    @property
    def keys(self) -> str:
        return f"{WINDOW}+{self.width}" if self.width else str(WINDOW)

    def cost(self, index_bytes: int | None = None, rows: int | None = None) -> tuple[int, int]:
        """Return bytes and FLOP of a call that reads each token's rows, or ``rows`` rows in all."""
        keys = sum(self.swa_lens) + sum(self.extra_lens)
        queries = self.tokens * self.heads * MainLayout.head_dim
        moved = (keys if rows is None else rows) * MainLayout(PAGE).row_bytes + 2 * 2 * queries
        moved += 4 * keys if index_bytes is None else index_bytes
        return moved, 2 * self.heads * keys * (MainLayout.head_dim + MainLayout.head_dim)


def uniform(tokens: int, heads: int, width: int) -> Shape:
    """Make full lists for every token."""
    return Shape(heads, width, (WINDOW,) * tokens, (width,) * tokens)


def ragged(tokens: int, heads: int, width: int, ratio: int) -> Shape:
    """Make contexts from 100 to 128k tokens, most of them short."""
    generator = torch.Generator().manual_seed(tokens)
    contexts = mixed_lengths(tokens, longest=_LONGEST, generator=generator).tolist()
    swa = tuple(min(context, WINDOW) for context in contexts)
    return Shape(heads, width, swa, tuple(min(context // ratio, width) for context in contexts))


def decode_cases(batches: Sequence[int], heads: Sequence[int], widths: Sequence[int]) -> list[Case]:
    """Make a case with adversarial entries, then cases with full lists for every shape."""
    edges = functools.partial(_edge_work, heads[0], widths[0])
    cases = [shape_case("decode", uniform(_EDGE_TOKENS, heads[0], widths[0]), edges, "adversarial")]
    for count, width, tokens in itertools.product(heads, widths, batches):
        shape = uniform(tokens, count, width)
        cases.append(shape_case("decode", shape, functools.partial(decode_work, shape)))
    return cases


def window_cases(batches: Sequence[int], heads: int) -> list[Case]:
    """Make calls of layers without compressed rows."""
    shapes = [uniform(tokens, heads, 0) for tokens in batches]
    return [shape_case("window", shape, functools.partial(decode_work, shape)) for shape in shapes]


def mtp_cases(requests: Sequence[int], heads: int, width: int, per_request: int) -> list[Case]:
    """Make requests of several tokens, as in speculative decoding; each token selects its rows."""
    work = functools.partial(decode_work, per_request=per_request)
    shapes = [uniform(count * per_request, heads, width) for count in requests]
    builds = [functools.partial(work, shape) for shape in shapes]
    variant = f"{per_request} a request"
    return [shape_case("mtp", *each, variant) for each in zip(shapes, builds, strict=True)]


def paged_cases(
    batches: Sequence[int], heads: int, width: int, lengths: Sequence[int]
) -> list[Case]:
    """Make C128 layers for requests of equal length, with blocks of 2 rows."""
    cases = []
    for tokens, rows in itertools.product(batches, lengths):
        shape = Shape(heads, width, (WINDOW,) * tokens, (rows,) * tokens)
        variant = "" if rows == width else f"{rows} rows each"
        cases.append(shape_case("paged", shape, functools.partial(paged_work, shape), variant))
    return cases


def ragged_cases(batches: Sequence[int], heads: int, widths: tuple[int, int]) -> list[Case]:
    """Make requests of very different lengths: C4, then C128."""
    cases = []
    for tokens in batches:
        for name, ratio, width, work, lens in (
            ("C4", C4, widths[0], decode_work, 6),
            ("C128", C128, widths[1], paged_work, 5),
        ):
            shape = ragged(tokens, heads, width, ratio)
            build = functools.partial(work, shape)
            variants: dict[str, Callable[[torch.device], Work]] = {
                name: build,
                f"{name}, planned": functools.partial(planned, build, lens),
                f"{name}, planning counted": functools.partial(planning, build),
            }
            cases += [shape_case("ragged", shape, each, key) for key, each in variants.items()]
    return cases


def planned(build: Callable[[torch.device], Work], lens: int, device: torch.device) -> Work:
    """Build the case with a plan, made from the numbers of compressed rows (argument ``lens``)."""
    work = build(device)
    return dataclasses.replace(work, sets=[(*args, plan_of(args, lens)) for args in work.sets])


def planning(build: Callable[[torch.device], Work], device: torch.device) -> Work:
    """Build the case; our call and the baseline's call make their own plans."""
    work = build(device)
    baseline: Any = work.baseline
    call = {decode: plan_and_decode, decode_paged: plan_and_decode_paged}[work.call]
    return dataclasses.replace(work, call=call, baseline=functools.partial(baseline, planned=False))


def shape_case(
    group: str, shape: Shape, build: Callable[[torch.device], Work], variant: str = ""
) -> Case:
    """Name a case by its group and shape. Adversarial cases are checked but not timed."""
    return Case(
        group, f"{shape.tokens} x {shape.heads} heads, {shape.keys}", build, rows=shape.tokens,
        requests=shape.tokens, variant=variant, timed=variant != "adversarial",
        labels={"heads": shape.heads, "keys": shape.keys},
    )  # fmt: skip


def decode_work(shape: Shape, device: torch.device, per_request: int = 1) -> Work:
    """Build a case that lists window and selected rows as slots."""
    draw, cost = AttentionDraw(device, shape.tokens), shape.cost()
    count, tokens = rotating_sets(cost[0], device), shape.tokens
    swa_cache, swa_tables = draw.cache(PAGE, (count, tokens, WINDOW // PAGE + 1))
    swa_lens, sink = draw.ints(*shape.swa_lens), draw.normal(shape.heads)
    candidates = _SELECTED_FROM * shape.width
    if shape.width:
        pages = -(-candidates // PAGE)
        extra_cache, extra_tables = draw.cache(PAGE, (count, tokens, pages))
        extra_lens = draw.ints(*shape.extra_lens)
    sets: list[Args] = []
    for place in range(count):
        rows = draw.window(tokens, swa_tables.shape[2])
        swa = (swa_cache, slots(swa_tables[place], rows, PAGE, swa_lens), swa_lens)
        extra: tuple[Tensor | None, ...] = (None, None, None)
        if shape.width:
            rows = draw.rows(tokens, shape.width, candidates)
            extra = (extra_cache, slots(extra_tables[place], rows, PAGE, extra_lens), extra_lens)
        sets.append((draw.queries(tokens, shape.heads), *swa, *extra, sink))
    of_baseline = [
        flash_mla.decode_arguments(*args, block_sizes=(PAGE, PAGE), per_request=per_request)
        for args in sets
    ]
    baseline = functools.partial(flash_mla.decode_call, of_baseline, SCALE)
    return DECODE.work(decode, sets, cost, baseline=baseline, baseline_sets=of_baseline)


def paged_work(shape: Shape, device: torch.device) -> Work:
    """Build a case that attends to a block table's first rows. The baseline gets their slots."""
    draw, tokens = AttentionDraw(device, shape.tokens), shape.tokens
    read = sum(-(-length // PAGE_128) for length in shape.extra_lens) + sum(shape.swa_lens)
    cost, columns = shape.cost(4 * read), -(-shape.width // PAGE_128)
    count = rotating_sets(cost[0], device)
    swa_cache, swa_tables = draw.cache(PAGE, (count, tokens, WINDOW // PAGE + 1))
    extra_cache, tables = draw.cache(PAGE_128, (count, tokens, columns))
    swa_lens, extra_lens = draw.ints(*shape.swa_lens), draw.ints(*shape.extra_lens)
    requests = torch.arange(tokens, dtype=torch.int32, device=device)
    row = torch.arange(shape.width, device=device).expand(tokens, -1)
    sink = draw.normal(shape.heads)
    sets: list[Args] = []
    of_baseline: list[Args] = []
    for place in range(count):
        rows = draw.window(tokens, swa_tables.shape[2])
        q, table = draw.queries(tokens, shape.heads), tables[place].clone()
        swa = (swa_cache, slots(swa_tables[place], rows, PAGE, swa_lens), swa_lens)
        sets.append((q, *swa, extra_cache, extra_lens, requests, table, sink))
        extra = (extra_cache, slots(table, row, PAGE_128, extra_lens), extra_lens)
        sizes = (PAGE, PAGE_128)
        of_baseline.append(flash_mla.decode_arguments(q, *swa, *extra, sink, block_sizes=sizes))
    baseline = functools.partial(flash_mla.decode_call, of_baseline, SCALE)
    return PAGED.work(decode_paged, sets, cost, baseline=baseline, baseline_sets=of_baseline)


def _edge_work(heads: int, width: int, device: torch.device) -> Work:
    """Build lists with absent slots among valid slots; some lists are empty or end early."""
    work = decode_work(uniform(_EDGE_TOKENS, heads, width), device)
    q, swa_cache, swa, _, extra_cache, extra, _, sink = work.sets[0]
    absent = torch.tensor([-1, -(2**31), 2**31 - 1, 10**6 * PAGE], device=device).to(torch.int32)
    for listed in (swa, extra):
        listed[::3, ::5] = absent[torch.arange(listed[0, ::5].shape[0], device=device) % 4]
    lens = torch.tensor([0, 1, 63, 65, 2**31 - 1, -1], device=device).to(torch.int32)
    # clone the tensors, because Dynamo guards on the base of a view
    swa_lens = lens.repeat(_EDGE_TOKENS // 6).clone()
    extra_lens = lens.repeat_interleave(_EDGE_TOKENS // 6).clone()
    args = (q, swa_cache, swa, swa_lens, extra_cache, extra, extra_lens, sink)
    return DECODE.work(decode, [args], (0, 0))
