"""The cache benchmark checks every byte before it times, and a case that fails fails the run."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.cases import cache_cases, index_cases
from benchmarks.harness import measure, timing
from benchmarks.harness.report import stamp
from benchmarks.harness.rows import CacheRow
from benchmarks.harness.work import Work, differing_bytes
from benchmarks.kv_cache import CASES, Bench, chosen_cases
from benchmarks.run import BenchError, WrongResult, main
from tests.fakes.timing import FakeCapture, pretend

CPU = torch.device("cpu")
STAMP = set(stamp(CPU, ""))


@pytest.fixture
def uncompiled(monkeypatch):
    """Stand the ops themselves in for the compiled ones, so that a run takes a second."""
    monkeypatch.setattr(measure, "compiled_op", lambda function: function)


def smoke(folder, *more):
    return main(["kv_cache", "--smoke", "--out", str(folder), *more])


def rows_of(folder):
    return [json.loads(line) for line in (folder / "kv_cache.jsonl").read_text().splitlines()]


def case_of(group, shape, variant=""):
    cases = chosen_cases((group,), smoke=True)
    return next(case for case in cases if (case.shape, case.variant) == (shape, variant))


@pytest.mark.slow
def test_smoke_leaves_table_rows_and_plot(tmp_path, capsys):
    assert smoke(tmp_path, "--cases", "insert") == 0
    captured = capsys.readouterr()
    rows = rows_of(tmp_path)
    schema = {field.name for field in dataclasses.fields(CacheRow)} | STAMP
    assert all(set(row) == schema for row in rows)
    assert [(row["case"], row["rows"]) for row in rows] == [("insert", 8), ("insert", 128)]
    for row in rows:
        assert row["moved_bytes"] == row["rows"] * (512 * 2 + 584 + 8)
        assert row["speedup"] == pytest.approx(row["eager_us"] / row["compiled_us"])
        assert row["error"] is row["baseline_error"] is row["copy_us"] is None
    text = (tmp_path / "kv_cache.txt").read_text()
    assert text.strip() in captured.out
    header = text.split("\n\n")[2].splitlines()[0].split()
    assert header == ["case", "shape", "variant", "compiled_us", "eager_us", "speedup"]
    assert "kv_cache 3/3: insert, 128 tokens, random" in captured.err
    assert (tmp_path / "kv_cache.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("uncompiled")
def test_every_group_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "wall_us", lambda *_, **__: timing.Timing(2.0, 1.0, 3.0))
    assert smoke(tmp_path, "--cases", ",".join(CASES), "--no-plot") == 0
    assert {row["case"] for row in rows_of(tmp_path)} == set(CASES)
    assert not (tmp_path / "kv_cache.png").exists()


def one_byte_off(call):
    def wrong(*args):
        call(*args)
        args[1].view(torch.uint8).view(-1)[-1] += 1  # padding of the last block

    return wrong


def negative_slots_to_0(call):
    return lambda k, k_cache, slots: call(k, k_cache, slots.clamp(min=0))


def late_slots_to_0(call):
    def wrong(k, k_cache, slots):
        call(k, k_cache, torch.where(slots < k_cache.shape[0] * 64, slots, 0))

    return wrong


def test_a_wrong_byte_is_not_timed_and_fails_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "compiled_op", one_byte_off)
    monkeypatch.setattr(measure, "wall_us", lambda *_, **__: pytest.fail("timed a wrong result"))
    assert smoke(tmp_path, "--cases", "insert") == 1
    captured = capsys.readouterr()
    assert "compiled (insert, slots that do not exist): 1 of 711360 bytes differ" in captured.err
    assert "error: compiled (insert, 8 tokens, random): 1 of 2396160 bytes differ" in captured.out
    rows = rows_of(tmp_path)
    assert len(rows) == 3
    assert all(row["error"] and row["compiled_us"] is None for row in rows)


@pytest.mark.parametrize("corrupted", [negative_slots_to_0, late_slots_to_0])
@pytest.mark.parametrize("group", ["insert", "indexer_insert", "plain_insert"])
def test_a_write_for_a_slot_that_does_not_exist_is_found(tmp_path, monkeypatch, group, corrupted):
    monkeypatch.setattr(measure, "compiled_op", corrupted)
    assert smoke(tmp_path, "--cases", group, "--no-plot") == 1
    assert [row["shape"] for row in rows_of(tmp_path) if row["error"]] == [
        "slots that do not exist"
    ]


def test_a_row_that_a_gather_should_leave_alone_is_checked(monkeypatch):
    def whole_workspace(call):
        def wrong(out, *args):
            call(out, *args)
            out[-1, -1] = 0

        return wrong

    monkeypatch.setattr(measure, "compiled_op", whole_workspace)
    bench = Bench(CPU, None, budget_s=0.0)
    row = bench.measure(case_of("gather", "8 x 2..512 rows", "ragged"))
    assert "1024 of 4194304 bytes differ" in row.error


def test_results_that_are_not_written_are_found(monkeypatch):
    kept = {}

    def lazy(call):
        def wrong(*args):
            if "first" not in kept:
                kept["first"] = call(*args)
            return kept["first"]  # the memory of the poisoned call

        return wrong

    monkeypatch.setattr(measure, "compiled_op", lazy)
    row = Bench(CPU, None, budget_s=0.0).measure(case_of("combine", "64x64"))
    assert "bytes differ from the reference. The case was not timed." in row.error


def test_a_wrong_dtype_or_number_of_results_is_a_wrong_result():
    lens = torch.tensor([1])
    with pytest.raises(WrongResult, match=r"torch.int32, \[1\].*the reference has .*torch.int64"):
        differing_bytes([lens.int()], [lens])
    with pytest.raises(WrongResult):
        differing_bytes([lens, lens], [lens])


def test_a_failing_op_is_a_row_and_an_error_at_the_end(tmp_path, monkeypatch, capsys):
    def failing(function):
        def fail(*_):
            raise RuntimeError("no kernel\nand more")

        return fail if function is cache_cases.gather_all else function

    monkeypatch.setattr(measure, "compiled_op", failing)
    assert smoke(tmp_path, "--cases", "gather_all,indexer_gather", "--no-plot") == BenchError.status
    assert "2 cases failed, RuntimeError: no kernel" in capsys.readouterr().err
    errors = [row["error"] for row in rows_of(tmp_path)]
    assert errors == ["RuntimeError: no kernel", "RuntimeError: no kernel", None]


def vllm_modules(wrong_bytes=0):
    """The kernels that the baselines are loaded from, played by ours."""

    def insert(k, k_cache, slots, block_size):
        cache_cases.insert_main(k, k_cache, slots)
        k_cache.view(-1)[:wrong_bytes] += 1

    def gather(out, k_cache, seq_lens, gather_lens, block_table, block_size, offset):
        assert (gather_lens, block_size, offset) == (None, 64, 0)
        cache_cases.gather_into(out, k_cache, seq_lens, block_table)

    def combine(selected, starts, seq_lens, gathered, window, ratio, topk, rows, offset):
        token = torch.arange(int(starts[-1]))
        requests = torch.searchsorted(starts, token, right=True) - 1
        positions = seq_lens[requests] - starts[requests + 1] + token
        ours = index_cases.combine(topk, rows, offset)
        return ours(selected, positions.long(), requests.int(), seq_lens, gathered)

    names = {
        "quantize_and_insert_k_cache": insert,
        "dequantize_and_gather_k_cache_triton": gather,
        "combine_topk_swa_indices": combine,
    }
    return SimpleNamespace(cache=SimpleNamespace(**names))


@pytest.fixture
def pretend_cuda(monkeypatch, uncompiled):
    """The flow of a CUDA case with clocks that always show the same."""
    bench = pretend(monkeypatch, Bench(CPU, None, budget_s=0.0), cache_cases, index_cases)
    bench.modules = vllm_modules()
    return bench


CUDA_CASES = [case for case in chosen_cases(CASES, smoke=True) if case.timed]


@pytest.mark.parametrize("case", CUDA_CASES, ids=str)
def test_a_cuda_row_adds_up(pretend_cuda, case):
    row = pretend_cuda.measure(case)
    assert row.error is row.baseline_error is row.baseline_note is None
    assert (row.input_sets, row.kernels, row.compiled_us, row.copy_us) == (3, 2, 4.0, 2.0)
    assert (row.pct_of_copy, row.roofline_us) == (50.0, row.moved_bytes / 4e6)
    assert row.pct_of_bandwidth == pytest.approx(25 * row.roofline_us)
    assert (row.eager_us, row.host_us) == ((None,) * 2 if row.variant == "scatter" else (4.0, 6.0))
    has_baseline = row.case in ("insert", "gather", "combine") or row.variant == "kernel"
    expected = (True, 4.0, 1.0, 6.0) if has_baseline else (None,) * 4
    baseline = (row.baseline_exact, row.baseline_us, row.times_faster, row.baseline_host_us)
    assert baseline == expected
    json.dumps(vars(row))


@pytest.mark.parametrize(
    ("group", "shape"), [("gather", "4x128 rows"), ("gather_all", "4x128 rows")]
)
def test_a_replay_that_writes_nothing_is_wrong(pretend_cuda, monkeypatch, group, shape):
    monkeypatch.setattr(FakeCapture, "replay", lambda self: None)
    row = pretend_cuda.measure(case_of(group, shape))
    assert "CUDA graph replay, compiled" in row.error
    assert row.compiled_us is None
    with pytest.raises(WrongResult):
        pretend_cuda.raise_failures()


def test_an_baseline_that_differs_is_timed_and_said(pretend_cuda):
    pretend_cuda.modules = vllm_modules(wrong_bytes=3)
    row = pretend_cuda.measure(case_of("insert", "8 tokens", "random"))
    assert (row.baseline_exact, row.baseline_us) == (False, 4.0)
    assert row.baseline_note == "3 of 2396160 bytes differ"
    pretend_cuda.raise_failures()


@pytest.mark.usefixtures("uncompiled")
def test_a_missing_baseline_is_a_note_not_the_end(tmp_path):
    options = ["--cases", "insert", "--baseline", str(tmp_path / "nowhere"), "--no-plot"]
    assert smoke(tmp_path, *options) == 0
    text = (tmp_path / "kv_cache.txt").read_text()
    assert "baseline_error: FileNotFoundError: no anchor_lib.py in" in text
    assert "(insert 8 tokens random; insert 128 tokens random)" in text


@pytest.mark.usefixtures("uncompiled")
def test_no_case_starts_after_max_seconds(tmp_path, monkeypatch):
    clock = SimpleNamespace(perf_counter=itertools.count(0, 10).__next__)
    monkeypatch.setattr(measure, "time", clock)
    assert smoke(tmp_path, "--cases", "insert", "--no-plot", "--max-seconds", "45") == 0
    assert [row["rows"] for row in rows_of(tmp_path)] == [8]
    text = (tmp_path / "kv_cache.txt").read_text()
    assert "left out, --max-seconds: insert, 128 tokens, random" in text


def test_only_cases_that_match(tmp_path, capsys):
    assert smoke(tmp_path, "--cases", "insert", "--no-plot", "--match", "insert, 8 tokens") == 0
    assert [row["rows"] for row in rows_of(tmp_path)] == [8]
    assert main(["kv_cache", "--smoke", "--out", str(tmp_path), "--match", "nine"]) == 2
    assert "--match nine: no case has it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--cases", "insert,isnert"], ["--cases", ""], ["--max-seconds", "0"]]
)
def test_bad_arguments_are_errors(arguments, capsys):
    assert main(["kv_cache", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_the_whole_run_has_all_sizes():
    cases = [case for case in chosen_cases(CASES, smoke=False) if case.timed]
    of = {group: [case for case in cases if case.case == group] for group in CASES}
    random = [1, 8, 32, 128, 512, 2048, 8192, 65536]
    assert [case.rows for case in of["insert"]] == [*random, 2048, 8192, 65536]
    gathers = [(case.requests, case.rows) for case in of["gather"]]
    plain = [(1, 128), (4, 128), (4, 2048), (1, 8192), (4, 8192), (1, 32768), (8, 8192)]
    assert gathers == [*plain, (8, 58098)]
    assert [case.shape for case in of["combine"]] == ["2048x512", "8192x1024", "8192x512"]
    assert [case.rows for case in of["indexer_gather"]] == [8192, 65536]
    assert all(of.values())


def test_moved_bytes_by_hand():
    def moved(group, shape, variant=""):
        work: Work = case_of(group, shape, variant).build(CPU)
        return work.moved_bytes

    assert moved("gather", "4x128 rows") == 4 * (128 * (584 + 1024) + 2 * 4 + 4)
    assert moved("gather_all", "1x128 rows") == 128 * (584 + 1024) + 2 * 4 + 4
    assert moved("indexer_insert", "8 tokens", "random") == 8 * (256 + 132 + 8)
    assert moved("plain_insert", "8 tokens", "random") == 8 * (1024 + 1024 + 8)
    assert moved("fused", "8 tokens", "scatter") == 8 * (1024 + 584 + 8) + 1024
    assert moved("combine", "64x64") == 64 * (64 * 4 + 12 + 256 * 4 + 4)
