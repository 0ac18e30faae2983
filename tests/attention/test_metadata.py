"""The metadata builders: against hand-computed numbers and the oracle, and as one graph."""

import dataclasses
from itertools import pairwise

import pytest
import torch

from dsv4_ops.attention.metadata import (
    AttentionSpec,
    BlockTables,
    build_decode_metadata,
    build_prefill_metadata,
)
from dsv4_ops.core.registry import OPS
from dsv4_ops.ops.batch import split_decodes_and_prefills
from dsv4_ops.testing.case import i32, i64
from tests.oracles import batch as oracles
from tests.support.metadata_batches import SPEC, random_inputs, tables_of

MAX_CHUNKS = 12
SMALL = AttentionSpec(
    window_size=3, c4_ratio=2, c128_ratio=4, block_tokens=8, swa_block_size=4, max_model_len=16
)


def decode(*inputs: torch.Tensor):
    return build_decode_metadata(SPEC, *inputs[:3], tables_of(inputs))


def prefill(*inputs: torch.Tensor):
    return build_prefill_metadata(SPEC, *inputs[:3], tables_of(inputs), max_chunks=MAX_CHUNKS)


def assert_equal(actual, expected) -> None:
    for field in dataclasses.fields(expected):
        left, right = getattr(actual, field.name), getattr(expected, field.name)
        assert left.dtype == right.dtype, field.name
        assert torch.equal(left, right), field.name


def test_decode_metadata_by_hand():
    """Two requests, a padding request and a padding token, with blocks of 4 window rows or 8
    positions, and ratios 2 and 4."""
    metadata = build_decode_metadata(
        SMALL,
        i32([0, 2, 3, 3]),
        i32([8, 5, 0]),
        i64([100, 101, 102, -1]),
        BlockTables(i32([[7, 3], [2, 5], [0, 0]]), i32([[10], [11], [0]]), i32([[20], [21], [0]])),
    )
    assert metadata.req_indices.tolist() == [0, 0, 1, -1]
    assert metadata.positions.tolist() == [6, 7, 4, -1]
    assert metadata.seq_lens.tolist() == [7, 8, 5, 0]
    assert metadata.c4_lens.tolist() == [3, 4, 2, 0]
    assert metadata.c128_lens.tolist() == [1, 2, 1, 0]
    assert metadata.swa_indices.tolist() == [[12, 13, 14], [13, 14, 15], [10, 11, 20], [-1, -1, -1]]
    assert metadata.swa_lens.tolist() == [3, 3, 3, 0]
    assert metadata.c4_slot_mapping.tolist() == [-1, 10 * 4 + 3, -1, -1]
    assert metadata.c128_slot_mapping.tolist() == [-1, 20 * 2 + 1, -1, -1]
    assert metadata.is_valid_token.tolist() == [True, True, True, False]
    assert metadata.c128_indices.shape == (4, 128)
    rows = [[40, -1, -1], [40, 41, -1], [42, -1, -1], [-1, -1, -1]]
    assert metadata.c128_indices[:, :3].tolist() == rows


def test_a_key_per_token_by_hand():
    """With ratio 1, as in DeepSeek-V3.2's indexer, rows are positions, here in blocks of 8. One
    request has two tokens, the other has one."""
    spec = dataclasses.replace(SMALL, c4_ratio=1, c128_ratio=1)
    table, c4 = i32([[7, 3], [2, 5]]), i32([[10], [11]])
    batch = (i32([0, 2, 3]), i32([8, 5]), i64([100, 101, -1]), BlockTables(table, c4, c4))
    valid = torch.ones(3, dtype=torch.bool)
    prefill = build_prefill_metadata(spec, *batch, valid, max_chunks=2)
    for metadata in (build_decode_metadata(spec, *batch, valid), prefill):
        assert metadata.c4_lens.tolist() == metadata.seq_lens.tolist() == [7, 8, 5]
        assert metadata.c4_slot_mapping.tolist() == [10 * 8 + 6, 10 * 8 + 7, -1]  # no slot
    assert prefill.c4_cu_seq_lens.tolist() == [0, 8, 13]
    assert prefill.c4_row_start.tolist() == [0, 0, 8]
    assert prefill.c4_row_stop.tolist() == [7, 8, 13]


