"""Plans of prefill chunks: on the device, on the host, and their upper bound."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

import dsv4_ops as ops
from tests.helpers import INT32_MAX, Result, assert_exact, call, check_stream, i32, rows32, strided
from tests.oracles import batch as oracles

SEEDS = range(400)

# seq_lens, query_lens, workspace_size, max_logits_bytes, request_offset -> chunks
CASES: dict[str, tuple[Any, ...]] = {
    "worked example": (
        [100, 50, 400],
        [10, 5, 40],
        160,
        16_000,
        2,
        [[2, 4, 0, 15], [4, 5, 0, 10], [4, 5, 10, 20], [4, 5, 20, 30], [4, 5, 30, 40]],
    ),
    "both budgets met exactly": ([3, 3], [2, 2], 6, 99, 0, [[0, 2, 0, 4]]),
    "one element short": ([3, 3], [2, 2], 6, 95, 0, [[0, 1, 0, 2], [1, 2, 0, 2]]),
    "one row short": ([3, 3], [2, 2], 5, 99, 0, [[0, 1, 0, 2], [1, 2, 0, 2]]),
    "remainder of a split": ([4], [7], 4, 48, 0, [[0, 1, 0, 3], [0, 1, 3, 6], [0, 1, 6, 7]]),
    "no room for one query": ([10], [3], 10, 20, 0, [[0, 1, 0, 1], [0, 1, 1, 2], [0, 1, 2, 3]]),
    "smallest budgets": ([2], [2], 1, 4, 5, [[5, 6, 0, 1], [5, 6, 1, 2]]),
    "a lone long request stays alone": (
        [500, 0],
        [1, 1],
        100,
        4000,
        0,
        [[0, 1, 0, 1], [1, 2, 0, 1]],
    ),
    "long request without a query": ([500, 5], [0, 2], 100, 4000, 0, [[1, 2, 0, 2]]),
    "no row at all": ([0, 0], [3, 5], 10, 4, 0, [[0, 2, 0, 8]]),
    "nothing at all": ([0], [0], 10, 40, 0, []),
    "empty request joins its group": (
        [2, 2, 2],
        [1, 0, 1],
        4,
        400,
        0,
        [[0, 2, 0, 1], [2, 3, 0, 1]],
    ),
    "empty group emits nothing": ([4, 4, 4], [1, 0, 1], 4, 400, 3, [[3, 4, 0, 1], [5, 6, 0, 1]]),
    "padding requests at the end": ([4, 0, 0], [2, 0, 0], 4, 400, 0, [[0, 3, 0, 2]]),
    "product beyond int32": (
        [70_000, 70_000],
        [40_000, 40_000],
        10**6,
        8 * 10**9,
        0,
        [
            [0, 1, 0, 28_571],
            [0, 1, 28_571, 40_000],
            [1, 2, 0, 28_571],
            [1, 2, 28_571, 40_000],
        ],
    ),
    "sum beyond int32": (
        [INT32_MAX, INT32_MAX],
        [1, 1],
        INT32_MAX,
        2**33,
        0,
        [[0, 1, 0, 1], [1, 2, 0, 1]],
    ),
    "no request": ([], [], 10, 40, 0, []),
}

# num_reqs, num_tokens, max_seq_len, max_logits_bytes -> bound
BOUNDS = {
    "splits and groups": (2, 40, 400, 16_000, 6),
    "a chunk per token at most": (3, 2, 10, 4000, 2),
    "no room for one query": (1, 5, 10, 20, 5),
    "no row": (2, 10, 0, 4, 10),
    "no row, wide step": (2, 10, 0, 40, 3),
    "step divides exactly": (1, 20, 4, 80, 5),
    "step just below": (1, 19, 4, 80, 4),
    "no token": (4, 0, 10, 4000, 1),
    "no request": (0, 7, 10, 4000, 1),
    "nothing at all": (0, 0, 0, 4, 1),
}


@pytest.mark.parametrize("spare", [0, 1, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_split_prefill_chunks(case: tuple[Any, ...], spare: int) -> None:
    seq_lens, query_lens, workspace, logits_bytes, offset, chunks = case
    max_chunks = max(len(chunks), 1) + spare
    settings = {
        "workspace_size": workspace,
        "max_logits_bytes": logits_bytes,
        "max_chunks": max_chunks,
        "request_offset": offset,
    }
    rows = chunks + [[0, 0, 0, 0]] * (max_chunks - len(chunks))
    assert oracles.split_prefill_chunks(seq_lens, query_lens, **settings) == (rows, [len(chunks)])
    result = call(ops.split_prefill_chunks, i32(seq_lens), i32(query_lens), **settings)
    assert_exact(result.chunks, rows32(rows, 4))
    assert_exact(result.num_chunks, i32([len(chunks)]))


@pytest.mark.parametrize("max_chunks", [1, 2, 4])
def test_too_many_chunks_are_counted_but_not_stored(max_chunks: int) -> None:
    seq_lens, query_lens, workspace, logits_bytes, offset, chunks = CASES["worked example"]
    result = call(
        ops.split_prefill_chunks,
        i32(seq_lens),
        i32(query_lens),
        workspace_size=workspace,
        max_logits_bytes=logits_bytes,
        max_chunks=max_chunks,
        request_offset=offset,
    )
    assert_exact(result.chunks, i32(chunks[:max_chunks]))
    assert_exact(result.num_chunks, i32([5]))


def test_a_million_chunks_are_counted() -> None:
    result = ops.split_prefill_chunks(
        i32([10]), i32([1_000_000]), workspace_size=10, max_logits_bytes=40, max_chunks=3
    )
    assert result.chunks.tolist() == [[0, 1, 0, 1], [0, 1, 1, 2], [0, 1, 2, 3]]
    assert result.num_chunks.tolist() == [1_000_000]


def test_negative_lengths_count_as_zero() -> None:
    settings = {"workspace_size": 10, "max_logits_bytes": 400, "max_chunks": 2}
    seq_lens, query_lens = [-5, 3, -(2**31)], [2, -1, 4]
    expected = ([[0, 3, 0, 6], [0, 0, 0, 0]], [1])
    assert oracles.split_prefill_chunks(seq_lens, query_lens, **settings) == expected
    result = call(ops.split_prefill_chunks, i32(seq_lens), i32(query_lens), **settings)
    assert_exact(result, tuple(map(i32, expected)))


def test_lengths_may_have_any_stride() -> None:
    result = call(
        ops.split_prefill_chunks,
        strided(i32([3, 3])),
        strided(i32([2, 2])),
        workspace_size=6,
        max_logits_bytes=95,
        max_chunks=3,
    )
    assert_exact(result.chunks, i32([[0, 1, 0, 2], [1, 2, 0, 2], [0, 0, 0, 0]]))
    assert_exact(result.num_chunks, i32([2]))


@pytest.mark.parametrize("convert", [list, tuple, i32, lambda values: strided(i32(values))])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_plan_prefill_chunks(case: tuple[Any, ...], convert: Any) -> None:
    seq_lens, query_lens, workspace, logits_bytes, offset, chunks = case
    settings = {
        "workspace_size": workspace,
        "max_logits_bytes": logits_bytes,
        "request_offset": offset,
    }
    expected = [(slice(row[0], row[1]), slice(row[2], row[3])) for row in chunks]
    assert oracles.plan_prefill_chunks(seq_lens, query_lens, **settings) == expected
    plan = ops.plan_prefill_chunks(convert(seq_lens), convert(query_lens), **settings)
    assert plan == expected
    assert all(isinstance(part, slice) for pair in plan for part in pair)


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "workspace_size", "max_logits_bytes"),
    [
        ([-1, 2], [1, 1], 10, 40),
        ([1, 2], [1, -1], 10, 40),
        ([1, 2], [1], 10, 40),
        ([1], [1, 2], 10, 40),
        ([1], [1], 0, 40),
        ([1], [1], 10, 3),
        ([1], [1], 10, 0),
    ],
)
def test_plan_prefill_chunks_refuses(
    seq_lens: list[int], query_lens: list[int], workspace_size: int, max_logits_bytes: int
) -> None:
    settings = {"workspace_size": workspace_size, "max_logits_bytes": max_logits_bytes}
    for convert in (list, i32):
        with pytest.raises(ValueError, match=r"^plan_prefill_chunks: "):
            ops.plan_prefill_chunks(convert(seq_lens), convert(query_lens), **settings)


@pytest.mark.parametrize("case", BOUNDS.values(), ids=BOUNDS)
def test_max_prefill_chunks(case: tuple[int, ...]) -> None:
    num_reqs, num_tokens, max_seq_len, max_logits_bytes, expected = case
    settings = {
        "num_reqs": num_reqs,
        "num_tokens": num_tokens,
        "max_seq_len": max_seq_len,
        "max_logits_bytes": max_logits_bytes,
    }
    assert oracles.max_prefill_chunks(**settings) == expected
    bound = ops.max_prefill_chunks(**settings)
    assert bound == expected
    assert type(bound) is int


def test_bound_of_an_empty_batch_is_a_capacity() -> None:
    sizes = {"num_reqs": 0, "num_tokens": 0, "max_seq_len": 0, "max_logits_bytes": 4}
    plan = ops.split_prefill_chunks(
        i32([]),
        i32([]),
        workspace_size=1,
        max_logits_bytes=4,
        max_chunks=ops.max_prefill_chunks(**sizes),
    )
    assert_exact(plan, (i32([[0, 0, 0, 0]]), i32([0])))


def random_lens(rng: Random, *, least: int) -> tuple[list[int], list[int], int, int]:
    """Lengths around the budgets: empty requests, lone long ones, exact fits."""
    workspace = rng.choice((1, 4, 10, 33))
    elems = rng.choice((1, 3, 24, 100, 1000))
    num_reqs = rng.choice((0, 1, 2, 3, 5, 9))
    rows = (0, 0, 1, 2, 5, workspace - 1, workspace, workspace + 1, 3 * workspace, least)
    queries = (0, 0, 1, 2, 3, 10, 40, elems // workspace, least)
    seq_lens = [rng.choice(rows) for _ in range(num_reqs)]
    query_lens = [rng.choice(queries) for _ in range(num_reqs)]
    return seq_lens, query_lens, workspace, 4 * elems + rng.randrange(4)


def split_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        rng = Random(seed)
        seq_lens, query_lens, workspace, logits_bytes = random_lens(rng, least=-3)
        settings = {
            "workspace_size": workspace,
            "max_logits_bytes": logits_bytes,
            "max_chunks": rng.choice((1, 2, 5, 50)),
            "request_offset": rng.choice((0, 0, 3)),
        }
        chunks, total = oracles.split_prefill_chunks(seq_lens, query_lens, **settings)
        layout = strided if rng.random() < 0.3 else (lambda tensor: tensor)
        result = call(
            ops.split_prefill_chunks, layout(i32(seq_lens)), layout(i32(query_lens)), **settings
        )
        yield result, (i32(chunks), i32(total))


def test_random_batches() -> None:
    check_stream(split_pairs())


def test_random_plans() -> None:
    for seed in SEEDS:
        rng = Random(seed)
        seq_lens, query_lens, workspace, logits_bytes = random_lens(rng, least=1)
        settings = {
            "workspace_size": workspace,
            "max_logits_bytes": logits_bytes,
            "request_offset": rng.choice((0, 4)),
        }
        expected = oracles.plan_prefill_chunks(seq_lens, query_lens, **settings)
        assert ops.plan_prefill_chunks(seq_lens, query_lens, **settings) == expected


def test_random_plans_cover_every_query_once_within_the_bound() -> None:
    """What a plan is for, whatever the algorithm: once each, within the budgets, few enough."""
    for seed in SEEDS:
        seq_lens, query_lens, workspace, logits_bytes = random_lens(Random(seed), least=0)
        plan = ops.plan_prefill_chunks(
            seq_lens, query_lens, workspace_size=workspace, max_logits_bytes=logits_bytes
        )
        bound = ops.max_prefill_chunks(
            num_reqs=len(seq_lens),
            num_tokens=sum(query_lens),
            max_seq_len=max(seq_lens, default=0),
            max_logits_bytes=logits_bytes,
        )
        assert len(plan) <= bound
        seen = []
        for requests, queries in plan:
            rows, width = sum(seq_lens[requests]), queries.stop - queries.start
            assert rows <= workspace or requests.stop - requests.start == 1
            assert rows * width <= logits_bytes // 4 or width == 1
            first = sum(query_lens[: requests.start])
            seen += range(first + queries.start, first + queries.stop)
        assert seen == list(range(sum(query_lens)))
