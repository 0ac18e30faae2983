"""The lightning indexer on a GPU: exact selections at full size, the precision of its scores,
graphs, memory, and DeepGEMM's logits. Run there with ``pytest -m gpu tests``."""

import importlib
from dataclasses import replace

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch.layers import module_of
from dsv4_ops.reference.indexer import ABSENT_KEY, best, sortable
from dsv4_ops.testing.contract import checks
from dsv4_ops.testing.contract.compare import assert_precise
from dsv4_ops.testing.float64.indexer import HOPPER_UNIT
from tests.support.attention_batches import graph_of, no_host_sync


class Batch:
    """Queries of several requests, and a pool of blocks that are full of keys."""

    def __init__(
        self, *, num_tokens, max_rows, heads=64, block_size=64, ratio=4, whole=True, seed=0
    ):
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.block_size, self.ratio = block_size, ratio
        layout = IndexerLayout(block_size)
        max_blocks = max_rows // block_size
        blocks = min(2 * max_blocks, 3000)
        data, rows = block_size * layout.data_bytes, blocks * block_size
        self.codes = self.values((rows, 128), whole)
        self.scales = torch.exp2(self.integers(-2, 3, (rows,)).float())
        self.cache = torch.full(layout.shape(blocks), 0xFF, dtype=torch.uint8, device="cuda")
        self.cache[:, :data] = self.codes.view(torch.uint8).view(blocks, data)
        scale_bytes = self.scales.view(torch.uint8).view(blocks, 4 * block_size)
        self.cache[:, data : data + 4 * block_size] = scale_bytes
        self.q = self.values((num_tokens, heads, 128), whole)
        if whole:
            self.weights = self.integers(-8, 17, (num_tokens, heads)) / 8
        else:
            self.weights = torch.randn(num_tokens, heads, generator=self.generator, device="cuda")
        num_reqs = min(num_tokens, 16)
        self.table = self.integers(0, blocks, (num_reqs, max_blocks)).int()
        self.table[self.integers(0, 50, self.table.shape) == 0] = -1
        self.requests = self.integers(0, num_reqs, (num_tokens,)).int()
        self.positions = self.integers(0, max_rows * ratio, (num_tokens,))
        self.positions[0] = max_rows * ratio - 1
        if num_tokens > 3:
            self.positions[1], self.requests[2], self.positions[3] = -1, -1, 4 * ratio

    def integers(self, low, high, shape):
        return torch.randint(low, high, shape, generator=self.generator, device="cuda")

    def values(self, shape, whole):
        if whole:
            return self.integers(-4, 5, shape).float().to(torch.float8_e4m3fn)
        return torch.randn(shape, generator=self.generator, device="cuda").to(torch.float8_e4m3fn)

    def select(self, topk, rows=slice(None), **settings):
        tensors = (self.positions[rows], self.requests[rows], self.table)
        sizes = {"block_size": self.block_size, "compress_ratio": self.ratio, "topk": topk}
        queries = (self.q[rows], self.weights[rows], self.cache)
        return ops.indexer_select(*queries, *tensors, **sizes, **settings)

    def slots(self, rows):
        """Return the slots of selected rows."""
        return ops.global_topk_indices_and_lens(
            rows, self.requests, self.table, block_size=self.block_size
        ).indices

    def logits(self):
        lens = ((self.positions + 1) // self.ratio).int()
        tensors = (self.q, self.weights, self.cache, lens, self.requests, self.table)
        num_rows = self.table.shape[1] * self.block_size
        return ops.indexer_logits(*tensors, block_size=self.block_size, num_rows=num_rows)

    def scores(self, token, dtype):
        """Return a token's scores, the sums of their absolute terms, and which are candidates."""
        request = int(self.requests[token])
        row = torch.arange(self.table.shape[1] * self.block_size, device="cuda")
        page = self.table[request, row // self.block_size].long()
        count = (int(self.positions[token]) + 1) // self.ratio if request >= 0 else 0
        slot = page.clamp(min=0) * self.block_size + row % self.block_size
        keys, q = self.codes[slot].to(dtype), self.q[token].to(dtype)
        weights, scales = self.weights[token].to(dtype), self.scales[slot].to(dtype)
        found = ((keys @ q.t()).relu() * weights).sum(1) * scales
        terms = (keys.abs() @ q.abs().t() * weights.abs()).sum(1) * scales
        return found, terms, (row < count) & (page >= 0)

    def expected(self, topk, dtype=torch.float32):
        rows = []
        for token in range(self.q.shape[0]):
            found, _, candidate = self.scores(token, dtype)
            keys = torch.where(candidate, sortable(found.float()), ABSENT_KEY)
            rows.append(best(keys[None], topk))
        return torch.cat(rows)


@pytest.mark.parametrize(
    ("num_tokens", "max_rows", "heads", "block_size", "topk"),
    [
        (1, 2048, 64, 64, 512), (1, 32768, 64, 64, 512), (1, 262144, 64, 64, 512),
        (2, 262144, 64, 64, 2048), (8, 32768, 64, 64, 1024), (8, 32768, 32, 256, 512),
        (8, 4096, 16, 2, 512), (8, 4096, 3, 64, 500), (8, 4096, 128, 64, 512),
        (64, 32768, 64, 64, 512), (128, 32768, 64, 64, 1024), (133, 8192, 64, 64, 2048),
        (265, 4096, 64, 64, 512), (700, 4096, 64, 64, 512), (8, 4096, 64, 64, 5000),
    ],
)  # fmt: skip
def test_selection_is_exact_where_scores_are(num_tokens, max_rows, heads, block_size, topk):
    """Values are small integers and powers of two: all scores are exact, and many are equal."""
    sizes = {"max_rows": max_rows, "heads": heads, "block_size": block_size}
    batch = Batch(num_tokens=num_tokens, **sizes)
    expected = batch.expected(topk)
    assert torch.equal(batch.select(topk), expected)
    assert torch.equal(batch.select(topk, slots=True), batch.slots(expected))


@pytest.mark.parametrize("order", ["ascending", "descending", "constant", "last"])
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_selection_is_exact_for_scores_in_any_order(order, num_tokens):
    """A key's score is 128 times its scale; the orders are the worst for a pass over the keys."""
    rows, topk = 16384, 512
    batch = Batch(num_tokens=num_tokens, max_rows=rows, ratio=1)
    place = torch.arange(1, rows + 1, dtype=torch.float32, device="cuda")
    scales = {
        "ascending": place,
        "descending": place.flip(0),
        "constant": torch.ones_like(place),
        "last": torch.where(place > rows - 100, 2.0, 1.0),
    }[order]
    layout, blocks = IndexerLayout(64), rows // 64
    batch.cache = layout.allocate(blocks, "cuda")
    batch.cache[:, : 64 * 128] = 0x38
    batch.cache[:, 64 * 128 : 64 * 132] = scales.view(torch.uint8).view(blocks, 256)
    batch.table = torch.arange(blocks, dtype=torch.int32, device="cuda")[None]
    batch.requests.zero_()
    batch.positions[:] = rows - 1 - torch.arange(num_tokens, device="cuda")
    batch.q = torch.ones(num_tokens, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    batch.weights = torch.zeros(num_tokens, 64, device="cuda")
    batch.weights[:, 0] = 1
    chosen = batch.select(topk)
    for token in range(0, num_tokens, 7):
        keys = sortable(scales[None, : rows - token])
        assert torch.equal(chosen[token : token + 1], best(keys, topk)), token


@pytest.mark.parametrize(("num_tokens", "max_rows"), [(1, 32768), (8, 8192), (300, 4096)])
def test_scores_are_within_the_precision_of_the_matrix_unit(num_tokens, max_rows):
    batch = Batch(num_tokens=num_tokens, max_rows=max_rows, whole=False, seed=1)
    logits = batch.logits()
    worst = 0.0
    for token in range(0, num_tokens, 11):
        found, terms, candidate = batch.scores(token, torch.float64)
        assert torch.equal(logits[token] > -torch.inf, candidate)
        error = torch.where(candidate, (logits[token] - found).abs() / terms, 0.0)
        worst = max(worst, float(error.max()))
    print(f"worst error of a score: {worst:.3g} of its absolute terms")
    assert worst < HOPPER_UNIT


@pytest.mark.parametrize(
    ("num_tokens", "max_rows"), [(1, 32768), (8, 8192), (64, 8192), (300, 4096)]
)
@pytest.mark.parametrize("topk", [512, 1024])
def test_selection_of_random_keys(num_tokens, max_rows, topk):
    """The selection follows ``indexer_logits``, whose scores are exact up to the precision."""
    batch = Batch(num_tokens=num_tokens, max_rows=max_rows, whole=False, seed=2)
    chosen, logits = batch.select(topk), batch.logits()
    keys = torch.where(logits > -torch.inf, sortable(logits), ABSENT_KEY)
    assert torch.equal(chosen, best(keys, topk))
    lens = ((batch.positions + 1) // batch.ratio).int()
    assert torch.equal(chosen, ops.indexer_topk(logits, lens, topk=topk))
    for token in range(0, num_tokens, 11):
        found, terms, candidate = batch.scores(token, torch.float64)
        row = chosen[token][chosen[token] >= 0].long()
        assert len(row) == min(topk, int(candidate.sum()))
        if len(row) < topk:
            continue
        budget = 2 * HOPPER_UNIT * float(terms[candidate].max())
        ranked = found[candidate].sort(descending=True).values
        assert bool((found[row] >= ranked[topk - 1] - budget).all())
        if len(ranked) > topk and ranked[topk - 1] - ranked[topk] > budget:
            expected = best(torch.where(candidate, sortable(found.float()), ABSENT_KEY)[None], topk)
            assert torch.equal(chosen[token : token + 1], expected)


def test_a_token_depends_on_no_other_token():
    """A row has three parts with 128 tokens, one with 300, and as many as fit with one token."""
    batch = Batch(num_tokens=300, max_rows=16384, whole=False, seed=3)
    whole = batch.select(512)
    assert torch.equal(batch.select(512, slice(0, 128)), whole[:128])
    for token in (0, 5, 77, 299):
        one = slice(token, token + 1)
        assert torch.equal(batch.select(512, one), whole[one])


def test_runs_are_the_same():
    batch = Batch(num_tokens=40, max_rows=32768, whole=False, seed=4)
    first = batch.select(1024)
    for _ in range(20):
        assert torch.equal(batch.select(1024), first)


@pytest.mark.parametrize("num_tokens", [1, 8, 128])
def test_captured_selection_follows_its_inputs(num_tokens):
    """The graph is captured with some lengths and replayed with others, without a host sync."""
    batch = Batch(num_tokens=num_tokens, max_rows=32768)
    graph, captured = graph_of(lambda: batch.select(512))
    for seed, limit in enumerate((131072, 5000, 3, 40000, 131072)):
        batch.positions.copy_(batch.integers(0, limit, batch.positions.shape))
        batch.table.copy_(batch.integers(-1, batch.cache.shape[0], batch.table.shape).int())
        other = Batch(num_tokens=num_tokens, max_rows=64, seed=10 + seed)
        batch.q.view(torch.uint8).copy_(other.q.view(torch.uint8))
        with no_host_sync():
            graph.replay()
        assert torch.equal(captured, batch.expected(512)), limit


@pytest.mark.parametrize(
    ("topk", "ratio", "batches"),
    [(512, 4, [(21, 12800), (2, 16384), (300, 2048), (130, 640)]),
     (2048, 1, [(21, 12800), (2, 131072), (130, 640), (300, 147456)])],
)  # fmt: skip
def test_compiled_selection_takes_any_sizes(topk, ratio, batches):
    """One graph serves 2 to 300 tokens and rows of any length; rows and slots are exact. Two
    wide selections list the kept keys, one needs no list, and one stores no scores."""
    torch._dynamo.reset()
    sizes = {"block_size": 64, "compress_ratio": ratio, "topk": topk}

    def call(*tensors):
        rows = ops.indexer_select(*tensors, **sizes)
        return rows, ops.indexer_select(*tensors, **sizes, slots=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for index, (num_tokens, max_rows) in enumerate(batches):
        batch = Batch(num_tokens=num_tokens, max_rows=max_rows, ratio=ratio, seed=20 + index)
        tensors = (batch.cache, batch.positions, batch.requests, batch.table)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            chosen, slots = compiled(batch.q, batch.weights, *tensors)
        assert torch.equal(chosen, batch.expected(topk))
        assert torch.equal(slots, batch.slots(chosen))


def test_memory_does_not_grow_with_the_context():
    batch = Batch(num_tokens=128, max_rows=262144)
    batch.select(512)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    batch.select(512)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 16 * 2**20  # logits would take 128 MiB


def test_pages_beyond_4_gib(gpu_memory_alone):
    layout = IndexerLayout(64)
    blocks = 5 * 2**30 // layout.page_bytes
    small = Batch(num_tokens=4, max_rows=2048, seed=5)
    cache = torch.full(layout.shape(blocks), 0xFF, dtype=torch.uint8, device="cuda")
    count = small.cache.shape[0]
    cache[-count:] = small.cache
    expected = small.select(256)
    small.cache = cache
    small.table = torch.where(small.table >= 0, small.table + blocks - count, -1)
    assert torch.equal(small.select(256), expected)
    del cache, small
    torch.cuda.empty_cache()


def test_queries_have_the_bytes_of_the_cpu():
    generator = torch.Generator().manual_seed(6)
    scale = torch.exp2(torch.randint(-40, 40, (2048, 64, 1), generator=generator).float())
    q = (torch.randn(2048, 64, 128, generator=generator) * scale).to(torch.bfloat16)
    q[0, 0], q[1, 0, 5], q[2, 0, 7] = 0, torch.nan, torch.inf
    weights = torch.randn(2048, 64, generator=generator).to(torch.bfloat16)
    positions = torch.randint(-2, 70000, (2048,), generator=generator)
    table = ops.rope_cos_sin_cache(65536, theta=160000.0, scaling=ops.YarnScaling())
    on_cpu = (q, weights, positions, table)
    ours = ops.indexer_quantize_q(*(tensor.cuda() for tensor in on_cpu))
    expected = ops.indexer_quantize_q(*on_cpu)
    assert torch.equal(ours.q.view(torch.uint8).cpu(), expected.q.view(torch.uint8))
    same = ours.weights.cpu().view(torch.int32) == expected.weights.view(torch.int32)
    assert bool(same.all())


@pytest.mark.parametrize(("num_tokens", "num_k"), [(1, 1), (7, 129), (300, 5000)])
def test_ragged_logits_are_those_of_the_pages(num_tokens, num_k):
    """The keys are the same; scores agree up to the precision of the matrix unit."""
    batch = Batch(num_tokens=num_tokens, max_rows=(num_k + 63) // 64 * 64, whole=False, seed=7)
    batch.requests.zero_()
    batch.table = batch.table[:1].clamp(min=0)
    starts = torch.tensor([0, num_k], dtype=torch.int32, device="cuda")
    keys = ops.gather_indexer_k(batch.cache, starts, batch.table, block_size=64, num_rows=num_k)
    lens = ((batch.positions + 1) // 4).int()
    ragged = ops.indexer_logits_ragged(batch.q, batch.weights, *keys, torch.zeros_like(lens), lens)
    paged = batch.logits()[:, :num_k]
    assert torch.equal(ragged == -torch.inf, paged == -torch.inf)
    seen = paged > -torch.inf
    torch.testing.assert_close(ragged[seen], paged[seen], rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("name", ["indexer_logits", "indexer_select"])
def test_plain_layout_takes_the_reference(name, monkeypatch):
    """float32 and bf16 are within the budget of float64, compiled and captured without a sync. The
    contract covers the plain layout only."""
    spec, op_testing = OPS[name], testing.op_testing(name)
    plain = tuple(chosen for chosen in op_testing.settings if chosen["layout"] == "plain")
    module = importlib.import_module(module_of("testing", spec.stem))
    monkeypatch.setattr(module, name, replace(op_testing, settings=plain))
    op_testing = spec.implementation("testing")
    for case in (case.on("cuda") for case in op_testing.cases()):
        if case.settings["layout"] == "plain":
            assert_precise(name, op_testing, case, case.run(spec.op))
    checks.CompiledOps([spec], "cuda").fuzz(50)
    checks.check_cuda_graph(spec)
