"""The attention benchmark checks against float64 before it times, and plays fair with FlashMLA."""

import dataclasses
import itertools
import json

import pytest
import torch

from benchmarks import packages
from benchmarks.cases import attention_cases, gathered_cases, prefill_cases
from benchmarks.cases.attention_cases import ragged, uniform
from benchmarks.cases.token_check import Tolerance, outside
from benchmarks.harness import measure, timing, variants
from benchmarks.harness.plot import mla_panels
from benchmarks.harness.report import stamp
from benchmarks.harness.rows import SparseMlaRow
from benchmarks.run import WrongResult, main
from benchmarks.sparse_mla import CASES, Bench, chosen_cases
from dsv4_ops.core.types import SparseMla, SparseMlaGathered
from tests.fakes.attention import Cache, FlashMLA
from tests.fakes.timing import FakeCapture, pretend, unpackaged
from tests.helpers import NIGHTLY

CPU = torch.device("cpu")
STAMP = set(stamp(CPU, ""))


@pytest.fixture
def uncompiled(monkeypatch):
    """Stand the ops themselves in for the compiled ones, so that a run takes seconds."""
    monkeypatch.setattr(measure, "compiled_op", lambda function: function)
    monkeypatch.setattr(packages, "build", unpackaged)
    for module in (measure, variants):
        monkeypatch.setattr(module, "wall_us", lambda *_, **__: timing.Timing(2.0, 1.0, 3.0))


def smoke(folder, *more):
    return main(["sparse_mla", "--smoke", "--out", str(folder), *more])


def rows_of(folder):
    return [json.loads(line) for line in (folder / "sparse_mla.jsonl").read_text().splitlines()]


def case_of(group, variant=""):
    return next(
        case for case in chosen_cases((group,), smoke=True) if case.variant.startswith(variant)
    )


def timed(group):
    return next(case for case in chosen_cases((group,), smoke=True) if case.timed)


