"""Cases, strategies and meaning in float64 of the lightning indexer's selection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.testing.case import Case, Exact, OpTesting, i32, i64
from dsv4_ops.testing.indexer import PLAIN, TAG, tiny_cache, tiny_query, with_layouts
from dsv4_ops.testing.indexer_scores import Scores, paged_scores

_SPECIAL = (torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38)


def _topk_cases() -> list[Case]:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [
            [1.0, 3.0, 2.0, 2.0, 2.0, 9.0],
            [-0.0, 0.0, -1.0, 0.0, nan, nan],
            [nan, -inf, -3e38, nan, inf, nan],
            [5.0] * 6,
            [5.0] * 6,
            [-1e-45, 1e-45, -1e-45, 0.0, -0.0, 7.0],
        ]
    )
    lens = i32([5, 6, 5, 2**31 - 1, -3, 6])
    rows = [[1, 2, 3], [0, 1, 3], [0, 2, 4], [0, 1, 2], [-1, -1, -1], [1, 3, 5]]
    three = {"topk": 3}
    return [
        Case("ties, NaN, zeros and infinities", (logits, lens), three, (rows,)),
        Case(
            "fewer candidates than topk",
            (logits[:3], i32([2, 1, 2])),
            three,
            ([[0, 1, -1], [0, -1, -1], [0, -1, -1]],),
        ),
        Case("no column", (logits[:2, :0], lens[:2]), three, ([[-1] * 3] * 2,)),
        Case("no row", (logits[:0], lens[:0]), three, ([],)),
    ]


def _topk_call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    from dsv4_ops.testing.caches import generator

    seed = generator(draw)
    num_tokens = max(draw(st.sampled_from((3, 0, 1, 2, 6))), min_size)
    num_rows = max(draw(st.sampled_from((40, 0, 1, 2, 7, 130, 600))), min_size)
    logits = torch.randn(num_tokens, num_rows, generator=seed)
    if draw(st.booleans()):
        logits = (logits * 2).round()
    if logits.numel():
        for place in draw(st.lists(st.integers(0, logits.numel() - 1), max_size=6)):
            logits.view(-1)[place] = draw(st.sampled_from(_SPECIAL))
    near = st.sampled_from((0, 1, settings["topk"], settings["topk"] + 1, num_rows, -1, 2**31 - 1))
    lens = i32([draw(near) for _ in range(num_tokens)]).reshape(num_tokens)
    return Case("drawn", (logits, lens), settings)


indexer_topk = OpTesting(
    cases=_topk_cases,
    settings=({"topk": 5}, {"topk": 1}, {"topk": 128}, {"topk": 512}),
    make=_topk_call,
)


def _select_cases() -> list[Case]:
    settings = {"block_size": 2, "compress_ratio": 4, "topk": 2}
    table = i32([[0, 1], [1, 9], [0, 0]])
    requests = i32([0, 0, 0, 1, 2, 2, 3, -1, 0, 0])
    positions = i64([2, 11, 15, 31, 15, 2**31 - 1, 15, 15, -1, -4])
    # scores of request 0: 64, 512, NaN, 256
    rows = [[-1, -1], [0, 1], [1, 3], [0, 1], [1, 3], *[[-1, -1]] * 5]
    none = (*tiny_query(0), tiny_cache(), i64([]), i32([]), table)
    cases = [
        Case(
            "what does not exist, NaN and ties",
            (*tiny_query(10), tiny_cache(), positions, requests, table),
            settings,
            (rows,),
        ),
        Case(
            "NaN if there is nothing else",
            (*tiny_query(1), tiny_cache(), i64([7]), i32([0]), i32([[1, 1]])),
            settings,
            ([[0, 1]],),
        ),
        Case(
            "more room than candidates",
            (*tiny_query(2), tiny_cache(), i64([11, 3]), i32([0, 0]), i32([[-1, 1]])),
            {**settings, "topk": 3},
            ([[2, -1, -1], [-1, -1, -1]],),
        ),
        Case("no token", none, settings, ([],)),
        Case(
            "no page in the table",
            (*tiny_query(1), tiny_cache(), i64([7]), i32([0]), i32([[]])),
            settings,
            ([[-1, -1]],),
        ),
        Case(
            "no head: all scores are equal",
            (*(part[:, :0] for part in tiny_query(1)), tiny_cache(), i64([15]), i32([0]), table),
            settings,
            ([[0, 1]],),
        ),
        Case(
            "slots of what does not exist, NaN and ties",
            (*tiny_query(10), tiny_cache(), positions, requests, table),
            {**settings, "slots": True},
            ([[-1, -1], [0, 1], [1, 3], [2, 3], [1, 1], *[[-1, -1]] * 5],),
        ),
        Case(
            "slots around pages that do not exist, and no further row",
            (
                *tiny_query(3),
                tiny_cache(),
                i64([31, 31, 3]),
                i32([0, 1, 0]),
                i32([[1, -1, 2**31 - 1, 0], [-(2**31), 2, 0, -1]]),
            ),
            {**settings, "topk": 3, "slots": True},
            # scores of request 0: NaN, 256 in page 1, 64, 512 in page 0; of request 1: 64, 512
            ([[3, 0, 1], [0, 1, -1], [2, -1, -1]],),
        ),
    ]
    return with_layouts(cases)


def _select_call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from dsv4_ops.testing.indexer_batches import pages_of

    return Case("drawn", tuple(draw(pages_of(settings=settings, min_size=min_size))), settings)


def _scores(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    compress_ratio: int,
    topk: int,
    layout: str,
    slots: bool = False,
) -> Scores:
    real = (positions >= 0) & (positions < 2**31 - 1)
    lens = torch.where(real, (positions.clamp(-1, 2**31) + 1) // compress_ratio, 0)
    num_rows = block_table.shape[1] * block_size
    tensors = (q, weights, k_cache, lens, req_indices, block_table)
    return paged_scores(*tensors, block_size, num_rows, layout)


def _ranked(scores: Tensor) -> Tensor:
    """NaN below every number."""
    return torch.where(scores.isnan(), -torch.inf, scores)


def _rows_of(
    slots: Tensor, candidate: Tensor, req_indices: Tensor, block_table: Tensor, block_size: int
) -> Tensor:
    """Rows that have these slots, each behind the one before it; of a slot that none of them has,
    the number of rows."""
    num_rows, rows = candidate.shape[1], []
    row = torch.arange(num_rows, device=slots.device)
    pages = block_table[req_indices.clamp(0, len(block_table) - 1)][:, row // block_size].long()
    there = torch.where(candidate, pages * block_size + row % block_size, -1)
    for wanted, held in zip(slots.tolist(), there.tolist(), strict=True):
        left = iter(enumerate(held))
        rows.append(
            [
                slot if slot < 0 else next((row for row, has in left if has == slot), num_rows)
                for slot in wanted
            ]
        )
    return slots.new_tensor(rows).view(slots.shape)


def _readable_selection(case: Case, outcome: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The indices where scores are exact; else the chosen scores in descending order, and that the
    result is a selection: rounding may choose another of two close scores."""
    tensors = [tensor for tensor in case.tensors if tensor is not None]
    found, indices = _scores(*tensors, **case.settings), outcome[0].long()
    if found.is_exact:
        return tuple(outcome)
    if case.settings.get("slots") and bool(found.candidate.any()):
        requests, table = tensors[4:]
        indices = _rows_of(indices, found.candidate, requests, table, case.settings["block_size"])
    there = indices >= 0
    if found.value.shape[1] == 0:
        return torch.zeros(indices.shape, dtype=torch.float64, device=indices.device), outcome[0]
    place = indices.clamp(0, found.value.shape[1] - 1)
    chosen = torch.where(there, _ranked(found.value).gather(1, place), -torch.inf)
    behind = torch.cat([there.new_zeros(len(there), 1), indices[:, 1:] <= indices[:, :-1]], 1)
    wrong = (behind | ~found.candidate.gather(1, place) | (place != indices)) & there
    return chosen.sort(1, descending=True).values, there.int() + 2 * wrong


