"""Plans of prefill chunks: on the host, their upper bound, and random plans.
dsv4_ops/testing/cases/chunking.py has hand-computed numbers."""

from random import Random
from typing import Any

import pytest

import dsv4_ops as ops
from dsv4_ops import testing
from tests.helpers import i32, strided
from tests.oracles import batch as oracles

SEEDS = range(400)

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


def test_a_million_chunks_are_counted() -> None:
    result = ops.split_prefill_chunks(
        i32([10]), i32([1_000_000]), workspace_size=10, max_logits_bytes=40, max_chunks=3
    )
    assert result.chunks.tolist() == [[0, 1, 0, 1], [0, 1, 1, 2], [0, 1, 2, 3]]
    assert result.num_chunks.tolist() == [1_000_000]


@pytest.mark.parametrize("convert", [list, tuple, i32, lambda values: strided(i32(values))])
def test_the_plan_on_the_host_is_that_of_the_device(convert: Any) -> None:
    """The hand-computed cases agree, except for negative lengths, which the host refuses."""
    compared = 0
    for case in testing.cases_of("split_prefill_chunks"):
        (chunks, (count,)), settings = case.expected, dict(case.settings)
        lens = [tensor.tolist() for tensor in case.tensors]
        if count > settings.pop("max_chunks") or min([0, *lens[0], *lens[1]]) < 0:
            continue
        expected = [(slice(row[0], row[1]), slice(row[2], row[3])) for row in chunks[:count]]
        assert oracles.plan_prefill_chunks(*lens, **settings) == expected
        assert ops.plan_prefill_chunks(*map(convert, lens), **settings) == expected
        compared += 1
    assert compared > 15


@pytest.mark.parametrize("case", BOUNDS.values(), ids=BOUNDS)
def test_max_prefill_chunks(case: tuple[int, ...]) -> None:
    *values, expected = case
    names = ("num_reqs", "num_tokens", "max_seq_len", "max_logits_bytes")
    settings = dict(zip(names, values, strict=True))
    assert oracles.max_prefill_chunks(**settings) == expected
    bound = ops.max_prefill_chunks(**settings)
    assert bound == expected
    assert type(bound) is int


def random_lens(rng: Random, *, least: int) -> tuple[list[int], list[int], int, int]:
    """Sample lengths near the budgets: empty requests, single long requests, and exact fits."""
    workspace = rng.choice((1, 4, 10, 33))
    elems = rng.choice((1, 3, 24, 100, 1000))
    num_reqs = rng.choice((0, 1, 2, 3, 5, 9))
    rows = (0, 0, 1, 2, 5, workspace - 1, workspace, workspace + 1, 3 * workspace, least)
    queries = (0, 0, 1, 2, 3, 10, 40, elems // workspace, least)
    seq_lens = [rng.choice(rows) for _ in range(num_reqs)]
    query_lens = [rng.choice(queries) for _ in range(num_reqs)]
    return seq_lens, query_lens, workspace, 4 * elems + rng.randrange(4)


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
    """Any algorithm must plan each query once, within the budgets, in few enough chunks."""
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
