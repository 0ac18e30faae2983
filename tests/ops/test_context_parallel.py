"""Sequences on several ranks: slots, row indices, and the combination of their attention."""

import math

import pytest
import torch

import dsv4_ops as ops
from tests.helpers import assert_exact, call, i32, i64

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("turn", [1, 4, 64])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_position_has_one_slot_on_one_rank(ranks: int, turn: int) -> None:
    """The slots of all ranks together are those that ``compressed_slot_mapping`` has of the owner,
    each on one rank; the first n positions have as many on a rank as ``cp_seq_lens`` says."""
    round_ = ranks * turn
    positions = torch.arange(2 * round_ + 3)
    requests = torch.zeros_like(positions).int()
    table = torch.randperm(40, generator=torch.Generator().manual_seed(0))[None].int()
    sizes = {"block_size": turn, "cp_world_size": ranks, "cp_interleave": turn}
    owner = ops.compressed_slot_mapping(
        positions, requests, table, positions, compress_ratio=1, **sizes
    )
    slots = [
        call(ops.cp_slot_mapping, positions, requests, table, i32([rank]), **sizes)
        for rank in range(ranks)
    ]
    every = torch.stack(slots)
    assert_exact((every >= 0).sum(0), torch.ones_like(positions))
    assert_exact(every.amax(0), owner)
    lens = i32([0, 1, turn, turn + 1, round_ - 1, round_, round_ + 1, len(positions)])
    counts = torch.stack([(every[:, :n] >= 0).sum(1) for n in lens.tolist()])
    owned = ops.cp_seq_lens(lens, cp_world_size=ranks, cp_interleave=turn)
    assert_exact(owned.long(), counts)


def test_slots_of_positions_beyond_int32_rounds() -> None:
    """A round of ranks longer than any sequence: everything is on rank 0 in order."""
    sizes = {"block_size": 4, "cp_world_size": 2**31 - 1, "cp_interleave": 2**31 - 1}
    positions, requests = i64([0, 5, 2**31 - 2]), i32([0, 0, 0])
    slots = ops.cp_slot_mapping(positions, requests, i32([[7, 3]]), i32([0]), **sizes)
    assert_exact(slots, i64([28, 13, -1]))


@pytest.mark.parametrize("base", ["e", "2"])
def test_shares_sum_to_the_merge(base: str) -> None:
    """Of ranks without keys, whatever their output and their log-sum-exp hold, too."""
    seed = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(4, 9, 3, 8, generator=seed), torch.randn(4, 9, 3, generator=seed) * 9
    for place, empty in enumerate((-INF, INF, NAN)):
        lses[place, place : place + 4] = empty
    lses[:, 8] = -INF
    outs[~lses.isfinite()] = NAN
    merged = ops.merge_states(outs, lses, lse_base=base)
    parts = [
        ops.cp_correct_out(out, lse, lses, lse_base=base)
        for out, lse in zip(outs, lses, strict=True)
    ]
    torch.testing.assert_close(sum(part.out for part in parts), merged.out, rtol=1e-5, atol=1e-6)
    for part in parts:
        assert_exact(part.lse, merged.lse)
    assert not merged.out[8].any()


def test_one_rank_changes_nothing() -> None:
    out, lse = torch.randn(5, 3, 8), torch.randn(5, 3)
    assert_exact(ops.cp_correct_out(out, lse, lse[None]), (out, lse))
    batch = (i64([3, -1, 7]), i32([0, 0, 0]), i32([[2, 5]]))
    slots = ops.cp_slot_mapping(*batch, i32([0]), block_size=4, cp_world_size=1)
    plain = ops.compressed_slot_mapping(*batch, batch[0], block_size=4, compress_ratio=1)
    assert_exact(slots, plain)
