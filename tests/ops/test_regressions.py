"""Bugs of older implementations that these stages must not copy, by number.

Each test fails if the bug is put back. Rows 1, 2, 3, 5, 7 and 13 are cases of ``batch.py``,
``slot_mapping.py`` and ``indices.py`` in ``dsv4_ops/testing/cases``; rows 8, 9, 10 and 12 belong to
other stages.
"""

import dsv4_ops as ops
from tests.helpers import assert_exact, i32, i64


def test_row_4_chunk_budget_compares_uncompressed_rows() -> None:
    """Three prompts of 400 tokens are 100 rows each: two share a workspace of 200, never three."""
    seq_lens, starts, ratio = i32([400, 400, 400]), i32([0, 1, 2, 3]), 4
    plan = ops.split_prefill_chunks(
        seq_lens // ratio, i32([1, 1, 1]), workspace_size=200, max_logits_bytes=4000, max_chunks=3
    )
    assert_exact(plan, (i32([[0, 2, 0, 2], [2, 3, 0, 1], [0, 0, 0, 0]]), i32([2])))
    gathered = [
        ops.prefill_chunk_row_bounds(
            i64([399] * 3), i32([0, 1, 2]), seq_lens, starts, chunk, compress_ratio=ratio
        )
        for chunk in plan.chunks
    ]
    assert [part.cu_seq_lens[-1].item() for part in gathered] == [200, 100, 0]
    assert [part.row_stop.tolist() for part in gathered] == [[100, 200, 0], [0, 0, 100], [0] * 3]


def test_row_11_context_parallel_lengths_localised_before_expansion() -> None:
    """Three new tokens see 7, 8 and 9 keys; of two ranks, in turns of one position, rank 0 has 4, 4
    and 5 of them and rank 1 has 3, 4 and 4. The 9 localised first are 5 and 4, which counted back
    would be 3, 4, 5 and 2, 3, 4: the last tokens' keys are missing."""
    flat = ops.flatten_decode(i32([0, 3]), i32([9]), num_tokens=4)
    assert_exact(flat.seq_lens, i32([7, 8, 9, 0]))
    for rank, lens in ((0, [4, 4, 5, 0]), (1, [3, 4, 4, 0])):
        assert_exact(ops.cp_seq_lens(flat.seq_lens, i32([rank]), cp_world_size=2), i32(lens))
    both = ops.cp_seq_lens(flat.seq_lens, cp_world_size=2)
    assert_exact(both, i32([[4, 3], [4, 4], [5, 4], [0, 0]]))


def test_row_11_context_parallel_slots_of_several_new_tokens() -> None:
    """Eight new tokens of a sequence of 16, two ranks, turns of 4: rank 0 owns positions 8..11.

    It completes its second row at position 11. Localising the length first (16 -> 8) would place
    the tokens at 0..7 and complete rows at the wrong tokens.
    """
    token_map = ops.token_map(i32([0, 8]), i32([16]), num_tokens=8)
    assert token_map.positions.tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    slots = ops.compressed_slot_mapping(
        token_map.positions,
        token_map.req_indices,
        i32([[5]]),
        i64([4, 5, 6, 7, -1, -1, -1, -1]),
        block_size=64,
        compress_ratio=4,
        cp_world_size=2,
        cp_interleave=4,
    )
    assert_exact(slots, i64([-1, -1, -1, 321, -1, -1, -1, -1]))
