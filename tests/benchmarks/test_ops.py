"""Benchmarks of ops: every group runs on a CPU, wrong results are not timed, and baselines are
compared. Eager ops replace compiled ops, and our ops replace the libraries."""

import hashlib
from types import SimpleNamespace

import pytest
import torch

from benchmarks import compressor, indexer, kv_cache, layer, metadata, sparse_mla
from benchmarks.cases import cache_cases, indexer_cases
from benchmarks.harness import builds, measure
from benchmarks.harness.work import differing_bytes
from benchmarks.run import BenchError, WrongResult
from dsv4_ops.core.layout import IndexerLayout
from tests.fakes.attention import Cache, FlashMLA

CPU = torch.device("cpu")
MODULES = {
    "kv_cache": kv_cache,
    "compressor": compressor,
    "indexer": indexer,
    "layer": layer,
    "metadata": metadata,
    "sparse_mla": sparse_mla,
}


def bench(name, modules=None):
    made = MODULES[name].Bench(CPU, None, budget_s=0.0)
    made.modules = modules
    return made


def cases(name, *groups):
    return MODULES[name].Bench.cases(groups or MODULES[name].CASES, smoke=True)


def timed(name, group, variant=""):
    found = [case for case in cases(name, group) if case.timed]
    return next(case for case in found if case.variant.startswith(variant))


@pytest.mark.parametrize("name", MODULES)
def test_every_group_runs(name, smoke, uncompiled, capsys):
    groups = tuple(MODULES[name].CASES)
    status, rows = smoke(name, "--cases", ",".join(groups))
    assert status == 0
    assert {row["case"] for row in rows} == set(groups)
    assert all(row["compiled_us"] == row["eager_us"] == 2.0 for row in rows)
    assert all(row["error"] is row["baseline_us"] is row["roofline_us"] is None for row in rows)
    assert all(row["moved_bytes"] > 0 for row in rows)
    assert "| case | shape |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_compiles_and_times(smoke):
    status, rows = smoke("kv_cache", "--cases", "insert", "--match", "insert, 8 tokens")
    assert (status, [row["rows"] for row in rows]) == (0, [8])
    assert rows[0]["compiled_us"] > 0
    assert rows[0]["eager_us"] > 0


@pytest.mark.parametrize("name", [name for name in MODULES if name != "compressor"])
def test_a_missing_baseline_is_a_row_not_the_end(name, smoke, uncompiled, tmp_path, capsys):
    status, rows = smoke(name, "--baseline", str(tmp_path / "nowhere"))
    assert status == 0
    errors = {row["baseline_error"] for row in rows if row["baseline_error"]}
    assert len(errors) == 1
    assert errors.pop().startswith("FileNotFoundError: no anchor_lib.py in nowhere/bench")
    assert str(tmp_path) not in capsys.readouterr().out


def changed(*path, change):
    """Return a wrapper of an op that applies ``change`` to a result or a written argument."""

    def corrupted(call):
        def wrong(*args):
            found = call(*args)
            target = args if found is None else [found] if hasattr(found, "shape") else found
            for place in path:
                target = target[place]
            change(target)
            return found

        return wrong

    return corrupted


def plus(amount):
    return lambda tensor: tensor.view(-1)[-1:].add_(amount)


def scaled(by):
    return lambda tensor: tensor[-1, 1].mul_(by)


def swap_last(rows):
    rows[-1, -1] = 638 if int(rows[-1, -1]) == 639 else 639


WRONG = [
    ("kv_cache", "insert", (1,), plus(1), "1 of 2396160 bytes differ from the reference"),
    ("kv_cache", "gather", (0,), plus(1), "bytes differ from the reference"),
    ("compressor", "c4", (2,), plus(1e-3), "bytes of the states differ from the reference"),
    ("compressor", "c4", (9,), plus(1), "result "),
    ("indexer", "logits", (0,), scaled(1.001), "budgets from float64"),
    ("indexer", "select", (0,), swap_last, "result 0"),
    ("layer", "c4", (0,), lambda out: out[-1, 0, :512].mul_(1.05), "out: "),
    ("metadata", "mixed", (0,), plus(1), "req_indices: 1 of 4 bytes differ from the reference"),
    *[("sparse_mla", group, (0,), scaled(1.05), "budgets") for group in sparse_mla.CASES],
    ("sparse_mla", "decode", (1,), scaled(1.001), "budgets from float64"),
]


@pytest.mark.parametrize(("name", "group", "path", "change", "text"), WRONG)
def test_a_wrong_result_is_not_timed(monkeypatch, uncompiled, name, group, path, change, text):
    monkeypatch.setattr(measure, "compiled_op", changed(*path, change=change))
    monkeypatch.setattr(measure, "wall_us", lambda *_, **__: pytest.fail("timed a wrong result"))
    made = bench(name)
    row = made.measure(timed(name, group))
    assert row.error.startswith("compiled (")
    assert text in row.error
    assert row.error.endswith("The case was not timed.")
    assert row.compiled_us is None
    with pytest.raises(WrongResult):
        made.raise_failures()


