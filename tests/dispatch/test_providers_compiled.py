"""Calls of ``benchmarks.choice``, kernels around the libraries' calls, and compile caches."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config

from benchmarks import choice as bench_choice
from tests.helpers import NIGHTLY, nightly
from tests.support import forked
from tests.support.providers_on_cpu import CASES, MODULE

pytest_plugins = ("tests.support.providers_on_cpu",)
pytestmark = pytest.mark.usefixtures("scalar_loops")


ROOT = Path(__file__).parents[2]


def test_the_benchmark_of_the_table_makes_calls(flash_mla, monkeypatch, capsys):
    """The benchmark calls all ops at the rules' sizes, and names libraries that do not run."""
    for op in bench_choice.SIZES:
        call = bench_choice.calls(op, 3, 64, 64, torch.device("cpu"))[0]
        expected = call(impl="reference")
        if op in CASES:
            actual = call(impl="flash_mla")
            torch.testing.assert_close(actual[0], expected[0], rtol=2e-2, atol=2e-2)
    monkeypatch.setattr(bench_choice, "unusable", lambda library: "not installed")
    assert bench_choice.main() == 1
    assert "flash_mla: not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_the_kernels_around_the_libraries():
    script = ROOT / "tests/kernels/interpreter/interpret_external.py"
    found = forked.interpreted(script, *["thorough"] * NIGHTLY)
    every = ["lists 12", "pages 24", "flash_mla 32", "deep_gemm 5"]
    assert found == (every if NIGHTLY else ["lists 2", "pages 4", "flash_mla 6", "deep_gemm 1"])


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
@pytest.mark.parametrize("kind", [*nightly("its code needs our ops too", "build"), "module"])
def test_cached_code_of_a_library_is_found_by_processes_that_have_it(kind, tmp_path):
    """The second process did not trace the call. A process without the library must not load the
    code. If the library is a module, whose functions are no ops, the code calls an op of ours."""
    if kind == "module":
        (tmp_path / "flash_mla.py").write_text(MODULE)
    env = {
        **os.environ,
        "ATEN_CPU_CAPABILITY": "default",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": ":".join([*sys.path, str(tmp_path)]),
    }

    def process(usable: str) -> str:
        done = forked.python("-c", CACHED, usable, kind, env=env, cwd=ROOT)
        return done.stdout.strip() or done.stderr

    assert process("1") == "['decode'] 0"
    assert process("1") == "['decode'] 1"
    assert "impl must be one that runs here, got 'flash_mla'. FlashMLA: gone" in process("0")
