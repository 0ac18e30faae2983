"""Bugs of older implementations that these stages must not copy, by number.

Each test fails if the bug is put back. Rows 8, 9, 10 and 12 belong to stages that are not here.
"""

import torch

import dsv4_ops as ops
from tests.helpers import assert_exact, call, i32, i64, rows32


def test_row_1_decode_length_of_padding_request_is_minus_one() -> None:
    """seq - L + j + 1 is -1 for an empty request of two tokens, and -1 // 4 is -1 again."""
    starts, seq_lens = i32([0, 2, 4, 6]), i32([10, 7, 0])
    for ratio, lens in ((1, [9, 10, 6, 7, 0, 0]), (4, [2, 2, 1, 1, 0, 0])):
        flat = ops.flatten_decode(starts, seq_lens, num_tokens=6, compress_ratio=ratio)
        assert_exact(flat, (i32(lens), i32([0, 0, 1, 1, -1, -1])))
        rows = ops.mtp_seq_lens(starts, seq_lens, next_n=2, compress_ratio=ratio)
        assert_exact(rows, i32(lens).reshape(3, 2))


def test_row_1_native_lengths_assume_the_longest_query() -> None:
    """seq - Lmax + j + 1 is one too small for a request of one token beside one of two."""
    rows = ops.mtp_seq_lens(i32([0, 2, 3]), i32([10, 7]), next_n=2)
    assert_exact(rows, i32([[9, 10], [7, 0]]))


def test_row_2_zero_length_padding_counted_as_prefill() -> None:
    split = ops.split_decodes_and_prefills(
        i32([0, 2, 4, 4, 4]), decode_threshold=2, require_uniform=True
    )
    assert_exact(split, i32([4, 0, 4, 0]))


def test_row_2_zero_length_first_request_sets_the_uniform_length() -> None:
    split = ops.split_decodes_and_prefills(
        i32([0, 0, 2, 4]), decode_threshold=2, require_uniform=True
    )
    assert_exact(split, i32([3, 0, 4, 0]))


def test_row_3_uniform_row_map_does_not_cover_padded_tokens() -> None:
    """Two requests of two tokens in a graph of six: the map has six rows, two of them padding."""
    flat = ops.flatten_decode(i32([0, 2, 4, 4]), i32([10, 7, 0]), num_tokens=6)
    assert_exact(flat, (i32([9, 10, 6, 7, 0, 0]), i32([0, 0, 1, 1, -1, -1])))
    expanded = ops.expand_block_table(i32([[5, 6], [7, 8], [9, 9]]), flat.req_indices)
    assert_exact(expanded, i32([[5, 6], [5, 6], [7, 8], [7, 8], [0, 0], [0, 0]]))


def test_row_4_chunk_without_queries_and_rows_has_step_zero() -> None:
    budgets = {"workspace_size": 10, "max_logits_bytes": 400}
    assert ops.plan_prefill_chunks([0, 0], [0, 0], **budgets) == []
    plan = ops.split_prefill_chunks(i32([0, 0]), i32([0, 0]), **budgets, max_chunks=2)
    assert_exact(plan, (i32([[0, 0, 0, 0], [0, 0, 0, 0]]), i32([0])))


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


def test_row_5_padding_slot_does_not_reach_the_compressed_slot() -> None:
    slots = ops.compressed_slot_mapping(
        i64([3, 7]), i32([0, 0]), i32([[5]]), i64([-1, 9]), block_size=64, compress_ratio=4
    )
    assert_exact(slots, i64([-1, 321]))


def test_row_5_slots_computed_in_int32() -> None:
    """50000000 * 64 = 3200000000 wraps to a negative number in int32."""
    slots = ops.compressed_slot_mapping(
        i64([3]), i32([0]), i32([[50_000_000]]), i64([0]), block_size=64, compress_ratio=4
    )
    assert_exact(slots, i64([3_200_000_000]))


def test_row_5_interleave_ignored() -> None:
    """With turns of 8 positions for two ranks, position 23 ends row 3; with turns of 4, row 2."""
    settings = {"block_size": 64, "compress_ratio": 4, "cp_world_size": 2}
    inputs = i64([23]), i32([0]), i32([[1]]), i64([0])
    wide = ops.compressed_slot_mapping(*inputs, **settings, cp_interleave=8)
    narrow = ops.compressed_slot_mapping(*inputs, **settings, cp_interleave=4)
    assert_exact(wide, i64([67]))
    assert_exact(narrow, i64([66]))


def test_row_5_negative_position_completes_a_row() -> None:
    """(-1 + 1) % 4 == 0: without a mask the table is read in front of its first column."""
    slots = ops.compressed_slot_mapping(
        i64([-1, -5, 3]), i32([0, 0, 0]), i32([[5]]), i64([0, 0, 0]), block_size=2, compress_ratio=4
    )
    assert_exact(slots, i64([-1, -1, 10]))


