"""``bench sparse_mla`` times AOTInductor packages of its forms beside the calls that they are made
of, after it has looked at their results."""

import dataclasses
import json

import pytest
import torch

from benchmarks import packages
from benchmarks.cases import attention_cases, gathered_cases, prefill_cases
from benchmarks.harness import measure, timing, variants
from benchmarks.run import WrongResult, main
from benchmarks.sparse_mla import Bench, chosen_cases
from tests.fakes.attention import FlashMLA
from tests.fakes.timing import pretend, unpackaged

CPU = torch.device("cpu")
NAMES = ("decode", "paged", "prefill", "gathered")
CASES = chosen_cases(("packages",), smoke=True)


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(measure, "compiled_op", lambda function: function)
    monkeypatch.setattr(packages, "build", unpackaged)


@pytest.fixture
def bench(monkeypatch, uncompiled):
    """Of a GPU with FlashMLA, three input sets a case."""
    made = Bench(CPU, None, budget_s=0.0)
    pretend(monkeypatch, made, attention_cases, prefill_cases, gathered_cases)
    made.modules, made.cache = FlashMLA(), ImportError("not needed")
    return made


def rows_of(folder):
    return [json.loads(line) for line in (folder / "sparse_mla.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.nightly("the tests below time stand-ins, and test_export.py builds packages")
def test_a_package_of_every_form_is_built_once_and_timed(tmp_path, monkeypatch, capsys):
    """Exported with 3 tokens, run with fewer and more. -O0 and no vectors, two of the four left as
    exported programs: a fraction of the time."""
    made, load = packages.build_package, packages.load_package

    def compiled(program, path):
        return made(program, path) if path.stem in ("decode", "prefill") else program.module()

    def loaded(package, **options):
        return package if callable(package) else load(package, **options)

    monkeypatch.setattr(packages, "build_package", compiled)
    monkeypatch.setattr(packages, "load_package", loaded)
    monkeypatch.setattr(measure, "compiled_op", lambda function: function)
    options = ["--cases", "packages", "--no-plot", "--out", str(tmp_path)]
    with torch._inductor.config.patch({"aot_inductor.debug_compile": True, "cpp.simdlen": 1}):
        assert main(["sparse_mla", "--smoke", *options]) == 0
    rows = rows_of(tmp_path)
    assert [(row["variant"], row["rows"]) for row in rows] == [
        (name, tokens) for name in NAMES for tokens in (2, 70 if name == "prefill" else 5)
    ]
    for row in rows:
        assert row["error"] is row["package_error"] is None
        low, high = row["package_us_range"]
        assert 0 < low <= row["package_us"] <= high
    said = capsys.readouterr().err
    for name in NAMES:
        for number, step in enumerate(("export", "compile", "load"), 1):
            assert said.count(f"package of {name} {number}/3: {step}\n") == 1
    header = (tmp_path / "sparse_mla.txt").read_text().split("\n\n")[2].splitlines()[0]
    assert header.split()[-1] == "package_us"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_cuda_row_has_the_package_beside_the_others(bench, case):
    row = bench.measure(case)
    assert row.error is row.baseline_error is row.package_error is None
    assert (row.case, row.variant in NAMES, row.input_sets) == ("packages", True, 3)
    times = (row.package_us, row.compiled_us, row.eager_us, row.baseline_us)
    assert (times, row.package_us_range) == ((4.0,) * 4, [3.0, 5.0])
    assert row.baseline_agrees is True
    assert row.baseline_whole_us is row.pages_us is row.note is None
    alone = "baseline_us is FlashMLA alone, over bf16 rows gathered before"
    assert row.baseline_note == (alone if row.variant == "prefill" else None)


def test_sizes_that_differ_between_cases_are_symbols_of_the_package(monkeypatch):
    """Of other numbers of tokens, and of as many in other numbers of input sets."""
    for form in {case.variant: case.build(CPU).form for case in CASES}.values():
        seen = []
        for tokens, sets in ((2, 1), (2, 3), (200, 1), (form.exported, 1)):
            for module in (attention_cases, prefill_cases, gathered_cases):
                monkeypatch.setattr(module, "rotating_sets", lambda *_, sets=sets: sets)
            work = form.case(tokens).build(CPU)
            assert len(work.sets) == sets
            seen += [[tuple(tensor.shape) for tensor in args] for args in work.sets]
        assert len(seen[0]) == len(form.dims)
        for place, shapes in enumerate(zip(*seen, strict=True)):
            differing = {
                dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1
            }
            assert differing <= set(form.dims[place]), f"{form.name}, argument {place}"


def wrong(form, device):
    """A package whose last head of the last token is off by a little."""
    call = unpackaged(form, device)

    def off(*args):
        results = call(*args)
        results.out[-1, -1] *= 1.05
        return list(results)

    return off


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_a_wrong_result_of_a_package_is_an_error_before_anything_is_timed(
    monkeypatch, uncompiled, case
):
    monkeypatch.setattr(packages, "build", wrong)
    for module in (measure, variants):
        monkeypatch.setattr(module, "wall_us", lambda *_, **__: pytest.fail("timed"))
    bench = Bench(CPU, None, budget_s=0.0)
    row = bench.measure(case)
    assert row.error.startswith("package (packages, 2 x 4 heads, ")
    assert row.error.endswith("The case was not timed.")
    assert row.package_us is row.compiled_us is row.package_error is None
    with pytest.raises(WrongResult):
        bench.raise_failures()


def test_a_replay_of_a_package_is_looked_at_for_every_input_set(monkeypatch, bench):
    """A package that has the first set's result for all of them."""

    def first_alone(form, device):
        call, kept = unpackaged(form, device), []

        def run(*args):
            kept[:] = kept or [args]
            return list(call(*kept[0]))

        return run

    monkeypatch.setattr(packages, "build", first_alone)
    row = bench.measure(CASES[0])
    assert row.error.startswith("CUDA graph replay, package (")
    assert row.package_us is None


def test_a_package_that_cannot_be_built_is_said_and_not_tried_again(
    monkeypatch, uncompiled, tmp_path, capsys
):
    tried = []

    def broken(form, device):
        tried.append(form.name)
        if form.name == "paged":
            raise RuntimeError("no compiler")
        return unpackaged(form, device)

    monkeypatch.setattr(packages, "build", broken)
    options = ["--cases", "packages", "--no-plot", "--out", str(tmp_path)]
    assert main(["sparse_mla", "--smoke", *options]) == 0
    assert tried == list(NAMES)
    for row in rows_of(tmp_path):
        failed = row["variant"] == "paged"
        assert row["package_error"] == ("RuntimeError: no compiler" if failed else None)
        assert (row["package_us"] is None) == failed
        assert row["compiled_us"] > 0
        assert row["error"] is None
    note = (
        "package_error: RuntimeError: no compiler (packages 2 x 4 heads, 128+64 paged; packages 5"
    )
    assert note in capsys.readouterr().out


@pytest.mark.parametrize("calls", [0, 2])
def test_a_package_that_fails_when_it_runs_is_said(monkeypatch, bench, calls):
    """At its first call, or when a graph is captured."""
    made = []

    def fails(form, device):
        call = unpackaged(form, device)

        def run(*args):
            made.append(form.name)
            if len(made) > calls:
                raise RuntimeError("cannot be captured")
            return list(call(*args))

        return run

    monkeypatch.setattr(packages, "build", fails)
    row = bench.measure(CASES[0])
    assert row.package_error == "RuntimeError: cannot be captured"
    assert len(made) == calls + 1
    assert (row.error, row.package_us, row.package_us_range) == (None, None, [])
    assert (row.compiled_us, row.baseline_us) == (4.0, 4.0)
    bench.raise_failures()


def test_a_package_is_timed_on_its_own(monkeypatch, uncompiled):
    """On a CPU too: its time is not that of the call."""
    clocks = {measure: 2.0, variants: 7.0}
    for module, us in clocks.items():
        found = timing.Timing(us, us - 1, us + 1)
        monkeypatch.setattr(module, "wall_us", lambda *_, found=found, **__: found)
    row = Bench(CPU, None, budget_s=0.0).measure(CASES[0])
    assert (row.compiled_us, row.package_us, row.package_us_range) == (2.0, 7.0, [6.0, 8.0])
    other = Bench(CPU, None, budget_s=0.0).measure(chosen_cases(("gathered",), smoke=True)[0])
    assert other.package_us is other.package_error is None
    assert {"package_us", "package_error"} <= {field.name for field in dataclasses.fields(other)}