@pytest.mark.slow
@pytest.mark.usefixtures(*([] if NIGHTLY else ["uncompiled"]))
def test_smoke_leaves_table_rows_and_plot(tmp_path, capsys):
    """Compiled in `make test-all`; test_kv_cache.py compiles and times in the same way."""
    assert smoke(tmp_path) == 0
    captured = capsys.readouterr()
    rows = rows_of(tmp_path)
    schema = {field.name for field in dataclasses.fields(SparseMlaRow)} | STAMP
    assert all(set(row) == schema for row in rows)
    assert [(row["case"], row["rows"], row["keys"]) for row in rows] == [
        ("decode", 2, "128+64"),
        ("decode", 8, "128+64"),
    ]
    for row in rows:
        assert row["speedup"] == pytest.approx(row["eager_us"] / row["compiled_us"])
        assert row["error"] is row["baseline_error"] is row["roofline_us"] is None
    text = (tmp_path / "sparse_mla.txt").read_text()
    assert text.strip() in captured.out
    header = text.split("\n\n")[2].splitlines()[0].split()
    assert header == ["case", "shape", "variant", "compiled_us", "eager_us", "speedup"]
    assert "sparse_mla 1/3: decode, 24 x 4 heads, 128+64, adversarial" in captured.err
    assert (tmp_path / "sparse_mla.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("uncompiled")
def test_every_group_runs(tmp_path):
    assert smoke(tmp_path, "--cases", ",".join(CASES), "--no-plot") == 0
    assert {row["case"] for row in rows_of(tmp_path)} == set(CASES)
    assert not (tmp_path / "sparse_mla.png").exists()


def changed(**results):
    """The op with some results of one token changed."""

    def corrupted(call):
        def wrong(*args):
            found = call(*args)
            for name, change in results.items():
                each = getattr(found, name)
                each[-1, 1] = change(each[-1, 1])
            return found

        return wrong

    return corrupted


@pytest.mark.parametrize("group", CASES)
@pytest.mark.parametrize(
    ("result", "change"),
    [("out", lambda row: row * 1.05), ("lse", lambda value: value + 1e-3)],
)
def test_an_error_over_the_budget_is_not_timed(monkeypatch, group, result, change):
    monkeypatch.setattr(measure, "compiled_op", changed(**{result: change}))
    monkeypatch.setattr(measure, "wall_us", lambda *_, **__: pytest.fail("timed a wrong result"))
    row = Bench(CPU, None, budget_s=0.0).measure(timed(group))
    fields = (SparseMlaGathered if group == "gathered" else SparseMla)._fields
    assert f"result {fields.index(result)} is " in row.error
    assert "budgets from float64" in row.error
    assert row.error.startswith("compiled (")
    assert row.error.endswith("The case was not timed.")
    assert row.compiled_us is None


def test_an_error_within_the_budget_is_timed(monkeypatch, uncompiled):
    one_step = changed(lse=lambda value: torch.nextafter(value, torch.tensor(torch.inf)))
    monkeypatch.setattr(measure, "compiled_op", one_step)
    row = Bench(CPU, None, budget_s=0.0).measure(timed("decode"))
    assert (row.error, row.compiled_us) == (None, 2.0)


def absent_as_first(call):
    return lambda q, cache, swa, *rest: call(q, cache, swa.clamp(min=0), *rest)


def late_as_first(call):
    def wrong(q, cache, swa, swa_lens, extra_cache, extra, *rest):
        late = extra >= extra_cache.shape[0] * 64
        return call(q, cache, swa, swa_lens, extra_cache, torch.where(late, 0, extra), *rest)

    return wrong


def lists_to_their_end(call):
    return lambda q, cache, swa, lens, *rest: call(q, cache, swa, lens.clamp(min=1), *rest)


@pytest.mark.parametrize("corrupted", [absent_as_first, late_as_first, lists_to_their_end])
@pytest.mark.usefixtures("uncompiled")
def test_a_row_that_does_not_exist_is_found(tmp_path, monkeypatch, corrupted):
    monkeypatch.setattr(measure, "compiled_op", corrupted)
    assert smoke(tmp_path, "--cases", "decode", "--no-plot") == 1
    assert [row["variant"] for row in rows_of(tmp_path) if row["error"]] == ["adversarial"]


def test_results_that_are_not_written_are_found(monkeypatch):
    kept = {}

    def lazy(call):
        return lambda *args: kept.setdefault("first", call(*args))  # the poisoned memory

    monkeypatch.setattr(measure, "compiled_op", lazy)
    row = Bench(CPU, None, budget_s=0.0).measure(timed("decode"))
    assert "The case was not timed." in row.error


@pytest.fixture
def pretend_cuda(monkeypatch, uncompiled):
    bench = Bench(CPU, None, budget_s=0.0)
    pretend(monkeypatch, bench, attention_cases, prefill_cases, gathered_cases)
    bench.modules, bench.cache = FlashMLA(), Cache()
    return bench


CUDA_CASES = [case for case in chosen_cases(CASES, smoke=True) if case.timed]


@pytest.mark.parametrize("case", CUDA_CASES, ids=str)
def test_a_cuda_row_adds_up(pretend_cuda, case):
    row = pretend_cuda.measure(case)
    assert row.error is row.baseline_error is None
    assert (row.input_sets, row.kernels, row.compiled_us, row.eager_us) == (3, 2, 4.0, 4.0)
    assert row.roofline_us == max(row.moved_bytes / 4e6, row.flop / 790e6) > 0
    assert row.pct_of_roofline == pytest.approx(25 * row.roofline_us)
    assert (row.host_us, row.baseline_host_us, row.times_faster) == (6.0, 6.0, 1.0)
    assert row.baseline_agrees is True
    assert 0 <= row.baseline_max_diff < 1e-3
    gathers = "prefill" in (case.case, case.variant)
    assert (row.baseline_note is None) == (not gathers)
    whole = (row.baseline_gather_us, row.baseline_combine_us, row.baseline_whole_us)
    whole += (row.baseline_our_gather_us,)
    assert whole == ((4.0,) * 4 if case.case == "prefill" else (None,) * 4)
    assert row.whole_times_faster == (1.0 if case.case == "prefill" else None)
    plans = len(pretend_cuda.modules.plans)
    planned = not gathers and "gathered" not in (case.case, case.variant)
    assert plans > 1 if "planning" in case.variant else plans == planned
    json.dumps(vars(row))


def test_an_baseline_that_differs_is_timed_and_said(pretend_cuda):
    pretend_cuda.modules = FlashMLA(factor=1.1)
    row = pretend_cuda.measure(timed("decode"))
    assert (row.baseline_agrees, row.baseline_us) == (False, 4.0)
    assert row.baseline_note.startswith("out: ")
    pretend_cuda.raise_failures()
    row = pretend_cuda.measure(timed("prefill"))
    assert "in the CuTe DSL; out: " in row.baseline_note
    assert "; whole: " in row.baseline_note
    assert (row.baseline_agrees, row.baseline_whole_us) == (False, 4.0)


def test_the_whole_prefill_gathers_all_rows_of_the_request(pretend_cuda):
    """16 tokens behind a prefix of 512 and a window: all of 655 // 4 rows, and 16 + 127."""
    row = pretend_cuda.measure(timed("prefill"))
    assert (row.context, row.gathered_rows) == (655, 163 + 143)
    assert set(pretend_cuda.cache.gathered) == {163, 143}
    assert "vLLM's gather of 163 C4 and 143 window rows to bf16, of one request of 655" in (
        row.baseline_note
    )


def test_a_whole_prefill_of_other_rows_is_said(pretend_cuda):
    pretend_cuda.cache = Cache(missing=1)
    row = pretend_cuda.measure(timed("prefill"))
    assert (row.baseline_agrees, row.baseline_whole_us) == (False, 4.0)
    assert "; whole: " in row.baseline_note


def test_without_vllms_gather_flashmla_is_still_timed(pretend_cuda):
    pretend_cuda.cache = ImportError("no cache_utils.py")
    row = pretend_cuda.measure(timed("prefill"))
    assert row.baseline_error == "whole: ImportError: no cache_utils.py"
    assert (row.baseline_us, row.baseline_agrees) == (4.0, True)
    assert row.baseline_whole_us is row.whole_times_faster is None


def test_a_broken_baseline_is_a_note(pretend_cuda):
    pretend_cuda.modules = object()
    row = pretend_cuda.measure(timed("window"))
    assert "AttributeError" in row.baseline_error
    assert (row.baseline_us, row.compiled_us) == (None, 4.0)


def test_a_replay_that_writes_nothing_is_wrong(pretend_cuda, monkeypatch):
    monkeypatch.setattr(FakeCapture, "replay", lambda self: None)
    row = pretend_cuda.measure(timed("paged"))
    assert "CUDA graph replay, compiled" in row.error
    with pytest.raises(WrongResult):
        pretend_cuda.raise_failures()


def replayed(change):
    """A replay that changes the lse of the second input set."""

    def replay(self):
        whole = FakeCapture(self.calls)
        for old, new in zip(self.outputs, whole.outputs, strict=True):
            old.out.copy_(new.out)
            old.lse.copy_(new.lse)
        self.outputs[1].lse[0] = change(self.outputs[1].lse[0])

    return replay


def test_a_replay_with_other_bits_is_compared_with_its_own_reference(pretend_cuda, monkeypatch):
    step = replayed(lambda lse: torch.nextafter(lse, torch.tensor(torch.inf)))
    monkeypatch.setattr(FakeCapture, "replay", step)
    assert pretend_cuda.measure(timed("decode")).error is None
    monkeypatch.setattr(FakeCapture, "replay", replayed(lambda lse: lse + 1e-3))
    assert "CUDA graph replay" in pretend_cuda.measure(timed("decode")).error


@pytest.mark.usefixtures("uncompiled")
def test_a_missing_baseline_is_a_note_not_the_end(tmp_path):
    options = ["--cases", "window", "--baseline", str(tmp_path / "nowhere"), "--no-plot"]
    assert smoke(tmp_path, *options) == 0
    text = (tmp_path / "sparse_mla.txt").read_text()
    assert "baseline_error: FileNotFoundError: no anchor_lib.py in nowhere/bench" in text
    assert str(tmp_path) not in text


def test_the_whole_run_has_all_sizes():
    cases = [case for case in chosen_cases(CASES, smoke=False) if case.timed]
    of = {group: [case for case in cases if case.case == group] for group in CASES}
    batches = (1, 2, 8, 32, 64, 128, 256)
    grid = itertools.product((64, 128), ("128+512", "128+1024"), batches)
    found = [(case.labels["heads"], case.labels["keys"], case.rows) for case in of["decode"]]
    assert found == list(grid)
    assert [case.rows for case in of["window"]] == [*batches]
    assert {case.labels["keys"] for case in of["window"]} == {"128"}
    assert [case.rows for case in of["mtp"]] == [16, 64, 128, 256]
    lengths = [f"{rows} rows each" for rows in (16, 128, 512)]
    assert [(case.rows, case.variant) for case in of["paged"]] == [
        *itertools.product((8, 32, 64, 128), (*lengths, "")),
        *itertools.product((24, 32, 64, 128), (lengths[0], "")),
    ]
    plans = ("", ", planned", ", planning counted")
    assert {case.variant for case in of["ragged"]} == {
        kind + plan for kind in ("C4", "C128") for plan in plans
    }
    some = (8, 32, 48, 64, 96, 128, 256, 512, 8, 32, 64, 96, 128, 256)
    most, short = (1, 8, 64, 128, 256, 512, 2048), "behind 2048 tokens"
    assert [case.rows for case in of["ragged"]] == [rows for rows in some for _ in range(6)]
    every = [(case.rows, case.labels["heads"], case.variant) for case in of["prefill"]]
    assert every == [
        *((rows, heads, kind) for kind in ("", "C128") for heads in (64, 128) for rows in most),
        *((rows, 64, f"C128, {short}") for rows in (64, 512, 2048)),
        *((rows, 64, f"C128, {short}, table of 8192 rows") for rows in (64, 128, 512, 2048)),
        *((rows, 64, "C128, behind 983040 tokens") for rows in (64, 128)),
    ]
    assert {case.requests for case in of["prefill"]} == {1}
    keys = {case.labels["keys"] for case in of["prefill"] if case.rows == 512}
    assert keys == {"128+512", "128+1024", "128+1028", "128+20"}
    models = ((64, "128"), (64, "640"), (128, "1152"))
    flash_mla_has = ((64, "512"), (64, "1024"), (128, "1024"))
    assert [(case.rows, case.labels["heads"], case.labels["keys"]) for case in of["gathered"]] == [
        *((rows, *model) for model in models for rows in (1, 8, 32, 128, 512, 2048)),
        *((rows, *model) for model in flash_mla_has for rows in (512, 2048, 8192)),
    ]
    few, many = (2, 8, 64, 256), (2, 8, 64, 256, 512, 2048)
    forms = (("decode", few), ("paged", few), ("prefill", many), ("gathered", many))
    assert [(case.variant, case.rows) for case in of["packages"]] == [
        (name, rows) for name, sizes in forms for rows in sizes
    ]
    assert {case.labels["keys"] for case in of["packages"]} == {"128+512", "128+1024", "640"}
    assert {case.labels["heads"] for case in of["packages"]} == {64}


def test_costs_are_those_of_the_roofline():
    # MB and GFLOP of Flash at 128 requests and Pro at 256
    for shape, megabytes, gflop in (
        (uniform(128, 64, 512), 64.9, 10.74),
        (uniform(256, 128, 1024), 240.5, 77.31),
    ):
        moved, flop = shape.cost()
        assert moved / 1e6 == pytest.approx(megabytes, abs=0.05)
        assert flop / 1e9 == pytest.approx(gflop, abs=0.005)
    assert uniform(1, 2, 0).cost() == (128 * 584 + 2 * 512 * 4 + 128 * 4, 2 * 2 * 128 * 1024)
    for case, rows in zip(chosen_cases(("paged",), smoke=True), (7, 64), strict=True):
        moved = (128 + rows) * 584 + 4 * 512 * 4 + (128 + -(-rows // 2)) * 4  # on blocks of 2
        assert case.build(CPU).moved_bytes == 3 * moved
    prefill = case_of("prefill").build(CPU)  # 16 tokens share 128 rows and a window of 143
    keys = 16 * (128 + 64)
    assert prefill.moved_bytes == (128 + 143) * 584 + 16 * 4 * 512 * 4 + keys * 4
    assert prefill.flop == 2 * 4 * keys * 1024


def test_ragged_lengths_are_of_short_and_long_contexts():
    shape = ragged(64, 64, 1024, 128)
    assert len(set(shape.extra_lens)) > 20
    assert min(shape.extra_lens) < 8
    assert 500 < max(shape.extra_lens) <= 1024
    assert max(shape.swa_lens) == 128


def test_input_sets_share_no_page(monkeypatch):
    monkeypatch.setattr(attention_cases, "rotating_sets", lambda *_: 3)
    sets = case_of("ragged", "C128").build(CPU).sets
    pages = torch.cat([args[7].flatten() for args in sets])
    assert pages.unique().numel() == pages.numel()
    selected = [args[5][args[5] >= 0] for args in timed("decode").build(CPU).sets]
    assert torch.cat(selected).unique().numel() == sum(part.numel() for part in selected)


@pytest.mark.parametrize(
    ("baseline", "passes"),
    [(1.0, True), (1.009, True), (1.02, False), (torch.nan, False), (torch.inf, False)],
)
def test_an_element_passes_by_absolute_or_relative_difference(baseline, passes):
    ours, small = torch.tensor([1.0, 1e-6, torch.inf]), 1e-3
    values = torch.tensor([baseline, 9e-4, torch.inf])
    found = outside("out", values, ours, Tolerance(small, 0.01))
    assert (found is None) == passes
    if not passes:
        assert found.startswith("out: 1 of 3 differ")


def test_many_small_differences_are_a_cosine():
    ours = torch.ones(1000)
    baseline = ours + torch.tensor([0.005, -0.005]).repeat(500)
    assert outside("out", baseline, ours, Tolerance(0.0, 0.01, 1e-4)) is None
    assert "cosine" in outside("out", baseline, ours, Tolerance(0.0, 0.01, 1e-6))
    assert outside("out", baseline[:5], ours, Tolerance(1.0, 1.0)) == "out is [5], not [1000]"


def test_panels_are_heads_by_keys_with_floor_and_baseline(pretend_cuda):
    cases = [case for case in CUDA_CASES if case.case in ("decode", "window")]
    rows = [pretend_cuda.measure(case) for case in cases]
    rows += [dataclasses.replace(row, heads=128) for row in rows if row.plotted]
    panels = mla_panels(rows, cuda=True)
    assert [panel.title for panel in panels] == ["4 heads, 128+64 keys", "128 heads, 128+64 keys"]
    labels = ["ours, compiled", "roofline: the bytes at copy bandwidth, or the FLOP"]
    assert [line.label for line in panels[1].series] == labels
    assert panels[1].baseline == "FlashMLA of vLLM 0.22.1"
    assert [x for x, _ in panels[0].series[0].points] == [2, 8]


@pytest.mark.parametrize("arguments", [["--cases", "decode,x"], ["--max-seconds", "0"]])
def test_bad_arguments_are_errors(arguments, capsys):
    assert main(["sparse_mla", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err
