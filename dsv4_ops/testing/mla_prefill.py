"""Cases, strategies and float64 meaning of sparse MLA for prefill."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.reference import mla_prefill as reference
from dsv4_ops.testing.case import Case, OpTesting, i32
from dsv4_ops.testing.mla_exact import exact_over_both
from dsv4_ops.testing.sparse_mla import (
    HEADS,
    SCALE,
    TAG,
    full_cache,
    one_key_page,
    queries,
    sink_of,
)


def _settings(
    window: int, ratio: int, swa: int, extra: int, *, layout: str = TAG
) -> dict[str, Any]:
    return {
        "softmax_scale": SCALE,
        "window_size": window,
        "compress_ratio": ratio,
        "swa_block_size": swa,
        "extra_block_size": extra,
        "layout": layout,
    }


def _i64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _cases() -> list[Case]:
    pages = torch.cat([one_key_page(value) for value in (2, 4, 6)])
    q, sink = torch.zeros(1, 1, 512, dtype=torch.bfloat16), torch.zeros(1)
    settings = _settings(2, 2, 1, 1)
    request, table = i32([0]), i32([[0, 1, 2]])
    out_of = {value: [[[float(value)] * 512]] for value in (0, 2, 3, 4, 5)}
    one, nothing = [[0.0]], [[-torch.inf]]
    two = [[float(torch.tensor(2.0).log())]]

    def call(position: int, *extra: Tensor | None, **changed: Tensor) -> tuple[Any, ...]:
        swa = changed.get("table", table)
        return (q, pages, _i64([position]), changed.get("request", request), swa, *extra, None)

    none = (None, None, None)
    return [
        Case("first token", call(0, *none), settings, (out_of[2], one)),
        Case("second token sees the first", call(1, *none), settings, (out_of[3], two)),
        Case("third no longer sees the first", call(2, *none), settings, (out_of[5], two)),
        Case("padding", call(-1, *none), settings, (out_of[0], nothing)),
        Case("past any request", call(2**31 - 1, *none), settings, (out_of[0], nothing)),
        Case("no request", call(1, *none, request=i32([1])), settings, (out_of[0], nothing)),
        Case(
            "page of the window that is gone",
            call(2, *none, table=i32([[-1, -1, 1]])),
            settings,
            (out_of[4], one),
        ),
        Case(
            "compressed row 0 alone, all rows of which the token sees one",
            call(2, pages, i32([[0, 1, 2]]), None, table=i32([[3, 3, 3]])),
            settings,
            (out_of[2], one),
        ),
        Case(
            "selected rows, of which only row 0 may be seen yet",
            call(2, pages, i32([[1, 0, 2]]), i32([[1, 0, -1]]), table=i32([[3, 3, 3]])),
            settings,
            (out_of[4], one),
        ),
        Case("sink", (*call(1, *none)[:-1], sink), settings),
        Case(
            "no token",
            (q[:0], pages, _i64([]), request[:0], table, pages, table, i32([[0]])[:0], sink),
            settings,
        ),
    ]


def _table(draw: Any, seed: Any, rows: int, columns: int, num_blocks: int) -> Tensor:
    from hypothesis import strategies as st

    from dsv4_ops.testing.batches import HOSTILE_PAGES

    table = torch.randint(0, num_blocks, (rows, columns), generator=seed).to(torch.int32)
    if table.numel():
        for place in draw(st.lists(st.integers(0, table.numel() - 1), max_size=3)):
            table.view(-1)[place] = draw(st.sampled_from((*HOSTILE_PAGES, num_blocks)))
    return table


def _selected(draw: Any, seed: Any, num_tokens: int, num_rows: int, least: int) -> Tensor:
    from hypothesis import strategies as st

    width = max(draw(st.sampled_from((5, 1, 64, 65, 130))), least)
    chosen = torch.randint(-1, num_rows + 1, (num_tokens, width), generator=seed).to(torch.int32)
    if chosen.numel():
        for place in draw(st.lists(st.integers(0, chosen.numel() - 1), max_size=4)):
            chosen.view(-1)[place] = draw(st.sampled_from((-(2**31), 2**31 - 1, 10**6)))
    return chosen


def _call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    from dsv4_ops.testing.caches import generator

    seed = generator(draw)
    q = queries(draw, seed, settings, min_size)
    num_tokens = q.shape[0]
    num_reqs = max(draw(st.sampled_from((2, 1, 0, 3))), min_size)
    tensors: list[Tensor | None] = []
    for size in ("swa_block_size", "extra_block_size"):
        num_blocks = max(draw(st.sampled_from((4, 1, 3))), min_size)
        columns = max(draw(st.sampled_from((3, 1, 5))), min_size)
        cache = full_cache(seed, settings, size, num_blocks, q)
        tensors += [cache, _table(draw, seed, num_reqs, columns, num_blocks)]
    last = settings["swa_block_size"] * 4
    places = st.sampled_from((last - 1, 0, 1, 2, settings["window_size"], last, -1, 2**31 - 1))
    positions = _i64([draw(places) for _ in range(num_tokens)]).reshape(num_tokens)
    requests = [draw(st.sampled_from((0, 1, -1, num_reqs, 2**31 - 1))) for _ in range(num_tokens)]
    token = (positions, i32(requests).reshape(num_tokens))
    swa_cache, swa_table, extra_cache, extra_table = tensors
    chosen = None
    if min_size or draw(st.booleans()):
        chosen = _selected(draw, seed, num_tokens, last // settings["compress_ratio"], min_size)
    elif draw(st.booleans()):
        extra_cache = extra_table = None
    sink = sink_of(seed) if min_size or draw(st.booleans()) else None
    assert q.shape[1] == HEADS
    window = (q, swa_cache, *token, swa_table)
    return Case("drawn", (*window, extra_cache, extra_table, chosen, sink), settings)


def _precise(
    q: Tensor,
    swa_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    swa_block_table: Tensor,
    extra_cache: Tensor | None,
    extra_block_table: Any,
    topk_indices: Tensor | None,
    attn_sink: Tensor | None,
    **settings: Any,
) -> Any:
    shared, extra = (positions, req_indices), None
    layout = settings["layout"]
    swa = reference.window_keys(
        swa_cache,
        *shared,
        swa_block_table,
        window_size=settings["window_size"],
        block_size=settings["swa_block_size"],
        layout=layout,
    )
    if extra_cache is not None:
        extra = reference.compressed_keys(
            extra_cache,
            topk_indices,
            *shared,
            extra_block_table,
            compress_ratio=settings["compress_ratio"],
            block_size=settings["extra_block_size"],
            layout=layout,
        )
    return exact_over_both(q, swa, extra, attn_sink, settings["softmax_scale"])


sparse_mla_prefill = OpTesting(
    cases=_cases,
    settings=(
        _settings(128, 4, 64, 64),
        _settings(100, 3, 16, 2),
        _settings(1, 128, 64, 2),
        _settings(7, 2, 4, 2, layout="plain"),
    ),
    make=_call,
    precise=_precise,
)
