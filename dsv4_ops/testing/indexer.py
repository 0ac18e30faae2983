"""Cases, strategies and float64 results of the lightning indexer's queries and logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import IndexerLayout, PlainLayout
from dsv4_ops.testing.case import Case, Exact, OpTesting, i32, i64
from dsv4_ops.testing.indexer_scores import Scores, paged_scores

ONE = 0x38
"""The e4m3 code of 1."""

TAG, PLAIN = IndexerLayout.tag, PlainLayout.tag


def _quantize_cases() -> list[Case]:
    q = torch.full((2, 1, 128), 3.0, dtype=torch.bfloat16)
    q[:, :, 126], q[:, :, 127] = 1.0, 2.0
    quarter = torch.tensor([[0.0, 1.0]])  # by which the last pair turns
    weights = torch.tensor([[1.0], [-2.0]])
    # 2^-7 is the scale of 3: 384, 128, 256, and turned -256 and 128
    rows = [[[384.0] * 126 + pair] for pair in ([-256.0, 128.0], [128.0, 256.0])]
    scale = {"softmax_scale": 0.5}
    nothing = torch.zeros(1, 2, 128, dtype=torch.bfloat16)
    ones = torch.ones(1, 2, dtype=torch.bfloat16)
    return [
        Case(
            "a quarter turn, and no such position",
            (q, weights, i64([0, 1]), quarter),
            scale,
            (rows, [[0.00390625], [-0.0078125]]),
        ),
        Case(
            "zeros have the smallest scale",
            (nothing, ones, i64([-1]), quarter),
            scale,
            ([[[0.0] * 128] * 2], [[2.0**-23] * 2]),
        ),
        Case("no token", (q[:0], weights[:0], i64([]), quarter), scale, ([], [])),
        Case("no head", (q[:, :0], weights[:, :0], i64([0, 1]), quarter), scale, ([[], []],) * 2),
        Case("no pair", (q, weights, i64([0, 1]), quarter[:, :0]), scale),
    ]


def _quantize_call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    from dsv4_ops.testing.caches import generator, keys
    from dsv4_ops.testing.rotation import positions, tables

    num_tokens = max(draw(st.sampled_from((3, 0, 1, 2, 5))), min_size)
    num_heads = 4 if min_size else draw(st.sampled_from((1, 3, 4, 17)))
    rope_dim = 64 if min_size else draw(st.sampled_from((64, 128, 2, 0)))
    table = tables(draw, rope_dim=rope_dim, min_size=min_size)
    q = draw(keys(num_rows=num_tokens * num_heads, width=128, special=128))
    weights = torch.randn(num_tokens, num_heads, generator=generator(draw))
    if min_size or draw(st.booleans()):
        weights = weights.to(torch.bfloat16)
    places = positions(draw, num_tokens=num_tokens, num_positions=table.shape[0])
    return Case("drawn", (q.view(num_tokens, num_heads, 128), weights, places, table), settings)


indexer_quantize_q = OpTesting(
    cases=_quantize_cases,
    settings=({"softmax_scale": 128**-0.5 / 4}, {"softmax_scale": 128**-0.5 / 8}),
    make=_quantize_call,
)


def tiny_query(num_tokens: int) -> tuple[Tensor, Tensor]:
    """Two heads of ones and of minus ones, and their weights 0.5 and 2: a key of ones scores 64, a
    key of minus ones 256."""
    q = torch.ones(num_tokens, 2, 128)
    q[:, 1] = -1
    return q.to(torch.float8_e4m3fn), torch.tensor([[0.5, 2.0]]).repeat(num_tokens, 1)


def tiny_cache() -> Tensor:
    """Two pages of two keys: of ones, of minus ones with scale 2; of NaN, of ones with scale 4."""
    cache = torch.zeros(IndexerLayout(2).shape(2), dtype=torch.uint8)
    cache[0, :128], cache[0, 128:256] = ONE, ONE | 0x80
    cache[1, :128], cache[1, 128:256] = 0x7F, ONE
    for page, scales in enumerate(([1.0, 2.0], [1.0, 4.0])):
        cache[page, 256:264] = torch.tensor(scales).view(torch.uint8)
    return cache


def beyond_int32() -> tuple[Tensor, ...]:
    """Tensors of ``indexer_select`` over pages of 64 rows: the last one whose slots int32 holds,
    the one behind it, and the first."""
    cache, last = IndexerLayout(64).allocate(1).expand(2**26, -1), 2**31 // 64 - 1
    table = i32([[last, last + 1, 0]])
    return (*tiny_query(2), cache, i64([191, 79]), i32([0, 0]), table)


def with_layouts(cases: list[Case]) -> list[Case]:
    """Cases over the tiny cache, then the same over plain caches of the same keys."""
    found = [Case(c.name, c.tensors, {**c.settings, "layout": TAG}, c.expected) for c in cases]
    for dtype in (torch.float32, torch.bfloat16):
        keys = torch.tensor([[1.0, -2.0], [torch.nan, 4.0]], dtype=dtype)
        cache = keys[:, :, None].repeat(1, 1, 128)
        for case in cases:
            q, weights, _, *rest = case.tensors
            assert q is not None
            tensors = (q.to(dtype), weights, cache, *rest)
            settings = {**case.settings, "layout": PLAIN}
            found.append(Case(f"plain {dtype}: {case.name}", tensors, settings, case.expected))
    return found


def _logits_cases() -> list[Case]:
    inf = torch.inf
    table = i32([[1, 0], [0, 9]])
    lens, requests = i32([3, 4, 2, -5, 9]), i32([1, 1, 2, 0, -1])
    rows = [[64.0, 512.0, -inf]] * 2 + [[-inf] * 3] * 3
    settings = {"block_size": 2, "num_rows": 3}
    none = (*tiny_query(0), tiny_cache(), i32([]), i32([]), table)
    cases = [
        Case(
            "pages and requests that do not exist",
            (*tiny_query(5), tiny_cache(), lens, requests, table),
            settings,
            (rows,),
        ),
        Case(
            "behind an unread NaN",
            (*tiny_query(2), tiny_cache(), i32([2, 4]), i32([0, 0]), i32([[0, 1]])),
            {"block_size": 2, "num_rows": 2},
            ([[64.0, 512.0]] * 2,),
        ),
        Case("no token", none, settings, ([],)),
        Case(
            "no column",
            (*tiny_query(1), tiny_cache(), i32([2]), i32([0]), table),
            {"block_size": 2, "num_rows": 0},
            ([[]],),
        ),
        Case(
            "no page in the table",
            (*tiny_query(1), tiny_cache(), i32([2]), i32([0]), i32([[]])),
            settings,
            ([[-inf] * 3],),
        ),
    ]
    return with_layouts(cases)


def _logits_call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    from dsv4_ops.testing.indexer_batches import pages_of

    paged = draw(pages_of(settings=settings, min_size=min_size))
    num_tokens = paged.positions.shape[0]
    lens = (paged.positions.clamp(-2, 2**20) + 1).to(torch.int32)
    if num_tokens:
        for token in draw(st.lists(st.integers(0, num_tokens - 1), max_size=2)):
            lens[token] = draw(st.sampled_from((0, -1, -(2**31), 2**31 - 1)))
    num_rows = max(draw(st.sampled_from((0, 1, 5, 40, 130))), min_size)
    tensors = (paged.q, paged.weights, paged.cache, lens, paged.req_indices, paged.table)
    return Case("drawn", tensors, {**settings, "num_rows": num_rows})


def _precise_logits(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_rows: int,
    layout: str,
) -> tuple[Exact]:
    tensors = (q, weights, k_cache, lens, req_indices, block_table)
    return (paged_scores(*tensors, block_size, num_rows, layout).exact(),)


indexer_logits = OpTesting(
    cases=_logits_cases,
    settings=(
        *({"block_size": size, "layout": TAG} for size in (64, 2, 3)),
        *({"block_size": size, "layout": PLAIN} for size in (64, 3)),
    ),
    make=_logits_call,
    precise=_precise_logits,
)


def _ragged_cases() -> list[Case]:
    k = torch.stack([torch.full((128,), code, dtype=torch.uint8) for code in (ONE, 0xB8, 0x7F)])
    scales = torch.tensor([1.0, 2.0, torch.inf])
    inf = torch.inf
    starts, stops = i32([0, 1, -7, 2, 2**31 - 1]), i32([1, 2, 2, 1, 2**31 - 1])
    rows = [[64.0, -inf, -inf], [-inf, 512.0, -inf], [64.0, 512.0, -inf], *[[-inf] * 3] * 2]
    return [
        Case("spans", (*tiny_query(5), k, scales, starts, stops), {}, (rows,)),
        Case("no key", (*tiny_query(5), k[:0], scales[:0], starts, stops), {}, ([[]] * 5,)),
        Case("no token", (*tiny_query(0), k, scales, starts[:0], stops[:0]), {}, ([],)),
    ]


def _ragged_call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    from dsv4_ops.testing.caches import generator
    from dsv4_ops.testing.indexer_batches import codes, query

    exact, seed = draw(st.booleans()), generator(draw)
    num_tokens = max(draw(st.sampled_from((3, 0, 1, 2, 9, 18))), min_size)
    num_k = max(draw(st.sampled_from((7, 0, 1, 2, 40, 130))), min_size)
    q, weights = query(
        seed, num_tokens, 16 if min_size else draw(st.sampled_from((1, 3, 16))), exact
    )
    scales = torch.exp2(torch.randint(-3, 3, (num_k,), generator=seed).float())
    bounds = torch.randint(-2, num_k + 3, (2, num_tokens), generator=seed, dtype=torch.int32)
    start, stop = bounds.sort(0).values if draw(st.booleans()) else bounds
    keys = codes(seed, (num_k, 128), exact)
    return Case("drawn", (q, weights, keys, scales, start.clone(), stop.clone()), settings)


def _precise_ragged(
    q: Tensor, weights: Tensor, k: Tensor, scales: Tensor, row_start: Tensor, row_stop: Tensor
) -> tuple[Exact]:
    row = torch.arange(k.shape[0], device=q.device)
    inside = (row >= row_start[:, None]) & (row < row_stop[:, None])
    keys = k.view(torch.float8_e4m3fn).to(torch.float64).expand(q.shape[0], -1, -1)
    return (Scores.of(q, weights, keys, scales.expand(q.shape[0], -1), inside).exact(),)


indexer_logits_ragged = OpTesting(
    cases=_ragged_cases, settings=({},), make=_ragged_call, precise=_precise_ragged
)
