"""The plan of sparse MLA: numbers by hand, what every plan must hold, and that no plan changes what
tokens attend to. Sampled plans, fakes, graphs and exports: tests/ops/test_contract.py; the kernel
with plans in Triton's interpreter: tests/kernels/interpreter/interpret_kernels.py."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.testing.contract.compare import assert_agrees
from tests.helpers import INT32_MAX, INT32_MIN, call, i32, strided
from tests.oracles import mla as oracles_mla, plan as oracle

ABSENT = [-1, -1, -1, -1]
LENS = (0, 1, 63, 64, 65, 127, 128, 129, 640, 8192, INT32_MAX, -1, INT32_MIN)


def plan_of(swa: list[int], extra: list[int] | None = None, **sizes: int) -> list[list[int]]:
    tensors = [i32(swa)] if extra is None else [i32(swa), i32(extra)]
    plan = call(ops.sparse_mla_plan, *tensors, **sizes)
    assert (plan.dtype, plan.is_contiguous()) == (torch.int32, True)
    rows: list[list[int]] = plan.tolist()
    return rows


@pytest.mark.parametrize(
    ("length", "splits"),
    [(0, 1), (1, 1), (64, 1), (65, 2), (128, 2), (129, 3), (192, 3), (193, 2), (256, 2), (257, 3)],
)
def test_one_token_on_three_programs(length: int, splits: int) -> None:
    """4 blocks of 64 keys on 3 programs are splits of 2, so two of them."""
    rows = plan_of([length], num_heads=8, num_programs=3)
    assert rows == [[0, split, splits, 0] for split in range(splits)] + [ABSENT] * (4 - splits)


@pytest.mark.parametrize(
    ("heads", "programs"), [(1, 6), (64, 6), (65, 3), (128, 3), (129, 2), (192, 2), (384, 1)]
)
def test_tiles_of_heads_share_the_programs(heads: int, programs: int) -> None:
    """Six programs; 60 blocks are splits of 10, 20, 30 and 60."""
    rows = plan_of([3840], num_heads=heads, num_programs=6)
    assert rows == [[0, split, programs, 0] for split in range(programs)] + [ABSENT]


def test_more_tiles_of_heads_than_programs() -> None:
    assert plan_of([640], num_heads=129, num_programs=2) == [[0, 0, 1, 0], ABSENT]


def test_the_default_is_an_h200() -> None:
    """132 programs, of 128 heads 66: 1320 blocks are ten each, or twenty."""
    lens = i32([1320 * 64])
    assert ops.sparse_mla_plan(lens, num_heads=64)[:132, 2].unique().tolist() == [132]
    assert ops.sparse_mla_plan(lens, num_heads=128)[:66, 2].unique().tolist() == [66]
    assert ops.sparse_mla_plan(lens, num_heads=64).shape == (133, 4)
    assert ops.sparse_mla_plan(lens, num_heads=128).shape == (67, 4)


def test_the_window_and_the_rows_round_up_apart() -> None:
    """1 + 1 blocks of one key each, although two keys fit in one; below 0 is none."""
    whole = [[0, 0, 2, 0], [0, 1, 2, 0], [1, 0, 1, 0]]
    assert plan_of([1, 64], [1, -9], num_heads=1, num_programs=3) == [*whole, ABSENT, ABSENT]
    assert plan_of([2, 64], None, num_heads=1, num_programs=3)[:2] == [[0, 0, 1, 0], [1, 0, 1, 0]]


def test_partial_results_lie_behind_each_other() -> None:
    """7, 1, 0, 5 and 2 blocks on 12 programs: splits of up to 2 take 2 * 12 + 3 * 5 = 39, of up to
    3 take 3 * 12 + 3 * 3 = 45. Tokens of 2 blocks or more come first, then those of 1, of 0."""
    rows = plan_of([7 * 64, 1, 0, 5 * 64, 2 * 64], num_heads=64, num_programs=12)
    assert rows == [
        [0, 0, 4, 0],
        [3, 0, 3, 4],
        [0, 1, 4, 0],
        [0, 2, 4, 0],
        [0, 3, 4, 0],
        [3, 1, 3, 4],
        [3, 2, 3, 4],
        [4, 0, 1, 0],
        [1, 0, 1, 0],
        [2, 0, 1, 0],
        *[ABSENT] * 7,
    ]


def test_few_longer_pieces_or_more_shorter_ones() -> None:
    """5 programs and as many tokens: one extra split. Of 15 blocks splits of 5 take 5 * 5 + 3, of
    6 take 33 and whole tokens 35. Of 20, 10, 1, 2 and 7 blocks splits of 10 take 53, of 11 take 58.
    One program more and 2 extra splits are as many as there may be: of 6 programs and 4 tokens
    of 16, 10, 1 and 7 blocks (a mean of 6) splits of 8 take 6 * 8 + 3 * 2, of 6 would be 3."""
    rows = plan_of([7 * 64, 1, 0, 5 * 64, 2 * 64], num_heads=64, num_programs=5)
    ordered = [[token, 0, 1, 0] for token in (3, 4, 1, 2)]
    assert rows == [[0, 0, 2, 0], [0, 1, 2, 0], *ordered, *[ABSENT] * 4]
    rows = plan_of([64 * count for count in (20, 10, 1, 2, 7)], num_heads=64, num_programs=5)
    assert [row[:3] for row in rows[:2]] == [[0, 0, 2], [0, 1, 2]]
    assert [row[:3] for row in rows[2:6]] == [[token, 0, 1] for token in (1, 4, 3, 2)]
    rows = plan_of([64 * count for count in (16, 10, 1, 7)], num_heads=64, num_programs=6)
    assert [row[:2] for row in rows[:6]] == [[0, 0], [1, 0], [0, 1], [1, 1], [3, 0], [2, 0]]


def test_longer_tokens_come_first() -> None:
    """More tokens than programs, and no extra splits of so few: of 14ths of 31 blocks 31 are 14,
    30 are 13, 3 and 4 are 1, 1 is 0; those of a class keep their order."""
    tiles = [3, 30, 1, 31, 1, 4]
    rows = plan_of([64 * count for count in tiles], num_heads=64, num_programs=2)
    assert [row[0] for row in rows] == [3, 1, 0, 5, 2, 4, -1, -1]


def test_no_token_and_no_keys() -> None:
    for extra in (None, []):
        assert plan_of([], extra, num_heads=64, num_programs=3) == [ABSENT] * 3
    assert plan_of([0, -5], num_heads=64, num_programs=1) == [[0, 0, 1, 0], [1, 0, 1, 0], ABSENT]


def test_lens_that_overflow_int32() -> None:
    """3 tokens of 2^26 blocks: splits of 2^25 * 3 on two programs, and of all of them on one."""
    rows = plan_of([INT32_MAX] * 3, [INT32_MAX] * 3, num_heads=64, num_programs=2)
    assert rows == [[0, 0, 1, 0], [1, 0, 1, 0], [2, 0, 1, 0], ABSENT, ABSENT]
    rows = plan_of([INT32_MAX], [INT32_MIN], num_heads=64, num_programs=7)
    assert rows == [[0, split, 7, 0] for split in range(7)] + [ABSENT]


def test_tokens_of_several_pieces_come_before_those_of_one() -> None:
    """150 tokens of 8 blocks and at last one of 40 on 132 programs: splits of 10, the mean, take
    1240 + 4 * (154 - 132) + 3 * 3 or 10 * 132. The last one comes first: combines look up to
    as many rows as there are programs."""
    rows = plan_of([64 * 8] * 150 + [64 * 40], num_heads=64)
    assert rows[:4] == [[150, split, 4, 0] for split in range(4)]
    assert [row[:3] for row in rows[4:154]] == [[token, 0, 1] for token in range(150)]
    rows = plan_of([64 * 10] * 150 + [64 * 40], num_heads=64)
    assert rows[0][:3] == [150, 0, 4]


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    lens=st.lists(st.tuples(st.sampled_from(LENS), st.sampled_from(LENS)), max_size=40),
    window_only=st.booleans(),
    num_heads=st.sampled_from((1, 8, 64, 65, 128, 129)),
    num_programs=st.sampled_from((1, 2, 3, 7, 66, 132)),
)
def test_properties(
    lens: list[tuple[int, int]], window_only: bool, num_heads: int, num_programs: int
) -> None:
    """Exactly the splits of every token, none above the size; capacity that the kernel has."""
    swa, extra = [length for length, _ in lens], [length for _, length in lens]
    more = None if window_only else extra
    rows = plan_of(swa, more, num_heads=num_heads, num_programs=num_programs)
    assert rows == oracle.sparse_mla_plan(swa, more, num_heads=num_heads, num_programs=num_programs)
    programs = oracle.programs_of(num_heads, num_programs)
    assert len(rows) == len(lens) + programs
    firsts = [number for number, row in enumerate(rows) if row[1] == 0 and row[2] > 1]
    assert all(number < programs for number in firsts)  # where combines look
    real = [row for row in rows if row != ABSENT]
    assert rows == real + [ABSENT] * (len(rows) - len(real))
    assert all(value >= 0 for row in real for value in row)
    tiles = oracle.tiles_of(swa, more)
    size, used = oracle.split_size(tiles, programs), set()
    for token, count in enumerate(tiles):
        mine = [row[1:] for row in real if row[0] == token]
        splits = len(mine)
        assert mine == [[split, splits, mine[0][2]] for split in range(splits)]
        assert splits > 1 or mine[0][2] == 0
        bounds = [count * split // splits for split in range(splits + 1)]  # as the kernel does
        assert all(right - left <= size for left, right in pairwise(bounds))
        if splits > 1:
            places = set(range(mine[0][2], mine[0][2] + splits))
            assert not used & places
            used |= places
    assert used == set(range(len(used)))
    assert len(used) <= programs


def test_partial_results_of_as_many_pieces_as_programs() -> None:
    """32 tokens of 66000 blocks on 64 programs: two splits of each."""
    rows = plan_of([64 * 66000] * 32, num_heads=64, num_programs=64)
    assert [row[2:] for row in rows[:32]] == [[2, 2 * token] for token in range(32)]


def test_tokens_that_would_make_another_round_in_two_stay_whole() -> None:
    """40 tokens of 18 blocks and 24 of 4 on 66 programs: in splits of 13, the mean, or more the
    former would be 80."""
    rows = plan_of([64 * 18] * 40 + [64 * 4] * 24, num_heads=128)
    assert [row[2] for row in rows] == [1] * 64 + [-1] * 66


@pytest.mark.parametrize("seed", range(8))
def test_lens_of_any_strides(seed: int) -> None:
    rng = Random(seed)
    swa, extra = (i32([rng.choice(LENS) for _ in range(9)]) for _ in range(2))
    expected = ops.sparse_mla_plan(swa, extra, num_heads=64)
    assert torch.equal(ops.sparse_mla_plan(strided(swa), strided(extra), num_heads=64), expected)
    same = i32([500]).expand(9)
    assert torch.equal(
        ops.sparse_mla_plan(same, num_heads=64), ops.sparse_mla_plan(same.clone(), num_heads=64)
    )


def planned_call(kind: str, op: str, seed: int) -> oracles_mla.Call:
    if op == "sparse_mla_decode":
        return oracles_mla.random_call(seed, kind)
    return oracles_mla.random_paged(seed, kind)


def plans(found: oracles_mla.Call) -> dict[str, Tensor]:
    """Plans of this batch, of others, and of what no lengths give."""
    tensors, tokens = found.tensors, found.tensors["q"].shape[0]
    own: Any = tensors["swa_lens"], tensors["extra_lens"]
    stale = i32([640, 0, 8192, 65][:tokens])
    wide = ops.sparse_mla_plan(stale, num_heads=64, num_programs=5)
    return {
        "own": ops.sparse_mla_plan(*own, num_heads=found.tensors["q"].shape[1]),
        "stale": ops.sparse_mla_plan(stale, stale, num_heads=64, num_programs=7),
        "one program": ops.sparse_mla_plan(*own, num_heads=64, num_programs=1),
        "column slice": torch.cat([wide, wide], 1)[:, 2:6].roll(2, 1),
        "strided": strided(wide),
        "many heads": ops.sparse_mla_plan(*own, num_heads=1000),
    }


@pytest.mark.parametrize("op", ["sparse_mla_decode", "sparse_mla_decode_paged"])
@pytest.mark.parametrize("kind", oracles_mla.KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_plan_changes_no_result_of_the_reference(seed: int, kind: str, op: str) -> None:
    found = planned_call(kind, op, seed)
    expected, exact = found.run(), found.expected()
    found = found.but()
    for name, plan in plans(found).items():
        found.tensors["plan"] = plan
        actual = found.run()
        assert all(map(torch.equal, actual, expected)), name
        oracles_mla.assert_attended(actual, exact, expected.out.dtype)
        outcome = (expected.out, expected.lse)
        assert_agrees(name, testing.op_testing(op), found.case(), tuple(actual), outcome)


def test_plans_with_compile() -> None:
    """A plan made inside of the graph that uses it, for batches of any size; no recompile."""
    torch._dynamo.reset()

    def step(q: Tensor, cache: Tensor, indices: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        plan = ops.sparse_mla_plan(lens, num_heads=q.shape[1], num_programs=5)
        rest = {"plan": plan, "softmax_scale": 0.5, "swa_block_size": 2, "layout": "plain"}
        out, _ = ops.sparse_mla_decode(q, cache, indices, lens, **rest)
        return out, plan

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    made = torch.Generator().manual_seed(0)
    cache = torch.randn(9, 2, 8, generator=made)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 2, 7, 64):
            q = torch.randn(tokens, 2, 8, generator=made)
            indices = torch.randint(-1, 19, (tokens, 5), generator=made).int()
            lens = torch.randint(-1, 7, (tokens,), generator=made).int()
            actual, expected = compiled(q, cache, indices, lens), step(q, cache, indices, lens)
            assert torch.equal(actual[1], expected[1])
            torch.testing.assert_close(actual[0], expected[0])
