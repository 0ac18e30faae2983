"""What is measured under max_autotune, the kernels around the libraries, and caches of compiled
code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config

import dsv4_ops as ops
from benchmarks import choice as bench_choice
from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch import choice
from dsv4_ops.lowering import measure
from tests.fakes.deep_gemm import indexer_call
from tests.support.attention_batches import DECODE, decode_case
from tests.support.providers_on_cpu import (
    CASES,
    LIBRARY_OPS,
    MODULE,
    check,
    plan_of,
)

pytest_plugins = ("tests.support.providers_on_cpu",)
pytestmark = pytest.mark.usefixtures("scalar_loops")


# --- under max_autotune


ROOT = Path(__file__).parents[2]

MAX_AUTOTUNE = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}
"""Without Inductor's own candidates for products, which take minutes to compile."""


@pytest.mark.parametrize("winner", ["flash_mla", "reference"])
def test_max_autotune_measures_what_can_run(winner, flash_mla, monkeypatch):
    """On inputs of the compiled sizes, full lists, and once per sizes."""
    timed = []

    def time_of(spec, impl, values):
        case = decode_case(1, 7, 64)
        for name, tensor in zip(spec.parameters, case.tensors[:8], strict=False):
            if "cache" not in name:
                assert (values[name].shape, values[name].dtype) == (tensor.shape, tensor.dtype)
        assert bool((values["extra_lens"] == values["extra_indices"].shape[1]).all())
        assert int(values["extra_indices"].max()) < len(values["extra_cache"]) * 64
        timed.append(impl)
        return 1.0 if impl == winner else 2.0

    monkeypatch.setattr(measure, "_time_of", time_of)
    monkeypatch.setattr(choice, "ours", lambda spec: "reference")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    measure._measured.cache_clear()
    case = decode_case(1, 7, 64)
    for more in ({}, {"max_fusion_size": 8}):
        options = {**MAX_AUTOTUNE, **more}
        torch._dynamo.reset()
        flash_mla.calls.clear()
        compiled = torch.compile(
            lambda *t: ops.sparse_mla_decode(*t, **case.settings),
            options=options,
            dynamic=False,
            fullgraph=True,
        )
        check(DECODE, case, compiled(*case.tensors[:8]), "max_autotune")
        assert flash_mla.calls == ["decode"] * (winner == "flash_mla")
    assert timed == ["reference", "flash_mla"]
    measure._measured.cache_clear()


def test_max_autotune_on_a_cpu_measures_nothing():
    """Of a torch that cannot ask a GPU anything."""
    case = decode_case(1, 3, 8)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *t: ops.sparse_mla_decode(*t, **case.settings),
        options=MAX_AUTOTUNE,
        dynamic=False,
        fullgraph=True,
    )
    check(DECODE, case, compiled(*case.tensors[:8]), "max_autotune on a CPU")


@pytest.mark.parametrize("name", [*LIBRARY_OPS["flash_mla"], *LIBRARY_OPS["deep_gemm"]])
def test_inputs_that_are_measured_are_calls(name, flash_mla):
    """Every execution takes them; with a plan of FlashMLA too."""
    if name in CASES:
        case = CASES[name](0)
        tensors = list(case.tensors)
        if name == DECODE:
            tensors[8] = plan_of(case).schedule
        values = OPS[name].arguments(tensors, case.settings)
    else:
        (q, weights, cache), lens, rows = indexer_call(0)
        settings = {"block_size": 64, "layout": "v4_indexer_fp8"}
        if name == "indexer_logits":
            settings["num_rows"] = 256
        else:
            lens, settings = lens.long(), {**settings, "compress_ratio": 4, "topk": 60}
        values = OPS[name].arguments((q, weights, cache, lens, *rows), settings)
    torch.manual_seed(0)
    made = measure.example(name, dict(measure._signature(values)))
    assert set(made) == set(OPS[name].parameters)
    given = {**made, "plan": None} if "plan" in made else made
    expected = OPS[name].reference(**given)
    if name == "indexer_select":
        assert bool((expected >= 0).all())
    if name in CASES:
        actual = OPS[name].launcher("flash_mla")(None, **made)
        torch.testing.assert_close(actual[0], expected[0], rtol=2e-2, atol=2e-2)


def test_the_benchmark_of_the_table_makes_calls(flash_mla, monkeypatch, capsys):
    """Of every op and sizes that rules are about, and says which library does not run."""
    monkeypatch.setattr(bench_choice, "_BLOCKS", 3)
    for op in bench_choice.SIZES:
        rows = {"indexer_logits": 128, "indexer_select": 128}.get(op, 64)
        torch.manual_seed(0)
        made = measure.example(op, bench_choice.like(op, 3, 64, rows, "cpu"))
        expected = OPS[op].reference(**{**made, "plan": None} if "plan" in made else made)
        if op in CASES:
            actual = OPS[op].launcher("flash_mla")(None, **made)
            torch.testing.assert_close(actual[0], expected[0], rtol=2e-2, atol=2e-2)
    monkeypatch.setattr(bench_choice, "unusable", lambda library: "not installed")
    assert bench_choice.main() == 1
    assert "flash_mla: not installed" in capsys.readouterr().err


# --- the kernels around both


@pytest.mark.slow
def test_the_kernels_around_the_libraries():
    script = ROOT / "tests/kernels/interpreter/interpret_external.py"
    hidden = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env={**os.environ, **hidden},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.splitlines() == ["lists 12", "flash_mla 26", "deep_gemm 5"]


# --- caches of compiled code

CACHED = """
import sys, torch
import dsv4_ops as ops
from dsv4_ops.dispatch import choice
from tests.fakes import flash_mla as fake_flash_mla
from tests.support.attention_batches import decode_case
choice.DEVICES = ("cuda", "cpu")
usable, build = sys.argv[1] == "1", sys.argv[2] == "build"
choice.unusable = lambda library: "" if usable else "gone"
case = decode_case(1, 7, 64)
run = torch.compile(lambda *t: ops.sparse_mla_decode(*t, **case.settings, impl="flash_mla").out)
if usable and build:
    with fake_flash_mla.registered():
        run(*case.tensors[:8])
else:
    run(*case.tensors[:8])
from torch._dynamo.utils import counters
print(fake_flash_mla.calls, counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "build",
            marks=pytest.mark.nightly("the module's code needs ops of ours as well"),
        ),
        "module",
    ],
)
def test_cached_code_of_a_library_is_found_by_processes_that_have_it(kind, tmp_path):
    """The second process has not traced the call; one without the library must not find it. Of a
    module, whose functions are no ops, the code calls ours."""
    if kind == "module":
        (tmp_path / "flash_mla.py").write_text(MODULE)
    env = {
        **os.environ,
        "ATEN_CPU_CAPABILITY": "default",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": ":".join([*sys.path, str(tmp_path)]),
    }

    def process(usable: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", CACHED, usable, kind],
            capture_output=True,
            text=True,
            env=env,
            cwd=ROOT,
            check=False,
        )
        return done.stdout.strip() or done.stderr

    assert process("1") == "['decode'] 0"
    assert process("1") == "['decode'] 1"
    assert "impl must be one that runs here, got 'flash_mla'. FlashMLA: gone" in process("0")
