"""Prefill attention of chunked contexts on a GPU: our kernel against the reference, at V3's sizes,
in CUDA graphs, and with offsets beyond 2**31."""

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.mla_context import ragged_prefill
from tests.helpers import assert_right

SCALE = 192**-0.5
LENS = [(129, 700), (1, 64), (0, 33), (300, 300), (17, 0), (64, 1)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ragged_requests(causal, dtype):
    seed, sizes = torch.Generator().manual_seed(0), (4, 128, 64, 128)
    made = ragged_prefill(seed, LENS, dtype=dtype, sizes=sizes)
    tensors = tuple(each.to("cuda") for each in made)
    settings = {"softmax_scale": SCALE, "causal": causal}
    case = Case("V3", tensors, settings)
    assert_right("mla_prefill", case, ops.mla_prefill(*tensors, **settings, impl="triton"))


def test_keys_beyond_2_31_values(gpu_memory_alone):
    """65600 keys of 128 heads and 256 columns: the last request's keys are beyond 2^31 values."""
    heads, num_k, last = 128, 65664, 65600
    kv = torch.full((num_k, heads, 256), torch.nan, dtype=torch.bfloat16, device="cuda")
    kv[last:] = torch.randn(num_k - last, heads, 256, device="cuda")
    k_pe = torch.randn(num_k, 64, device="cuda").to(torch.bfloat16)
    q = torch.randn(64, heads, 192, device="cuda").to(torch.bfloat16)
    start_loc = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    bounds = torch.tensor([last, num_k], dtype=torch.int32, device="cuda")
    settings = {"softmax_scale": SCALE, "causal": False}
    whole = (q, kv[..., :128], k_pe, kv[..., 128:])
    found = ops.mla_prefill(*whole, start_loc, bounds, **settings, impl="triton")
    near = (q, *(each[last:].contiguous() for each in whole[1:]), start_loc, bounds - last)
    assert_right("mla_prefill", Case("V3", near, settings), found)