def test_invalid_tokens_are_padding_by_hand():
    """The batch of the first test, with tokens 1 and 3 masked as padding: token 1 no longer
    completes its C4 and C128 rows, although it has a slot in the window cache."""
    table = i32([[7, 3], [2, 5]])
    batch = (i32([0, 2, 4]), i32([8, 6]), i64([100, 101, -1, 103]), BlockTables(*[table] * 3))
    valid = torch.tensor([True, False, True, False])
    decode = build_decode_metadata(SMALL, *batch, valid)
    prefill = build_prefill_metadata(SMALL, *batch, valid, max_chunks=2)
    for metadata in (decode, prefill):
        assert metadata.is_valid_token.tolist() == valid.tolist()
        assert metadata.req_indices.tolist() == [0, -1, 1, -1]
        assert metadata.positions.tolist() == [6, -1, 4, -1]
        assert metadata.c4_lens.tolist() == [3, 0, 2, 0]
        assert metadata.swa_lens.tolist() == [3, 0, 3, 0]
        assert metadata.swa_indices.tolist() == [[12, 13, 14], [-1] * 3, [10, 11, 20], [-1] * 3]
        assert metadata.c4_slot_mapping.tolist() == [-1] * 4
        assert metadata.c128_slot_mapping.tolist() == [-1] * 4
    assert prefill.c4_row_stop.tolist() == [3, 0, 4 + 2, 0]
    assert decode.c128_indices[1].tolist() == [-1] * 128
    with pytest.raises(TypeError, match=r"^build_decode_metadata: is_valid_token must be torch"):
        build_decode_metadata(SMALL, *batch, valid.int())
    with pytest.raises(ValueError, match=r"is_valid_token must have shape \[num_tokens\] with"):
        build_prefill_metadata(SMALL, *batch, valid[:3], max_chunks=2)


def test_tokens_without_a_slot_are_padding_by_hand():
    """As in vLLM, a token without a slot is padding. A mask of ones lets the token attend."""
    table = i32([[7, 3], [2, 5]])
    slots, tables = i64([100, 101, -1, 103]), BlockTables(table, table, table)
    batch, everywhere = (i32([0, 2, 4]), i32([8, 6]), slots, tables), torch.ones(4).bool()
    for build, more in ((build_decode_metadata, {}), (build_prefill_metadata, {"max_chunks": 2})):
        metadata = build(SMALL, *batch, **more)
        assert metadata.is_valid_token.tolist() == [True, True, False, True]
        assert metadata.req_indices.tolist() == [0, 0, -1, 1]
        assert metadata.positions.tolist() == [6, 7, -1, 5]
        assert metadata.seq_lens.tolist() == [7, 8, 0, 6]
        assert metadata.c4_lens.tolist() == [3, 4, 0, 3]
        assert metadata.c128_lens.tolist() == [1, 2, 0, 1]
        assert metadata.swa_lens.tolist() == [3, 3, 0, 3]
        assert metadata.swa_indices.tolist() == [[12, 13, 14], [13, 14, 15], [-1] * 3, [11, 20, 21]]
        assert metadata.c4_slot_mapping.tolist() == [-1, 7 * 4 + 3, -1, 2 * 4 + 2]
        assert metadata.c128_slot_mapping.tolist() == [-1, 7 * 2 + 1, -1, -1]
        whole = build(SMALL, *batch, everywhere, **more)
        assert whole.is_valid_token.tolist() == [True] * 4
        assert whole.positions.tolist() == [6, 7, 4, 5]
        assert whole.swa_indices[2].tolist() == [10, 11, 20]
        assert torch.equal(whole.c4_slot_mapping, metadata.c4_slot_mapping)
        with pytest.raises(TypeError, match=f"^{build.__name__}: slot_mapping must be torch.int64"):
            build(SMALL, *batch[:2], slots.int(), tables, **more)


