"""Sparse MLA beyond the contract: two keys by hand, effects of NaN in queries, and the tightness of
the contract's budget."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.testing.case import Case, i32
from dsv4_ops.testing.contract.compare import assert_agrees

INF, NAN = math.inf, math.nan
CACHE = torch.tensor([[[0.0, 8.0], [math.log(3), 16.0]]])
"""With the query (1, 0), the logits are 0 and ln 3."""
SETTINGS = {"softmax_scale": 1.0, "swa_block_size": 2, "layout": "plain"}


def attend(
    q: Tensor, slots: list[list[int]], lens: list[int], sink: Any = None, **given: Any
) -> Any:
    sink = None if sink is None else torch.tensor(sink)
    return ops.sparse_mla_decode(
        q, CACHE, i32(slots), i32(lens), attn_sink=sink, **SETTINGS, **given
    )


@pytest.mark.parametrize(("sink", "share"), [(None, 1), (-INF, 1), (math.log(4), 0.5), (INF, 0)])
def test_two_keys(sink: float | None, share: float) -> None:
    """The weights are 1/4 and 3/4. A sink of ln 4 takes half of both, and is not in the lse."""
    q, sinks = torch.tensor([[[1.0, 0.0]]]), None if sink is None else [sink]
    out, lse = attend(q, [[0, 1]], [2], sinks)
    torch.testing.assert_close(out[0, 0], torch.tensor([0.75 * math.log(3), 14.0]) * share)
    assert lse.item() == pytest.approx(math.log(4), rel=1e-6)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_query_that_is_not_finite_spoils_its_own_row(bad: float) -> None:
    """A row is a token, or a head of a token."""
    q = torch.randn(3, 3, 2, generator=torch.Generator().manual_seed(0))
    lists = [[0, 1]] * 3, [2, 2, 1]
    expected, kept = attend(q, *lists), [0, 2]
    for rows, others in ((1, kept), ((slice(None), 1), (slice(None), kept))):
        spoiled = q.clone()
        spoiled[rows] = bad
        for left, right in zip(attend(spoiled, *lists), expected, strict=True):
            assert torch.equal(left[others], right[others])


@pytest.mark.parametrize(
    "mistake", ["none", "no sink", "a key less", "sink in lse", "log2", "+inf"]
)
def test_the_budget_refuses_wrong_results(mistake: str) -> None:
    q = torch.randn(3, 3, 2, generator=torch.Generator().manual_seed(1))
    sink = [0.5, 1.0, 2.0]
    outcome = out, lse = attend(q, [[0, 1]] * 3, [2, 1, 0], sink)
    if mistake == "no sink":
        out = attend(q, [[0, 1]] * 3, [2, 1, 0]).out
    elif mistake == "a key less":
        out = attend(q, [[0, 1]] * 3, [1, 1, 0], sink).out
    elif mistake == "sink in lse":
        lse = torch.logaddexp(lse, torch.tensor(sink))
    elif mistake == "log2":
        lse = lse / math.log(2)
    elif mistake == "+inf":
        lse = lse.abs()
    tensors = (q, CACHE, i32([[0, 1]] * 3), i32([2, 1, 0]), None, None, None, torch.tensor(sink))
    call = Case("called", tensors, SETTINGS), (out, lse), outcome
    op_testing = testing.op_testing("sparse_mla_decode")
    if mistake == "none":
        assert_agrees("right", op_testing, *call)
        return
    with pytest.raises(AssertionError, match=r"budgets from float64|other NaN or infinities"):
        assert_agrees("wrong", op_testing, *call)
