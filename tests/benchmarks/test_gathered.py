"""``bench sparse_mla`` compares our attention over gathered rows with FlashMLA's over the same."""

import pytest
import torch

from benchmarks.cases import gathered_cases
from benchmarks.cases.gathered_cases import gathered_work
from benchmarks.harness import measure
from benchmarks.sparse_mla import Bench, chosen_cases
from tests.fakes.attention import FlashMLA
from tests.fakes.timing import pretend

CPU = torch.device("cpu")
(CASE,) = chosen_cases(("gathered",), smoke=True)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(measure, "compiled_op", lambda function: function)
    made = pretend(monkeypatch, Bench(CPU, None, budget_s=0.0), gathered_cases)
    made.modules = FlashMLA()
    return made


def test_rows_and_lists_are_those_of_flashmla(monkeypatch):
    monkeypatch.setattr(gathered_cases, "rotating_sets", lambda *_: 3)
    work = CASE.build(CPU)
    assert len(work.sets) == len(work.baseline_sets) == 3
    for (q, kv, listed, lens, sink), baseline in zip(work.sets, work.baseline_sets, strict=True):
        assert (q.shape, kv.shape, listed.shape) == ((3, 4, 512), (256, 512), (3, 128))
        assert (kv.dtype, listed.dtype) == (torch.bfloat16, torch.int32)
        assert lens.tolist() == [128] * 3
        assert all(row.unique().numel() == 128 for row in listed)
        assert [tensor.shape for tensor in baseline[1:3]] == [(256, 1, 512), (3, 1, 128)]
        assert all(tensor.is_contiguous() for tensor in baseline)
        same = (baseline[0] is q, baseline[3] is lens, baseline[4] is sink)
        assert all(same)
        assert torch.equal(baseline[1][:, 0], kv)
        assert torch.equal(baseline[2][:, 0], listed)
    rows, lists = ([args[place] for args in work.sets] for place in (1, 2))
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(lists[0], lists[1])


def test_the_floor_has_a_row_once_that_several_tokens_list():
    work = gathered_work(5, 4, 128, 256, CPU)
    distinct = len({int(row) for row in work.sets[0][2].flatten()})
    assert 200 < distinct <= 256
    assert work.moved_bytes == distinct * 1024 + 2 * 5 * 4 * 512 * 2 + 5 * 128 * 4
    assert work.flop == 2 * 4 * 5 * 128 * 1024
    alone = gathered_work(1, 4, 128, 256, CPU)
    assert alone.moved_bytes == 128 * 1024 + 2 * 4 * 512 * 2 + 128 * 4


def test_both_are_timed(bench):
    row = bench.measure(CASE)
    assert row.error is row.baseline_error is row.baseline_note is None
    assert (row.shape, row.heads, row.keys) == ("3 x 4 heads, 128 keys", 4, "128")
    assert (row.compiled_us, row.eager_us, row.baseline_us) == (4.0, 4.0, 4.0)
    assert (row.times_faster, row.baseline_agrees) == (1.0, True)
    assert row.pct_of_roofline > 0


def test_it_is_compared_within_the_tolerance_of_a_prefill(bench):
    """Over 2 of 128, as decodes may differ, is within 3 of 128."""
    bench.modules = FlashMLA(factor=1 + 2.5 / 128)
    row = bench.measure(CASE)
    assert "cosine" in row.baseline_note
    bench.modules = FlashMLA(factor=1 + 3.5 / 128)
    row = bench.measure(CASE)
    assert row.baseline_note.startswith("out: ")
    assert "differ, by up to" in row.baseline_note
    assert row.baseline_agrees is False
