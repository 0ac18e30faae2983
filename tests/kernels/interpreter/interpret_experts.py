"""FP4 and bf16 experts in blocks of every size, in Triton's interpreter. test_scripts.py starts
this file, which prints the blocks that were right."""

import math
import sys
from collections.abc import Callable
from itertools import groupby, product
from typing import Any, ClassVar

import torch

from dsv4_ops import testing
from dsv4_ops.core.layout import round_up
from dsv4_ops.core.registry import OPS
from dsv4_ops.kernels.common.reorder import _permuted, reordered
from dsv4_ops.kernels.experts import activations, experts, grouped_gemm, plan
from dsv4_ops.kernels.launcher import EAGER, Launcher, _WithOptions
from dsv4_ops.reference import experts as reference, linear as reference_linear
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.experts import expert_weights
from dsv4_ops.testing.contract.compare import assert_agrees, equal

SETTINGS = {"swiglu_limit": 10.0, "activations": "bf16"}
W4A8 = {**SETTINGS, "activations": "fp8"}

CHOOSE_BLOCKS = grouped_gemm.choose_blocks

WITHOUT_CODES = Launcher(_WithOptions, capability=(8, 0))
"""The launcher of an A100, whose tensor cores do not multiply e4m3 codes."""


def checked(name: str, case: Case, launch: Launcher = EAGER) -> Any:
    """Return an op's results, which agree with those of its reference."""
    found = OPS[name].implementation("kernels")(launch, *case.tensors, **case.settings)
    expected = case.run(OPS[name].reference)
    assert expected[0].any()
    results = found if isinstance(found, tuple) else (found,)
    assert_agrees(name, testing.op_testing(name), case, results, expected)
    return found


def check(block: int, width: int, size: int, bits: int) -> None:
    """A row's scales end within a step or begin at an odd byte; experts have few or many rows."""
    seed = torch.Generator().manual_seed(block)
    up, up_scale, down, down_scale = expert_weights(seed, 3, width, size, bits)
    several = (bits, block) in grouped_gemm.PAIR_STAGES and width == 256
    tokens = 2 * block + 15 if several else 40
    x = torch.randn(tokens, width, generator=seed).bfloat16()
    ids = torch.randint(-1, 4, (tokens, 2), generator=seed).int()
    ids[10:, 0] = 1
    call = (x, torch.rand(tokens, 2, generator=seed), ids, up, up_scale, down, down_scale)
    stages = grouped_gemm.PAIR_STAGES.get((bits, block), 0)
    blocks = grouped_gemm.Blocks(block, grouped_gemm.TILES[bits][block], stages, False)
    grouped_gemm.choose_blocks = lambda *_, **__: blocks
    found = checked("experts", Case(f"blocks of {block}", call, SETTINGS))
    if bits == 16:
        return
    if several and (bits, block) == (4, 16):
        found = checked("experts", Case("rounded", call, W4A8))
        assert torch.equal(experts(WITHOUT_CODES, *call, **W4A8), found)
    if several:
        return
    odd = [torch.cat((each[..., :1], each), -1)[..., 1:] for each in (up_scale, down_scale)]
    again = experts(EAGER, *call[:4], odd[0], down, odd[1], **SETTINGS)
    assert torch.equal(again, found)


def check_codes(every: bool) -> None:
    """Multiply FP4 by FP8 codes: a row's scales are just within the limits, just outside, or of
    blocks of zeros; scales are NaN, and a token has NaN."""
    again, case = codes_case(512, 128, 20)
    _, _, _, up, up_scale, _, down_scale = case.tensors
    up_scale[1, 5, -1], up_scale[1, 6, -1] = 122, 111
    up[1, 11, :16], up_scale[1, 11, 0] = 0, 0
    assert not every or not again()
    for row, scale in ((5, 123), (6, 110)) if every else ((5, 123),):
        usual = int(up_scale[1, row, -1])
        up_scale[1, row, -1] = scale
        assert again()
        up_scale[1, row, -1] = usual
    down_scale[1, 3, 1] = 255
    assert not again()  # the first product has no NaN
    again, case = codes_case(128, 384 if every else 256, 50 if every else 30)
    assert not every or not again()
    case.tensors[0][20, 7] = math.nan
    assert again()


def codes_case(width: int, size: int, tokens: int) -> tuple[Callable[[], bool], Case]:
    """Return a call, and a function that runs it and says if programs multiplied block by block."""
    seed = torch.Generator().manual_seed(width)
    up, up_scale, down, down_scale = expert_weights(seed, 2, width, size, 4)
    up_scale, down_scale = (torch.full_like(each, 118) for each in (up_scale, down_scale))
    x = torch.randn(width, tokens, generator=seed).bfloat16().t()
    ids = torch.randint(-1, 3, (tokens, 2), generator=seed).int()
    ids[10:, 0] = 1
    weights = torch.rand(tokens, 2, generator=seed)
    case = Case("codes", (x, weights, ids, up, up_scale, down, down_scale), W4A8)
    grouped_gemm.choose_blocks = CHOOSE_BLOCKS
    assert CHOOSE_BLOCKS(ids.numel(), 2, 4, codes=True).codes

    def again() -> bool:
        Kept.launches.clear()
        checked("experts", case, Launcher(Kept))
        kernel = grouped_gemm.gate_up_by_blocks_kernel
        (args,) = (args for each, args in Kept.launches if each is kernel)
        return bool(args[kernel.arg_names.index("out_of_reach")].any())

    return again, case


