"""Run every script of examples/ as a user would, and check what it prints.

`make test` runs 01, and 05 eagerly; `make test-all` runs all. One test runs the scripts that
compile the decode step, one after the other: the step is the same, so Inductor's cache serves all
but the first."""

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support import forked

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("[0-9][0-9]_*.py"))


@pytest.fixture
def without_vectors(monkeypatch) -> None:
    """Compile loops without SIMD, in half the time; the demo and smoke runs keep SIMD."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")


def run(script: str, *options: object, status: int = 0) -> list[str]:
    """Run an example, check its exit status, and return its lines."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    env = {**os.environ, "PYTHONPATH": path}
    ended = forked.python(EXAMPLES / script, *options, env=env)
    assert ended.returncode == status, f"{script}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout.splitlines()


def test_every_script_says_what_it_shows_and_stays_short():
    assert [name[:2] for name in SCRIPTS] == [f"{number:02}" for number in range(1, 13)]
    for name in SCRIPTS:
        text = (EXAMPLES / name).read_text()
        assert text.startswith('"""'), name
        assert f"python examples/{name}" in text.split('"""')[1], name
        assert 'print(f"shown: ' in text or 'f"shown: ' in text, name


OPTIONS = [
    (name, option)
    for name in SCRIPTS
    for option in re.findall(r'"(--\w+)",\s+type=bounded_int', (EXAMPLES / name).read_text())
]


