"""Prefill calls of sparse MLA, and plans for decodes, for tests on GPUs and in the interpreter."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core.layout import MainLayout, PlainLayout
from dsv4_ops.lowering.inspect import compile_and_get_code
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.sparse_mla import BARE
from tests.helpers import INT32_MAX, INT32_MIN, i32, i64
from tests.support import attention_batches as batches
from tests.support.attention_batches import DECODE, DEVICE, WINDOW, cache_of, generator, integers

PREFILL = "sparse_mla_prefill"
GRAPHS = {"triton.cudagraphs": True, "triton.cudagraph_or_error": True}
MODES = {"C4": (4, 64), "C128": (128, 2), "window": (1, 64)}  # ratio, rows per block
BAD = (-1, INT32_MIN, INT32_MAX)
PLACES = (0, 2, 3, 7)  # of tensors with a row per token


def unsplit(case: Case) -> Case:
    """Return the call without splits of keys, which "auto" uses for few tokens."""
    return Case(f"{case.name}, unsplit", case.tensors, {**case.settings, "impl": "triton"})


def requests_of(made: torch.Generator, tokens: int, longest: int) -> tuple[Tensor, Tensor]:
    """Sample positions and requests of first and later chunks, some of them one token."""
    positions, owners = [], []
    while len(positions) < tokens:
        room = tokens - len(positions)
        count = min(room, int(integers(made, 1, 2 + tokens // (1 + len(positions) % 3), 1)))
        start = int(integers(made, 0, longest - count + 1, 1)) if len(set(owners)) % 3 else 0
        owner = len(set(owners))
        positions += range(start, start + count)
        owners += [owner] * count
    return i64(positions), i32(owners)


def pages_of(
    made: torch.Generator, stored: torch.Generator, size: int, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Make a cache of random blocks, half of them NaN, and a table of the others, some absent."""
    count = shape[0] * shape[1]
    pages = torch.randperm(2 * count, generator=stored)[:count]
    slots = (pages[:, None] * size + torch.arange(size)).flatten()
    cache = cache_of(MainLayout(size), 2 * count, slots, batches.keys_of(stored, len(slots)))
    table = pages[torch.randperm(count, generator=made)].view(shape).int()
    for bad in (*BAD, 2 * count):
        if count > 8:
            table.view(-1)[integers(made, 0, count, 1).long()] = bad
    return cache, table


