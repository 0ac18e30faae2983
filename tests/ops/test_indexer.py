"""The lightning indexer: selection against plain Python, tokens per request, and schedules."""

import pytest
import torch
from hypothesis import given, strategies as st

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.reference.indexer import sortable
from dsv4_ops.testing.case import i32, i64
from dsv4_ops.testing.cases.indexer import beyond_int32, tiny_cache, tiny_query
from dsv4_ops.testing.strategies.indexer_batches import in_rows
from tests.support.sampled import sampled

PAGES, SIZE = 12, 64


def random_call(seed, *, num_tokens=6, num_heads=16, length=700):
    """Sample a cache of one request, and queries at its end."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(PAGES * SIZE, 128, generator=generator).to(torch.bfloat16)
    cache = IndexerLayout(SIZE).allocate(PAGES)
    ops.quantize_and_insert_indexer_k(k, cache, torch.arange(PAGES * SIZE), block_size=SIZE)
    q = torch.randn(num_tokens, num_heads, 128, generator=generator).to(torch.bfloat16)
    weights = torch.randn(num_tokens, num_heads, generator=generator).to(torch.bfloat16)
    positions = torch.arange(length - num_tokens, length)
    query = ops.indexer_quantize_q(q, weights, positions, torch.zeros(0, 64))
    table = torch.randperm(PAGES, generator=generator).to(torch.int32)[None]
    requests = torch.zeros(num_tokens, dtype=torch.int32)
    return (*query, cache, positions, requests, table), k, q, weights


def select(tensors, *, topk=64, ratio=1, **settings):
    sizes = {"block_size": SIZE, "compress_ratio": ratio, "topk": topk}
    return ops.indexer_select(*tensors, **sizes, **settings)


def test_both_kinds_of_scores_are_sampled():
    op_testing, kinds = testing.op_testing("indexer_select"), []

    @sampled(60)
    @given(testing.strategy("indexer_select"))
    def collect(case):
        if case.tensors[0].shape[0]:
            kinds.append(len(op_testing.precise(*case.tensors, **case.settings)))

    collect()
    assert {1, 2} == set(kinds)


def test_slots_beyond_int32_are_absent():
    """The table names one block so often that the public function would refuse it."""
    tensors, last = beyond_int32(), 2**31 - SIZE
    sizes = {"block_size": SIZE, "compress_ratio": 1, "topk": 130, "layout": IndexerLayout.tag}
    found = OPS["indexer_select"].reference(*tensors, **sizes, slots=True).tolist()
    fitting, absent = [*range(last, 2**31)], [-1] * SIZE
    assert found == [[*fitting, *absent, 0, 1], [*fitting, *absent, -1, -1]]


def test_sortable_orders_every_kind_of_float():
    values = [-torch.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, torch.inf]
    keys = sortable(torch.tensor([torch.nan, *values])).tolist()
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
    assert min(keys) > -(2**31)
    zeros = sortable(torch.tensor([0.0, -0.0, torch.nan, -torch.nan]))
    assert zeros[0] == zeros[1]
    assert zeros[2] == zeros[3]


def test_rows_of_tokens_give_the_hand_computed_numbers():
    """Three requests of two tokens have keys that score 64, 512, NaN and 256. One selects all, one
    has a padding token, and one has no existing block."""
    table, requests = i32([[0, 1], [1, 0], [9, -1]]), i32([0, 0, 1, 1, 2, 2])
    tensors = (*tiny_query(6), tiny_cache())
    positions = i64([[11, 15], [7, -1], [15, 15]])
    sizes = {"block_size": 2, "compress_ratio": 4, "topk": 2}
    chosen = ops.indexer_select(*tensors, positions, requests, table, **sizes)
    none = [-1, -1]
    assert chosen.tolist() == [[0, 1], [1, 3], [0, 1], none, none, none]
    slots = ops.indexer_select(*tensors, positions, requests, table, **sizes, slots=True)
    assert slots.tolist() == [[0, 1], [1, 3], [2, 3], none, none, none]
    lens = i32([[1, 2], [0, -3], [2, 2]])
    logits = ops.indexer_logits(*tensors, lens, requests, table, block_size=2, num_rows=2)
    inf = torch.inf
    assert logits.tolist() == [[64.0, -inf], [64.0, 512.0], *[[-inf, -inf]] * 4]


def test_lengths_of_drafts_are_read_by_schedule_logits_and_selection():
    """Requests have three, two or no tokens; the last row of tokens has no request."""
    starts, seq_lens = i32([0, 3, 5, 5, 6]), i32([1200, 302, 0, 9])
    lens = ops.mtp_seq_lens(starts, seq_lens, next_n=3, compress_ratio=4)
    assert lens.tolist() == [[299, 299, 300], [75, 75, 0], [0, 0, 0], [2, 0, 0]]
    # 2, 1, 0 and 1 splits of 256 keys
    schedule = ops.paged_mqa_logits_metadata(lens, block_size=64, num_sms=3)
    assert schedule.tolist() == [[0, 0], [1, 0], [3, 0], [4, 0]]
    packed = ops.mtp_seq_lens(starts, seq_lens, next_n=3)
    tensors, *_ = random_call(20, num_tokens=12)
    q, weights, cache, _, _, table = tensors
    table = table.expand(4, -1)
    requests = torch.arange(4, dtype=torch.int32).repeat_interleave(3)
    flat = (packed.flatten().long() - 1, requests, table)
    expected = select((q, weights, cache, *flat), ratio=4)
    by_position = (packed.long() - 1, requests, table)
    assert torch.equal(select((q, weights, cache, *by_position), ratio=4), expected)
    by_length = (lens.long() - 1, requests, table)
    assert torch.equal(select((q, weights, cache, *by_length), ratio=1), expected)
    scored = {"block_size": SIZE, "num_rows": PAGES * SIZE}
    logits = ops.indexer_logits(q, weights, cache, lens, requests, table, **scored)
    assert torch.equal(ops.indexer_topk(logits, lens.flatten(), topk=64), expected)


def test_a_schedule_of_rows_is_that_of_their_longest_lengths():
    generator = torch.Generator().manual_seed(21)
    lens = torch.randint(-300, 3000, (40, 4), generator=generator, dtype=torch.int32)
    sizes = {"block_size": 64, "num_sms": 132}
    longest = ops.paged_mqa_logits_metadata(lens.amax(1), **sizes)
    assert torch.equal(ops.paged_mqa_logits_metadata(lens, **sizes), longest)
    assert torch.equal(ops.paged_mqa_logits_metadata(lens.t().contiguous().t(), **sizes), longest)
    none = ops.paged_mqa_logits_metadata(lens[:, :0], **sizes)
    assert torch.equal(none, ops.paged_mqa_logits_metadata(0 * lens[:, 0], **sizes))
    assert ops.paged_mqa_logits_metadata(lens[:0], **sizes).tolist() == [[0, 0]] * 133


@pytest.mark.parametrize("name", ["indexer_logits", "indexer_select"])
def test_rows_of_tokens_are_those_of_the_flattened_form(name):
    @sampled(60)
    @given(testing.strategy(name), st.integers(1, 5), st.booleans())
    def compare(case, next_n, mixed):
        case = in_rows(case, next_n, mixed)
        *queries, places, requests, table = case.tensors
        op = getattr(ops, name)
        found = op(*queries, places, requests, table, **case.settings)
        flat = op(*queries, places.flatten(), requests, table, **case.settings)
        assert torch.equal(found.nan_to_num(7.0), flat.nan_to_num(7.0))

    compare()
