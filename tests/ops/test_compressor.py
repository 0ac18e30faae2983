"""The compressor: windows by hand, the oracle, adversarial values, what is written and what is
read."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout, StateLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.compressor import decode, precise, written_slots
from dsv4_ops.testing.contract.compare import assert_agrees
from tests.helpers import i32, i64, strided
from tests.oracles import compressor as oracles
from tests.support.sampled import sampled

LN2, LN3 = math.log(2), math.log(3)


def compress(rows: list[list[float]], **changed: Any) -> Tensor:
    """One request, windows of two, blocks of one; the first rows of a plain cache."""
    kv_score = torch.tensor(rows)
    tokens, width = kv_score.shape[0], kv_score.shape[1] // 2
    overlap = changed.pop("overlap", False)
    head_dim = width // 2 if overlap else width
    first = changed.pop("first", 0)
    positions = torch.arange(first, first + tokens)
    tensors = {
        "kv_score": kv_score,
        "ape": torch.zeros(2, width),
        "states": StateLayout(1, 2 * width).allocate(1),
        "state_block_table": i32([[-1] * 8]),
        "positions": positions,
        "req_indices": torch.zeros(tokens, dtype=torch.int32),
        "norm_weight": torch.ones(head_dim),
        "cos_sin_cache": torch.zeros(0, 0),
        "k_cache": torch.full((4, 1, head_dim), 7.0),
        "slot_mapping": torch.where(positions % 2 == 1, positions // 2, -1),
    }
    tensors.update({name: changed.pop(name) for name in [*changed] if name in tensors})
    settings = {"compress_ratio": 2, "state_block_size": 1, "block_size": 1, "eps": 1e-30}
    settings |= {"layout": "plain", "overlap": overlap, **changed}
    assert ops.compress_and_insert(**tensors, **settings) is None
    return tensors["k_cache"][:, 0]


def unit(*row: float) -> list[float]:
    """A row over the root of its mean square."""
    root = math.sqrt(sum(value * value for value in row) / len(row))
    return [value / root for value in row]


def assert_rows(actual: Tensor, *expected: Any) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=3e-7, atol=1e-7)


KEPT = [7.0, 7.0]


def test_every_channel_has_its_own_softmax() -> None:
    """Weights 1/4 and 3/4 in the first channel, 2/3 and 1/3 in the second."""
    rows = compress([[4.0, 3.0, 0.0, LN2], [8.0, 9.0, LN3, 0.0]])
    assert_rows(rows, unit(7, 5), KEPT, KEPT, KEPT)


def test_scores_are_biased_by_the_place_in_the_window() -> None:
    ape = torch.tensor([[0.0, LN2], [LN3, 0.0]])
    rows = compress([[4.0, 3.0, 5.0, -2.0], [8.0, 9.0, 5.0, -2.0]], ape=ape)
    assert_rows(rows, unit(7, 5), KEPT, KEPT, KEPT)


def test_the_norm_has_a_weight_and_an_epsilon() -> None:
    """Mean square 25 / 2 and eps 3.5: the root is 4."""
    rows = compress([[3.0, 4.0, 0.0, 0.0]] * 2, norm_weight=torch.tensor([2.0, -1.0]), eps=3.5)
    assert_rows(rows, [1.5, -1.0], KEPT, KEPT, KEPT)


OVERLAPPING = [
    [2.0, 9.0, 0.0, 0.0],  # kv left, right; score left, right
    [4.0, 1.0, 0.0, 0.0],
    [9.0, 0.0, 9.0, LN2],
    [9.0, 3.0, 9.0, LN3],
]


def test_the_first_overlapping_window_has_nothing_before_it() -> None:
    """Right channels alone: (9 + 1) / 2 in channel 0. Head_dim 1, so that eps says how large."""
    rows = compress(OVERLAPPING[:2], overlap=True, eps=75.0)
    assert_rows(rows, [0.5], [7.0], [7.0], [7.0])  # 5 / sqrt(25 + 75)


def test_an_overlapping_window_reads_the_one_before_to_the_left() -> None:
    """(2 * 1 + 4 * 1 + 0 * 2 + 3 * 3) / 7 = 15 / 7."""
    rows = compress(OVERLAPPING, overlap=True, eps=100 - (15 / 7) ** 2)
    assert_rows(rows[1:2], [1.5 / 7])


def test_no_overlap_ignores_the_window_before() -> None:
    rows = compress([[100.0, 5.0, 9.0, 9.0]] * 2 + [[4.0, 3.0, 0, LN2], [8.0, 9.0, LN3, 0]])
    assert_rows(rows[1:2], unit(7, 5))


def test_rows_of_earlier_steps_come_from_the_states() -> None:
    """Position 0 is in the states, with its bias; the bias of position 1 is added here."""
    states = StateLayout(1, 4).allocate(3)
    states[2, :4] = torch.tensor([4.0, 3.0, 0.0, LN2])
    ape = torch.tensor([[50.0, 60.0], [LN3, 0.0]])
    table = i32([[2, -1]])
    rows = compress(
        [[8.0, 9.0, 0.0, 0.0]], first=1, ape=ape, states=states, state_block_table=table
    )
    assert_rows(rows, unit(7, 5), KEPT, KEPT, KEPT)


@pytest.mark.parametrize("page", [-1, 3, -(2**31), 2**31 - 1])
def test_a_row_on_a_page_that_does_not_exist_has_no_weight(page: int) -> None:
    states = torch.full((3, 576 // 4), float("nan"))
    table = i32([[page]])
    rows = compress([[8.0, 6.0, 0.0, 0.0]], first=1, states=states, state_block_table=table)
    assert_rows(rows, unit(8, 6), KEPT, KEPT, KEPT)


def test_a_table_that_is_too_short_has_no_rows() -> None:
    empty = torch.zeros(1, 0, dtype=torch.int32)
    states = torch.full((3, 576 // 4), float("nan"))
    rows = compress([[8.0, 6.0, 0.0, 0.0]], first=1, states=states, state_block_table=empty)
    assert_rows(rows, unit(8, 6), KEPT, KEPT, KEPT)


ZERO_BEFORE = {"state_block_table": i32([[0] * 8, [0] * 8])}


@pytest.mark.parametrize(
    ("positions", "requests"), [([2, 1], [0, 0]), ([0, 1], [1, 0]), ([-1, 1], [0, 0])]
)
def test_a_token_of_something_else_is_not_part_of_the_window(
    positions: list[int], requests: list[int]
) -> None:
    """The row before is of another position or request, so it comes from the states: zeros."""
    rows = compress(
        [[100.0, 100.0, 0.0, 0.0], [8.0, 6.0, 0.0, 0.0]],
        positions=i64(positions),
        req_indices=i32(requests),
        eps=75.0,
        **ZERO_BEFORE,
    )
    assert_rows(rows[:1], [4 / math.sqrt(87.5), 3 / math.sqrt(87.5)])


def test_rope_turns_the_last_pairs_at_the_first_position_of_the_window() -> None:
    """Positions 2 and 3: the table row of 2 turns the last pair by a quarter."""
    table = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    rows = compress([[3.0, 4.0, 1.0, 2.0, *[0.0] * 4]] * 4, cos_sin_cache=table)
    norm = unit(3, 4, 1, 2)
    assert_rows(rows[:2], norm, [norm[0], norm[1], -norm[3], norm[2]])


def test_a_window_past_the_table_is_not_rotated() -> None:
    table = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    rows = compress([[3.0, 4.0, 0.0, 0.0]] * 4, cos_sin_cache=table)
    norm = unit(3, 4)
    assert_rows(rows[:2], [-norm[1], norm[0]], norm)


def test_the_longest_sequence_there_is() -> None:
    """The last position of all ends a window of two; its row before is in no table."""
    rows = compress(
        [[3.0, 4.0, 0.0, 0.0]] * 2,
        positions=i64([2**31 - 3, 2**31 - 2]),
        compress_ratio=1,
        ape=torch.zeros(1, 2),
        slot_mapping=i64([1, 0]),
    )
    assert_rows(rows[:2], unit(3, 4), unit(3, 4))
    for late in (2**31 - 1, 2**31, 2**40 + 1, 2**63 - 1):
        rows = compress([[3.0, 4.0, 0.0, 0.0]], positions=i64([late]), slot_mapping=i64([0]))
        assert_rows(rows[:1], KEPT)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_spoils_its_own_window_alone(bad: float) -> None:
    kv = [[3.0, 4.0, 0.0, 0.0]] * 4
    rows = compress([[bad, 4.0, 0.0, 0.0], *kv[1:]])
    assert rows[0].isnan().any()
    assert_rows(rows[1:2], unit(3, 4))
    rows = compress([[3.0, 4.0, bad, 0.0], *kv[1:]])
    # of two rows one has no weight where its score is -inf
    assert rows[0].isnan().any() != (bad == float("-inf"))
    assert_rows(rows[1:2], unit(3, 4))


def tokens_of(case: Case) -> list[Any]:
    return [tensor.tolist() for index, tensor in enumerate(case.tensors) if index != 8]


def test_float64_results_are_those_of_the_oracle() -> None:
    """``precise`` is what every execution is measured against."""
    seen = [0]

    @sampled(100)
    @given(testing.strategy("compress_and_insert"))
    def compare(case: Case) -> None:
        num_slots = case.tensors[8].shape[0] * case.settings["block_size"]
        expected = oracles.compressed_rows(*tokens_of(case), num_slots=num_slots, **case.settings)
        values = [exact.value for exact in precise(*case.tensors, **case.settings) if exact]
        actual = torch.cat(values, -1)
        want = torch.tensor(expected, dtype=torch.float64).reshape(actual.shape)
        torch.testing.assert_close(actual, want, rtol=1e-9, atol=1e-12, equal_nan=True)
        seen[0] += len(expected)

    compare()
    assert seen[0] > 25


LAYOUTS = {"v4_fp8": (MainLayout, 512), "v4_indexer_fp8": (IndexerLayout, 128)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantised_row_is_what_the_insert_makes_of_the_bfloat16_row(layout: str) -> None:
    kind, head_dim = LAYOUTS[layout]
    made = torch.Generator().manual_seed(1)
    tokens, width, blocks = 24, 2 * head_dim, 3
    angle = torch.rand(40, 32, generator=made)
    tensors = {
        "kv_score": torch.randn(tokens, 2 * width, generator=made),
        "ape": torch.randn(4, width, generator=made),
        "states": StateLayout(4, 2 * width).allocate(1),
        "state_block_table": i32([[-1]]),
        "positions": torch.arange(tokens),
        "req_indices": torch.zeros(tokens, dtype=torch.int32),
        "norm_weight": torch.randn(head_dim, generator=made),
        "cos_sin_cache": torch.cat([angle.cos(), angle.sin()], 1),
        "slot_mapping": torch.arange(tokens) // 4,
    }
    settings = {"compress_ratio": 4, "overlap": True, "eps": 1e-6, "state_block_size": 4}
    plain = PlainLayout(2, head_dim).allocate(blocks)
    ops.compress_and_insert(k_cache=plain, **tensors, **settings, block_size=2, layout="plain")
    quantised = torch.full(kind(2).shape(blocks), 9, dtype=torch.uint8)
    expected = quantised.clone()
    ops.compress_and_insert(k_cache=quantised, **tensors, **settings, block_size=2, layout=layout)
    insert = {
        "v4_fp8": ops.quantize_and_insert_k_cache,
        "v4_indexer_fp8": ops.quantize_and_insert_indexer_k,
    }[layout]
    insert(plain.flatten(0, 1), expected, torch.arange(6), block_size=2)
    assert torch.equal(quantised, expected)
    assert plain.float().abs().amin(-1).gt(0).all()


def test_arguments_may_have_any_strides() -> None:
    op_testing = testing.op_testing("compress_and_insert")

    @sampled(40)
    @given(testing.strategy("compress_and_insert"))
    def compare(case: Case) -> None:
        expected = case.run(OPS["compress_and_insert"].reference, (8,))
        views = [
            tensor if index in (2, 8) else strided(tensor)
            for index, tensor in enumerate(case.copy().tensors)
        ]
        ops.compress_and_insert(*views, **case.settings)
        assert_agrees("strided", op_testing, case, (views[8],), expected)

    compare()


def test_pages_may_lie_apart() -> None:
    case = next(
        case for case in testing.cases_of("compress_and_insert") if case.name == "two channels"
    )
    expected = case.run(ops.compress_and_insert, (8,))
    states = torch.full((2, 2 * case.tensors[2].shape[1]), float("nan"))
    states[:, : case.tensors[2].shape[1]] = case.tensors[2]
    apart = torch.full((1, 5, 2), 3.0)
    apart[:, ::2][:, :2] = case.tensors[8]
    tensors = [*case.copy().tensors]
    tensors[2], tensors[8] = states[:, : case.tensors[2].shape[1]], apart[:, ::2][:, :2]
    ops.compress_and_insert(*tensors, **case.settings)
    assert torch.equal(tensors[8], expected[0])
    assert (apart[:, 1::2] == 3).all()
    assert (apart[:, 4] == 3).all()


def test_only_written_rows_change() -> None:
    """Every byte outside of the slots of finished windows is as before."""

    @sampled(100)
    @given(testing.strategy("compress_and_insert"))
    def compare(case: Case) -> None:
        written = case.run(ops.compress_and_insert, (8,))
        before = decode(case, [case.tensors[8]])[-1]
        after = decode(case, written)[-1]
        if case.settings["layout"] == "v4_fp8":  # the eighth scale byte becomes 0
            layout = MainLayout(case.settings["block_size"])
            for _, slot in written_slots(case):
                before.view(-1)[layout.scale_offset(slot) + 7] = 0
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
        if not written_slots(case):
            assert torch.equal(case.tensors[8].view(torch.uint8), written[0].view(torch.uint8))

    compare()


def test_of_two_tokens_with_one_slot_other_rows_know_nothing() -> None:
    rows = compress([[3.0, 4.0, 0.0, 0.0]] * 6, slot_mapping=i64([-1, 1, -1, 1, -1, 3]))
    norm = unit(3, 4)
    assert_rows(rows, KEPT, norm, KEPT, norm)
