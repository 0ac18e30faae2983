"""Rows of the gathered workspace that every prefill token reads: its top-k, then its window."""

from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import pytest
from torch import Tensor

import dsv4_ops as ops
from tests.helpers import (
    BAD_POSITIONS,
    BAD_REQUESTS,
    INT32_MAX,
    INT32_MIN,
    LAST_POSITION,
    Batch,
    Result,
    assert_exact,
    call,
    check_stream,
    i32,
    i64,
    maybe_strided,
    random_batch,
    rows32,
    strided,
    widened,
)
from tests.oracles import batch as oracles, sparse as oracles_sparse

SEEDS = range(300)

# the specification's
EXAMPLE = {"window_size": 4, "compress_ratio": 4, "topk": 2, "workspace_rows": 20, "swa_offset": 8}
PAIR = {**EXAMPLE, "window_size": 2, "compress_ratio": 1}
# 1.5 * 10^9 rows per request: of the second one, row 647483647 is the last that an int32 can name
FAR = {"workspace_rows": 1_500_000_000, "swa_offset": 1_499_999_990}
EDGE = 647_483_647

Requests = list[tuple[int, int]]
Token = tuple[list[int], int, int, list[int]]


class Case(NamedTuple):
    """Length and gathered length of every request; of every token its top-k, position, request
    and the columns that count: as many as its lengths, -1 behind them."""

    requests: Requests
    tokens: list[Token]
    settings: dict[str, int]


def case(requests: Requests, *tokens: Token, **settings: int) -> Case:
    return Case(requests, [*tokens], {**PAIR, **settings})


