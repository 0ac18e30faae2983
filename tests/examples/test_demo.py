"""The demo: its measurements, and what it prints about them."""

import io
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.cpp_builder import CppBuilder

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing import models, text
from examples.demo import jobs, measure, ours, run, stock, table
from examples.demo.measure import Captured, Failed, Graphs, Unmeasured
from examples.demo.progress import Progress
from examples.demo.run import main


@pytest.fixture(scope="module")
def small():
    return models.small_model(eos_token_id=None)


@pytest.fixture(scope="module")
def prompts():
    return torch.tensor(text.prompts(2, 124))


def test_stock_decodes_what_its_own_generate_does_and_that_is_no_loop(small, prompts):
    decoded = measure.decode(stock.Stock(small, prompts), 40)
    assert decoded.tokens == stock.generated(small, prompts, 41)
    assert decoded.logits.shape == (41, 2, text.VOCAB_SIZE)
    assert min(len(set(row)) for row in decoded.tokens) > 20


def test_ours_decodes_the_tokens_of_stock(small, prompts):
    """The texts pass position 128, where the window and a C128 window end."""
    expected = measure.decode(stock.Stock(small, prompts), 8)
    patched = v4.patch(small, kv="fp32", precision="reference")
    try:
        decoded = measure.decode(ours.Ours(patched, prompts, 160), 8)
    finally:
        v4.unpatch(small)
    assert decoded.tokens == expected.tokens
    assert (decoded.logits - expected.logits).abs().max() < 1e-4


class Growing:
    """A side with a Python int in its cache: every step is another graph."""

    def __init__(self):
        self.prompts = torch.zeros(2, 1, dtype=torch.int64)
        self.length = 0

    @staticmethod
    def step(tokens, length):
        return torch.nn.functional.one_hot((tokens + length) % 5, 5).float()

    def start(self):
        self.length = 0
        return torch.eye(5)[:2]

    def arguments(self, tokens):
        self.length += 1
        return tokens, self.length


class Steady(Growing):
    """The same side with a tensor in its cache: all steps are one graph."""

    def arguments(self, tokens):
        self.length += 1
        return tokens, torch.tensor(self.length)


def test_decoding_follows_the_arguments():
    assert measure.decode(Growing(), 3).tokens == [[0, 1, 3, 1], [1, 2, 4, 2]]


def test_graphs_of_a_step_with_tensors_only():
    found = measure.count_graphs(Steady(), 12, backend="eager")
    assert (found.graphs, found.breaks, found.recompiles, found.fails_at) == (1, 0, 0, None)
    assert found.tokens == measure.decode(Steady(), 12).tokens


@torch._dynamo.config.patch(specialize_int=True)
def test_a_step_that_recompiles_fails_at_torchs_limit_and_is_counted_beyond():
    said = []
    found = measure.count_graphs(Growing(), 12, backend="eager", progress=said.append)
    limit = torch._dynamo.config.recompile_limit
    assert (found.graphs, found.recompiles, found.breaks) == (12, 11, 0)
    assert (found.limit, found.fails_at) == (limit, limit + 1)
    assert found.tokens == measure.decode(Growing(), 12).tokens
    assert len(said) == 13


@torch._dynamo.config.patch(specialize_int=True)
def test_counting_stops_at_enough_graphs():
    found = measure.count_graphs(Growing(), 12, backend="eager", enough=3)
    assert (found.graphs, found.recompiles, found.stopped_at) == (3, 2, 3)
    assert found.tokens == measure.decode(Growing(), 3).tokens
    found = measure.count_graphs(Growing(), 3, backend="eager", enough=3)
    assert (found.graphs, found.stopped_at) == (3, None)


def test_speed_is_of_all_requests(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    assert measure.tokens_per_second(Steady(), 23) == 2 * measure.CHUNK_STEPS


def test_an_attempt_keeps_the_error():
    assert measure.attempt(lambda: 3) == 3
    assert measure.attempt(lambda: {}["missing"]) == Failed("KeyError: 'missing'")


def test_a_package_that_does_not_load_says_how_its_process_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "RUNNER", tmp_path / "runner.py")
    ours.RUNNER.write_text("raise OSError('no package')")
    text = "the process of the package ended with 1: OSError: no package"
    with pytest.raises(RuntimeError, match=text):
        ours.decoded(ours.decoding_process(tmp_path / "decode.pt2", tmp_path / "inputs.pt"))


