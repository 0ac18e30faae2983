"""The plan of sparse MLA: what every plan holds, and that no plan changes what tokens attend to.
Plans by hand, sampled plans, fakes, graphs and exports: tests/ops/test_contract.py; the kernel with
plans in Triton's interpreter: tests/kernels/interpreter/interpret_kernels.py."""

from itertools import pairwise

import torch
from hypothesis import given, settings, strategies as st

import dsv4_ops as ops
from tests.helpers import INT32_MAX, INT32_MIN, NIGHTLY, call, i32
from tests.oracles import plan as oracle

ABSENT = [-1, -1, -1, -1]
LENS = (0, 1, 63, 64, 65, 127, 128, 129, 640, 8192, INT32_MAX, -1, INT32_MIN)


def plan_of(swa: list[int], extra: list[int] | None = None, **sizes: int) -> list[list[int]]:
    tensors = [i32(swa)] if extra is None else [i32(swa), i32(extra)]
    plan = call(ops.sparse_mla_plan, *tensors, **sizes)
    assert (plan.dtype, plan.is_contiguous()) == (torch.int32, True)
    rows: list[list[int]] = plan.tolist()
    return rows


def test_the_default_is_an_h200() -> None:
    """An H200 has 132 programs, or 66 of 128 heads: 1320 blocks are ten or twenty per program."""
    lens = i32([1320 * 64])
    assert ops.sparse_mla_plan(lens, num_heads=64)[:132, 2].unique().tolist() == [132]
    assert ops.sparse_mla_plan(lens, num_heads=128)[:66, 2].unique().tolist() == [66]
    assert ops.sparse_mla_plan(lens, num_heads=64).shape == (133, 4)
    assert ops.sparse_mla_plan(lens, num_heads=128).shape == (67, 4)


@settings(max_examples=300 if NIGHTLY else 75, deadline=None, derandomize=True, database=None)
@given(
    lens=st.lists(st.tuples(st.sampled_from(LENS), st.sampled_from(LENS)), max_size=40),
    window_only=st.booleans(),
    num_heads=st.sampled_from((1, 8, 64, 65, 128, 129)),
    num_programs=st.sampled_from((1, 2, 3, 7, 66, 132)),
)
def test_properties(
    lens: list[tuple[int, int]], window_only: bool, num_heads: int, num_programs: int
) -> None:
    """All splits of every token occur, none exceeds the size, and partial results fit."""
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
    capacity = max(programs - len(lens), programs // 4)
    size, used = oracle.split_size(tiles, programs, capacity), set()
    for token, count in enumerate(tiles):
        mine = [row[1:] for row in real if row[0] == token]
        splits = len(mine)
        assert mine == [[split, splits, mine[0][2]] for split in range(splits)]
        assert splits > 1 or mine[0][2] == 0
        bounds = [count * split // splits for split in range(splits + 1)]  # as in the kernel
        assert all(right - left <= size for left, right in pairwise(bounds))
        if splits > 1:
            places = set(range(mine[0][2], mine[0][2] + splits))
            assert not used & places
            used |= places
    assert used == set(range(len(used)))
    assert len(used) <= programs