def prefill_case(
    seed: int,
    tokens: int,
    heads: int,
    mode: str,
    *,
    topk: int = 512,
    longest: int = 2500,
    max_reqs: int = 8,
    block: int = 64,
    window: int = WINDOW,
    cache_seed: int = 0,
) -> Case:
    """Make ragged requests over random blocks, some absent; other blocks are NaN. C4 lists ``topk``
    rows, some absent or in the future; C128 reads all rows; the rest has a window only."""
    made, stored = generator(seed + 3), generator(cache_seed)
    ratio, extra_block = MODES[mode]
    positions, owners = requests_of(made, tokens, longest)
    owners %= max_reqs
    positions[5::9] = i64([-1, INT32_MAX, 2**40])[integers(made, 0, 3, len(positions[5::9])).long()]
    owners[7::11] = i32([-1, max_reqs, *BAD])[integers(made, 0, 5, len(owners[7::11])).long()]
    q = batches.normal(made, tokens, heads, 512)
    columns = -(-longest // block)
    cache, table = pages_of(made, stored, block, (max_reqs, columns))
    extra: list[Tensor | None] = [None, None, None]
    if mode != "window":
        columns = -(-(longest // ratio) // extra_block)
        extra[:2] = pages_of(made, stored, extra_block, (max_reqs, columns))
    if mode == "C4":
        extra[2] = selected(made, positions, ratio, topk)
    changed = {"window_size": window, "compress_ratio": ratio}
    numbers = batches.settings_of(block, extra_block, **changed)
    del numbers["num_splits"], numbers["batch_invariant"]
    tensors = (q, cache, positions, owners, table, *extra, batches.sink_of(made, heads))
    return Case(mode, tensors, numbers)


def selected(made: torch.Generator, positions: Tensor, ratio: int, topk: int) -> Tensor:
    """Sample visible rows of a token in any order; 1 in 10 is absent or not visible yet."""
    visible = (positions.clamp(0, INT32_MAX - 1) + 1)[:, None] // ratio
    shape = (len(positions), topk)
    rows = (torch.rand(shape, generator=made) * visible).int()
    strange = torch.rand(shape, generator=made) < 0.1
    none = i32([-1, *BAD, 10**6])[integers(made, 0, 5, *shape).long()]
    future = (visible + integers(made, 0, 3, *shape)).clamp(max=INT32_MAX).int()
    none = torch.where(torch.rand(shape, generator=made) < 0.5, none, future)
    rows = torch.where(strange, none, rows)
    behind = torch.arange(topk) >= visible  # entries that the indexer cannot fill
    return torch.where(behind, -1, rows)


def with_plan(case: Case, plan: Tensor | None) -> Case:
    return Case(case.name, (*case.tensors[:-3], plan, *case.tensors[-2:]), case.settings)


def plan_of(case: Case, num_programs: int = 132) -> Tensor:
    """Make the plan of a call of a decode op."""
    extra = case.tensors[5 if case.tensors[5] is None or case.tensors[5].dim() == 1 else 6]
    heads = case.tensors[0].shape[1]
    return ops.sparse_mla_plan(case.tensors[3], extra, num_heads=heads, num_programs=num_programs)


def stale_plan(case: Case, seed: int, num_programs: int = 132) -> Tensor:
    """Make a plan for the same number of tokens with other lengths."""
    made, tokens = generator(seed), case.tensors[0].shape[0]
    lens = integers(made, 0, 9000, tokens) * integers(made, 0, 2, tokens)
    lens[0] = 100_000
    heads = case.tensors[0].shape[1]
    return ops.sparse_mla_plan(lens, None, num_heads=heads, num_programs=num_programs)


def adversarial_plan(
    plan: Tensor, victims: Tensor, num_tokens: int, seed: int, *, anywhere: bool = False
) -> Tensor:
    """Spoil the plan's rows of the tokens ``victims``, and its unused rows: absent tokens, and
    impossible splits and starts. Spoiled rows name no other token of the batch. Their starts are
    outside of the buffer of partial results or, if ``anywhere``, also inside."""
    made = generator(seed)
    room = 2 * (plan.shape[0] - num_tokens)
    values = (0, 1, 2, 7, 130, -1, room - 1, room, INT32_MAX - 1, INT32_MAX, INT32_MIN)
    wild = i32(values)[integers(made, 0, len(values), *plan.shape).long()]
    starts = (-1, -7, room - 1, room, room + 1, INT32_MAX, INT32_MIN)
    starts = (*range(room + 1), *starts) if anywhere else starts
    wild[:, 3] = i32(starts)[integers(made, 0, len(starts), len(plan)).long()]
    nobody = i32([-1, num_tokens, num_tokens + 5, INT32_MAX, INT32_MIN])
    owners = torch.cat([victims.int(), nobody])
    wild[:, 0] = owners[integers(made, 0, len(owners), len(plan)).long()]
    spoiled = torch.isin(plan[:, 0], victims) | (plan[:, 0] < 0)
    return torch.where(spoiled[:, None], wild, plan)


def plain_case(name: str) -> tuple[Case, Case]:
    """Make a call over plain caches, and the same call with gaps between compressed rows."""
    made = generator(4)
    swa, extra = (PlainLayout(size).allocate(4) for size in (64, 2))
    for cache in (swa, extra):
        cache.copy_(torch.randn(cache.shape, generator=made))
    wide = torch.full((4, 2, 1024), math.nan, dtype=extra.dtype)[..., :512]
    wide.copy_(extra)
    tables = (integers(made, 0, 4, 2, 4), integers(made, 0, 4, 2, 4))
    q = torch.randn(3, 8, 512, generator=made).to(torch.bfloat16)
    owners, rows = torch.tensor([0, 1, 0]).int(), integers(made, 0, 8, 3, 5)
    numbers = {"softmax_scale": 512**-0.5, "swa_block_size": 64, "extra_block_size": 2}
    numbers["layout"] = "plain"
    if name == PREFILL:
        numbers |= {"window_size": 70, "compress_ratio": 4}
        before, after = (swa, torch.tensor([200, 9, 40]), owners, tables[0]), (tables[1], rows)
    else:
        numbers |= {"num_splits": 0, "batch_invariant": False}
        lens, slots = torch.tensor([5, 4, 0]).int(), integers(made, 0, 256, 3, 90)
        before = (swa, slots, torch.tensor([90, 70, 3]).int())
        after = (rows, lens) if name == DECODE else (lens, owners, tables[1])
        after = (*after, *BARE)
    return tuple(
        Case(name, tuple(move(t) for t in (q, *before, cache, *after, None)), numbers)
        for cache in (extra, wide)
    )


def move(tensor: Tensor | None) -> Tensor | None:
    """Copy a tensor to the device with its strides."""
    if tensor is None or tensor.is_contiguous():
        return None if tensor is None else tensor.to(DEVICE)
    base = torch.as_strided(tensor, (4, 2, 1024), (2048, 1024, 1))
    return base.to(DEVICE)[..., :512]


def compiled_and_captured(
    step: Callable[..., Any], static: list[Tensor | None], captured_by: str
) -> tuple[Callable[[], Any], str]:
    """Return a function that replays the compiled step, and the compiled code."""
    torch._dynamo.reset()
    options = GRAPHS if captured_by == "inductor" else {}
    compiled = torch.compile(step, fullgraph=True, options=options)
    _, code = compile_and_get_code(compiled, *static)
    return captured(compiled, static, captured_by), code


def captured(
    step: Callable[..., Any], static: list[Tensor | None], captured_by: str
) -> Callable[[], Any]:
    """Return a function that replays the step and returns its results."""
    if captured_by == "inductor":
        for _ in range(3):
            step(*static)
        return lambda: step(*static)
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        results.append(step(*static))

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return results[0]

    return replay


def replayed(
    replay: Callable[[], Any], static: list[Tensor | None], fresh: list[Tensor | None]
) -> Any:
    """Change all inputs in place and replay without a host sync; return the results."""
    for tensor, value in zip(static, fresh, strict=True):
        if tensor is not None:
            tensor.copy_(value)
    with batches.no_host_sync():
        return replay()