ABSENT = {
    "kv_cache": (("insert",), 2),
    "compressor": (compressor.CASES, 10),
    "indexer": (indexer.CASES, 4),
    "sparse_mla": (("decode",), 2),
}


@pytest.mark.parametrize("name", ABSENT)
def test_what_does_not_exist_is_checked(monkeypatch, name):
    """The wrong op takes entries below 0 for entry 0; only the adversarial case shows this."""
    groups, place = ABSENT[name]

    def first_for_absent(call):
        return lambda *args: call(*args[:place], args[place].clamp(min=0), *args[place + 1 :])

    monkeypatch.setattr(measure, "compiled_op", first_for_absent)
    for group in groups:
        made = bench(name)
        (case,) = (case for case in cases(name, group) if not case.timed)
        assert "The case was not timed." in made.measure(case).error


def test_a_failing_op_is_a_row_and_an_error_at_the_end(monkeypatch, uncompiled, smoke, capsys):
    def failing(function):
        def fail(*_):
            raise RuntimeError("no kernel\nand more")

        return fail if function is cache_cases.gather_into else function

    monkeypatch.setattr(measure, "compiled_op", failing)
    status, rows = smoke("kv_cache", "--cases", "insert,gather")
    assert status == BenchError.status
    failed = [row["error"] for row in rows if row["error"]]
    assert set(failed) == {"RuntimeError: no kernel"}
    assert f"{len(failed)} cases failed, RuntimeError: no kernel" in capsys.readouterr().err
    assert rows[0]["compiled_us"] == 2.0


def test_a_wrong_dtype_or_number_of_results_is_a_wrong_result():
    lens = torch.tensor([1])
    with pytest.raises(WrongResult, match=r"torch.int32, \[1\].*the reference has .*torch.int64"):
        differing_bytes([lens.int()], [lens])
    with pytest.raises(WrongResult):
        differing_bytes([lens, lens], [lens])


def test_a_package_is_checked_and_timed_beside_the_call(uncompiled):
    row = bench("sparse_mla").measure(timed("sparse_mla", "packages", "paged"))
    assert (row.error, row.note, row.more["package_us"]) == (None, None, 2.0)


def vllm_modules(wrong_bytes=0):
    def insert(k, k_cache, slots, block_size):
        cache_cases.insert_main(k, k_cache, slots)
        k_cache.view(-1)[:wrong_bytes] += 1

    def gather(out, k_cache, seq_lens, gather_lens, block_table, block_size, offset):
        assert (gather_lens, block_size, offset) == (None, 64, 0)
        cache_cases.gather_into(out, k_cache, seq_lens, block_table)

    names = {"quantize_and_insert_k_cache": insert, "dequantize_and_gather_k_cache_triton": gather}
    return SimpleNamespace(cache=SimpleNamespace(**names))


class DeepGEMM:
    """A fake of DeepGEMM that runs our op; the plan is the same for every input set."""

    def __init__(self, wrong=0.0):
        self.wrong = wrong

    def get_num_sms(self):
        return 132

    def get_paged_mqa_logits_metadata(self, lens, block_size, num_sms):
        assert (lens.dim(), block_size, num_sms) == (2, 64, 132)
        return "plan"

    def fp8_fp4_paged_mqa_logits(
        self, q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len,
        clean_logits,
    ):  # fmt: skip
        assert (clean_logits, schedule_meta) == (False, "plan")
        assert max_context_len == block_table.shape[1] * 64
        pages = (kv_cache.shape[0], IndexerLayout(64).page_bytes)
        cache = kv_cache.as_strided(pages, (kv_cache.stride(0), 1))
        requests = torch.arange(len(block_table), dtype=torch.int32)
        rest = weights, cache, context_lens[:, 0], requests, block_table
        found = indexer_cases.logits(q[0][:, 0], *rest)
        return found + self.wrong * torch.arange(found.shape[1])


@pytest.mark.parametrize("case", [case for case in cases("kv_cache") if case.timed], ids=str)
def test_vllms_caches_are_compared_byte_for_byte(uncompiled, case):
    row = bench("kv_cache", vllm_modules()).measure(case)
    assert row.error is row.baseline_error is None
    assert row.baseline_agrees is True


def test_a_cache_that_differs_is_said(uncompiled):
    made = bench("kv_cache", vllm_modules(wrong_bytes=3))
    row = made.measure(timed("kv_cache", "insert"))
    assert (row.baseline_agrees, row.error) == (False, None)
    assert row.baseline_note == "3 of 2396160 bytes differ"
    made.raise_failures()