def test_both_files_of_a_package_compile_at_once_and_before_the_linker(monkeypatch):
    both, done = threading.Barrier(2, timeout=60), []

    def build(builder):
        if builder.name.endswith(".o"):
            both.wait()
        done.append(builder.name)

    monkeypatch.setattr(CppBuilder, "build", build)
    with ours._compilers_at_once():
        for name in ("x.wrapper.o", "x.kernel.o", "x.so"):
            CppBuilder.build(SimpleNamespace(name=name, get_target_file_path=lambda n=name: n))
    assert sorted(done[:2]) == ["x.kernel.o", "x.wrapper.o"]
    assert done[2:] == ["x.so"]
    assert CppBuilder.build is build


@pytest.mark.parametrize("name", ["dsv4_ops", "transformers"])
def test_the_process_of_a_package_can_import_neither(name):
    code = (
        f"import runpy, sys; refuse = runpy.run_path({str(ours.RUNNER)!r})['Refuse']\n"
        f"sys.meta_path.insert(0, refuse)\nimport {name}"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert f"ImportError: {name} is not to be imported here" in ended.stderr


WORK = jobs.Work(torch.device("cpu"), 1, 8)


def test_a_job_whose_process_dies_has_failed(monkeypatch):
    monkeypatch.setattr(jobs.sys, "executable", shutil.which("false"))
    with jobs.Job("package", WORK, Progress()) as job:
        assert job.result() == Failed("RuntimeError: its process ended with 1")


def test_a_job_that_raises_prints_its_error(monkeypatch, capsys):
    def raises(*_):
        raise OSError("no compiler")

    monkeypatch.setitem(jobs.JOBS, "package", (raises, ours.Package))
    assert main(["--job=package", "--layers=1", "--steps=8", "--device=cpu", "--since=0"]) == 0
    assert json.loads(capsys.readouterr().out) == {"error": "OSError: no compiler"}


TOKENS = [[1, 2, 3], [4, 5, 6]]


def graphs(**changed):
    made = Graphs(
        backend="eager", graphs=1, breaks=0, recompiles=0, limit=8, fails_at=None, seconds=2.0,
        tokens=TOKENS,
    )  # fmt: skip
    return replace(made, **changed)


def fake_demo(**changed):
    """Return a demo in which all went well, with ``changed`` figures of our side."""
    stock_figures = table.Figures(
        tokens=TOKENS, eager_speed=12.34, compiled_speed=Unmeasured("a reason"),
        graphs=graphs(graphs=16, recompiles=15, fails_at=9), host_syncs=Unmeasured("needs a GPU"),
        cuda_graph=Captured([[1, 2, 2], [4, 5, 5]]), static_generate=Failed("KeyError: 'x'"),
        package=Failed("ValueError: Unsupported input type"),
    )  # fmt: skip
    good = table.Figures(
        tokens=TOKENS, eager_speed=7.0, compiled_speed=463.2, graphs=graphs(backend="inductor"),
        host_syncs=0.0, cuda_graph=Captured(TOKENS), static_generate=[[1, 2], [4, 5]],
        package=ours.Package(3.25, 100.4, TOKENS, []), compiled_by="torch.compile",
    )  # fmt: skip
    setting = table.Setting("CPU", 2, "2.13", "5.23", "0.1", 2, "The Zen", 100, 2, 2, 3)
    return table.Demo(setting, stock_figures, replace(good, **changed), 1.2e-5, 3.0)


def test_the_table_says_what_was_measured_and_what_was_not():
    assert table.rows(fake_demo()) == [
        ("compiled decode: graphs", "16 (backend eager, 2 CPU s)", "1 (backend inductor, 2 CPU s)"),
        ("  graph breaks", "0", "0"),
        ("  recompiles over 2 steps", "15", "0"),
        ("  torch's recompile limit", "reached at step 9 (8)", "not reached (8)"),
        ("host syncs per step", "not measured: needs a GPU", "0"),
        ("CUDA graph", "no: replayed, only 4 of 6 the same", "yes, 6 of 6 the same"),
        ("greedy tokens", "6 (reference)", "6 of 6 the same, logits within 1.2e-05"),
        ("  compiled", "6 of 6 the same", "6 of 6 the same"),
        ("tokens/s, eager", "12.3", "7"),
        ("tokens/s, compiled by Inductor", "not measured: a reason", "463 (torch.compile)"),
        ("generate(cache_implementation='static')", "unsupported (KeyError)", "4 of 4 the same"),
        ("torch.export and AOTInductor package", "unsupported (ValueError)", "3.2 MB in 100 CPU s"),
        ("  its tokens, in a process with torch only", "-", "6 of 6 the same"),
    ]


def test_the_table_says_where_counting_stopped():
    demo = fake_demo()
    some = graphs(graphs=3, recompiles=2, stopped_at=3, tokens=[row[:2] for row in TOKENS])
    found = table.rows(replace(demo, stock=replace(demo.stock, graphs=some)))
    rows = {name: stock for name, stock, _ in found}
    assert rows["compiled decode: graphs"] == "3 and more (backend eager, 2 CPU s)"
    assert rows["  recompiles over 2 steps"] == "2 in 3 steps, where counting stopped"
    assert rows["  torch's recompile limit"] == "not counted so far (8)"
    assert rows["  compiled"] == "4 of 4 the same"


def test_the_table_is_followed_by_errors_in_full_and_the_setting():
    printed = table.render(fake_demo())
    heading = "Not supported by stock Hugging Face (expected, no failure of dsv4_ops):"
    assert f"{heading}\n  static cache: KeyError: 'x'\n" in printed
    assert "\n  torch.export and AOTInductor: ValueError: Unsupported input type\n" in printed
    assert "dsv4_ops failed" not in printed
    assert "2 requests with prompts of 100 tokens, 'The Zen' and so on, 2 decode steps" in printed
    assert "torch 2.13, transformers 5.23, dsv4_ops 0.1" in printed
    assert not any(line != line.rstrip() for line in printed.splitlines())


WRONG = [[1, 2, 3], [4, 5, 7]]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens": WRONG}, "greedy tokens of eager decode differ from stock Hugging Face: "
         "only 5 of 6 the same"),
        ({"graphs": graphs(tokens=WRONG)}, "greedy tokens of compiled decode differ"),
        ({"cuda_graph": Captured(WRONG)}, "greedy tokens of the CUDA graph differ"),
        ({"static_generate": WRONG}, "greedy tokens of generate with a static cache differ"),
        ({"static_generate": [[], []]}, "generate with a static cache differ from stock Hugging "
         "Face: 0 of 0 the same, 4 expected"),
        ({"package": ours.Package(1, 1, WRONG, [])}, "greedy tokens of the AOTInductor package"),
        ({"package": Failed("CppCompileError: no g++")}, "package failed with CppCompileError: no"),
        ({"graphs": Failed("Unsupported: print")}, "compiled decode failed with Unsupported"),
        ({"compiled_speed": Failed("Error: x")}, "compiled_speed failed with Error: x"),
        ({"graphs": graphs(graphs=3)}, "decode compiled to 3 graphs, 0 breaks, not 1"),
        ({"host_syncs": 2.0}, "waits for the device 2 times, not 0"),
        ({"package": ours.Package(1, 1, TOKENS, ["dsv4_ops"])}, "process imported dsv4_ops"),
    ],
)  # fmt: skip
def test_what_ours_did_not_do_is_a_problem(changed, said):
    (problem,) = table.problems(fake_demo(**changed))
    raised = any(isinstance(value, Failed) for value in changed.values())
    assert ("dsv4_ops failed, which it should not:" in table.render(fake_demo(**changed))) == raised
    assert said in problem
    assert table.as_json(fake_demo(**changed))["problems"] == [problem]


