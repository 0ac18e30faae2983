"""Hyper-connections of many tokens, in which a program computes several groups of columns."""

import pytest
import torch

from dsv4_ops.core.registry import OPS
from dsv4_ops.kernels.launcher import EAGER
from dsv4_ops.testing.case import Case, results
from tests.helpers import assert_right

OP = "hyper_connection"


@pytest.mark.parametrize("after_a_block", [False, True])
@pytest.mark.parametrize("num_tokens", [448, 449, 1000])
def test_many_tokens(num_tokens, after_a_block):
    made = torch.Generator().manual_seed(num_tokens)
    width, count, weights = 4096, 4, 24

    def some(*shape):
        return torch.randn(*shape, generator=made)

    tensors = [
        some(num_tokens, count, width).bfloat16(),
        some(weights, count * width) / 128,
        some(weights),
        some(3),
        some(width),
    ]
    if after_a_block:
        mix = torch.rand(num_tokens, count, count, generator=made) / count
        tensors += [some(num_tokens, width).bfloat16(), some(num_tokens, count), mix]
    settings = {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-6}
    case = Case("many", tuple(each.cuda() for each in tensors), settings)
    found = OPS[OP].implementation("kernels")(EAGER, *case.tensors, **settings)
    assert_right(OP, case, results(found))
