"""The lightning indexer: its selection against plain Python, its invariances, the quantised
pipeline from bf16, rows of tokens of one request, and its plain layout."""

import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, strategies as st

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.layout import IndexerLayout, PlainLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch.layers import module_of
from dsv4_ops.reference.indexer import scores, sortable
from dsv4_ops.testing.case import i32, i64
from dsv4_ops.testing.cases.indexer import beyond_int32, tiny_cache, tiny_query
from dsv4_ops.testing.contract import checks
from dsv4_ops.testing.float64.indexer import paged_scores
from dsv4_ops.testing.strategies.indexer_batches import in_rows
from tests.helpers import NIGHTLY, nightly
from tests.ops.test_contract import patterns
from tests.oracles.indexer import indexer_select as oracle
from tests.support.sampled import sampled

PAGES, SIZE = 12, 64


def random_call(seed, *, num_tokens=6, num_heads=16, length=700):
    """A random cache of one request, and queries at the end of it."""
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


@pytest.mark.parametrize("name", ["indexer_select"])
def test_selection_equals_the_oracle_where_scores_are_exact(name):
    op_testing = testing.op_testing(name)
    used = [0]

    @sampled(60)
    @given(testing.strategy(name))
    def compare(case):
        assume(len(op_testing.precise(*case.tensors, **case.settings)) == 1)
        used[0] += 1
        lists = [patterns(tensor) for tensor in case.tensors]
        plain = case.settings["layout"] == "plain"
        bf16 = case.tensors[0].dtype == torch.bfloat16 if plain else None
        assert ops.indexer_select(*case.tensors, **case.settings).tolist() == oracle(
            *lists, **case.settings, bf16=bf16
        )

    compare()
    assert used[0] >= 10


def test_both_kinds_of_scores_are_sampled():
    op_testing, kinds = testing.op_testing("indexer_select"), []

    @sampled(60)
    @given(testing.strategy("indexer_select"))
    def collect(case):
        if case.tensors[0].shape[0]:
            kinds.append(len(op_testing.precise(*case.tensors, **case.settings)))

    collect()
    assert {1, 2} == set(kinds)