def test_row_6_stale_swa_rows_behind_padding_tokens() -> None:
    """A full step, then the same shapes with less in them: nothing of the first one is left."""
    table = i32([[7, 3]])
    settings = {"block_size": 4, "window_size": 4}
    full = ops.swa_indices_and_lens(i64([5, 6]), i32([0, 0]), table, **settings)
    less = ops.swa_indices_and_lens(i64([1, -1]), i32([0, -1]), table, **settings)
    assert_exact(full, (i32([[30, 31, 12, 13], [31, 12, 13, 14]]), i32([4, 4])))
    assert_exact(less, (i32([[28, 29, -1, -1], [-1, -1, -1, -1]]), i32([2, 0])))


def test_row_6_masked_lanes_have_addresses_outside_the_table() -> None:
    """The table ends with the window: lanes behind pos would read column 1 of a one-block table."""
    around = i32([[77, 77, 77], [77, 3, 77], [77, 77, 77]])
    table = around[1:2, 1:2]
    indices = call(
        ops.swa_indices_and_lens, i64([0, 1]), i32([0, 0]), table, block_size=2, window_size=8
    )
    assert_exact(indices, (i32([[6, *([-1] * 7)], [6, 7, *([-1] * 6)]]), i32([1, 2])))
    assert_exact(ops.prefill_gather_lens(i32([0]), i32([]), window_size=8), i32([]))


def test_row_7_default_width_writes_past_a_narrower_buffer() -> None:
    """The caller's width is the row's width, and longer sequences are truncated to it."""
    dense = ops.dense_compressed_indices(
        i64([767, 767]),
        i32([0, 1]),
        i32([[1, 2, 3], [4, 5, 6]]),
        block_size=2,
        compress_ratio=128,
        max_compressed=3,
    )
    assert_exact(dense, (i32([[2, 3, 4], [8, 9, 10]]), i32([3, 3])))


def test_row_7_row_stride_depends_on_the_batch() -> None:
    """A replayed graph keeps the stride it captured: short and long batches must have the same."""
    table = i32([[1, 2, 3], [4, 5, 6]])
    shapes = set()
    for longest in (0, 127, 255, 767):
        dense = ops.dense_compressed_indices(
            i64([longest, 127]),
            i32([0, 1]),
            table,
            block_size=2,
            compress_ratio=128,
            max_compressed=6,
        )
        shapes.add((tuple(dense.indices.shape), dense.indices.stride()))
        assert dense.indices[1].tolist() == [8, -1, -1, -1, -1, -1]
        assert dense.lens[1].item() == 1
    assert shapes == {((2, 6), (6, 1))}


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


def test_row_11_local_lengths_are_the_slots_of_the_rank() -> None:
    """What a rank has stored of the first 1, 2, .. 40 positions is as long as its lengths say,
    without gaps, wherever turns and blocks end."""
    position, length = torch.arange(40), torch.arange(1, 41, dtype=torch.int32)
    batch = (position, torch.zeros_like(length), i32([[5, 2, 9, 7, 3, 8, 6, 4, 1, 0]]))
    for ranks, turn in ((2, 1), (2, 4), (4, 2), (3, 2)):
        sizes = {"cp_world_size": ranks, "cp_interleave": turn}
        lens = ops.cp_seq_lens(length, **sizes)
        for rank in range(ranks):
            owned = torch.where(position // turn % ranks == rank, position, -1)
            slots = ops.compressed_slot_mapping(
                *batch, owned, block_size=4, compress_ratio=1, **sizes
            )
            assert_exact(lens[:, rank], (slots >= 0).cumsum(0).int())
            pages = batch[2][0, (lens[:, rank] - 1).clamp(min=0) // 4]
            last = pages * 4 + (lens[:, rank] - 1) % 4
            assert_exact(slots[slots >= 0], last[slots >= 0].long())


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


def test_row_13_shared_block_table_clamped_in_place() -> None:
    """-1 survives every op that reads the table, and no op takes it for block 0."""
    table = i32([[-1, 4]])
    request, position = i32([0]), i64([1])
    slots = ops.compressed_slot_mapping(
        position, request, table, i64([0]), block_size=2, compress_ratio=2
    )
    window = ops.swa_indices_and_lens(position, request, table, block_size=2, window_size=2)
    chosen = ops.global_topk_indices_and_lens(i32([[0, 2]]), request, table, block_size=2)
    dense = ops.dense_compressed_indices(
        position, request, table, block_size=2, compress_ratio=1, max_compressed=2
    )
    expanded = ops.expand_block_table(table, request)
    assert_exact(slots, i64([-1]))
    assert_exact(window, (i32([[-1, -1]]), i32([2])))
    assert_exact(chosen, (i32([[-1, 8]]), i32([2])))
    assert_exact(dense, (i32([[-1, -1]]), i32([2])))
    assert_exact(expanded, i32([[-1, 4]]))
    assert_exact(table, rows32([[-1, 4]], 2))
