"""A whole step of the compressor: by hand, against its two ops, and over sequences."""

import torch
from hypothesis import given

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.layout import StateLayout
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.compressor import read_slots
from tests.helpers import i32, i64
from tests.support.sampled import sampled


def test_a_ring_that_is_shorter_than_a_step_is_read_before_it_is_saved_to() -> None:
    """Position 2 has the slot of position 0, whose state -9 the window of position 1 needs. -9 and
    3 give -1; if position 2 is saved first, its 5 and 3 give 1."""
    case = next(c for c in testing.cases_of("save_and_compress") if c.name == "two windows")
    states, page = StateLayout(2, 2).allocate(1), torch.full((1, 1, 1), 7.0)
    StateLayout(2, 2).rows(states)[0, 0] = torch.tensor([-9.0, 0.5])
    tensors = [torch.tensor([[3.0, 0.0], [5.0, 0.0]]), case.tensors[1], states, i32([[0, 0]])]
    tensors += [i64([1, 0]), i64([1, 2]), i32([0, 0]), torch.ones(1), torch.zeros(0, 0)]
    ring = Case("ring", (*tensors, page, i64([0, -1])), {**case.settings, "block_size": 1})
    assert by_two_ops(ring, compress_first=True)[1].item() == -1.0
    assert by_two_ops(ring)[1].item() == 1.0


def by_two_ops(case: Case, compress_first: bool = False) -> list[torch.Tensor]:
    """Run the two ops; return states and cache."""
    kv_score, ape, states, table, slots, positions, *rest = case.copy().tensors
    settings = {key: value for key, value in case.settings.items() if key != "save_first"}
    sizes = {"block_size": settings["state_block_size"]}
    sizes["compress_ratio"] = settings["compress_ratio"]
    if not compress_first:
        ops.save_compressor_states(kv_score, ape, states, slots, positions, **sizes)
    ops.compress_and_insert(kv_score, ape, states, table, positions, *rest, **settings)
    if compress_first:
        ops.save_compressor_states(kv_score, ape, states, slots, positions, **sizes)
    return [states, rest[-2]]


def same_bytes(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def test_a_step_is_what_its_two_ops_are_in_either_order() -> None:
    """If a sampled call does not save first, no token saves a state that a window reads."""
    saved, differ = [0], [0]

    @sampled(130)
    @given(testing.strategy("save_and_compress"))
    def compare(case: Case) -> None:
        written = case.copy()
        ops.save_and_compress(*written.tensors, **case.settings)
        result = [written.tensors[2], written.tensors[9]]
        assert same_bytes(result, by_two_ops(case))
        same = same_bytes(result, by_two_ops(case, compress_first=True))
        if not case.settings.get("save_first"):
            assert same
            written = case.copy()
            ops.save_and_compress(*written.tensors, **case.settings, save_first=True)
            assert same_bytes(result, [written.tensors[2], written.tensors[9]])
        differ[0] += not same
        saved[0] += not torch.equal(result[0].nan_to_num(), case.tensors[2].nan_to_num())

    compare()
    assert saved[0] > 10
    assert differ[0] > 0


def test_sampled_calls_save_next_to_what_they_read() -> None:
    """Tokens save states in the blocks that windows read, but not in the same rows."""
    beside = [0]

    @sampled(400)
    @given(testing.strategy("save_and_compress"))
    def look(case: Case) -> None:
        windows = Case(case.name, (*case.tensors[:4], *case.tensors[5:]), case.settings)
        size, read = case.settings["state_block_size"], read_slots(windows)
        slots = {slot for slot in case.tensors[4].tolist() if slot >= 0}
        assert not slots & read or case.settings.get("save_first")
        beside[0] += bool({slot // size for slot in slots} & {slot // size for slot in read})

    look()
    assert beside[0] > 3