@pytest.mark.parametrize("value", ["-1", "x", "1000000000000"])
def test_numbers_out_of_range_are_refused(value, monkeypatch, capsys):
    """Every numeric option is checked before anything is built."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    assert not [name for name in SCRIPTS if "type=int" in (EXAMPLES / name).read_text()]
    unbounded = {"--requests", "--seed", "--examples", "--interleave"}
    for name, option in OPTIONS:
        if value.isdigit() and (option in unbounded or name.startswith("07")):
            continue
        monkeypatch.setattr("sys.argv", [name, option, value])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / name))["main"]()
        assert ended.value.code == 2
        rule = rf"argument {option}: must be an int.*, got {value}\n"
        assert re.search(rule, capsys.readouterr().err), name


def test_tensorrt_says_what_is_missing():
    """This machine has no torch-tensorrt; tests/tensorrt compiles the same program."""
    if importlib.util.find_spec("torch_tensorrt") is not None:
        pytest.skip("torch-tensorrt is installed: tests marked tensorrt run the example")
    (line,) = run("10_tensorrt.py", status=1)
    assert line.startswith("needs torch-tensorrt: enable: torch_tensorrt must be installed")


def test_ops_eager():
    lines = run("01_ops_eager.py")
    assert any(line.endswith("[3.594, 8.0, 16.0, 24.0, 0.0, 0.0]") for line in lines)
    assert lines[-1] == "shown: 9 results of ragged steps on cpu, each as worked out by hand"


@pytest.mark.slow
@pytest.mark.nightly("transformers/test_context_parallel.py; no other runs the script")
def test_context_parallel():
    last = run("09_context_parallel.py", "--steps", 4)[-1]
    assert last.startswith("shown: 2 ranks decode the tokens of one process, 0 differ; each holds ")


@pytest.mark.slow
@pytest.mark.nightly("transformers/test_model.py samples schedules; no other runs the script")
def test_fuzz_your_model():
    last = run("06_fuzz_your_model.py", "--examples", 4)[-1]
    found = r"request \d, token 3 is off by [\d.]+ in \[.*\]"
    assert re.fullmatch(rf"shown: 4 schedules of .* right; .* shrinks to: {found}", last)


def test_continuous_batching_in_eager():
    lines = run("05_continuous_batching.py", "--eager", "--requests", 5, "--seed", 5)
    assert lines == [
        "5 requests have ended; one was preempted 1 times",
        "shown: 0 graphs for all steps, 4 of 4 blocks free again, "
        "0 of 5 requests differ in a bit from each alone",
    ]


@pytest.mark.slow
@pytest.mark.nightly("test_compile_step.py compiles such steps; no other runs 02, 03 and 07")
@pytest.mark.usefixtures("without_vectors")
def test_examples_of_the_compiled_step(tmp_path):
    last = run("02_compile_decode.py")[-1]
    shown = "graphs = 1, graph breaks = 0, recompiles = 0 in"
    assert int(re.fullmatch(rf"shown: {shown} (\d+) steps; 0 tokens differ .*", last)[1]) >= 64
    last = run("05_continuous_batching.py", "--requests", 12)[-1]
    assert last.startswith("shown: 1 graphs for all steps, 4 of 4 blocks free again, 0 of 12 req")

    trace = tmp_path / "trace.json"
    lines = run("07_trace.py", "--trace", trace, "--steps", 2)
    assert lines[-1].startswith("shown: of an eager step of ")
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"compiled step 1", "eager step 1", "attention ops"} <= names
    assert sum(name.startswith("fused ") for name in names) > 10

    lines = run("03_cuda_graph.py", "--steps", 8, "--device", "cpu")
    assert lines[-1].startswith("shown: no GPU here: compiled gives the tokens of the eager step")


@pytest.mark.slow
@pytest.mark.nightly("test_deepseek_v32.py has a changing batch in one graph; none compiles these")
@pytest.mark.usefixtures("without_vectors")
@pytest.mark.parametrize(
    ("script", "options", "steps"),
    [
        ("08_deepseek_v3.py", [], 32),
        ("08_deepseek_v3.py", ["--eager", "--version", 2], 32),
        ("12_deepseek_v32.py", [], 24),
        ("12_deepseek_v32.py", ["--eager", "--family", "GLM-5"], 24),
    ],
    ids=["V3", "V2", "V3.2", "GLM-5"],
)
def test_dense_and_selected_rows(script, options, steps):
    last = run(script, *options)[-1]
    graphs = 0 if options else 1
    assert last.startswith(f"shown: graphs = {graphs}, graph breaks = 0 in {steps} decode steps")
    assert last.endswith("0 tokens differ from Hugging Face's")


@pytest.mark.slow
@pytest.mark.nightly("test_quantized.py and test_compile_step.py; no other runs the script")
@pytest.mark.usefixtures("without_vectors")
@pytest.mark.parametrize("options", [["--eager"], []], ids=["eager", "compiled"])
def test_checkpoint(options):
    lines = run("11_checkpoint.py", *options)
    assert any(line.endswith("checked 427 tensors, 0.014 GB") for line in lines)
    parts = 0 if options else 7
    assert sum("compiling " in line for line in lines) == parts
    assert lines[-1].startswith(f"shown: 4 layers with fp4 experts on cpu, {parts} compiled parts")


@pytest.mark.slow
@pytest.mark.nightly("`make demo` packages a model, test_export.py runs packages in C++")
@pytest.mark.usefixtures("without_vectors")
def test_package_and_cpp_runner(tmp_path):
    """Build with CMake if it is installed, and with the compiler alone."""
    package, prefill = tmp_path / "decode.pt2", tmp_path / "prefill.pt2"
    shown = "shown: a C++ program linked to libtorch, not to Python, generates the 16 tokens that"
    packages = ["--package", package, "--prefill", prefill]
    lines = run("04_aoti_export.py", *packages, "--build", tmp_path / "build")
    assert lines[-1].startswith(shown)
    assert any("prompts in 2 steps" in line for line in lines)
    program = tmp_path / "build" / "aoti_runner"
    for arguments, message in [
        ([], "usage: aoti_runner [--prefill PACKAGE] PACKAGE NUM_TOKENS PROMPT"),
        (["--prefill", prefill], "usage: aoti_runner"),
        (["--prefill", package, package, "1", "a"], "--prefill is no package of export_prefill"),
        ([package, "1", "a", "b", "c"], "more prompts than the package has requests"),
        ([package, "600", "a"], "longer than the package's longest request"),
    ]:
        ended = subprocess.run([program, *arguments], capture_output=True, text=True)
        assert ended.returncode != 0
        assert message in ended.stderr
    calls = [(program, []), (program, ["--prefill", prefill])]
    # for a CUDA build of torch, its CMake files need nvcc
    if shutil.which("cmake") and (torch.version.cuda is None or shutil.which("nvcc")):
        assert not any("CMake fails" in line for line in lines)
        (tmp_path / "direct").mkdir()
        example = runpy.run_path(str(EXAMPLES / "04_aoti_export.py"))
        calls.append((example["build_directly"](tmp_path / "direct"), ["--prefill", prefill]))
    given = [package, "5", "Beautiful is", "In"]
    tokens = [
        subprocess.run([each, *how, *given], capture_output=True, text=True, check=True).stdout
        for each, how in calls
    ]
    assert len(tokens[0].splitlines()) == 2
    assert set(tokens) == {tokens[0]}
