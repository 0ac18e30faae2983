"""Bytes and FLOP of rooflines by hand, the sizes of a whole run, and the inputs of cases."""

import pytest
import torch

from benchmarks import kv_cache, packages, sparse_mla
from benchmarks.cases import (
    attention_cases,
    gathered_cases,
    indexer_cases,
    layer_cases,
    prefill_cases,
)
from benchmarks.cases.attention_cases import uniform
from benchmarks.cases.compressor_cases import KINDS, decode_step, moved_bytes, prefill_step
from benchmarks.cases.gathered_cases import gathered_work
from benchmarks.cases.prefill_cases import dense_cases
from benchmarks.cases.token_check import Tolerance, outside
from benchmarks.mla import Row, roofline_us

CPU = torch.device("cpu")


def small(module, group, shape=None, variant=""):
    cases = module.Bench.cases((group,), smoke=True)
    wanted = (case for case in cases if case.timed and case.variant.startswith(variant))
    return next(case for case in wanted if shape in (None, case.shape))


def test_bytes_of_caches():
    def moved(group, shape):
        return small(kv_cache, group, shape).build(CPU).moved_bytes

    assert moved("insert", "8 tokens") == 8 * (512 * 2 + 584 + 8)
    assert moved("gather", "4x128 rows") == 4 * (128 * (584 + 1024) + 2 * 4 + 4)


def test_bytes_of_compressors():
    c4, key, c128 = KINDS["c4"], KINDS["c4_indexer"], KINDS["c128"]
    vectors = 8 + 8 + 8 + 4
    alone = decode_step(c4, 1, finishing=True)  # reads half of seven earlier states
    projections = 2 * 2048 * 4
    row = 584 + 64 * 4
    assert moved_bytes(c4, alone) == projections + 7 * 2 * 512 * 4 + row + 2 * 4 + vectors
    assert moved_bytes(c4, decode_step(c4, 1, finishing=False)) == projections + vectors
    spread = decode_step(c128, 8, finishing=False)
    assert moved_bytes(c128, spread) == 8 * (2 * 1024 * 4 + vectors)
    assert decode_step(c4, 8, finishing=False).finished(c4) == 2
    # a prefill reads no earlier states
    whole = moved_bytes(key, prefill_step(8))
    assert whole == 8 * (2 * 512 * 4 + vectors) + 2 * (132 + 64 * 4)