def plan_behind(num_decodes):
    """Plan two decodes of 96 and 8 rows, prefills of 40, 24 and 80 rows with 10, 4 and 20 queries,
    and a padding request, for a workspace of 96 rows and 800 logits."""
    spec = AttentionSpec(max_model_len=384, indexer_workspace=96, max_logits_bytes=3200)
    starts, lens = i32([0, 1, 2, 12, 16, 36, 36]), i32([384, 33, 163, 96, 320, 0])
    table = torch.zeros(6, 8, dtype=torch.int32)
    batch = (starts, lens, torch.full((36,), -1), BlockTables(table, table, table))
    return build_prefill_metadata(spec, *batch, max_chunks=5, num_decodes=num_decodes)


def test_a_chunk_plan_leaves_out_the_decodes_by_hand():
    """Requests 2 and 3 have 40 + 24 = 64 rows and 14 queries: 896 logits exceed 800, so each is a
    chunk. Request 4 has 80 rows, so its chunks have 800 // 80 = 10 queries. With the decodes, 96
    rows fill the first chunk, and 8 + 40 rows with 11 queries (528 logits) fit the second."""
    prefills = [[2, 3, 0, 10], [3, 4, 0, 4], [4, 5, 0, 10], [4, 5, 10, 20]]
    split = split_decodes_and_prefills(i32([0, 1, 2, 12, 16, 36, 36]), decode_threshold=1)
    assert split.tolist() == [2, 4, 2, 34]
    for num_decodes in (None, 2, i32([2]), split):
        plan = plan_behind(num_decodes)
        assert plan.num_chunks.tolist() == [4]
        assert plan.chunks.tolist() == [*prefills, [0] * 4]
    whole = [[0, 1, 0, 1], [1, 3, 0, 11], *prefills[1:]]
    for num_decodes in (0, i32([0]), i32([-7])):
        assert plan_behind(num_decodes).chunks.tolist() == whole
        assert plan_behind(num_decodes).num_chunks.tolist() == [5]
    for num_decodes in (6, i32([6]), i32([2**31 - 1])):
        plan = plan_behind(num_decodes)
        assert not plan.chunks.any()
        assert not plan.num_chunks.any()


@pytest.mark.parametrize("num_decodes", range(7))
def test_decodes_known_to_the_host_and_to_the_device_give_one_plan(num_decodes):
    for seed in range(30):
        inputs = random_inputs(seed, num_reqs=6, num_tokens=90, max_query=40)
        spec = dataclasses.replace(SPEC, indexer_workspace=1024, max_logits_bytes=4 * 9000)
        host, device = (
            build_prefill_metadata(
                spec, *inputs[:3], tables_of(inputs), max_chunks=MAX_CHUNKS, num_decodes=number
            )
            for number in (num_decodes, i32([num_decodes]))
        )
        assert_equal(device, host)
        assert bool((host.chunks[: int(host.num_chunks)][:, 0] >= num_decodes).all())


def test_errors_of_num_decodes():
    for wrong, error, text in (
        (-1, ValueError, "num_decodes must be at least 0, got -1"),
        (7, ValueError, "num_decodes must be at most num_reqs = 6, got 7"),
        (i32([]), ValueError, "num_decodes must have shape"),
        (i64([2]), TypeError, "num_decodes must be torch.int32, got torch.int64"),
        (2.0, TypeError, "num_decodes must be an int, got float"),
    ):
        with pytest.raises(error, match=f"build_prefill_metadata: {text}"):
            plan_behind(wrong)


