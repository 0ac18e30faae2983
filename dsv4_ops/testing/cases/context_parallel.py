"""Cases and strategies of context parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.testing.case import Case, OpTesting, i32, i64
from dsv4_ops.testing.cases.mla_context import INF, NAN, merged_lses, merged_out
from dsv4_ops.testing.float64.mla_context import exact_share
from dsv4_ops.testing.strategies.batches import ragged_batch
from dsv4_ops.testing.strategies.draw import Draw

_LENS = (0, 1, 2, 3, 4, 5, 8, 9, 127, 4096, 2**31 - 1, -1, -(2**31))
_RANKS = (0, 1, 2, 3, -1, 7, 2**31 - 1, -(2**31))


def _ranks(ranks: int, positions: int = 1, **others: int) -> dict[str, Any]:
    return {**others, "cp_world_size": ranks, "cp_interleave": positions}


def _cases() -> list[Case]:
    return [
        Case("one by one", (i32([5, 0, -3]), None), _ranks(2, 1), ([[3, 2], [0, 0], [0, 0]],)),
        Case("turns of four", (i32([5, 10, 13]), None), _ranks(2, 4), ([[4, 1], [6, 4], [8, 5]],)),
        Case("four ranks", (i32([9]), None), _ranks(4, 2), ([[3, 2, 2, 2]],)),
        Case("of a rank", (i32([7, 8, 9]), i32([1])), _ranks(2, 1), ([3, 4, 4],)),
        Case("of no rank", (i32([7, 8, 9]), i32([2])), _ranks(2, 1), ([0, 0, 0],)),
        Case("longest", (i32([2**31 - 1]), None), _ranks(2, 1), ([[2**30, 2**30 - 1]],)),
        Case("no sequence", (i32([]), None), _ranks(2, 1)),
    ]


def _call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    size = max(draw.one_of(3, 0, 1, 2, 33), min_size)
    lens = i32([draw.one_of(*_LENS) for _ in range(size)])
    rank = None if not min_size and draw.flag() else i32([draw.one_of(*_RANKS)])
    return Case("sampled", (lens, rank), settings)


cp_seq_lens = OpTesting(
    cases=_cases, settings=(_ranks(2), _ranks(4, 3), _ranks(1), _ranks(2, 64)), make=_call
)


def _slot_cases() -> list[Case]:
    batch = (i64(list(range(6))), i32([0] * 6), i32([[3, 5]]))
    adversarial = (i64([0, -1, 1, 4, 8, 2**40]), i32([1, 0, 7, 0, 0, 0]), i32([[3, -1], [2, 0]]))
    both = {rank: (*batch, i32([rank])) for rank in (-1, 0, 1, 2)}
    two, turns = _ranks(2, block_size=2), _ranks(2, 2, block_size=2)
    none = [-1] * 6
    return [
        Case("even positions", both[0], two, ([6, -1, 7, -1, 10, -1],)),
        Case("odd positions", both[1], two, ([-1, 6, -1, 7, -1, 10],)),
        Case("turns of two", both[0], turns, ([6, 7, -1, -1, 10, 11],)),
        Case("second turns of two", both[1], turns, ([-1, -1, 6, 7, -1, -1],)),
        Case("of no rank", both[2], two, (none,)),
        Case("of a negative rank", both[-1], two, (none,)),
        Case("one rank", both[1], _ranks(1, 3, block_size=2), ([6, 7, 10, 11, -1, -1],)),
        Case("absent", (*adversarial, i32([0])), two, ([4, -1, -1, -1, -1, -1],)),
        Case("no token", (batch[0][:0], batch[1][:0], batch[2], i32([0])), two, ([],)),
    ]


def _slot_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    batch = ragged_batch(draw, min_size=min_size)
    rank = i32([draw.one_of(*_RANKS)])
    tensors = (batch.positions, batch.req_indices, batch.block_table, rank)
    return Case("sampled", tensors, settings)


cp_slot_mapping = OpTesting(
    cases=_slot_cases,
    settings=(
        _ranks(2, 2, block_size=4),
        _ranks(4, 3, block_size=64),
        _ranks(1, 5, block_size=2),
        _ranks(2**31 - 1, 2**31 - 1, block_size=2**31 - 1),
    ),
    make=_slot_call,
)


def _row_cases() -> list[Case]:
    one_each, turns = _ranks(2, num_local_rows=4), _ranks(2, 2, num_local_rows=4)
    first = (i32([0] * 5 + [1] * 2 + [-1]), i64([0, 1, 2, 3, 4, 0, 1, -1]))
    third = (i32([0] * 3 + [1] * 3), i64([8, 9, 10, 0, 1, 2]))
    absent = (i32([0, 0, 0, 7, 1, 1]), i64([4, 14, 2**40, 9, 0, 6]))
    bounds = i32([4, 0]), i32([0, 2, 4])
    return [
        Case(
            "one by one",
            (*first, i32([0, 0]), i32([0, 3, 4])),
            one_each,
            ([0, 4, 1, 5, 2, 3, 7, -1],),
        ),
        Case("rest", (i32([1]), i64([2]), i32([3, 1]), i32([0, 0, 1])), one_each, ([0],)),
        Case("turns of two", (*third, *bounds), turns, ([0, 1, 4, 2, 3, 6],)),
        Case("rows that nobody gathered", (*absent, *bounds), turns, ([-1, -1, -1, -1, 2, -1],)),
        Case(
            "past what a rank gathers",
            (i32([0, 0]), i64([0, 1]), i32([0]), i32([3, 2**31 - 1])),
            _ranks(1, num_local_rows=4),
            ([3, -1],),
        ),
        Case("no row", (i32([]), i64([]), i32([0]), i32([0, 0])), turns, ([],)),
    ]


def _row_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    batch = ragged_batch(draw, min_size=min_size)
    num_reqs = batch.seq_lens.shape[0]
    entries = draw.st.integers(0, 40) | draw.st.sampled_from((-1, 2**31 - 1, -(2**31), 300))
    starts, ends = (i32([draw(entries) for _ in range(size)]) for size in (num_reqs, num_reqs + 1))
    return Case("sampled", (batch.req_indices, batch.positions, starts, ends), settings)


cp_row_indices = OpTesting(
    cases=_row_cases,
    settings=(
        _ranks(2, 2, num_local_rows=64),
        _ranks(4, 3, num_local_rows=500),
        _ranks(1, 1, num_local_rows=40),
        _ranks(2**31 - 1, 64, num_local_rows=2**31 - 1),
    ),
    make=_row_call,
)


def _topk_cases() -> list[Case]:
    # in rows of the request, the candidates of token 0 are 0 and 5 (rank 0), 3 and 6 (rank 1); the
    # candidates of token 1 are 0 (rank 0), 3 and 6 (rank 1)
    rows = i32([[[0, 3], [0, -1], [3, 0]], [[1, 2], [1, 2], [-1, -4]]])
    scores = torch.tensor(
        [[[1.0, 2.0], [-0.0, 9.0], [NAN, -INF]], [[2.0, 2.0], [0.0, -1.0], [9.0, 9.0]]]
    )
    two = {"topk": 2, "cp_interleave": 2}
    return [
        Case("ties and no row", (scores, rows), two, ([[3, 5], [0, 3], [0, 5]],)),
        Case(
            "all",
            (scores, rows),
            {"topk": 5, "cp_interleave": 2},
            ([[0, 3, 5, 6, -1], [0, 3, 6, -1, -1], [0, 5, -1, -1, -1]],),
        ),
        Case("NaN last", (scores[:, 2:], rows[:, 2:]), {**two, "topk": 1}, ([[0]],)),
        Case(
            "rows beyond int32",
            (torch.ones(2, 1, 1), i32([[[2**30 - 1]], [[2**30 - 1]]])),
            {"topk": 2, "cp_interleave": 1},
            ([[2**31 - 2, -1]],),
        ),
        Case("one rank", (scores[:1], rows[:1]), two, ([[0, 3], [0, -1], [0, 3]],)),
        Case("no candidate", (scores[..., :0], rows[..., :0]), two, ([[-1, -1]] * 3,)),
        Case("no token", (scores[:, :0], rows[:, :0]), two, ([],)),
    ]


_CANDIDATES = {5: (2, 40), 1: (3, 5), 64: (4, 300), 0: (2, 2), 512: (2, 300)}
"""Number of ranks and of candidates per rank, by topk; these sizes are static."""


def _topk_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    seed = draw.generator()
    num_tokens = max(draw.one_of(3, 0, 1, 2, 6), min_size)
    ranks, width = _CANDIDATES[settings["topk"]]
    shape = (ranks, num_tokens, width)
    scores = torch.randn(shape, generator=seed).mul(2).round()
    draw.spoil(scores, (NAN, INF, -INF, -0.0, 1e-45), 6)
    # a rank's rows are distinct
    rows = (
        torch.rand((ranks, num_tokens, width + 10), generator=seed).argsort(-1)[..., :width].int()
    )
    draw.spoil(rows, (-1, -7, 2**31 - 1, -(2**31), 2**30), 6)
    return Case("sampled", (scores, rows), settings)


cp_topk = OpTesting(
    cases=_topk_cases,
    settings=tuple(
        {"topk": topk, "cp_interleave": turn}
        for topk, turn in ((5, 2), (1, 1), (64, 3), (0, 64), (512, 16))
    ),
    make=_topk_call,
)


def _local_cases() -> list[Case]:
    rows = i32([[0, 3, 5, 6, -1], [-1, 9, 2, -5, 8], [2, 3, 6, 7, 2**31 - 1]])
    turns = _ranks(2, 2)
    first = [[0, 3, -1, -1, -1], [5, 4, -1, -1, -1], [-1] * 5], [2, 2, 0]
    second = [[1, 2, -1, -1, -1], [0, -1, -1, -1, -1], [0, 1, 2, 3, 2**30 - 1]], [2, 1, 5]
    none = [[-1] * 5] * 3, [0] * 3
    return [
        Case("first rank", (rows, i32([0])), turns, first),
        Case("second rank", (rows, i32([1])), turns, second),
        Case("of no rank", (rows, i32([2])), turns, none),
        Case("of a negative rank", (rows, i32([-1])), turns, none),
        Case("one rank", (rows[:1], i32([0])), _ranks(1, 3), ([[0, 3, 5, 6, -1]], [4])),
        Case("no column", (rows[:, :0], i32([0])), turns, ([[]] * 3, [0] * 3)),
        Case("no token", (rows[:0], i32([0])), turns, ([], [])),
    ]


def _local_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 6), min_size)
    topk = max(draw.one_of(5, 0, 1, 2, 40), min_size)
    rows = torch.randint(-1, 300, (num_tokens, topk), generator=draw.generator()).int()
    draw.spoil(rows, (-1, -7, 2**31 - 1, -(2**31), 2**30), 6)
    return Case("sampled", (rows, i32([draw.one_of(*_RANKS)])), settings)


cp_local_rows = OpTesting(
    cases=_local_cases,
    settings=(_ranks(2, 2), _ranks(4, 3), _ranks(1, 5), _ranks(2**31 - 1, 2**31 - 1)),
    make=_local_call,
)


def _correct_cases() -> list[Case]:
    out = torch.tensor([8.0, 8.0, NAN, NAN, 8.0]).view(1, 5, 1)
    lse = torch.tensor([[1.0, 1.0, -INF, INF, 1.0]])
    other = torch.tensor([[1.0, -INF, 1.0, NAN, INF]])
    shares = [[[4.0], [8.0], [0.0], [0.0], [8.0]]], [[2.0, 1.0, 1.0, -INF, 1.0]]
    tensors = (out, lse, torch.stack((other, lse)))
    return [
        Case("base 2", tensors, {"lse_base": "2"}, shares),
        Case(
            "one rank",
            (out, lse, lse[None]),
            {"lse_base": "e"},
            ([[[8.0], [8.0], [0.0], [0.0], [8.0]]], [[1.0, 1.0, -INF, -INF, 1.0]]),
        ),
        Case("no token", (out[:0], lse[:0], lse[None, :0]), {"lse_base": "e"}),
    ]


def _correct_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    seed = draw.generator()
    num_tokens = max(draw.one_of(3, 0, 1, 2, 7), min_size)
    dtype = torch.bfloat16 if min_size or draw.flag() else torch.float32
    lses = merged_lses(draw, seed, max(draw.one_of(2, 1, 4), min_size), num_tokens, 3)
    lse = lses[-1].clone()
    return Case("sampled", (merged_out(lse, seed, 20, dtype), lse, lses), settings)


def _precise_correct(out: Tensor, lse: Tensor, lses: Tensor, *, lse_base: str) -> Any:
    return exact_share(out, lse, lses, lse_base)


cp_correct_out = OpTesting(
    cases=_correct_cases,
    settings=({"lse_base": "e"}, {"lse_base": "2"}),
    make=_correct_call,
    precise=_precise_correct,
)
