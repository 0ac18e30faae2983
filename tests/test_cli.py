"""The command line: list, show, doctor."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4_ops import __version__
from dsv4_ops.__main__ import main
from dsv4_ops.cli import doctor, show
from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch import probes
from tests.helpers import NIGHTLY, SMOKE
from tests.support import forked

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("ops", "meta", "reference", "lowering", "testing")


def run(capsys, *arguments):
    """Run a command; return its exit status and standard output."""
    status = main(arguments)
    return status, capsys.readouterr().out


# torch reads CXX when it is imported, and a forked process has already imported torch
DOCTOR = """
import sys
from torch._inductor import config
config.cpp.cxx = (None, sys.argv[1])
from dsv4_ops.__main__ import main
sys.exit(main(["doctor", "--quick", "--json"]))
"""


def doctor_of(compiler):
    """Return the JSON of ``doctor --json`` if CXX is ``compiler``."""
    return forked.python("-c", DOCTOR, compiler, cwd=ROOT, env={**os.environ, "CXX": compiler})


def fails(*_arguments, **_settings):
    raise Exception("broken on purpose")


def test_list_has_a_row_for_every_op(capsys):
    status, out = run(capsys, "list")
    header, *lines = out.splitlines()
    assert status == 0
    assert header.split()[0] == "op"
    assert [line.split()[0] for line in lines] == list(OPS)
    for line, spec in zip(lines, OPS.values(), strict=True):
        assert line.split()[1:3] == [spec.lowering["cpu"], spec.lowering["cuda"]]
        assert line.endswith(", ".join(spec.dynamic))


@pytest.mark.parametrize("op", OPS)
def test_show_prints_the_spec(capsys, op):
    status, out = run(capsys, "show", op)
    assert status == 0
    assert out.startswith(f"{op}(")
    assert f"dsv4_ops::{OPS[op].schema}" in out
    assert OPS[op].source in out
    assert "Returns:" in out
    assert "Raises:" in out
    launches = re.search(r"^kernels +(dsv4_ops/kernels/|missing)", out, re.MULTILINE)
    assert bool(launches) == OPS[op].has_kernel
    for layer in LAYERS:
        (place,) = re.findall(rf"^{layer} .*?(\S+\.py):(\d+)|^{layer} +missing", out, re.MULTILINE)
        file, line = place
        if layer == "meta":
            assert "def " in (ROOT / file).read_text()  # ops share fakes
        elif layer != "testing" or file:
            assert op in (ROOT / file).read_text().splitlines()[int(line) - 1]


def test_show_says_where_a_lowering_gets_its_meaning(capsys):
    _, out = run(capsys, "show", "mtp_seq_lens")
    assert re.search(r"Decompose: function at dsv4_ops/reference/batch\.py:\d+", out)
    _, out = run(capsys, "show", "token_map")
    assert re.search(r"PointwiseIR: function at dsv4_ops/lowering/batch\.py:\d+", out)


def test_show_says_missing_for_a_layer_that_is_not_there(capsys, monkeypatch):
    from dsv4_ops.lowering import batch

    monkeypatch.delattr(batch, "token_map")
    status, out = run(capsys, "show", "token_map")
    assert status == 0
    assert re.search(r"^lowering +missing", out, re.MULTILINE)


def test_show_of_an_unknown_op_names_close_ones(capsys):
    assert main(["show", "token_mp"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "show: op must be a name in the registry, got 'token_mp'. Did you mean token_map? "
        "`python -m dsv4_ops list` prints all of them.\n"
    )
    assert main(["show", "zzzzz"]) == 2
    assert "Did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["", "no_such_command", "show", "list --bogus"])
def test_bad_usage_exits_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    command = arguments if arguments == "show" else "list" * arguments.startswith("list")
    assert f"usage: dsv4-ops {command}" in capsys.readouterr().err


def test_explain_says_what_auto_takes_and_why_not_a_library(capsys):
    status, out = run(capsys, "explain")
    assert status == 0
    for name, spec in OPS.items():
        assert (f"{name}\n  elsewhere  reference" in out) == spec.has_choice
    status, out = run(capsys, "explain", "indexer_logits")
    assert "  deep_gemm  for 64 heads, at least 32 tokens" in out
    assert "not available here: " in out
    assert "sparse" not in out
    decode = run(capsys, "explain", "sparse_mla_decode")[1]
    assert "  flash_mla  only with impl='flash_mla': it was faster at no size" in decode
    for op in ("mla_decode", "mla_sparse"):
        assert "% faster from" in run(capsys, "explain", op)[1]
    prefill = run(capsys, "explain", "sparse_mla_prefill")[1]
    assert max(map(len, prefill.splitlines())) <= 100
    assert " ".join(prefill.split()).startswith(
        "sparse_mla_prefill elsewhere reference cuda triton "
        "but the reference for rows other than 512 bfloat16 values "
        "on Hopper it runs over a bf16 copy of the rows, if that saves time: a copy costs "
        "12 us and 0.5 ns per row of the block tables, and saves 0.06 ns per key of a token "
        "and 64 heads; otherwise calls of up to 66 tokens of 64 heads split their keys flash_mla "
    )


def test_explain_refuses_what_is_no_op(capsys):
    assert main(["explain", "token"]) == 2
    assert "explain: op must be the name of an op, got 'token'" in capsys.readouterr().err


def test_list_show_and_explain_for_machines(capsys):
    listed = json.loads(run(capsys, "list", "--json")[1])
    assert [each["op"] for each in listed] == list(OPS)
    assert all(each["lowering"] == OPS[each["op"]].lowering for each in listed)
    shown = json.loads(run(capsys, "show", "token_map", "--json")[1])
    assert shown["schema"] == f"dsv4_ops::{OPS['token_map'].schema}"
    assert shown["doc"].partition("Args:")[1]
    explained = json.loads(run(capsys, "explain", "--json")[1])
    assert [each["op"] for each in explained] == [n for n, spec in OPS.items() if spec.has_choice]
    (logits,) = json.loads(run(capsys, "explain", "indexer_logits", "--json")[1])
    assert logits["libraries"]["deep_gemm"]["usable"] is False
    assert logits["libraries"]["deep_gemm"]["taken_from"].startswith("64 heads")
    for command in ("show", "explain"):
        assert run(capsys, command, "no_such_op", "--json") == (2, "")


def test_a_reader_that_leaves_is_no_error():
    """An example is `list | head -1` in a shell."""
    reader, writer = os.pipe()
    os.close(reader)
    for flags in ((), ("-u",)) if NIGHTLY else ((),):
        command = [sys.executable, *flags, "-m", "dsv4_ops", "list"]
        with subprocess.Popen(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE) as process:
            assert process.communicate(timeout=300) == (None, b"")
        assert process.returncode == 141
    os.close(writer)


def test_kernels_says_what_it_compiles(capsys, monkeypatch):
    report = pytest.importorskip("dsv4_ops.cli.kernels")
    monkeypatch.setattr(report, "launches", lambda *given: [])
    assert main(["kernels"]) == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    names = list(report.examples())
    count = len(names)
    assert lines[0].startswith(f"kernels: compiling the kernels of {count} calls, which takes ")
    assert lines[1] == f"kernels: compiling {names[0]} (1 of {count})"
    assert len(lines) == 1 + count
    assert captured.out.startswith("op ")


@pytest.mark.parametrize("targets", ["90a", "130", "80,75", ""])
def test_kernels_are_compiled_for_known_targets(targets, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["kernels", "--targets", targets])
    assert "targets must be of 80, 86, 87, 89, 90" in capsys.readouterr().err


def test_version_of_the_module():
    result = forked.python("-m", "dsv4_ops", "--version", cwd=ROOT)
    assert (result.returncode, result.stdout) == (0, f"dsv4_ops {__version__}\n")


def test_doctor_prints_every_section_and_judges_by_its_problems(capsys):
    status, out = run(capsys, "doctor", "--quick")
    for section in ("system", "torch", "gpu", "providers", "lowerings", "cache", "aot_inductor"):
        assert re.search(rf"^{section}$", out, re.MULTILINE)
    for fact in (torch.__version__, "triton", "flash_mla", "cache_key_tag", "not run"):
        assert fact in out
    assert status == (0 if "no problems found" in out else 1)


def test_doctor_json_parses_and_says_the_same(capsys):
    status, out = run(capsys, "doctor", "--quick", "--json")
    report = json.loads(out)
    assert status == (1 if report["problems"] else 0)
    assert report["torch"]["version"] == torch.__version__
    assert report["lowerings"]["ops"] == len(OPS)
    assert report["lowerings"]["active"] is True
    assert report["cache"]["included"] is True
    assert set(report["providers"]) == set(probes.NAMES)
    assert {"fastapi", "uvicorn", "accelerate", "usable"} <= set(report["serve"])


def test_doctor_reports_a_failed_selftest(monkeypatch):
    monkeypatch.setattr(doctor, "_selftest_outcome", lambda: "exit status 1: opaque")
    report = doctor.collect(steps=False, selftest=True)
    assert report["lowerings"]["active"] is False
    assert any("self-test failed: exit status 1: opaque" in text for text in report["problems"])


@pytest.mark.parametrize(
    "target",
    [
        *(f"dsv4_ops.dispatch.probes.{name}" for name in ("probe", "no_gpu_reason", "probe_all")),
        "platform.platform",
        "torch._library.simple_registry.find_torch_dispatch_rule",
        "dsv4_ops.core.fingerprint.source_hash",
        "dsv4_ops.cli.doctor.linked_libraries",
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_doctor_prints_although_a_probe_raises(capsys, monkeypatch, target, form):
    monkeypatch.setattr(target, fails)
    status, out = run(capsys, "doctor", "--quick", *form)
    assert status == 1
    assert "broken on purpose" in out
    assert "aot_inductor" in out


def test_doctor_finds_an_op_without_trace_rule(monkeypatch):
    rule = "torch._library.simple_registry.find_torch_dispatch_rule"
    monkeypatch.setattr(rule, lambda op, mode: None if "token_map" in str(op) else fails)
    report = doctor.collect(steps=False)
    assert report["lowerings"]["without trace rule"] == ["token_map"]
    assert any("opaque calls: token_map." in text for text in report["problems"])


def test_doctor_finds_an_overwritten_cache_key_tag():
    with torch.compiler.config.patch(cache_key_tag="mine"):
        report = doctor.collect(steps=False)
    assert report["cache"]["included"] is False
    assert any("lacks 'dsv4_ops=" in text for text in report["problems"])


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.skipif(not SMOKE, reason="`make smoke` runs it; `make demo` compiles")
def test_doctor_has_no_problem_and_its_steps_compile(capsys):
    pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")
    from dsv4_ops.cli import steps

    status, out = run(capsys, "doctor", "--quick")
    assert status == 0, out
    for family in doctor.FAMILIES:
        assert steps.check(family) > 0


def test_doctor_says_which_step_fails_and_what_shows_it(monkeypatch):
    stderr = "Traceback ...\n  File ...\nValueError: broken on purpose\n\nSet a variable\n"
    done = [
        SimpleNamespace(returncode=0, stdout="8.5\n", stderr="a warning\n"),
        SimpleNamespace(returncode=1, stdout="", stderr=stderr),
    ]
    monkeypatch.setattr(doctor.subprocess, "run", lambda command, **_: done["V4" in command[-1]])
    monkeypatch.setattr(probes, "distribution_version", lambda name: "5.24.0")
    problems, said = [], []
    section = doctor._steps(problems, True, said.append)
    want = {"DeepSeek-V4": "fails: ValueError: broken on purpose", "DeepSeek-V3": "compiles, 8.5 s"}
    assert section == want
    (problem,) = problems
    assert "DeepSeek-V4 fails with torch" in problem
    assert f"`{sys.executable} -m dsv4_ops.cli.steps DeepSeek-V4` prints" in problem
    (line,) = said
    assert line.startswith("compiling a decode step of DeepSeek-V4 and of DeepSeek-V3, in about")


def test_doctor_prints_what_it_knows_before_it_compiles(capsys, monkeypatch):
    """Output reaches a pipe only if it is flushed; with JSON it goes to stderr."""
    pipe, flushed = Pipe(), []

    def child(command):
        flushed.append(pipe.flushed)
        return 0, "8.5", ""

    monkeypatch.setattr(doctor, "_child", child)
    monkeypatch.setattr(probes, "distribution_version", lambda name: "5.24.0")
    monkeypatch.setattr(sys, "stdout", pipe)
    main(["doctor"])
    assert len(flushed) == len(doctor.FAMILIES)
    said = "  compiling a decode step of DeepSeek-V4 and of DeepSeek-V3, in about half a minute"
    assert re.search(rf"\naot_inductor\n(  .*\n)+steps\n{re.escape(said)}", flushed[0])
    assert re.search(r"^  DeepSeek-V3 +compiles, 8\.5 s$", pipe.flushed, re.MULTILINE)
    main(["doctor", "--json"])
    assert capsys.readouterr().err.startswith(said)


class Pipe(io.StringIO):
    """A stdout whose reader gets what is flushed."""

    flushed = ""

    def flush(self):
        self.flushed = self.getvalue()


def test_doctor_names_the_folder_of_compiled_steps(monkeypatch, tmp_path):
    pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for setting, said in (
        ("", str(tmp_path / "dsv4_ops")),
        ("a/folder", "a/folder"),
        ("off", "not kept: DSV4_OPS_CACHE is off, or the folder of caches is not yours alone"),
    ):
        monkeypatch.setenv("DSV4_OPS_CACHE", setting)
        assert doctor._cache([])["compiled steps"] == said


TESTED = "torch 2.11 to 2.15 were tested."


@pytest.mark.parametrize(
    ("torch_version", "transformers", "said"),
    [
        *(("2.15.0+cu132", version, "") for version in ("5.24.0", "5.23.1", None)),
        ("2.15.0+cu132", "5.17.0", "torch 2.15.0+cu132 with transformers 5.17.0 was not tested: "
         "torch 2.15.0+cu132 was tested with transformers 5.21, 5.23, 5.24."),
        ("2.16.0a0+git123", "5.24.0", "torch 2.16.0a0+git123 with transformers 5.24.0 was not "
         f"tested: {TESTED}"),
        ("3.0", None, f"torch 3.0 was not tested: {TESTED}"),
        ("2.10.1", "5.24.0", 'pip install "torch>=2.11"'),
        ("2.15.0", "5.16.1", 'pip install "transformers>=5.17"'),
    ],
)  # fmt: skip
def test_doctor_knows_versions_tested_together(monkeypatch, torch_version, transformers, said):
    """doctor warns of other versions, and reports versions that are too old as a problem."""
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(probes, "distribution_version", lambda name: transformers)
    problems, warnings = [], []
    section = doctor._versions(problems, warnings)
    if said.startswith("pip"):
        assert len(problems) == 1
        assert said in problems[0]
    else:
        assert section["tested together"] is (said == "")
        assert (problems, warnings) == ([], [said] if said else [])


lacks_gxx = sys.platform != "linux" or shutil.which("g++") is None
needs_gxx = pytest.mark.skipif(lacks_gxx, reason="needs g++ on Linux")


@pytest.fixture
def static_cxx(tmp_path):
    """Write a compiler that breaks AOTInductor packages."""
    wrapper = tmp_path / "static-g++"
    wrapper.write_text('#!/bin/sh\nexec g++ -static-libstdc++ "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


@needs_gxx
@pytest.mark.parametrize("readelf", [True, False])
def test_linked_libraries_tells_static_from_dynamic(monkeypatch, static_cxx, readelf):
    if not readelf:
        monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    elif shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    assert any("libstdc++.so" in name for name in doctor.linked_libraries("g++"))
    assert not any("libstdc++.so" in name for name in doctor.linked_libraries(static_cxx))


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [
        *((older, "Triton, e4m3 codes by integers") for older in ((7, 5), (8, 0))),
        *((each, "Triton") for each in ((8, 9), (12, 0))),
        ((9, 0), "Triton and Gluon (Hopper)"),
    ],
)
def test_doctor_says_which_kernels_a_gpu_runs(monkeypatch, capability, kernels):
    major, minor = capability
    numbers = {"multi_processor_count": 108, "total_memory": 2**36}
    found = SimpleNamespace(name="A100", major=major, minor=minor, **numbers)
    monkeypatch.setattr(probes, "no_gpu_reason", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    problems = []
    section = doctor._gpu(problems)
    assert section["cuda:0"] == f"A100, 108 SMs, 64.0 GiB, sm_{major}{minor}"
    assert section["kernels on cuda:0"] == kernels
    assert bool(problems) == (capability < (8, 0))


@needs_gxx
def test_doctor_warns_of_a_compiler_that_links_libstdcxx_statically(static_cxx):
    result = doctor_of(static_cxx)
    report = json.loads(result.stdout)
    assert result.returncode == 1
    assert report["aot_inductor"]["compiler"] == static_cxx
    (problem,) = (text for text in report["problems"] if "libstdc++" in text)
    assert problem.startswith("export CXX=g++ (a compiler that links libstdc++ dynamically);")
    assert "crash at load" in problem


def test_doctor_says_what_to_do_without_a_compiler():
    report = json.loads(doctor_of("/no/such/cxx").stdout)
    assert any("Install g++, or set CXX" in text for text in report["problems"])


def test_linked_libraries_reports_a_compiler_that_fails():
    with pytest.raises(RuntimeError, match="does not run"):
        doctor.linked_libraries("/no/such/cxx")
    with pytest.raises(RuntimeError, match="false builds no shared library"):
        doctor.linked_libraries("false")


def test_a_probe_never_raises(monkeypatch):
    monkeypatch.setattr(probes.importlib.util, "find_spec", fails)
    for provider in probes.probe_all(load=True):
        assert not provider.usable
        assert "broken on purpose" in provider.reason


def test_a_library_that_fails_to_import_is_unusable_once_asked(monkeypatch):
    monkeypatch.setattr(probes.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(probes.importlib, "import_module", fails)
    assert probes.probe("transformers").usable
    broken = probes.probe("transformers", load=True)
    assert (broken.usable, broken.reason) == (False, "import failed: Exception: broken on purpose")


def test_a_gpu_library_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(probes.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(probes, "no_gpu_reason", lambda: "no driver")
    where = " (found: module deep_gemm)"
    assert probes.probe("deep_gemm").reason == f"needs a CUDA device: no driver{where}"
    monkeypatch.setattr(probes, "no_gpu_reason", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    reason = f"needs compute capability 9.0 or later; this GPU has 8.0{where}"
    assert probes.probe("deep_gemm").reason == reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert probes.probe("deep_gemm").usable


def test_an_unknown_provider_is_refused():
    with pytest.raises(ValueError, match=r"probe: name must be one of triton, .* got 'numpy'"):
        probes.probe("numpy")


def test_the_markdown_table_has_one_line_per_op():
    assert len(show.markdown_table().splitlines()) == len(OPS) + 2
