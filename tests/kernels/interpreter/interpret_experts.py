"""FP4 and bf16 experts in blocks of every size, in Triton's interpreter.

test_expert_kernels.py starts it. Prints the blocks that were right."""

import torch

import tests.kernels.interpreter.masks  # noqa: F401  # before any kernel runs
from dsv4_ops import testing
from dsv4_ops.core.registry import OPS
from dsv4_ops.kernels.experts import experts, plan, products
from dsv4_ops.kernels.launcher import EAGER
from dsv4_ops.reference import experts as reference
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.experts import expert_weights
from dsv4_ops.testing.contract.compare import assert_agrees

SETTINGS = {"swiglu_limit": 10.0, "activations": "bf16"}


def check(block: int, width: int, size: int, bits: int) -> None:
    """Scales of a row that end within a step, and ones that begin at an odd byte; an expert of
    several blocks, and two of few rows."""
    seed = torch.Generator().manual_seed(block)
    up, up_scale, down, down_scale = expert_weights(seed, 3, width, size, bits)
    tokens = 40 if block > 32 else 90
    x = torch.randn(tokens, width, generator=seed).bfloat16()
    ids = torch.randint(-1, 4, (tokens, 2), generator=seed).int()
    ids[10:, 0] = 1
    call = (x, torch.rand(tokens, 2, generator=seed), ids, up, up_scale, down, down_scale)
    products.block_rows = lambda *_: block
    case = Case(f"blocks of {block}", call, SETTINGS)
    found = experts(EAGER, *call, **SETTINGS)
    expected = case.run(OPS["experts"].reference)
    assert expected[0].any()
    assert_agrees("experts", testing.op_testing("experts"), case, (found,), expected)
    if bits == 16:
        return
    odd = [torch.cat((each[..., :1], each), -1)[..., 1:] for each in (up_scale, down_scale)]
    again = experts(EAGER, *call[:4], odd[0], down, odd[1], **SETTINGS)
    assert torch.equal(again, found)


def check_plan(num_rows: int) -> None:
    """More rows than a program looks at at a time."""
    assert num_rows > 2 * plan.MOST_ROWS
    seed, settings = torch.Generator().manual_seed(0), {"num_experts": 8, "block_size": 32}
    ids = torch.randint(-1, 9, (num_rows // 6, 6), generator=seed).int()
    found = plan.expert_plan(EAGER, ids, **settings)
    for left, right in zip(found, reference.expert_plan(ids, **settings), strict=True):
        assert torch.equal(left, right)


def check_pairs() -> None:
    """Experts of 0, 1, 2 and 3 blocks of 2 rows."""
    ids = torch.tensor([[3, 1], [3, 2], [3, 2], [3, 2], [3, 4]]).int()
    sizes = {"num_experts": 4, "block_size": 2}
    found = plan.expert_plan(EAGER, ids, **sizes, pairs=True)
    alone = plan.expert_plan(EAGER, ids, **sizes)
    assert alone.expert_of_block.tolist() == [1, 2, 2, 3, 3, 3, -1]
    first = plan.PAIR.value
    assert found.expert_of_block.tolist() == [1, first + 2, -1, first + 3, -1, 3, -1]
    assert torch.equal(found.sorted_rows, alone.sorted_rows)
    assert found.num_blocks.tolist() == [6]


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_plan(4500)
    check_pairs()
    for block in products.TILES[16]:
        if block in products.TILES[4]:
            check(block, 288, 64, 4)
            check(block, 256, 256, 4)
            check(block, 256, 128, 8)
        check(block, 200, 72, 16)
        check(block, 256, 256, 16)
        print(block)