@pytest.mark.parametrize("seed", range(20))
def test_prefill_metadata_against_the_oracle(seed):
    inputs = random_inputs(seed, num_reqs=6, num_tokens=90, max_query=40)
    query_start_loc, seq_lens, slots, swa, c4, c128 = (tensor.tolist() for tensor in inputs)
    metadata = prefill(*inputs)
    requests, positions = oracles.token_map(query_start_loc, seq_lens, num_tokens=len(slots))
    assert metadata.req_indices.tolist() == requests
    assert metadata.positions.tolist() == positions
    assert metadata.c4_lens.tolist() == [(position + 1) // 4 for position in positions]
    window = oracles.swa_indices_and_lens(positions, requests, swa, block_size=64, window_size=128)
    assert [metadata.swa_indices.tolist(), metadata.swa_lens.tolist()] == list(window)
    for name, table, page, ratio in (("c4", c4, 64, 4), ("c128", c128, 2, 128)):
        mapped = oracles.compressed_slot_mapping(
            positions, requests, table, slots, block_size=page, compress_ratio=ratio
        )
        assert getattr(metadata, f"{name}_slot_mapping").tolist() == mapped
    bounds = oracles.prefill_row_bounds(positions, requests, seq_lens, compress_ratio=4)
    found = (metadata.c4_cu_seq_lens, metadata.c4_row_start, metadata.c4_row_stop)
    assert [tensor.tolist() for tensor in found] == list(map(list, bounds))
    split = oracles.split_decodes_and_prefills(query_start_loc, decode_threshold=4)
    assert metadata.split.tolist() == split
    chunks, num_chunks = oracles.split_prefill_chunks(
        [max(length, 0) // 4 for length in seq_lens[split[0] :]],
        [stop - start for start, stop in pairwise(query_start_loc)][split[0] :],
        workspace_size=SPEC.indexer_workspace,
        max_logits_bytes=SPEC.max_logits_bytes,
        max_chunks=MAX_CHUNKS,
        request_offset=split[0],
    )
    assert metadata.chunks.tolist() == chunks
    assert metadata.num_chunks.tolist() == num_chunks


def test_configuration_stays_constant_under_dynamic_shapes():
    """dynamic=True makes ints of a captured spec symbolic. Widths computed from such ints
    would cost a division per entry, so the schemas take these settings as plain ints."""
    spec = AttentionSpec(next_n=2, max_model_len=8192)
    widths = []

    def backend(graph, _):
        dense = OPS["dense_compressed_indices"].op
        calls = [node for node in graph.graph.nodes if node.target is dense]
        widths.extend(node.meta["example_value"][0].shape[1] for node in calls)
        return graph.forward

    def build(*inputs):
        return build_decode_metadata(spec, *inputs[:3], tables_of(inputs))

    torch._dynamo.reset()
    inputs = random_inputs(0, num_reqs=5, num_tokens=23, spec=spec)
    torch.compile(build, fullgraph=True, dynamic=True, backend=backend)(*inputs)
    assert widths == [128]
    assert [type(width) for width in widths] == [int]


def test_max_chunks_of_a_spec_is_enough():
    spec = AttentionSpec(max_model_len=4096, indexer_workspace=1024, max_logits_bytes=4096)
    bound = spec.max_chunks(num_reqs=6, num_tokens=90)
    for seed in range(50):
        inputs = random_inputs(seed, num_reqs=6, num_tokens=90, spec=spec, max_query=60)
        metadata = build_prefill_metadata(spec, *inputs[:3], tables_of(inputs), max_chunks=bound)
        assert 0 <= metadata.num_chunks.item() <= bound


def test_presets():
    flash, pro = AttentionSpec.deepseek_v4_flash(next_n=2), AttentionSpec.deepseek_v4_pro()
    assert (flash.index_topk, pro.index_topk, flash.next_n) == (512, 1024, 2)
    assert (flash.c4_block_size, flash.c128_block_size, flash.max_c128_rows) == (64, 2, 8192)