CASES = {
    "worked example": case(
        [(9, 5), (6, 5)],
        ([1, 0], 7, 0, [1, 0, 8, 9, 10, 11]),
        ([0, 1], 8, 0, [0, 1, 9, 10, 11, 12]),
        ([0, -1], 4, 1, [20, 28, 29, 30, 31]),
        ([0, -1], 5, 1, [20, 29, 30, 31, 32]),
        **EXAMPLE,
    ),
    "early tokens, in any order": case(
        [(8, 8)],
        ([0, 1], 6, 0, [0, 11, 12, 13, 14]),
        ([0, 1], 0, 0, [8]),
        ([0, 1], 3, 0, [0, 8, 9, 10, 11]),
        ([0, 1], 7, 0, [0, 1, 12, 13, 14, 15]),
        ([0, 1], 2, 0, [8, 9, 10]),
        **EXAMPLE,
    ),
    "entries behind the visible rows are not read": case(
        [(4, 4), (3, 3)], ([5, 6], 3, 0, [5, 8, 9, 10, 11]), ([7, 7], 2, 1, [28, 29, 30]), **EXAMPLE
    ),
    "holes keep their column": case(
        [(10, 6), (10, 6)],
        ([-1, 2], 9, 0, [-1, 2, 12, 13]),
        ([4, -1], 8, 1, [24, -1, 31, 32]),
        ([-1, -1], 7, 0, [-1, -1, 10, 11]),
    ),
    "adversarial entries": case(
        [(6, 6), (6, 6)],
        ([INT32_MIN, 7, INT32_MAX], 5, 0, [-1, 7, -1, 12, 13]),
        ([8, 0, 9], 5, 1, [-1, 20, -1, 32, 33]),
        ([-20, 19, 20], 5, 1, [-1, -1, -1, 32, 33]),
        ([2**31 - 20, 20 - 2**31, -8], 5, 1, [-1, -1, -1, 32, 33]),
        topk=3,
    ),
    "more columns than topk": case(
        [(16, 2), (16, 2)],
        ([3, 2, 1, 0], 15, 0, [3, 2, 8, 9]),
        ([1, -1, 5, 6], 14, 1, [21, -1, -1, 28]),
    ),
    "no topk": case([(6, 2), (2, 2)], ([3], 5, 0, [8, 9]), ([1], 0, 1, [28]), topk=0),
    "no topk and no column": case([(6, 2), (2, 2)], ([], 5, 0, [8, 9]), ([], 0, 1, [28]), topk=0),
    "no room for topk": case([(6, 6)], ([0, 1], 5, 0, [-1, -1, 4, 5]), swa_offset=0),
    "the window begins before the gathered rows": case(
        [(10, 2)], ([], 8, 0, [-1, 8]), ([], 9, 0, [8, 9]), ([], 7, 0, [-1, -1]), topk=0
    ),
    "the window ends behind the gathered rows": case(
        [(6, 3)], ([], 6, 0, [10, -1]), ([], 7, 0, [-1, -1]), ([], 20, 0, [-1, -1]), topk=0
    ),
    "the workspace is too small": case(
        [(5, 5), (5, 5)],
        ([0, 7], 2, 0, [0, 7, 9, -1]),
        ([0, 7], 1, 0, [0, 7, 8, 9]),
        ([0, 7], 1, 1, [10, 17, 18, 19]),
        ([0, 7], 2, 1, [10, 17, 19, -1]),
        workspace_rows=10,
    ),
    "the workspace has no row for windows": case(
        [(5, 5)] * 2,
        ([7, 8], 4, 0, [7, -1, -1, -1]),
        ([7, 8], 4, 1, [15, -1, -1, -1]),
        workspace_rows=8,
    ),
    "the workspace ends before the windows": case(
        [(5, 5)] * 2,
        ([7, 8], 4, 0, [7, -1, -1, -1]),
        ([7, 8], 4, 1, [12, -1, -1, -1]),
        workspace_rows=5,
    ),
    # 3 * 1.5 * 10^9 is 205032704 in int32
    "rows at the edge of int32": case(
        [(13, 13)] * 4,
        ([EDGE, EDGE + 1], 9, 0, [EDGE, EDGE + 1, 1_499_999_998, 1_499_999_999]),
        ([EDGE, EDGE + 1], 9, 1, [INT32_MAX, -1, -1, -1]),
        ([0, 1], 9, 2, [-1, -1, -1, -1]),
        ([0, 1], 9, 3, [-1, -1, -1, -1]),
        **FAR,
    ),
    "window rows at the edge of int32": case(
        [(10, 10)] * 2,
        ([], 9, 0, [8, 9]),
        ([], 8, 1, [INT32_MAX, -1]),
        ([], 9, 1, [-1, -1]),
        topk=0,
        workspace_rows=2_147_483_640,
        swa_offset=0,
    ),
    # as int32, 4 * 2^30 is 0
    "a workspace of 2^30 rows": case(
        [(2, 2)] * 5,
        ([3, 2], 1, 0, [3, 2, 8, 9]),
        ([3, 2], 1, 2, [-1] * 4),
        ([3, 2], 1, 4, [-1] * 4),
        workspace_rows=2**30,
    ),
    # in int32 the gathered rows of the first request would begin at 1, of the second at -1
    "lengths whose difference is beyond int32": case(
        [(INT32_MIN, INT32_MAX), (INT32_MAX, INT32_MIN), (INT32_MIN, INT32_MIN)],
        ([0, 1], 5, 0, [0, 1, -1, -1]),
        ([0, 1], 5, 1, [20, 21, -1, -1]),
        ([0, 1], 5, 2, [40, 41, -1, -1]),
        ([0, 1], LAST_POSITION, 0, [0, 1, -1, -1]),
    ),
    "lengths below zero": case(
        [(-5, -5), (2, -1), (-3, 1)],
        ([0, 1], 1, 0, [0, 1, -1, -1]),
        ([0, 1], 1, 1, [20, 21, -1, -1]),
        ([0, 1], 1, 2, [40, 41, -1, -1]),
    ),
    "nothing gathered": case(
        [(2, 0), (0, 0)], ([0, 1], 1, 0, [0, 1, -1, -1]), ([0, 1], 0, 1, [20, -1])
    ),
    # by the formula the gathered rows begin at position -2 of the first request, -3 of the second
    "more gathered than there is": case(
        [(3, 5), (0, 3)],
        ([0, 1], 1, 0, [0, 1, 10, 11]),
        ([0, 1], 2, 0, [0, 1, 11, 12]),
        ([0, 1], 0, 1, [20, -1]),
    ),
    "the last position there is": case(
        [(INT32_MAX, 3), (INT32_MAX, INT32_MAX)],
        ([0, -1], LAST_POSITION, 0, [0, -1, 9, 10]),
        ([0, -1], LAST_POSITION, 1, [20, -1, -1, -1]),
        ([0, -1], INT32_MAX, 0, []),
    ),
    "the last position there is, all gathered": case(
        [(INT32_MAX, INT32_MAX)],
        ([], LAST_POSITION, 0, [INT32_MAX - 2, INT32_MAX - 1]),
        topk=0,
        workspace_rows=INT32_MAX,
        swa_offset=0,
    ),
    "rows of 128 positions": case(
        [(256, 129)],
        ([0, 1], 126, 0, [-1, -1]),
        ([0, 1], 127, 0, [0, -1, 8]),
        ([0, 1], 255, 0, [0, 1, 135, 136]),
        ([0, 1], 100_000, 0, [0, 1, -1, -1]),
        compress_ratio=128,
        workspace_rows=137,
    ),
    "no such request": case(
        [(6, 6)] * 2,
        ([0, 1], 5, 1, [20, 21, 32, 33]),
        *[([0, 1], 5, request, []) for request in (2, *BAD_REQUESTS)],
    ),
    "no such position": case([(6, 6)], *[([0, 1], position, 0, []) for position in BAD_POSITIONS]),
    "no token": case([(6, 6)]),
    "no request": case([], ([0, 1], 5, 0, []), ([0, 1], 0, -1, [])),
}