@pytest.mark.parametrize("difference", [1.1e-4, float("nan"), float("inf")])
def test_logits_beyond_the_promise_are_a_problem(difference):
    (problem,) = table.problems(replace(fake_demo(), logits_difference=difference))
    assert problem.startswith("logits differ from stock Hugging Face by")


@pytest.mark.parametrize("field", ["host_syncs", "cuda_graph", "package"])
def test_what_was_not_measured_is_no_problem(field):
    assert table.problems(fake_demo(**{field: Unmeasured("needs a GPU")})) == []


def test_all_measurements_are_json():
    found = json.loads(json.dumps(table.as_json(fake_demo())))
    assert found["ours"]["graphs"]["graphs"] == 1
    assert found["stock"]["host_syncs"] == {"reason": "needs a GPU"}
    assert found["table"][0]["stock"] == "16 (backend eager, 2 CPU s)"


@pytest.mark.parametrize(("wrong", "status"), [({}, 0), ({"tokens": WRONG}, 1)])
def test_the_exit_status_says_whether_tokens_differ(monkeypatch, capsys, tmp_path, wrong, status):
    monkeypatch.setattr(run, "run", lambda *_, **__: fake_demo(**wrong))
    out = tmp_path / "new" / "demo.json"
    assert main(["--device", "cpu", "--out", str(out)]) == status
    printed = capsys.readouterr()
    assert ("differ from stock Hugging Face" in printed.err) == bool(status)
    again = "-m examples.demo --model=v4 --steps=64 --layers=2 --device=cpu --stock-graphs=3"
    assert (again in printed.err) == bool(status)
    assert "16 (backend eager, 2 CPU s)" in printed.out
    assert json.loads(out.read_text())["setting"]["torch"] == "2.13"


