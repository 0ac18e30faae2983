"""The indexer benchmark: scores against float64 before timing, DeepGEMM's logits beside them."""

import json

import pytest
import torch

from benchmarks.cases import indexer_cases
from benchmarks.cases.indexer_cases import cost, logits
from benchmarks.harness import measure, timing
from benchmarks.harness.plot import indexer_panels
from benchmarks.indexer import CASES, Bench, chosen_cases
from benchmarks.run import main
from dsv4_ops.core.layout import IndexerLayout
from tests.fakes.timing import pretend
from tests.helpers import NIGHTLY

CPU = torch.device("cpu")


@pytest.fixture
def uncompiled(monkeypatch):
    """Stand the ops themselves in for the compiled ones, so that a run takes seconds."""
    monkeypatch.setattr(measure, "compiled_op", lambda function: function)
    monkeypatch.setattr(measure, "wall_us", lambda *_, **__: timing.Timing(2.0, 1.0, 3.0))


def smoke(folder, *more):
    return main(["indexer", "--smoke", "--out", str(folder), *more])


def rows_of(folder):
    return [json.loads(line) for line in (folder / "indexer.jsonl").read_text().splitlines()]


def timed(group):
    return next(case for case in chosen_cases((group,), smoke=True) if case.timed)


@pytest.mark.slow
@pytest.mark.usefixtures(*([] if NIGHTLY else ["uncompiled"]))
def test_smoke_leaves_rows_and_plot(tmp_path):
    """Compiled in `make test-all`; test_kv_cache.py compiles and times in the same way."""
    assert smoke(tmp_path) == 0
    rows = rows_of(tmp_path)
    assert [(row["case"], row["requests"], row["context"]) for row in rows] == [
        ("select", 2, 2560),
        ("select", 5, 2560),
    ]
    assert all(row["compiled_us"] > 0 and row["error"] is None for row in rows)
    assert (tmp_path / "indexer.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("uncompiled")
def test_every_group_runs(tmp_path):
    assert smoke(tmp_path, "--cases", ",".join(CASES), "--no-plot") == 0
    assert {row["case"] for row in rows_of(tmp_path)} == set(CASES)


def off_by_little(result):
    result[-1, 7] *= 1.001


def worst_row(result):
    last = int(result[-1, -1])
    result[-1, -1] = 639 if last != 639 else 638


def row_twice(result):
    result[-1, 1] = result[-1, 0]


@pytest.mark.parametrize(
    ("group", "change"),
    [("logits", off_by_little), ("select", worst_row), ("select", row_twice)],
)
def test_a_wrong_result_is_not_timed(monkeypatch, group, change):
    def corrupted(call):
        def wrong(*args):
            result = call(*args)
            change(result)
            return result

        return wrong

    monkeypatch.setattr(measure, "compiled_op", corrupted)
    monkeypatch.setattr(measure, "wall_us", lambda *_, **__: pytest.fail("timed a wrong result"))
    row = Bench(CPU, None, budget_s=0.0).measure(timed(group))
    assert row.error.startswith(f"compiled ({group}")
    assert row.compiled_us is None


@pytest.mark.parametrize("group", CASES)
@pytest.mark.parametrize("place", [4, 5], ids=["requests", "pages"])
@pytest.mark.usefixtures("uncompiled")
def test_what_does_not_exist_is_checked(tmp_path, monkeypatch, group, place):
    def first_for_absent(call):
        def wrong(*args):
            args = list(args)
            args[place] = args[place].clamp(min=0)
            return call(*args)

        return wrong

    monkeypatch.setattr(measure, "compiled_op", first_for_absent)
    assert smoke(tmp_path, "--cases", group, "--no-plot") == 1
    assert [row["variant"] for row in rows_of(tmp_path) if row["error"]] == ["adversarial"]


class DeepGEMM:
    """The library that the baseline is loaded from, played by our op."""

    def __init__(self, wrong=0.0):
        self.wrong, self.plans = wrong, []

    def get_num_sms(self):
        return 132

    def get_paged_mqa_logits_metadata(self, lens, block_size, num_sms):
        assert (lens.dim(), block_size, num_sms) == (2, 64, 132)
        self.plans.append(object())
        return self.plans[-1]

    def fp8_fp4_paged_mqa_logits(
        self, q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len,
        clean_logits, logits_dtype,
    ):  # fmt: skip
        assert (clean_logits, logits_dtype) == (False, torch.float32)
        assert schedule_meta is self.plans[-1]
        assert max_context_len == block_table.shape[1] * 64
        pages = (kv_cache.shape[0], IndexerLayout(64).page_bytes)
        cache = kv_cache.as_strided(pages, (kv_cache.stride(0), 1))
        requests = torch.arange(len(block_table), dtype=torch.int32)
        found = logits(q[0][:, 0], weights, cache, context_lens[:, 0], requests, block_table)
        return found + self.wrong * torch.arange(found.shape[1])


class OlderDeepGEMM:
    """The same under its older name."""

    def __init__(self):
        self.newer = DeepGEMM()
        self.get_num_sms = self.newer.get_num_sms
        self.get_paged_mqa_logits_metadata = self.newer.get_paged_mqa_logits_metadata

    def fp8_paged_mqa_logits(self, q, cache, weights, lens, table, plan, num_rows, clean):
        rest = (weights, lens, table, plan, num_rows, clean, torch.float32)
        return self.newer.fp8_fp4_paged_mqa_logits((q, None), cache, *rest)


@pytest.fixture
def pretend_cuda(monkeypatch, uncompiled):
    bench = pretend(monkeypatch, Bench(CPU, None, budget_s=0.0), indexer_cases)
    bench.modules = DeepGEMM()
    return bench


@pytest.mark.parametrize("library", [DeepGEMM, OlderDeepGEMM])
@pytest.mark.parametrize("group", CASES)
def test_a_cuda_row_adds_up(pretend_cuda, group, library):
    pretend_cuda.modules = library()
    row = pretend_cuda.measure(timed(group))
    assert row.error is row.baseline_error is None
    assert (row.input_sets, row.compiled_us, row.baseline_us, row.times_faster) == (
        3,
        4.0,
        4.0,
        1.0,
    )
    assert row.roofline_us == max(row.moved_bytes / 4e6, row.flop / 1580e6) > 0
    assert row.pct_of_roofline == pytest.approx(25 * row.roofline_us)
    assert row.baseline_agrees is True
    assert row.baseline_note is None
    json.dumps(vars(row))


@pytest.mark.parametrize(("group", "text"), [("logits", "cosine"), ("select", "rows are shared")])
def test_an_baseline_that_differs_is_timed_and_said(pretend_cuda, group, text):
    pretend_cuda.modules = DeepGEMM(wrong=10.0)
    row = pretend_cuda.measure(timed(group))
    assert (row.baseline_agrees, row.baseline_us) == (False, 4.0)
    assert text in row.baseline_note


def test_costs_are_those_of_the_roofline():
    # MB of keys and of logits, and GFLOP, at 64 requests of 131072 tokens
    moved, flop = cost("logits", 64, 32768)
    vectors = 64 * (32768 // 64 * 4 + 64 * 132 + 8)
    assert (moved - vectors) / 1e6 == pytest.approx(276.8 + 8.4, abs=0.1)
    assert flop / 1e9 == pytest.approx(34.36, abs=0.005)
    assert cost("select", 2, 64) == (2 * (64 * 132 + 4 + 64 * 132 + 8 + 512 * 4), 2 * 2 * 64 * 8192)


def test_the_whole_run_has_all_sizes_and_a_panel_per_batch(pretend_cuda):
    cases = [case for case in chosen_cases(CASES, smoke=False) if case.timed]
    found = [(case.case, case.rows, case.labels["context"]) for case in cases]
    assert len(set(found)) == len(found) == 2 * 4 * 4
    assert {context for _, _, context in found} == {8192, 32768, 65536, 131072}
    rows = [pretend_cuda.measure(case) for case in chosen_cases(CASES, smoke=True) if case.timed]
    panels = indexer_panels(rows, cuda=True)
    assert [panel.title for panel in panels] == ["2 requests", "5 requests"]
    assert [len(panel.series) for panel in panels] == [2, 2]