class Kept(_WithOptions):
    """A kernel whose launches, with their arguments, are kept."""

    launches: ClassVar[list[tuple[Any, tuple[Any, ...]]]] = []

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **given: Any) -> None:
            self.launches.append((self.kernel, args))
            super(Kept, self).__getitem__(grid)(*args, **given)

        return launch


def check_plan(num_rows: int) -> None:
    """Programs read all rows in several steps and count them, or an earlier launch counts them."""
    assert num_rows > 2 * max(plan.MAX_STEP_ROWS, plan.FUSED_COUNT_ROWS)
    seed, settings = torch.Generator().manual_seed(0), {"num_experts": 8, "block_size": 32}
    ids = torch.randint(-1, 9, (6, num_rows // 6), generator=seed).int().t()
    expected = reference.expert_plan(ids, **settings)
    usual = plan.FUSED_COUNT_ROWS
    for most in (2 * num_rows, usual):
        plan.FUSED_COUNT_ROWS = most
        found = plan.expert_plan(EAGER, ids, **settings)
        assert all(map(torch.equal, found, expected))
        pairs = plan.expert_plan(EAGER, ids, **settings, pairs=True)
        assert torch.equal(pairs.sorted_rows, found.sorted_rows)
        assert pairs.expert_of_block.tolist() == marked(found.expert_of_block.tolist())


def marked(experts: list[int]) -> list[int]:
    """Return the plan with pairs: the first block of a pair represents both, the second none."""
    found = []
    for expert, same in groupby(experts):
        pairs, alone = divmod(len(list(same)), 2)
        found += [expert + plan.PAIR.value if expert >= 0 else -1, -1] * pairs + [expert] * alone
    return found


def check_pairs() -> None:
    """Experts have 0, 1, 2 and 3 blocks of 2 rows."""
    ids = torch.tensor([[3, 1], [3, 2], [3, 2], [3, 2], [3, 4]]).int()
    sizes = {"num_experts": 4, "block_size": 2}
    found = plan.expert_plan(EAGER, ids, **sizes, pairs=True)
    alone = plan.expert_plan(EAGER, ids, **sizes)
    assert alone.expert_of_block.tolist() == [1, 2, 2, 3, 3, 3, -1]
    first = plan.PAIR.value
    assert found.expert_of_block.tolist() == [1, first + 2, -1, first + 3, -1, 3, -1]
    assert torch.equal(found.sorted_rows, alone.sorted_rows)
    assert found.num_blocks.tolist() == [6]


def check_route() -> None:
    """Tokens exceed a tile, experts do not fill one, and the width is no multiple of a step."""
    seed = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 200, generator=seed).bfloat16() for n in (90, 70))
    bias = torch.randn(70, generator=seed) / 8
    call = (hidden, weight / 16, bias, None, None)
    checked("route", Case("many tokens", call, {"top_k": 6, "scale": 1.5}))


def check_rounding() -> None:
    """Blocks have NaN, infinity, zeros, or amax near 1e-4 and 2^7 * 1.75; two rows are absent."""
    seed = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.arange(-20, 12, 4)[:, None]
    rows = (torch.randn(8, 384, generator=seed) * sizes).bfloat16()
    rows[1, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    rows[2, 128:256], rows[3, :128], rows[4, :128] = 0, 1e-4, 224
    rows[4, 5], rows[5, 128:256] = -225, math.nan
    places = torch.tensor([3, 0, 7, 5, 9, 1, -1, -1]).int()
    expected = reference_linear.activation_values(rows, None, "fp8").to(torch.bfloat16)
    expected[6:] = rows[6:]
    assert not torch.equal(expected[:6].nan_to_num(), rows[:6].nan_to_num())
    activations.round_rows(EAGER, rows, places)
    assert equal(rows, expected)


def check_reordered() -> None:
    """Rows have gaps and begin at odd addresses, are padded or not, or there are none."""
    shapes = ((0, 64), (1, 512), (5, 200), (3, 2, 384))
    for fp4, dtype, shape in product((False, True), (torch.bfloat16, torch.uint8), shapes):
        width, order = shape[-1], [0] * (64 << fp4)
        for t, i, j, h, p in product(range(4), range(4), range(2), range(1 + fp4), range(2)):
            value = 32 * t + 8 * i + 4 * j + 2 * h + p if fp4 else 16 * t + 4 * i + 2 * j + p
            order[64 * h + 16 * i + 8 * p + 2 * t + j] = value
        whole = torch.randint(1, 256, (*shape[-2::-1], width + 9)).to(dtype)
        x = whole.movedim(0, -2)[..., 1:-8]
        expected = torch.nn.functional.pad(x, (0, round_up(width, 128 << fp4) - width))
        expected = expected.unflatten(-1, (-1, 64 << fp4))[..., order].flatten(-2)
        both = reordered(EAGER, x, fp4), _permuted(x, fp4)  # the kernel, and fixed-size graphs
        assert all(torch.equal(each, expected) for each in both)


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_reordered()
    check_plan(4500)
    check_pairs()
    check_rounding()
    check_route()
    every = len(sys.argv) > 1
    check_codes(every)
    for block in list(grouped_gemm.TILES[16])[:: 1 if every else 2]:
        if block in grouped_gemm.TILES[4]:
            if every:
                check(block, 288, 64, 4)
            if every or block == 16:
                check(block, 256, 256, 4)
            check(block, 256, 128, 8)
        check(block, 200, 72, 16)
        if every or block == 64:
            check(block, 256, 256, 16)
        print(block)
