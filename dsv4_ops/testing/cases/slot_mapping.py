"""Cases and strategies of the slot stages."""

from __future__ import annotations

from dsv4_ops.testing.case import Case, OpTesting, i32, i64
from dsv4_ops.testing.strategies.batches import calls_of

_PLAIN = {"block_size": 64, "compress_ratio": 4, "cp_world_size": 1, "cp_interleave": 1}


def _cases() -> list[Case]:
    batch = (i64([7, 8, 9, 6, 8, 9, 10, 11]), i32([0, 0, 0, 1, 2, 2, 2, 2]), i32([[5], [6], [9]]))
    own, replayed = i64([0, 1, 2, 3, 4, 5, 6, 7]), i64([-1, 1, 2, 3, 4, 5, 6, 7])
    far = (i64([3]), i32([0]), i32([[50_000_000]]), i64([0]))
    ranks = (i64([3, 7, 11, 15]), i32([0, 0, 0, 0]), i32([[5]]), i64([0, -1, 1, -1]))
    in_turn = {**_PLAIN, "cp_world_size": 2, "cp_interleave": 4}
    return [
        Case("worked example", (*batch, own), _PLAIN, ([321, *[-1] * 6, 578],)),
        Case("PAD in, PAD out", (*batch, replayed), _PLAIN, ([-1] * 7 + [578],)),
        Case("beyond int32", far, _PLAIN, ([3_200_000_000],)),
        Case("two ranks, 4 positions in turn", ranks, in_turn, ([320, -1, 321, -1],)),
    ]


compressed_slot_mapping = OpTesting(
    cases=_cases,
    settings=(
        _PLAIN,
        {**_PLAIN, "block_size": 2, "compress_ratio": 128},
        {**_PLAIN, "cp_world_size": 2, "cp_interleave": 4},
        {**_PLAIN, "block_size": 3, "compress_ratio": 1, "cp_world_size": 3, "cp_interleave": 5},
    ),
    make=calls_of("positions", "req_indices", "block_table", "slot_mapping"),
)
