"""The tiles of ``mla_prefill`` in Triton's interpreter; test_scripts.py starts this file, which
prints the tiles that were right."""

import sys

import torch

from dsv4_ops.kernels.launcher import EAGER
from dsv4_ops.kernels.mla_context import mla_prefill, prefill
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.mla_context import ragged_prefill
from tests.helpers import assert_right

NAN = float("nan")
LENS = [(3, 5), (70, 70), (0, 4), (2, 6)]
FIRST, BEHIND = 3, 73
"""First query of the second request, and the query after its last."""


def check(causal: bool) -> None:
    settings = {"softmax_scale": 0.2, "causal": causal}
    clean = ragged_prefill(torch.Generator().manual_seed(0), LENS)
    case = Case("tiles", clean, settings)
    found = mla_prefill(EAGER, *clean, **settings)
    assert_right("mla_prefill", case, found)
    spoiled = [each.clone() for each in clean]
    spoiled[1][6], spoiled[3][7] = NAN, NAN
    seeing = FIRST + causal  # the first causal query does not see these rows
    for left, right in zip(mla_prefill(EAGER, *spoiled, **settings), found, strict=True):
        assert left[seeing:BEHIND].isnan().any()
        assert torch.equal(left[:seeing], right[:seeing])
        assert torch.equal(left[BEHIND:], right[BEHIND:])


def check_decreasing_starts(causal: bool) -> None:
    """A start below the earlier start counts as that start; every row is written."""
    *tensors, starts, bounds = ragged_prefill(torch.Generator().manual_seed(0), LENS)
    settings = {"softmax_scale": 0.2, "causal": causal}
    adversarial = starts.clone()
    adversarial[2], adversarial[3] = 1, -7
    monotone = adversarial.cummax(0).values
    torch.use_deterministic_algorithms(True)  # memory that no kernel writes is NaN
    found, expected = (
        mla_prefill(EAGER, *tensors, each, bounds, **settings) for each in (adversarial, monotone)
    )
    torch.use_deterministic_algorithms(False)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)
        assert not left[: monotone[-1]].isnan().any()


if __name__ == "__main__":
    torch.set_num_threads(1)
    both, masks = (prefill._LARGE_TILE, prefill._SMALL_TILE), (False, True)
    thorough = len(sys.argv) > 1
    for tile in both if thorough else both[1:]:
        prefill._LARGE_TILE = tile
        for causal in masks if thorough else masks[1:]:
            check(causal)
            check_decreasing_starts(causal)
        print(*tile)
