"""Routed experts on a GPU: kernels of every block size against the reference."""

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.experts import W4A8, W4A16, expert_weights
from tests.helpers import assert_right

PRECISIONS = pytest.mark.parametrize(
    ("bits", "settings"),
    [(4, W4A16), (4, W4A8), (8, W4A16), (8, W4A8), (16, W4A16)],
    ids=["w4a16", "w4a8", "w8a16", "w8a8", "bf16"],
)


def sampled(num_tokens, num_experts, bits):
    seed = torch.Generator().manual_seed(num_tokens)
    weights = expert_weights(seed, num_experts, 512, 384, bits)
    x = torch.randn(num_tokens, 512, generator=seed).bfloat16() * (2.0**-8 if bits == 8 else 1)
    scores = torch.rand(num_tokens, num_experts, generator=seed).topk(2)
    return x, scores.values, scores.indices.int(), weights


@PRECISIONS
@pytest.mark.parametrize(
    ("num_tokens", "num_experts"), [(5, 8), (20, 4), (40, 4), (40, 2), (60, 2), (600, 2)]
)
def test_blocks_of_every_size_give_what_the_reference_does(num_tokens, num_experts, bits, settings):
    """Experts have 1 to 600 rows on average, so that blocks have every size."""
    x, scores, ids, weights = sampled(num_tokens, num_experts, bits)
    ids[0, 0], ids[1, 1] = -1, num_experts
    check(x, scores, ids, weights, settings)


@PRECISIONS
@pytest.mark.parametrize("num_tokens", [100, 260, 600])
def test_an_expert_of_many_blocks_among_others_of_one(num_tokens, bits, settings):
    """Experts have 3, 8 or 19 rows on average; at each size, some programs have two blocks."""
    x, scores, ids, weights = sampled(num_tokens, 64, bits)
    ids[: num_tokens // 2, 0] = 3
    check(x, scores, ids, weights, settings)


def check(x, scores, ids, weights, settings):
    tensors = (x, scores, ids, *weights)
    on_gpu = tuple(None if each is None else each.cuda() for each in tensors)
    case = Case("triton", on_gpu, settings)
    assert_right("experts", case, case.run(ops.experts))


@pytest.mark.parametrize("skipped", [1, 4])
def test_scales_that_begin_at_any_byte_give_the_same(skipped):
    """Kernels load eight FP4 scales at once, at addresses that must be multiples of 8 bytes."""
    seed = torch.Generator().manual_seed(skipped)
    up, up_scale, down, down_scale = (
        each.cuda() for each in expert_weights(seed, 4, 512, 256, 4) if each is not None
    )
    x = torch.randn(20, 512, generator=seed).bfloat16().cuda()
    scores = torch.rand(20, 4, generator=seed).topk(2)
    routed = (x, scores.values.cuda(), scores.indices.int().cuda())
    moved = [
        torch.cat((each[..., :skipped], each), -1)[..., skipped:] for each in (up_scale, down_scale)
    ]
    expected = ops.experts(*routed, up, up_scale, down, down_scale, **W4A16)
    assert torch.equal(ops.experts(*routed, up, moved[0], down, moved[1], **W4A16), expected)


@pytest.mark.parametrize("num_tokens", [40, 100])  # single blocks, and pairs of blocks
@pytest.mark.parametrize("scale", [110, 111, 122, 123, 255])
def test_scales_around_the_reach_of_codes(num_tokens, scale):
    """Scale bytes are 118, except for one in some rows: 111 to 122 are within reach of codes."""
    seed = torch.Generator().manual_seed(num_tokens)
    up, up_scale, down, down_scale = expert_weights(seed, 2, 512, 384, 4)
    up_scale, down_scale = (torch.full_like(each, 118) for each in (up_scale, down_scale))
    up_scale[1, 5, -1] = up_scale[0, 700, 9] = down_scale[1, 70, -1] = scale
    x = torch.randn(512, num_tokens, generator=seed).bfloat16().t()
    scores = torch.rand(num_tokens, 2, generator=seed).topk(2)
    routed = scores.values, scores.indices.int()
    check(x, *routed, (up, up_scale, down, down_scale), W4A8)


def test_codes_of_nan_of_an_odd_width_and_of_a_symbolic_number_of_tokens():
    seed = torch.Generator().manual_seed(0)
    weights = tuple(each.cuda() for each in expert_weights(seed, 2, 384, 384, 4))
    x = torch.randn(90, 384, generator=seed).bfloat16().cuda()
    x[20, 7] = torch.nan
    scores = torch.rand(90, 2, generator=seed).topk(2)
    routed = scores.values.cuda(), scores.indices.int().cuda()
    compiled = torch.compile(ops.experts, dynamic=True, fullgraph=True)
    for count in (90, 50):
        call = (x[:count], *(each[:count] for each in routed), *weights)
        found = compiled(*call, **W4A8)
        assert found[20].isnan().all()
        others = torch.arange(count) != 20
        assert found[others].isfinite().all()
        expected = ops.experts(*call, **{**W4A8, "impl": "reference"})
        assert (found - expected)[others].norm() < 2e-2 * expected[others].norm()