LAYOUTS = {"dense": lambda tensor: tensor, "strided": strided, "widened": widened}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_combine_topk_swa_indices(case: Case, layout: Any) -> None:
    selected, positions, requests, heads = ([token[i] for token in case.tokens] for i in range(4))
    seq_lens, gather_lens = ([pair[i] for pair in case.requests] for i in range(2))
    lists = selected, positions, requests, seq_lens, gather_lens
    expected = [head + [-1] * (128 - len(head)) for head in heads], [len(head) for head in heads]
    assert oracles_sparse.combine_topk_swa_indices(*lists, **case.settings) == expected
    matrix = rows32(selected, len(selected[0]) if selected else 2)
    vectors = [i64(positions), i32(requests), i32(seq_lens), i32(gather_lens)]
    if layout is not LAYOUTS["dense"]:
        vectors = [strided(vector) for vector in vectors]
    result = call(ops.combine_topk_swa_indices, layout(matrix), *vectors, **case.settings)
    assert isinstance(result, ops.TopkIndices)
    assert_exact(result.indices, rows32(expected[0], 128))
    assert_exact(result.lens, i32(expected[1]))


@pytest.mark.parametrize(
    ("topk", "window_size", "width"),
    [
        (0, 1, 128),
        (0, 128, 128),
        (0, 129, 256),
        (123, 5, 128),
        (124, 5, 256),
        (128, 128, 256),
        (512, 128, 640),
        (1024, 128, 1152),
    ],
)
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_width_is_a_multiple_of_128(
    num_tokens: int, topk: int, window_size: int, width: int
) -> None:
    result = ops.combine_topk_swa_indices(
        i32([list(range(topk))] * num_tokens).reshape(num_tokens, topk),
        i64([5000] * num_tokens),
        i32([0] * num_tokens),
        i32([5001]),
        i32([window_size]),
        window_size=window_size,
        compress_ratio=4,
        topk=topk,
        workspace_rows=2000,
        swa_offset=1500,
    )
    row = [*range(topk), *range(1500, 1500 + window_size)]
    row += [-1] * (width - len(row))
    assert result.indices.is_contiguous()
    assert_exact(result.indices, rows32([row] * num_tokens, width))
    assert_exact(result.lens, i32([topk + window_size] * num_tokens))


def test_rows_shared_by_tokens() -> None:
    """Inputs that are expanded from one value have stride 0."""
    result = ops.combine_topk_swa_indices(
        i32([[1, 0]]).expand(3, 2),
        i64([7]).expand(3),
        i32([1]).expand(3),
        i32([8]).expand(2),
        i32([4]).expand(2),
        **EXAMPLE,
    )
    row = [21, 20, 28, 29, 30, 31] + [-1] * 122
    assert_exact(result, (i32([row] * 3), i32([6] * 3)))


def workspace_slots(
    batch: Batch, table: Tensor, seq_lens: list[int], gather_lens: list[int], rows: int, offset: int
) -> dict[int, tuple[str, int]]:
    """What lies in every row of the workspace: a compressed row or a window row, and its slot."""
    size = batch.block_size
    content = {}
    for request, (seq_len, gathered) in enumerate(zip(seq_lens, gather_lens, strict=True)):
        pages, base = table[request].tolist(), request * rows
        for v in range(offset):
            content[base + v] = ("compressed", oracles.narrow_slot(pages, v, size))
        for g in range(gathered):
            slot = oracles.narrow_slot(pages, seq_len - gathered + g, size)
            content[base + offset + g] = ("window", slot)
    return content


