"""DeepGEMM behind ``impl=`` on a GPU. Run there with ``pytest -m gpu tests``; ANCHOR_DIR names the
bundle that holds it."""

import math

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.dispatch import libraries
from dsv4_ops.dispatch.providers import deep_gemm_num_sms
from tests.gpu.test_cache import needs_baselines
from tests.gpu.test_indexer import Batch
from tests.helpers import INT32_MAX, INT32_MIN
from tests.support.attention_batches import graph_of

pytestmark = [needs_baselines, pytest.mark.usefixtures("found")]
pytest_plugins = ("tests.gpu.providers",)


def deep_gemm(
    batch: Batch,
    topk: int | None = None,
    impl: str = "deep_gemm",
    schedule: Tensor | None = None,
    **changed,
) -> Tensor:
    common = (batch.q, batch.weights, batch.cache)
    settings = {"block_size": 64, "impl": impl}
    if topk is not None:
        rows = (batch.positions, batch.requests, batch.table)
        sizes = {"compress_ratio": batch.ratio, "topk": topk}
        return ops.indexer_select(*common, *rows, schedule, **sizes, **settings)
    lens = ((batch.positions + 1) // batch.ratio).int()
    rows = {"num_rows": batch.table.shape[1] * 64, **changed}
    paged = (lens, batch.requests, batch.table, schedule)
    return ops.indexer_logits(*common, *paged, **rows, **settings)


SHAPES = [(1, 2048, 64), (64, 4096, 32), (130, 8192, 64)]


@pytest.mark.parametrize(("tokens", "rows", "heads"), SHAPES)
def test_deep_gemm_selects_exactly_where_scores_are_exact(tokens, rows, heads):
    """Some blocks and requests are absent, some tokens have no row, and scores tie."""
    batch = Batch(num_tokens=tokens, max_rows=rows, heads=heads)
    batch.table[:, 1::9] = batch.cache.shape[0] + 5
    batch.table[0, 2::11] = INT32_MAX
    batch.table[-1, 3::11] = INT32_MIN
    assert torch.equal(deep_gemm(batch, 512), deep_gemm(batch, 512, "triton"))
    logits = deep_gemm(batch)
    assert logits.is_contiguous()
    assert torch.equal(logits, deep_gemm(batch, impl="triton"))
    for num_rows in (0, 1, rows - 100, rows + 300):
        same = deep_gemm(batch, num_rows=num_rows)
        assert torch.equal(same, deep_gemm(batch, impl="triton", num_rows=num_rows))


@pytest.mark.parametrize(("tokens", "rows", "heads"), SHAPES)
def test_deep_gemm_scores_are_near(tokens, rows, heads):
    """The squared difference is within upstream's 5e-6 of the sum of all squares."""
    batch = Batch(num_tokens=tokens, max_rows=rows, heads=heads, whole=False)
    upstream, ours = deep_gemm(batch), deep_gemm(batch, impl="triton")
    exist = ours > -math.inf
    assert torch.equal(upstream > -math.inf, exist)
    left, right = upstream[exist].double(), ours[exist].double()
    assert 1 - 2 * (left * right).sum() / (left.square() + right.square()).sum() < 5e-6
    lens = ((batch.positions + 1) // batch.ratio).int()
    assert torch.equal(deep_gemm(batch, 512), ops.indexer_topk(upstream, lens, topk=512))


@pytest.mark.parametrize("topk", [None, 512])
def test_deep_gemm_compiled_and_captured(topk):
    batch = Batch(num_tokens=24, max_rows=4096)
    expected = deep_gemm(batch, topk)
    compiled = torch.compile(lambda: deep_gemm(batch, topk), fullgraph=True, dynamic=False)
    assert torch.equal(compiled(), expected)
    graph, outputs = graph_of(lambda: deep_gemm(batch, topk))
    for limit in (16384, 3000, 7):
        batch.positions.copy_(batch.integers(0, limit, batch.positions.shape))
        graph.replay()
        assert torch.equal(outputs, deep_gemm(batch, topk, "triton"))


def lens_of(what: str, rows: int) -> Tensor:
    made = torch.Generator().manual_seed(rows)
    return {
        "none": torch.zeros(rows),
        "one key": torch.ones(rows),
        "random": torch.randint(0, 70_000, (rows,), generator=made),
        "mostly none": torch.randint(-9, 2, (rows,), generator=made).clamp(min=0) * 262144,
        "whole splits": torch.randint(0, 3, (rows,), generator=made) * 256,
        "long first": torch.arange(rows).eq(0) * INT32_MAX,
        "long last": torch.arange(rows).eq(rows - 1) * INT32_MAX,
        "longest": torch.arange(rows).lt(256) * INT32_MAX,
    }[what].to("cuda", torch.int32)


SCHEDULED = ["none", "one key", "random", "mostly none", "whole splits", "long first", "long last"]


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 150, 1000])
@pytest.mark.parametrize("what", [*SCHEDULED, "longest"])
def test_the_schedule_is_that_of_deep_gemm(what: str, rows: int) -> None:
    """The bits are equal, eager and compiled."""
    library = libraries.load(libraries.DEEP_GEMM)
    lens = lens_of(what, rows)
    settings = {"block_size": 64, "num_sms": library.get_num_sms()}
    upstream = library.get_paged_mqa_logits_metadata(lens[:, None], *settings.values())
    assert torch.equal(ops.paged_mqa_logits_metadata(lens, **settings), upstream)
    compiled = torch.compile(ops.paged_mqa_logits_metadata, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(lens, **settings), upstream)


def test_a_captured_schedule_follows_its_lens() -> None:
    library = libraries.load(libraries.DEEP_GEMM)
    lens = lens_of("random", 150)
    settings = {"block_size": 64, "num_sms": library.get_num_sms()}
    graph, schedule = graph_of(lambda: ops.paged_mqa_logits_metadata(lens, **settings))
    for what in SCHEDULED:
        lens.copy_(lens_of(what, 150))
        graph.replay()
        upstream = library.get_paged_mqa_logits_metadata(lens[:, None], *settings.values())
        assert torch.equal(schedule, upstream)
    empty = ops.paged_mqa_logits_metadata(lens[:0], **settings)
    assert not empty.any()


@pytest.mark.parametrize("topk", [None, 512])
def test_logits_by_our_schedule_are_those_by_its_own(topk: int | None) -> None:
    """The schedule is in the captured graph, once for two calls."""
    batch = Batch(num_tokens=130, max_rows=8192)
    sizes = {"block_size": 64, "num_sms": deep_gemm_num_sms()}

    def both() -> tuple[Tensor, Tensor]:
        lens = ((batch.positions + 1) // batch.ratio).int()
        real = (batch.requests >= 0) & (batch.requests < batch.table.shape[0])
        lens = torch.where(real, lens, 0).clamp(0, batch.table.shape[1] * 64)
        schedule = ops.paged_mqa_logits_metadata(lens, **sizes)
        return tuple(deep_gemm(batch, topk, schedule=schedule) for _ in range(2))

    graph, outputs = graph_of(both)
    for limit in (32768, 3000, 7, 1):
        batch.positions.copy_(batch.integers(0, limit, batch.positions.shape))
        graph.replay()
        for found in outputs:
            assert torch.equal(found, deep_gemm(batch, topk))
    compiled = torch.compile(both, fullgraph=True, dynamic=False)
    assert torch.equal(compiled()[0], deep_gemm(batch, topk))
