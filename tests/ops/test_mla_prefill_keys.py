"""Which keys a token sees in sparse MLA for prefill, one by one and by hand."""

import math
from typing import Any

import pytest
import torch

import dsv4_ops as ops
from tests.helpers import (
    BAD_POSITIONS,
    BAD_REQUESTS,
    INT32_MAX,
    INT32_MIN,
    LAST_POSITION,
    i32,
    i64,
)

INF, NAN = math.inf, math.nan
TABLE, EXTRA_TABLE = [[2, 1, 4, 3]], [[3, 1, 2]]


def seen(
    position: int,
    *,
    window: int = 1,
    ratio: int = 1,
    topk: list[int] | None = None,
    extra: bool = True,
    **changed: Any,
) -> dict[str, int]:
    """How often one token sees every key: w0..w7 on blocks of the window, c0..c5 on blocks of
    compressed rows, two to a block. Key and value n are the n-th unit vector and the query is 0, so
    that the output is one n-th for each of n keys. All other blocks are NaN."""
    names = [f"w{row}" for row in range(8)] + [f"c{row}" for row in range(6)]
    one_hot = torch.eye(len(names))
    caches = torch.full((2, 6, 2, len(names)), NAN)
    caches[0, TABLE[0]] = one_hot[:8].view(4, 2, -1)
    caches[1, EXTRA_TABLE[0]] = one_hot[8:].view(3, 2, -1)
    given: dict[str, Any] = {
        "swa_block_table": i32(TABLE),
        "req_indices": i32([0]),
        "extra_cache": caches[1] if extra else None,
        "extra_block_table": i32(EXTRA_TABLE) if extra else None,
        "topk_indices": None if topk is None else i32([topk]),
    }
    out, lse = ops.sparse_mla_prefill(
        torch.zeros(1, 1, len(names)),
        caches[0],
        i64([position]),
        **{**given, **changed},
        softmax_scale=1.0,
        window_size=window,
        compress_ratio=ratio,
        swa_block_size=2,
        extra_block_size=2,
        layout="plain",
    )
    keys = lse.exp().item()
    counts = (out[0, 0] * max(keys, 1)).tolist()
    assert all(abs(count - round(count)) < 1e-4 for count in counts)
    assert sum(counts) == pytest.approx(keys)
    return {name: round(n) for name, n in zip(names, counts, strict=True) if round(n)}


def window_of(*rows: int) -> dict[str, int]:
    return {f"w{row}": 1 for row in rows}


NO_WINDOW = {"swa_block_table": i32([[-1] * 4])}


@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 8])
def test_the_window_is_the_token_and_those_before_it(window: int) -> None:
    for position in range(8):
        rows = range(max(position - window + 1, 0), position + 1)
        assert seen(position, window=window, extra=False) == window_of(*rows)


@pytest.mark.parametrize(
    ("ratio", "counts"),
    [
        (1, {0: 1, 1: 2, 5: 6, 6: 6, 1000: 6}),
        (2, {0: 0, 1: 1, 2: 1, 3: 2, 10: 5, 11: 6, 12: 6, 13: 6}),
        (4, {2: 0, 3: 1, 6: 1, 7: 2, 8: 2, 22: 5, 23: 6, LAST_POSITION: 6}),
        (128, {0: 0, 126: 0, 127: 1, 254: 1, 255: 2, 511: 4, 767: 6, 895: 6}),
        (2**30, {2**30 - 2: 0, 2**30 - 1: 1, LAST_POSITION: 1}),
        (INT32_MAX, {LAST_POSITION - 1: 0, LAST_POSITION: 1}),
    ],
)
def test_all_rows_that_are_complete(ratio: int, counts: dict[int, int]) -> None:
    """(position + 1) // ratio rows, up to the table."""
    for position, count in counts.items():
        expected = {f"c{row}": 1 for row in range(count)}
        assert seen(position, ratio=ratio, **NO_WINDOW) == expected, position
        every = [*range(6), 6, 7, INT32_MAX, -1, INT32_MIN]
        assert seen(position, ratio=ratio, topk=every, **NO_WINDOW) == expected, position


def test_selected_rows() -> None:
    """Token 7 of ratio 2 sees rows 0..3: gaps, rows of the future and none at all are skipped."""
    both = {"w6": 1, "w7": 1}
    for topk, expected in (
        ([0], {"c0": 1}),
        ([-1, 3, -1, -1, 1], {"c1": 1, "c3": 1}),
        ([4, 5], {}),
        ([4, 3, 5, 2], {"c2": 1, "c3": 1}),
        ([-1, -1], {}),
        ([2, 2, 0, 2], {"c0": 1, "c2": 3}),
        ([6, 7, 100, INT32_MAX, INT32_MIN, -2, 0], {"c0": 1}),
    ):
        assert seen(7, window=2, ratio=2, topk=topk) == {**both, **expected}, topk


@pytest.mark.parametrize("bad", [-1, -2, INT32_MIN, 6, 7, INT32_MAX])
def test_pages_that_do_not_exist(bad: int) -> None:
    """The second block of each: w2, w3 and c2, c3."""
    tables = {"swa_block_table": i32([[2, bad, 4, 3]]), "extra_block_table": i32([[3, bad, 2]])}
    rows = {"c0": 1, "c1": 1, "c4": 1, "c5": 1}
    assert seen(5, window=4, **tables) == {"w4": 1, "w5": 1, **rows}
    assert seen(5, window=4, topk=[2, 5, 3], **tables) == {"w4": 1, "w5": 1, "c5": 1}
    nothing = {name: torch.full_like(table, bad) for name, table in tables.items()}
    assert seen(5, window=4, **nothing) == {}


def test_tables_that_end_before_the_token() -> None:
    """Blocks for 4 positions and 2 rows: token 5 has lost w4 and w5, token 9 all of its window."""
    tables = {"swa_block_table": i32([[2, 1]]), "extra_block_table": i32([[3]])}
    assert seen(5, window=4, **tables) == {"w2": 1, "w3": 1, "c0": 1, "c1": 1}
    assert seen(9, window=4, **tables) == {"c0": 1, "c1": 1}
    assert seen(9, window=4, topk=[2, 1, 3], **tables) == {"c1": 1}
    tables = {name: table[:, :0] for name, table in tables.items()}
    assert seen(0, window=4, **tables) == seen(9, topk=[0], **tables) == {}


@pytest.mark.parametrize("topk", [None, [0, 1]], ids=["all", "selected"])
@pytest.mark.parametrize("position", BAD_POSITIONS)
def test_padding_and_positions_that_no_request_has(position: int, topk: list[int] | None) -> None:
    assert seen(position, window=4, topk=topk) == {}


@pytest.mark.parametrize("topk", [None, [0, 1]], ids=["all", "selected"])
@pytest.mark.parametrize("request_", [*BAD_REQUESTS, 1])
def test_requests_that_do_not_exist(request_: int, topk: list[int] | None) -> None:
    assert seen(3, window=4, topk=topk, req_indices=i32([request_])) == {}