@pytest.mark.parametrize(("group", "text"), [("logits", "cosine"), ("select", "rows are shared")])
def test_deep_gemms_logits_are_compared(uncompiled, group, text):
    row = bench("indexer", DeepGEMM()).measure(timed("indexer", group))
    assert (row.error, row.baseline_error, row.baseline_agrees) == (None, None, True)
    row = bench("indexer", DeepGEMM(wrong=10.0)).measure(timed("indexer", group))
    assert row.baseline_agrees is False
    assert text in row.baseline_note


def test_rows_and_the_head_name_the_build_that_was_loaded(uncompiled, smoke, monkeypatch, capsys):
    monkeypatch.setattr(DeepGEMM, "__version__", "2.8.1", raising=False)
    monkeypatch.setattr(indexer.Bench, "load", lambda *_: DeepGEMM())
    run = ("indexer", "--cases", "logits")
    assert {row["baseline"] for row in smoke(*run, "--baseline", "some")[1]} == {"DeepGEMM 2.8.1"}
    assert " baseline=DeepGEMM 2.8.1\n" in capsys.readouterr().out
    assert not any("baseline" in row for row in smoke(*run)[1])


def test_builds_of_vllm_are_named_by_their_bytes(tmp_path, monkeypatch):
    for name in ("library.so", "cache_utils.py"):
        (tmp_path / name).write_text(name)
    digests = [hashlib.sha256(path.name.encode()).hexdigest()[:12] for path in tmp_path.iterdir()]
    made = sparse_mla.Bench(CPU, None, budget_s=0.0)
    made.modules = SimpleNamespace(so=str(tmp_path / "library.so"))
    made.cache = SimpleNamespace(__file__=str(tmp_path / "cache_utils.py"))
    digest = hashlib.sha256(b"library.so").hexdigest()[:12]
    monkeypatch.setattr(builds, "_RELEASES", dict.fromkeys(digests, "0.33.0"))
    assert builds.names(*made.loaded()) == "FlashMLA of vLLM 0.33.0, kernels of vLLM 0.33.0"
    monkeypatch.setattr(builds, "_RELEASES", {})
    made.cache = ImportError("no cache_utils.py")
    unknown = f"FlashMLA of an unknown release of vLLM (SHA-256 {digest})"
    assert builds.names(*made.loaded()) == unknown


def with_flash_mla(factor=1.0, cache=None):
    made = bench("sparse_mla", FlashMLA(factor))
    made.cache = cache or Cache()
    return made


@pytest.mark.parametrize("case", [case for case in cases("sparse_mla") if case.timed], ids=str)
def test_flash_mla_is_compared_within_the_tolerance_of_its_tests(uncompiled, case):
    made = with_flash_mla()
    row = made.measure(case)
    assert row.error is row.baseline_error is None
    assert row.baseline_agrees is True
    assert 0 <= row.baseline_max_diff < 1e-3
    gathers = "prefill" in (case.case, case.variant)
    assert (row.baseline_note is None) == (not gathers)
    plans = len(made.modules.plans)
    planned = not gathers and "gathered" not in (case.case, case.variant)
    assert plans > 1 if "planning" in case.variant else plans == planned


def test_flash_mla_that_differs_is_said(uncompiled):
    row = with_flash_mla(1.1).measure(timed("sparse_mla", "decode"))
    assert row.baseline_agrees is False
    assert row.baseline_note.startswith("out: ")
    row = with_flash_mla(1.1).measure(timed("sparse_mla", "prefill"))
    assert "in the CuTe DSL; out: " in row.baseline_note
    assert "; whole: " in row.baseline_note
    row = with_flash_mla(1 + 2.5 / 128).measure(timed("sparse_mla", "gathered"))
    assert "cosine" in row.baseline_note  # an error of 2 codes is within other tolerances


def test_the_whole_prefill_gathers_all_rows_of_the_request(uncompiled):
    """16 tokens follow 512 + 127 tokens: vLLM gathers 163 C4 rows, and 16 + 127 window rows."""
    made = with_flash_mla()
    row = made.measure(timed("sparse_mla", "prefill"))
    assert (row.more["context"], row.more["gathered_rows"]) == (655, 163 + 143)
    assert set(made.cache.gathered) == {163, 143}
    note = "vLLM's gather of 163 C4 and 143 window rows to bf16, of one request of 655"
    assert note in row.baseline_note
    row = with_flash_mla(cache=Cache(missing=1)).measure(timed("sparse_mla", "prefill"))
    assert row.baseline_agrees is False
    assert "; whole: " in row.baseline_note
    made = with_flash_mla(cache=ImportError("no cache_utils.py"))
    row = made.measure(timed("sparse_mla", "prefill"))
    assert row.baseline_error == "whole: ImportError: no cache_utils.py"
    assert row.baseline_agrees is True


def test_a_broken_baseline_is_a_note(uncompiled):
    row = bench("sparse_mla", object()).measure(timed("sparse_mla", "window"))
    assert "AttributeError" in row.baseline_error
    assert row.compiled_us == 2.0
