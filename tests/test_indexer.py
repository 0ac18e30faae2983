"""The lightning indexer: its selection against plain Python, its invariances, the quantised
pipeline from bf16, and Hugging Face's indexer."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from oracles_indexer import indexer_select as oracle
from test_contract import patterns

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.reference.indexer import scores
from dsv4_ops.reference.indexer_topk import best, sortable
from dsv4_ops.reference.rotation import rotate_tail
from dsv4_ops.testing.indexer import tiny_cache, tiny_query
from dsv4_ops.testing.indexer_scores import paged_scores

drawn = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
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


def select(tensors, *, topk=64, ratio=1):
    return ops.indexer_select(*tensors, block_size=SIZE, compress_ratio=ratio, topk=topk)


@pytest.mark.parametrize("name", ["indexer_select"])
def test_selection_equals_the_oracle_where_scores_are_exact(name):
    station = testing.station(name)
    used = [0]

    @drawn
    @given(testing.strategy(name))
    def compare(case):
        assume(len(station.precise(*case.tensors, **case.settings)) == 1)
        used[0] += 1
        lists = [patterns(tensor) for tensor in case.tensors]
        assert ops.indexer_select(*case.tensors, **case.settings).tolist() == oracle(
            *lists, **case.settings
        )

    compare()
    assert used[0] >= 40


def test_both_kinds_of_scores_are_drawn():
    station, kinds = testing.station("indexer_select"), []

    @drawn
    @given(testing.strategy("indexer_select"))
    def collect(case):
        if case.tensors[0].shape[0]:
            kinds.append(len(station.precise(*case.tensors, **case.settings)))

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
    exact = paged_scores(*tensors, SIZE, PAGES * SIZE)
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
    expected = scores(q.float(), factors, pages.float(), torch.ones(PAGES * SIZE))
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


def test_sortable_orders_every_kind_of_float():
    values = [-torch.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, torch.inf]
    keys = sortable(torch.tensor([torch.nan, *values])).tolist()
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
    assert min(keys) > -(2**31)
    zeros = sortable(torch.tensor([0.0, -0.0, torch.nan, -torch.nan]))
    assert zeros[0] == zeros[1]
    assert zeros[2] == zeros[3]


def hugging_face():
    """Hugging Face's indexer in float32 with random weights, and what goes into its scores."""
    transformers = pytest.importorskip("transformers")
    name = "transformers.models.deepseek_v4.modeling_deepseek_v4"
    modeling = pytest.importorskip(name)
    config = transformers.DeepseekV4Config(
        hidden_size=256,
        q_lora_rank=64,
        num_hidden_layers=1,
        layer_types=["compressed_sparse_attention"],
        index_n_heads=16,
        index_head_dim=128,
        index_topk=24,
    )
    torch.manual_seed(11)
    indexer = modeling.DeepseekV4Indexer(config)
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    seen = {}
    indexer.q_b_proj.register_forward_hook(lambda module, args, out: seen.update(q=out))
    indexer.scorer.register_forward_hook(lambda module, args, out: seen.update(args=args, out=out))
    hidden, residual = torch.randn(1, 301, 256), torch.randn(1, 301, 64)
    positions = torch.arange(301)
    with torch.no_grad():
        indices = indexer(hidden, residual, positions[None], None, 0)
        weights = indexer.scorer.weights_proj(hidden)[0]
    return config, indices[0], positions, weights, seen


def test_scores_and_selection_are_those_of_hugging_face():
    """Without quantisation: the scores of rotated queries, and the rows that they choose."""
    config, indices, positions, weights, seen = hugging_face()
    keys, theirs = seen["args"][1][0].detach(), seen["out"][0]
    rope = config.rope_parameters["compress"]
    scaling = ops.YarnScaling() if rope["rope_type"] == "yarn" else None
    table = ops.rope_cos_sin_cache(301, theta=float(rope["rope_theta"]), scaling=scaling)
    q = rotate_tail(seen["q"][0].detach().view(301, 16, 128), positions, table)
    # theirs has float32 angles, which at position 300 are off by 1e-5
    torch.testing.assert_close(q, seen["args"][0][0].detach(), rtol=0, atol=5e-4)
    ours = scores(q, weights * 128**-0.5 * 16**-0.5, keys, torch.ones(keys.shape[0]))
    spread = theirs.std()
    assert (ours - theirs).abs().max() < 2e-4 * spread

    lens = ((positions + 1) // 4).to(torch.int32)
    ours = ours.masked_fill(torch.arange(keys.shape[0]) >= lens[:, None], -torch.inf)
    chosen = best(torch.where(ours > -torch.inf, sortable(ours), -(2**31)), config.index_topk)
    flips = 0
    for token, (mine, other) in enumerate(zip(chosen, indices, strict=True)):
        differing = set(mine.tolist()) ^ set(other.tolist())
        flips += bool(differing)
        if differing - {-1}:  # scores that rounding may order either way
            assert theirs[token, sorted(differing - {-1})].std() < 2e-4 * spread
    assert flips <= 3
    assert int((chosen >= 0).sum()) > 301 * 20
