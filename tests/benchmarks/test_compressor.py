"""The compressor benchmark: states byte for byte, rows within rounding, rooflines by hand."""

import json

import pytest
import torch

from benchmarks.cases import compressor_cases
from benchmarks.cases.compressor_cases import KINDS, decode_step, moved_bytes, prefill_step
from benchmarks.compressor import CASES, chosen_cases
from benchmarks.harness import measure, timing
from benchmarks.kv_cache import Bench
from benchmarks.run import main
from tests.fakes.timing import pretend

CPU = torch.device("cpu")
STATES, CACHE, SLOTS = 2, 9, 10


@pytest.fixture
def uncompiled(monkeypatch):
    """Stand the ops themselves in for the compiled ones, so that a run takes seconds."""
    monkeypatch.setattr(measure, "compiled_op", lambda function: function)
    monkeypatch.setattr(measure, "wall_us", lambda *_, **__: timing.Timing(2.0, 1.0, 3.0))


def smoke(folder, *more):
    return main(["compressor", "--smoke", "--no-plot", "--out", str(folder), *more])


def rows_of(folder):
    return [json.loads(line) for line in (folder / "compressor.jsonl").read_text().splitlines()]


def case_of(kind, shape, variant=""):
    cases = chosen_cases((kind,), smoke=True)
    return next(case for case in cases if (case.shape, case.variant) == (shape, variant))


@pytest.mark.usefixtures("uncompiled")
def test_every_kind_runs(tmp_path):
    assert smoke(tmp_path, "--cases", ",".join(CASES)) == 0
    rows = rows_of(tmp_path)
    assert {row["case"] for row in rows} == {"c4", "c4_indexer", "c128"}
    assert [row["shape"] for row in rows if row["case"] == "c4"] == [
        "decode, 2",
        "decode, 8",
        "decode, 2",
        "decode, 8",
        "prefill, 256",
    ]


@pytest.mark.slow
@pytest.mark.nightly("test_kv_cache.py compiles and times in the same way")
def test_smoke_compiles_and_times_a_kind(tmp_path):
    assert main(["compressor", "--smoke", "--out", str(tmp_path)]) == 0
    assert all(row["compiled_us"] > 0 and row["error"] is None for row in rows_of(tmp_path))
    assert (tmp_path / "compressor.png").read_bytes().startswith(b"\x89PNG")


def after(change):
    """The op, then a change of what it left."""

    def corrupted(call):
        def wrong(*args):
            call(*args)
            change(args)

        return wrong

    return corrupted


def first_row(args):
    """The codes of a row that was written: 448 bytes of the C4 cache."""
    page, row = divmod(int(args[SLOTS][args[SLOTS] >= 0][-1]), 64)
    return args[CACHE][page, row * 576 : row * 576 + 448]


def state_value(args):
    args[STATES][0, 0] += 1e-3


def byte_around(args):
    args[CACHE][-1, -1] += 1


def many_steps(args):
    codes = first_row(args)
    codes[::2] += 16


def nan(args):
    first_row(args)[5] = 0x7F


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (state_value, "bytes of the states differ"),
        (byte_around, "bytes around the compressed rows differ"),
        (many_steps, "codes of 1 rows"),
        (nan, "codes of 1 rows"),
    ],
)
def test_a_wrong_value_is_not_timed(monkeypatch, change, message):
    monkeypatch.setattr(measure, "compiled_op", after(change))
    monkeypatch.setattr(measure, "wall_us", lambda *_, **__: pytest.fail("timed a wrong result"))
    row = Bench(CPU, None, budget_s=0.0).measure(case_of("c4", "prefill, 256"))
    assert message in row.error
    assert row.error.startswith("compiled (c4, prefill, 256): ")
    assert row.compiled_us is None


def test_rows_that_are_all_a_step_off_are_over_the_budget(monkeypatch):
    def step(args):
        codes = first_row(args)
        codes.copy_(torch.where(codes & 0x7F == 0x7E, codes, codes + 1))

    monkeypatch.setattr(measure, "compiled_op", after(step))
    row = Bench(CPU, None, budget_s=0.0).measure(case_of("c4", "decode, 8", "finishing"))
    assert "budgets from float64" in row.error


def test_a_row_of_a_neighbouring_window_is_found(monkeypatch):
    def swapped(call):
        return lambda *args: call(*args[:SLOTS], args[SLOTS].roll(4))

    monkeypatch.setattr(measure, "compiled_op", swapped)
    row = Bench(CPU, None, budget_s=0.0).measure(case_of("c128", "prefill, 256"))
    assert row.error


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("place", [3, SLOTS], ids=["state slots", "slots"])
@pytest.mark.usefixtures("uncompiled")
def test_a_write_for_a_slot_that_does_not_exist_is_found(monkeypatch, kind, place):
    def first_for_absent(call):
        def wrong(*args):
            args = list(args)
            args[place] = args[place].clamp(min=0)
            call(*args)

        return wrong

    monkeypatch.setattr(measure, "compiled_op", first_for_absent)
    bench = Bench(CPU, None, budget_s=0.0)
    assert bench.measure(case_of(kind, "absent slots and padding")).error


@pytest.mark.parametrize("kind", CASES)
def test_a_cuda_row_adds_up(monkeypatch, uncompiled, kind):
    bench = pretend(monkeypatch, Bench(CPU, None, budget_s=0.0), compressor_cases)
    row = bench.measure(case_of(kind, "decode, 8", "finishing"))
    assert row.error is row.baseline_us is row.baseline_error is None
    assert (row.input_sets, row.kernels, row.compiled_us, row.host_us) == (3, 2, 4.0, 6.0)
    assert (row.pct_of_copy, row.roofline_us) == (50.0, row.moved_bytes / 4e6)
    assert row.pct_of_bandwidth == pytest.approx(25 * row.roofline_us)
    json.dumps(vars(row))


def test_moved_bytes_by_hand():
    c4, indexer, c128 = KINDS["c4"], KINDS["c4_indexer"], KINDS["c128"]
    vectors = 8 + 8 + 8 + 4
    alone = decode_step(c4, 1, finishing=True)  # seven earlier states, half of each, on two blocks
    projections = 2 * 2048 * 4
    row = 584 + 64 * 4
    assert moved_bytes(c4, alone) == projections + 7 * 2 * 512 * 4 + row + 2 * 4 + vectors
    assert moved_bytes(c4, decode_step(c4, 1, finishing=False)) == projections + vectors
    spread = decode_step(c128, 8, finishing=False)
    assert moved_bytes(c128, spread) == 8 * (2 * 1024 * 4 + vectors)
    assert decode_step(c4, 8, finishing=False).finished(c4) == 2
    # a prefill finds everything in its own projections
    whole = moved_bytes(indexer, prefill_step(8))
    assert whole == 8 * (2 * 512 * 4 + vectors) + 2 * (132 + 64 * 4)


def test_the_whole_run_has_all_sizes():
    for kind in CASES:
        cases = [case for case in chosen_cases((kind,), smoke=False) if case.timed]
        shapes = [(case.shape, case.variant) for case in cases]
        decode = [f"decode, {requests}" for requests in (1, 8, 128)]
        assert shapes == [
            *((shape, variant) for variant in ("spread", "finishing") for shape in decode),
            ("prefill, 4096", ""),
            ("prefill, 8192", ""),
        ]