def test_keys_are_those_of_the_global_indices() -> None:
    """A token reads the same cache rows through the workspace as through global slots."""
    compared = 0
    for seed in SEEDS:
        batch, rng = random_batch(seed), Random(seed)
        seq_lens = [min(max(length, 0), 400) for length in batch.seq_lens]
        queries = oracles.query_lens(batch.query_start_loc)
        if not seq_lens or any(map(int.__gt__, queries, seq_lens)):
            continue
        starts, lengths = i32(batch.query_start_loc), i32(seq_lens)
        requests, positions = ops.token_map(starts, lengths, num_tokens=batch.num_tokens)
        table = i32([[rng.randrange(1000) for _ in range(400)] for _ in seq_lens])
        gather_lens = ops.prefill_gather_lens(starts, lengths, window_size=batch.window_size)
        topk = rng.choice((1, 3, 8))
        visible = [(position + 1) // batch.compress_ratio for position in positions.tolist()]
        local = [rng.sample(range(n), min(n, topk)) for n in visible]
        selected = rows32([ids + [-1] * (topk - len(ids)) for ids in local], topk)
        offset = 400 // batch.compress_ratio
        rows = offset + max(gather_lens.tolist()) + rng.choice((0, 3))
        combined = ops.combine_topk_swa_indices(
            selected,
            positions,
            requests,
            lengths,
            gather_lens,
            window_size=batch.window_size,
            compress_ratio=batch.compress_ratio,
            topk=topk,
            workspace_rows=rows,
            swa_offset=offset,
        )
        settings = {"block_size": batch.block_size}
        window = ops.swa_indices_and_lens(
            positions, requests, table, **settings, window_size=batch.window_size
        )
        chosen = ops.global_topk_indices_and_lens(selected, requests, table, **settings)
        assert_exact(combined.lens, window.lens + chosen.lens)
        content = workspace_slots(batch, table, seq_lens, gather_lens.tolist(), rows, offset)
        for token, length in enumerate(combined.lens.tolist()):
            keys = [content[row] for row in combined.indices[token, :length].tolist()]
            ids = chosen.indices[token, : chosen.lens[token]].tolist()
            expected = [("compressed", slot) for slot in ids]
            ids = window.indices[token, : window.lens[token]].tolist()
            expected += [("window", slot) for slot in ids]
            assert keys == expected
            compared += length
    assert compared > 1000


def adversarial_len(rng: Random, length: int) -> int:
    if rng.random() < 0.8:
        return length
    return rng.choice((0, -1, -4, 1, length + 1, length + 3, INT32_MAX, INT32_MIN, 2**30))


def combine_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        batch, rng = random_batch(seed), Random(seed)
        topk, offset = rng.choice((0, 1, 2, 5, 16)), rng.choice((0, 1, 4, 8, 20))
        rows = max(offset + rng.choice((-1, 0, 1, 5, 40)), 1)
        if rng.random() < 0.1:
            rows = rng.choice((2**29, 2**30 + 3, INT32_MAX))
        settings = {
            "window_size": batch.window_size,
            "compress_ratio": batch.compress_ratio,
            "topk": topk,
            "workspace_rows": rows,
            "swa_offset": offset,
        }
        lengths = oracles.prefill_gather_lens(
            batch.query_start_loc, batch.seq_lens, window_size=batch.window_size
        )
        gather_lens = [adversarial_len(rng, length) for length in lengths]
        odd = (-1, -1, offset - 1, offset, min(rows, 2**30), INT32_MAX, INT32_MIN)
        width = topk + rng.choice((0, 0, 1, 3))
        usual = range(offset + 1)
        selected = [
            [rng.choice(odd if rng.random() < 0.3 else usual) for _ in range(width)]
            for _ in batch.positions
        ]
        indices, lens = oracles_sparse.combine_topk_swa_indices(
            selected, batch.positions, batch.req_indices, batch.seq_lens, gather_lens, **settings
        )
        matrix = rows32(selected, width)
        result = call(
            ops.combine_topk_swa_indices,
            maybe_strided(rng, widened(matrix) if rng.random() < 0.3 else matrix),
            batch.pos(rng),
            batch.req(rng),
            batch.seq(rng),
            maybe_strided(rng, i32(gather_lens)),
            **settings,
        )
        width = oracles_sparse.round_up(topk + batch.window_size, 128)
        yield result, (rows32(indices, width), i32(lens))


def test_random_batches() -> None:
    check_stream(combine_pairs())