def _precise_selection(*tensors: Tensor, **settings: Any) -> tuple[Exact | None, ...]:
    found = _scores(*tensors, **settings)
    if found.is_exact:
        return (None,)
    num_tokens, num_rows = found.value.shape
    topk = settings["topk"]
    if num_rows == 0:
        nothing = found.value.new_zeros((num_tokens, topk))
        return Exact(nothing, nothing), None
    padding = found.value.new_full((num_tokens, topk), -torch.inf)
    value = torch.cat([_ranked(found.value), padding], 1).sort(1, descending=True).values[:, :topk]
    exact = found.exact()
    magnitude = exact.magnitude.amax(1, keepdim=True)
    return Exact(value, magnitude, exact.unit), None


indexer_select = OpTesting(
    cases=_select_cases,
    settings=(
        *(
            {
                "block_size": size,
                "compress_ratio": ratio,
                "topk": topk,
                "layout": layout,
                "slots": slots,
            }
            for layout, size, ratio, topk, slots in (
                (TAG, 64, 4, 16, False),
                (TAG, 64, 4, 16, True),
                (TAG, 2, 4, 3, False),
                (TAG, 3, 1, 20, True),
                (TAG, 64, 1, 128, True),
                (TAG, 64, 128, 512, False),
                (PLAIN, 64, 4, 16, True),
                (PLAIN, 3, 1, 20, False),
            )
        ),
    ),
    make=_select_call,
    precise=_precise_selection,
    readable=_readable_selection,
)