@pytest.mark.parametrize("ratio", [1, 4])
def test_selection_is_topk_of_logits(ratio):
    tensors, *_ = random_call(0)
    q, weights, cache, positions, requests, table = tensors
    lens = ((positions + 1) // ratio).to(torch.int32)
    logits = ops.indexer_logits(
        q, weights, cache, lens, requests, table, block_size=SIZE, num_rows=PAGES * SIZE
    )
    chosen = ops.indexer_topk(logits, lens, topk=64)
    assert torch.equal(chosen, select(tensors, ratio=ratio))
    assert (chosen >= 0).all()
    kth = logits.gather(1, chosen.long()).amin(1)
    assert ((logits > kth[:, None]).sum(1) < 64).all()


def test_ragged_logits_are_those_of_the_pages():
    (q, weights, cache, positions, requests, table), *_ = random_call(1)
    lens = (positions + 1).to(torch.int32)
    starts = torch.tensor([0, PAGES * SIZE], dtype=torch.int32)
    keys = ops.gather_indexer_k(cache, starts, table, block_size=SIZE, num_rows=PAGES * SIZE)
    ragged = ops.indexer_logits_ragged(q, weights, *keys, torch.zeros_like(lens), lens)
    paged = ops.indexer_logits(
        q, weights, cache, lens, requests, table, block_size=SIZE, num_rows=PAGES * SIZE
    )
    torch.testing.assert_close(ragged, paged, rtol=1e-5, atol=1e-5)


def test_a_nan_in_a_key_or_its_scale_is_a_nan_score():
    q, weights = tiny_query(2)
    cache, table = tiny_cache(), torch.tensor([[0, 1]], dtype=torch.int32)
    cache[0, 2 * 128 + 4 : 2 * 128 + 8] = 0xFF  # NaN in place of the scale 2
    lens, requests = torch.tensor([4, 2], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    logits = ops.indexer_logits(q, weights, cache, lens, requests, table, block_size=2, num_rows=4)
    assert logits.nan_to_num(7.0, 0, -8.0).tolist() == [[64, 7, 7, 256], [64, 7, -8, -8]]
    chosen = ops.indexer_topk(logits, lens, topk=3)
    assert chosen.tolist() == [[0, 1, 3], [0, 1, -1]]


def test_scores_are_those_of_float64_on_dequantised_keys():
    (q, weights, cache, positions, requests, table), *_ = random_call(2)
    lens = (positions + 1).to(torch.int32)
    tensors = (q, weights, cache, lens, requests, table)
    exact = paged_scores(*tensors, SIZE, PAGES * SIZE, IndexerLayout.tag)
    logits = ops.indexer_logits(*tensors, block_size=SIZE, num_rows=PAGES * SIZE)
    error = torch.where(exact.candidate, (logits - exact.value).abs(), 0.0)
    assert (error <= 2.0**-22 * exact.magnitude).all()


def test_quantised_scores_are_close_to_those_of_bf16():
    """e4m3 has 3 bits: an error of 2^-4 per value, which averages out over 128 of them."""
    (q8, weights8, cache, positions, requests, table), k, q, weights = random_call(3)
    lens = (positions + 1).to(torch.int32)
    logits = ops.indexer_logits(
        q8, weights8, cache, lens, requests, table, block_size=SIZE, num_rows=PAGES * SIZE
    )
    pages = k.view(PAGES, SIZE, 128)[table[0].long()].reshape(PAGES * SIZE, 128)
    factors = weights.float() * 128**-0.5 * 16**-0.5
    expected = scores(q.float(), factors, pages.float())
    seen = logits > -torch.inf
    error = (logits - expected)[seen].pow(2).mean().sqrt() / expected[seen].std()
    assert 1e-3 < error < 0.1


@pytest.mark.parametrize("scale", [None, 0.25])
def test_weights_carry_the_scale_of_the_query(scale):
    q = torch.full((2, 4, 128), 7.0, dtype=torch.bfloat16)
    q[1] = 448.0
    weights = torch.tensor([[1.0, -2.0, 0.0, 0.5]]).repeat(2, 1)
    query = ops.indexer_quantize_q(
        q, weights, torch.tensor([-1, -1]), torch.zeros(0, 64), softmax_scale=scale
    )
    factor = 128**-0.5 * 4**-0.5 if scale is None else scale
    expected = weights * torch.tensor([[2.0**-6], [1.0]]) * factor
    assert torch.equal(query.weights, expected)
    assert query.q.dtype == torch.float8_e4m3fn
    assert (query.q.float() == 448).all()


def test_rotation_is_that_of_apply_rope():
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(9, 4, 128, generator=generator).to(torch.bfloat16)
    weights = torch.ones(9, 4)
    table = ops.rope_cos_sin_cache(40, theta=160000.0)
    positions = torch.tensor([0, 1, 5, 39, 40, -1, 2**40, 7, 8])
    query = ops.indexer_quantize_q(q, weights, positions, table)
    rotated = ops.apply_rope(q, positions, table)
    again = ops.indexer_quantize_q(rotated, weights, torch.full((9,), -1), table)
    assert torch.equal(query.q.view(torch.uint8), again.q.view(torch.uint8))
    assert torch.equal(query.weights, again.weights)


def test_a_token_depends_on_no_other_token():
    tensors, *_ = random_call(4, num_tokens=8)
    q, weights, cache, positions, requests, table = tensors
    whole = select(tensors)
    for token in range(8):
        one = slice(token, token + 1)
        alone = (q[one], weights[one], cache, positions[one], requests[one], table)
        assert torch.equal(select(alone), whole[one])


def test_pages_may_lie_anywhere():
    (q, weights, cache, positions, requests, table), *_ = random_call(6)
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(7))
    moved = torch.empty_like(cache)
    moved[order] = cache
    there = order[table.long()].to(torch.int32)
    expected = select((q, weights, cache, positions, requests, table))
    assert torch.equal(select((q, weights, moved, positions, requests, there)), expected)


def test_garbage_in_unused_bytes_changes_nothing():
    (q, weights, cache, positions, requests, table), *_ = random_call(8, length=300)
    expected = select((q, weights, cache, positions, requests, table))
    spoiled = torch.full_like(cache, 0xFF)
    used = table[0, : (300 + SIZE - 1) // SIZE].long()
    row_bytes = SIZE * 132
    spoiled[used, :row_bytes] = cache[used, :row_bytes]
    last = int(used[-1])
    spoiled[last, (300 % SIZE) * 128 : SIZE * 128] = 0x7F
    spoiled[last, SIZE * 128 + (300 % SIZE) * 4 : row_bytes] = 0xFF
    assert torch.equal(select((q, weights, spoiled, positions, requests, table)), expected)


@pytest.mark.parametrize("topk", [1, 5, 64, 699, 700, 701, 2048])
def test_any_number_of_rows_can_be_chosen(topk):
    tensors, *_ = random_call(9, num_tokens=2)
    chosen = select(tensors, topk=topk)
    for row, position in zip(chosen.tolist(), tensors[3].tolist(), strict=True):
        count = min(topk, position + 1)
        assert row[:count] == sorted(set(row[:count]))
        assert row[count:] == [-1] * (topk - count)
        assert set(row[:count]) <= set(range(position + 1))


def test_strided_arguments_are_read_as_they_are():
    q, weights, cache, positions, requests, table = random_call(10)[0]
    wide = torch.zeros(6, 16, 256, dtype=torch.uint8)
    wide[:, :, ::2] = q.view(torch.uint8)
    views = (
        wide.view(torch.float8_e4m3fn)[:, :, ::2],
        weights.t().contiguous().t(),
        torch.cat([cache, cache], 1)[:, : cache.shape[1]],
        torch.stack([positions, positions], 1)[:, 0],
        torch.stack([requests, requests], 1)[:, 0],
        torch.cat([table, table], 1)[:, : table.shape[1]],
    )
    plain = (q, weights, cache, positions, requests, table)
    assert torch.equal(select(views), select(plain))


def test_slots_are_what_the_translation_makes_of_the_rows():
    q, weights, cache, positions, requests, table = random_call(16)[0]
    positions, requests = positions.clone(), requests.clone()
    table = torch.cat([table, table.flip(1)])
    table[0, 3], table[1, 2], table[1, 5] = -1, 2**31 - 1, -(2**31)
    positions[1], requests[2], requests[3], requests[4] = -5, -1, 2, 1
    tensors = (q, weights, cache, positions, requests, table)
    for topk in (16, 64, 800):
        rows = select(tensors, topk=topk)
        expected = ops.global_topk_indices_and_lens(rows, requests, table, block_size=SIZE).indices
        assert torch.equal(select(tensors, topk=topk, slots=True), expected)
        assert (expected[4] >= 0).any()


def test_slots_beyond_int32_are_absent():
    """Of a cache of one block seen so many times that the public function would refuse it."""
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


IN_ROWS = ("indexer_logits", "indexer_select")


def test_rows_of_tokens_give_the_hand_computed_numbers():
    """Three requests of two tokens over keys that score 64, 512, NaN and 256: all of them, the
    second token padding, and a request whose only block does not exist."""
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
    """Requests with all of their three tokens, with two, with none, and the last of no request."""
    starts, seq_lens = i32([0, 3, 5, 5, 6]), i32([1200, 302, 0, 9])
    sizes = {"next_n": 3, "compress_ratio": 4}
    lens = ops.mtp_seq_lens(starts, seq_lens, **sizes)
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


@pytest.mark.parametrize("name", IN_ROWS)
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


def rows_only(name, monkeypatch):
    """The op, under a contract of rows of two tokens alone."""
    spec, op_testing = OPS[name], testing.op_testing(name)

    def make(draw, settings, min_size):
        return in_rows(op_testing.make(draw, settings, min_size), 2, draw.flag())

    module = importlib.import_module(module_of("testing", spec.stem))
    changed = replace(op_testing, cases=list, make=make, settings=op_testing.settings[:1])
    monkeypatch.setattr(module, name, changed)
    return spec


@pytest.mark.nightly("test_opcheck traces the flattened form, which has the same rows")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["indexer_select", *nightly("the selection", "indexer_logits")])
def test_rows_of_tokens_are_compiled_and_exported(name, monkeypatch):
    spec = rows_only(name, monkeypatch)
    checks.check_fake(spec)
    checks.check_opcheck(spec, traces=1)
    checks.CompiledOps([spec]).fuzz(50 if NIGHTLY else 20)
    if NIGHTLY:
        checks.check_package(spec)


def test_a_schedule_of_rows_is_compiled():
    compiled = torch.compile(ops.paged_mqa_logits_metadata, fullgraph=True, dynamic=True)
    for shape in ((5, 2), (3, 4), (9, 3)):
        lens = torch.arange(300, 300 + shape[0] * shape[1], dtype=torch.int32).view(shape)
        with torch._dynamo.config.patch(error_on_recompile=shape != (5, 2)):
            found = compiled(lens, block_size=64, num_sms=7)
        assert torch.equal(found, ops.paged_mqa_logits_metadata(lens, block_size=64, num_sms=7))


PLAIN = {"block_size": SIZE, "layout": "plain"}


def plain_call(seed, dtype, **sizes):
    """A random call, and the same over queries and keys that are no codes but their values."""
    (q, weights, cache, *rest), *_ = random_call(seed, **sizes)
    every = torch.arange(PAGES, dtype=torch.int32)[None]
    starts = torch.tensor([0, PAGES * SIZE], dtype=torch.int32)
    codes, scales = ops.gather_indexer_k(
        cache, starts, every, block_size=SIZE, num_rows=PAGES * SIZE
    )
    keys = codes.view(torch.float8_e4m3fn).float() * scales[:, None]
    keys = keys.to(dtype)  # three bits and a power of two: no rounding
    plain = PlainLayout(SIZE, 128, dtype).allocate(PAGES)
    ops.insert_k_cache(keys, plain, torch.arange(PAGES * SIZE))
    return (q, weights, cache, *rest), (q.to(dtype), weights, plain, *rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_keys_score_as_their_codes_do(dtype):
    coded, plain = plain_call(12, dtype)
    lens, size = (coded[3] + 1).to(torch.int32), {"num_rows": PAGES * SIZE}
    rest = (lens, *coded[4:])
    expected = ops.indexer_logits(*coded[:3], *rest, block_size=SIZE, **size)
    logits = ops.indexer_logits(*plain[:3], *rest, **PLAIN, **size)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    chosen = ops.indexer_select(*plain, **PLAIN, compress_ratio=1, topk=64)
    assert torch.equal(chosen, ops.indexer_topk(logits, lens, topk=64))
    assert (chosen == select(coded)).float().mean() > 0.99  # rounding may turn two of them


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_garbage_in_unused_plain_rows_changes_nothing(dtype):
    _, (q, weights, cache, positions, requests, table) = plain_call(13, dtype, length=300)
    sizes = {**PLAIN, "compress_ratio": 1, "topk": 64}
    expected = ops.indexer_select(q, weights, cache, positions, requests, table, **sizes)
    spoiled = torch.full_like(cache, torch.nan)
    used = table[0, : (300 + SIZE - 1) // SIZE].long()
    spoiled[used] = cache[used]
    spoiled[used[-1], 300 % SIZE :] = torch.inf
    found = ops.indexer_select(q, weights, spoiled, positions, requests, table, **sizes)
    assert torch.equal(found, expected)


def test_a_factor_of_the_weights_changes_no_selection():
    _, (q, weights, *rest) = plain_call(14, torch.float32)
    sizes = {**PLAIN, "compress_ratio": 1, "topk": 64}
    expected = ops.indexer_select(q, weights, *rest, **sizes)
    assert torch.equal(ops.indexer_select(q, 2.0**-9 * weights, *rest, **sizes), expected)


def test_plain_pages_may_lie_apart():
    _, (q, weights, cache, *rest) = plain_call(15, torch.float32)
    sizes = {**PLAIN, "compress_ratio": 1, "topk": 64}
    expected = ops.indexer_select(q, weights, cache, *rest, **sizes)
    wide = torch.full((PAGES, SIZE + 3, 160), torch.nan)[:, 2 : SIZE + 2, 16:144]
    wide.copy_(cache)
    assert torch.equal(ops.indexer_select(q, weights, wide, *rest, **sizes), expected)


def plain_only(name, monkeypatch):
    """The op, under a contract of its plain layout alone."""
    spec, op_testing = OPS[name], testing.op_testing(name)
    plain = tuple(chosen for chosen in op_testing.settings if chosen["layout"] == "plain")
    module = importlib.import_module(module_of("testing", spec.stem))
    monkeypatch.setattr(module, name, replace(op_testing, settings=plain))
    return spec


@pytest.mark.nightly("test_opcheck traces the other layout; test_compiled_cache.py inserts in both")
@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ROWS)
def test_plain_layout_is_compiled_and_packaged(name, monkeypatch):
    """The contract compiles one configuration of an op, the FP8 layout. Packages hold the code of
    another trace of the same lowering; test_export.py builds them of all ops."""
    spec = plain_only(name, monkeypatch)
    compiled = checks.CompiledOps([spec] * NIGHTLY, fused=[spec])
    compiled.check_cases()
    compiled.fuzz(50 if NIGHTLY else 20)
    if NIGHTLY:
        checks.check_package(spec)
