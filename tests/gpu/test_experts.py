"""Routed experts on a GPU: kernels of every block size beside the reference."""

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.cases.experts import W4A8, W4A16, expert_weights
from dsv4_ops.testing.contract.compare import assert_agrees

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("settings", [W4A16, W4A8], ids=["a16", "a8"])
@pytest.mark.parametrize("fp8", [False, True], ids=["fp4", "fp8"])
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(5, 8), (20, 4), (60, 2)])
def test_blocks_of_every_size_give_what_the_reference_does(num_tokens, num_experts, fp8, settings):
    """On average 1, 10 and 60 rows for an expert: blocks of 16, 32 and 128."""
    seed = torch.Generator().manual_seed(num_tokens)
    weights = expert_weights(seed, num_experts, 512, 384, fp8, True)
    x = torch.randn(num_tokens, 512, generator=seed).bfloat16() * (2.0**-8 if fp8 else 1)
    scores = torch.rand(num_tokens, num_experts, generator=seed).topk(2)
    ids = scores.indices.int()
    ids[0, 0], ids[1, 1] = -1, num_experts
    tensors = (x, scores.values, ids, *weights)
    case = testing.Case("triton", tuple(each.cuda() for each in tensors), settings)
    expected = case.run(OPS["experts"].reference)
    found = case.run(ops.experts)
    assert_agrees("experts", testing.op_testing("experts"), case, found, expected)
