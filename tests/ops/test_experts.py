"""Routed experts: tokens, formats, and compiled code without copies of experts."""

import re

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops.lowering.inspect import compile_and_get_code
from dsv4_ops.reference import experts as reference
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.experts import W4A16, expert_weights
from dsv4_ops.testing.float64.experts import E2M1
from tests.helpers import assert_right, i32

EXPERTS, WIDTH, SIZE = 6, 256, 128


def made(num_tokens, topk=2):
    """Return a call of experts, in which every token has distinct experts."""
    generator = torch.Generator().manual_seed(num_tokens)
    weights = expert_weights(generator, EXPERTS, WIDTH, SIZE, 4)
    x = torch.randn(num_tokens, WIDTH, generator=generator)
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(1)[:, :topk]
    routed = torch.rand(num_tokens, topk, generator=generator)
    return x.to(torch.bfloat16), routed, ids.to(torch.int32), *weights


def test_codes_of_e2m1_have_their_values():
    packed = i32([low | (low + 1) << 4 for low in range(0, 16, 2)]).to(torch.uint8)
    codes = torch.cat([packed, packed])[None]
    scale = torch.tensor([[128]], dtype=torch.uint8)
    values = [2 * value for value in (*E2M1, *(-value for value in E2M1))]
    assert reference.fp4_values(codes, scale)[0].tolist() == values + values


def test_a_token_does_not_depend_on_the_others():
    call = made(5)
    x = call[0].clone()
    x[3] = torch.nan
    out = ops.experts(x, *call[1:], **W4A16)
    assert out[3].isnan().all()
    assert torch.equal(out[[0, 1, 2, 4]], ops.experts(*call, **W4A16)[[0, 1, 2, 4]])


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_plan_has_room_for_whatever_the_routing_is(block_size):
    """One call has all rows in one expert, another as many experts as rows."""
    for ids in (torch.zeros(7, 2), torch.arange(14).view(7, 2) % 6, torch.arange(14).view(7, 2)):
        for num_experts in (1, 6, 14, 400):
            plan = ops.expert_plan(ids.int(), num_experts=num_experts, block_size=block_size)
            assert int((plan.sorted_rows >= 0).sum()) == int((ids < num_experts).sum())
            assert int((plan.expert_of_block >= 0).sum()) == plan.num_blocks.item()


def test_compiled_code_holds_no_copy_of_an_expert():
    """Buffers grow with the number of rows, not with the size of a weight times that number."""
    call = made(5)
    compiled = torch.compile(lambda *tensors: ops.experts(*tensors, **W4A16), fullgraph=True)
    torch._dynamo.reset()
    out, code = compile_and_get_code(compiled, *call)
    assert_right("experts", Case("compiled", call, W4A16), (out,))
    shapes = re.findall(r"empty_strided\w*\(\(([\d, ]+)\)", code)
    sizes = [torch.Size(map(int, shape.split(", "))).numel() for shape in shapes]
    assert sizes
    assert max(sizes) == 5 * 2 * max(2 * SIZE, WIDTH)