@pytest.mark.parametrize(
    ("failed", "job"), [("graphs", "compile"), ("package", "package"), ("host_syncs", None)]
)
def test_a_failure_says_what_shows_it_alone(monkeypatch, capsys, failed, job):
    monkeypatch.setattr(run, "run", lambda *_, **__: fake_demo(**{failed: Failed("Error: x")}))
    assert main(["--device", "cpu"]) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"demo:   `{sys.executable} -m examples.demo --model=v4")
    assert line.endswith("runs it alone")
    assert re.findall(r"--job=(\w+)`", line) == ([job] if job else [])


@pytest.mark.parametrize(
    ("device", "package", "backend"),
    [("cpu", True, "eager"), ("cpu", False, "inductor"), ("cuda", True, "inductor")],
)
def test_inductor_compiles_the_step_once_on_a_cpu(device, package, backend):
    work = jobs.Work(torch.device(device), 3, 64, package=package)
    assert work.backend == backend
    again = run._parser().parse_args(jobs.arguments(work, "compile")[2:])
    assert (again.fast, again.job) == (not package, "compile")


@pytest.mark.parametrize(
    ("package", "folder"), [(Failed("Error: x"), jobs.ROOT), (ours.Package(1, 1, [], []), None)]
)
def test_without_a_package_its_speed_is_not_measured(package, folder):
    work = jobs.Work(torch.device("cpu"), 1, 8, folder=folder)
    assert run._compiled_speed(work, None, None, package) == {"compiled_speed": run.NO_PACKAGE}


def test_a_job_by_itself_raises(monkeypatch):
    def raises(*_):
        raise LookupError("broken on purpose")

    monkeypatch.setitem(jobs.JOBS, "compile", (raises, Graphs))
    with pytest.raises(LookupError, match="broken on purpose"):
        main(["--job=compile", "--device=cpu"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "7"], "must be an int, 8 to 4096, got 7"),
        (["--steps", "many"], "must be an int, 8 to 4096, got many"),
        (["--layers", "0"], "must be an int, 1 to 61, got 0"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_bad_options_are_refused(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--device", "cuda"]) == 2
    assert "--device must be one that torch sees, got cuda" in capsys.readouterr().err
    assert main(["--device", "tpu"]) == 2
    assert "--device must be auto, cpu or cuda, got 'tpu'" in capsys.readouterr().err


def test_a_long_task_says_that_it_goes_on():
    stream = io.StringIO()
    with Progress(since=time.time() - 100, every=0.01, stream=stream).during("a task"):
        time.sleep(0.2)
    first, *more = stream.getvalue().splitlines()
    assert first.startswith("[ 100.")
    assert first.endswith("s] a task")
    assert len(more) > 1
    assert all("still at it after 0 s: a task" in line for line in more)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_demo_on_a_gpu(tmp_path):
    out = tmp_path / "demo.json"
    assert main(["--fast", "--steps=40", "--device=cuda", f"--out={out}"]) == 0
    found = json.loads(out.read_text())
    assert found["ours"]["host_syncs"] == 0
    assert found["ours"]["cuda_graph"]["tokens"] == found["stock"]["tokens"]