def test_costs_of_the_indexer():
    # MB of keys and of logits, and GFLOP, for 64 requests of 131072 tokens
    cost = indexer_cases.cost
    moved, flop = cost("logits", 64, 32768)
    vectors = 64 * (32768 // 64 * 4 + 64 * 132 + 8)
    assert (moved - vectors) / 1e6 == pytest.approx(276.8 + 8.4, abs=0.1)
    assert flop / 1e9 == pytest.approx(34.36, abs=0.005)
    assert cost("select", 2, 64) == (2 * (64 * 132 + 4 + 64 * 132 + 8 + 512 * 4), 2 * 2 * 64 * 8192)


def test_costs_of_a_layer():
    """One C4 request of 16384 tokens has 128 + 512 rows of 584 bytes and 4096 + 1 keys of 132."""
    moved, flop = layer_cases.cost("c4", layer_cases.FLASH, 1, 16384)
    queries = 2 * 64 * 512 * 2 + 512 * 2 + 64 * (128 * 2 + 4)
    projections = 2 * 1024 * 4 + 2 * 256 * 4  # read, and written to the states
    older = 7 * 2 * (512 + 128) * 4  # half of each state's kv and score
    rows = (128 + 512 + 2) * 584 + (4096 + 1) * 132
    assert moved == queries + 2 * projections + older + rows + 128 * 4
    assert flop == 4 * 64 * 640 * 512 + 4096 * 64 * 128
    several = layer_cases.cost("c4", layer_cases.FLASH, 3, 16384)
    assert several == (3 * moved, 3 * flop)


def test_costs_of_sparse_attention():
    # MB and GFLOP of Flash with 128 requests, and of Pro with 256
    cases = (uniform(128, 64, 512), 64.9, 10.74), (uniform(256, 128, 1024), 240.5, 77.31)
    for shape, megabytes, gflop in cases:
        moved, flop = shape.cost()
        assert moved / 1e6 == pytest.approx(megabytes, abs=0.05)
        assert flop / 1e9 == pytest.approx(gflop, abs=0.005)
    assert uniform(1, 2, 0).cost() == (128 * 584 + 2 * 512 * 4 + 128 * 4, 2 * 2 * 128 * 1024)
    paged = sparse_mla.Bench.cases(("paged",), smoke=True)
    for case, rows in zip(paged, (7, 64), strict=True):
        moved = (128 + rows) * 584 + 4 * 512 * 4 + (128 + -(-rows // 2)) * 4  # 2 rows per block
        assert case.build(CPU).moved_bytes == 3 * moved
    prefill = small(sparse_mla, "prefill").build(CPU)  # 16 tokens see 143 window keys
    keys = 16 * (128 + 64)
    assert prefill.moved_bytes == (128 + 143) * 584 + 16 * 4 * 512 * 4 + keys * 4
    assert prefill.flop == 2 * 4 * keys * 1024


def test_a_row_that_several_tokens_list_is_read_once():
    work = gathered_work(5, 4, 128, 256, CPU)
    distinct = len({int(row) for row in work.sets[0][2].flatten()})
    assert 200 < distinct <= 256
    assert work.moved_bytes == distinct * 1024 + 2 * 5 * 4 * 512 * 2 + 5 * 128 * 4
    assert work.flop == 2 * 4 * 5 * 128 * 1024


def test_the_roofline_of_dense_decodes():
    """One request of 4096 rows and 16 heads is bound by bytes, 64 requests of 128 heads by FLOP."""
    queries = 16 * (576 + 512) * 2
    one = Row("plain", 16, 1, 4096)
    assert roofline_us(one, 4e6) == pytest.approx((4096 * 1152 + queries) / 4e6)
    many = Row("plain", 128, 64, 4096)
    assert roofline_us(many, 4e6) == pytest.approx(2 * 64 * 128 * 4096 * 1088 / 790e6)


def test_a_dense_prefill_sees_the_rows_that_are_finished(monkeypatch):
    """Position 766 sees 5 rows of 128 tokens, and 767 sees 6. The request has 783 tokens."""
    case = dense_cases((16,), (4,), prefix=640)[0]
    assert (case.labels["context"], case.labels["gathered_rows"]) == (783, 6 + 143)
    work = case.build(CPU)
    (_, kv, indices, lens, _), mine = work.baseline_sets[0], work.sets[0]
    assert mine[2].tolist() == [*range(767, 783)]
    assert mine[7] is None
    assert (kv.shape, indices.shape) == ((149, 1, 512), (16, 1, 256))
    assert lens.tolist() == [134] * 16
    assert indices[3, 0, :136].tolist() == [*range(9, 137), *range(6), -1, -1]
    assert work.flop == 2 * 4 * 16 * 134 * 1024
    assert work.moved_bytes == (6 + 143) * 584 + 16 * 4 * 512 * 4


def test_input_sets_share_no_block(monkeypatch):
    monkeypatch.setattr(attention_cases, "rotating_sets", lambda *_: 3)
    sets = small(sparse_mla, "ragged", variant="C128").build(CPU).sets
    blocks = torch.cat([args[7].flatten() for args in sets])
    assert blocks.unique().numel() == blocks.numel()
    selected = [args[5][args[5] >= 0] for args in small(sparse_mla, "decode").build(CPU).sets]
    assert torch.cat(selected).unique().numel() == sum(part.numel() for part in selected)


def test_sizes_that_differ_between_cases_are_symbols_of_the_package(monkeypatch):
    """Cases differ in their numbers of tokens, and in their numbers of input sets."""
    cases = sparse_mla.Bench.cases((packages.GROUP,), smoke=True)
    for form in {case.variant: case.build(CPU).details for case in cases}.values():
        seen = []
        for tokens, sets in ((2, 1), (2, 3), (200, 1), (form.exported, 1)):
            for module in (attention_cases, prefill_cases, gathered_cases):
                monkeypatch.setattr(module, "rotating_sets", lambda *_, sets=sets: sets)
            work = form.case(tokens).build(CPU)
            seen += [[tuple(tensor.shape) for tensor in args] for args in work.sets]
        assert len(seen[0]) == len(form.dims)
        for place, shapes in enumerate(zip(*seen, strict=True)):
            differing = {
                dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1
            }
            assert differing <= set(form.dims[place]), f"{form.name}, argument {place}"


@pytest.mark.parametrize(
    ("baseline", "passes"),
    [(1.0, True), (1.009, True), (1.02, False), (torch.nan, False), (torch.inf, False)],
)
def test_an_element_passes_by_absolute_or_relative_difference(baseline, passes):
    ours, near = torch.tensor([1.0, 1e-6, torch.inf]), 1e-3
    values = torch.tensor([baseline, 9e-4, torch.inf])
    found = outside("out", values, ours, Tolerance(near, 0.01))
    assert (found is None) == passes
    if not passes:
        assert found.startswith("out: 1 of 3 differ")


def test_many_small_differences_are_a_cosine():
    ours = torch.ones(1000)
    baseline = ours + torch.tensor([0.005, -0.005]).repeat(500)
    assert outside("out", baseline, ours, Tolerance(0.0, 0.01, 1e-4)) is None
    assert "cosine" in outside("out", baseline, ours, Tolerance(0.0, 0.01, 1e-6))
    assert outside("out", baseline[:5], ours, Tolerance(1.0, 1.0)) == "out is [5], not [1000]"
