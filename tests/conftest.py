"""Settings of the whole test run, made before anything imports torch."""

import contextlib
import fcntl
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support import cpu_seconds

hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")  # a busy machine must not fail a test

# A compilation makes a million objects but little garbage: collections take a tenth of the time.
gc.set_threshold(50_000, 20, 20)
# Dynamo would also collect garbage after every compilation.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# Images often forbid bytecode files; then each process compiles torch's Python files: 10 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# No test may find code that another test or an earlier run compiled.
os.environ.setdefault("DSV4_OPS_CACHE", "off")
# After a crashed compilation, Inductor's worker pool waits for minutes at exit; with one thread
# there is no pool.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# References and models make and drop tensors of megabytes; a worker that returned their memory to
# the system each time would spend a quarter of its CPU time on that.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**30))
# Idle threads must not spin: they would take the core from working threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Inductor would test each set of vector instructions with a compilation and a process; if the
# compiler lacks a set, kernels fail clearly without this test.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# The code that calls a package's kernels has no loops to optimise; -O1 would take 10 s.
if os.environ.get("DSV4_OPS_NIGHTLY") != "1":
    os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")

if "PYTEST_XDIST_WORKER" in os.environ and "DSV4_OPS_GPUS" in os.environ:  # share the GPUs
    _number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = str(_number % int(os.environ["DSV4_OPS_GPUS"]))

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    os.environ["OMP_NUM_THREADS"] = "1"  # processes that tests start inherit this

    import torch

    import tests.support.once
    import tests.support.quick
    import tests.support.unprobed  # noqa: F401

    torch.set_num_threads(1)


@pytest.fixture
def vectors() -> Iterator[None]:
    """Let Inductor use SIMD instructions in workers too, as it does for users."""
    from torch._inductor import config

    # precompiled headers for a single graph take more time than they save
    with config.patch({"cpp.simdlen": None, "cpp_cache_precompile_headers": False}):
        yield


# test_stubs.py runs this folder in a process of its own, where torch-tensorrt imports stubs
under_stubs = os.environ.get("DSV4_OPS_UNDER_STUBS")
collect_ignore_glob = [] if under_stubs else ["tensorrt/under_stubs/*.py"]


@pytest.fixture(autouse=True)
def _ours_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``impl="auto"`` select our kernels, except in tests of providers: a test that loads
    FlashMLA or DeepGEMM leaves the library loaded."""
    if "providers" not in request.node.nodeid:
        from dsv4_ops.dispatch import choice

        monkeypatch.setattr(choice, "is_faster", lambda *call: False)


OF_MODELS = {"transformers", "benchmarks/test_model", "gpu/test_model", "gpu/test_dsa_model"}
"""Files and folders of tests of models."""


@pytest.fixture(autouse=True)
def _no_grad_for_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Disable gradients in tests of models, and reset Dynamo before and after each.

    The conftest.py of these tests cannot have the fixture, because it imports transformers.
    """
    path = request.path.relative_to(Path(__file__).parent).with_suffix("")
    if OF_MODELS.isdisjoint(map(str, (path, *path.parents))):
        yield
        return
    import torch

    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dsv4_ops", "long suites in several calls")
    group.addoption("--part", metavar="K/N", help="run every N-th test, from the K-th on")
    group.addoption("--stop-after", type=float, metavar="S", help="skip the rest after S seconds")
    group.addoption("--cpu-seconds", metavar="FILE", help="write the time of each test and file")


def pytest_configure(config: pytest.Config) -> None:
    with contextlib.suppress(ImportError):  # pytest before 8.4 collects only once
        from _pytest.unraisableexception import gc_collect_iterations_key

        config.stash[gc_collect_iterations_key] = 1  # at the end; by default 5, which take 5 s
    seconds = config.getoption("--stop-after")
    if seconds is not None:  # workers get the time of the end, not the remaining seconds
        os.environ.setdefault("DSV4_OPS_STOP_AT", str(time.time() + seconds))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("--part")
    if chosen is not None:
        part, _, parts = chosen.partition("/")
        if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
            raise pytest.UsageError(f"--part must be K/N with 1 <= K <= N, got {chosen!r}")
        items[:] = items[int(part) - 1 :: int(parts)]
    for item in items:
        nightly = item.get_closest_marker("nightly")
        if nightly is not None and os.environ.get("DSV4_OPS_NIGHTLY") != "1":
            (shown_by,) = nightly.args
            item.add_marker(pytest.mark.skip(reason=f"in make test-all only: {shown_by}"))
    items[:] = _dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


def pytest_collection_finish() -> None:
    """Freeze the objects that imports made, so that no later collection visits them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def frozen_heap() -> None:
    """Freeze all objects: Hugging Face's managers collect garbage, which then takes less time."""
    gc.collect()
    gc.freeze()


def _dealt(items: list[pytest.Item], hands: int) -> list[pytest.Item]:
    """Sort slow tests to the front of each worker's part, so that short tests fill up its end.

    xdist gives all workers equally many consecutive tests. Slow tests of a file share fixtures,
    so they stay together. One worker runs all tests that fork, because it imports torch for them.
    """
    if hands == 1:
        return items
    files: dict[Path, list[pytest.Item]] = {}
    forking, short = [], []
    for item in items:
        if item.get_closest_marker("skip"):
            short.append(item)
        elif _forks(item):
            forking.append(item)
        elif item.get_closest_marker("slow"):
            files.setdefault(item.path, []).append(item)
        else:
            short.append(item)
    dealt: list[list[pytest.Item]] = [forking, *([] for _ in range(hands - 1))]
    for tests in sorted(files.values(), key=len, reverse=True):
        min(dealt, key=len).extend(tests)
    for number, hand in enumerate(dealt):
        size = (len(items) - sum(map(len, dealt[:number]))) // (hands - number)
        taken = max(size - len(hand), 0)
        hand += short[:taken]
        del short[:taken]
    return [item for hand in dealt for item in hand] + short


def _forks(item: pytest.Item) -> bool:
    """Return whether the test's file starts processes by ``forked.py`` or ``ranks.py``."""
    names = vars(item.module) if isinstance(item, pytest.Function) else {}
    forks = not names.keys().isdisjoint({"forked", "run_ranks", "start_forked"})
    return forks and not item.get_closest_marker("gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    end = os.environ.get("DSV4_OPS_STOP_AT")
    if end is not None and time.time() > float(end):
        pytest.skip(f"not run, --stop-after is over: {item.nodeid}")


_cpu_until_now = cpu_seconds.until_now()
_cpu_seconds: dict[str, float] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Any:
    """Give every report the CPU time of its phase, including that of ended processes."""
    global _cpu_until_now
    report = yield
    report.cpu_seconds = -_cpu_until_now + (_cpu_until_now := cpu_seconds.until_now())
    return report


def pytest_terminal_summary(config: pytest.Config) -> None:
    """Write the CPU seconds of files and tests, in descending order."""
    path = config.getoption("--cpu-seconds")
    if path is None or not _cpu_seconds:
        return
    files: dict[str, float] = {}
    for test, seconds in _cpu_seconds.items():
        file = test.partition("::")[0]
        files[file] = files.get(file, 0.0) + seconds
    rows = [("total", sum(files.values())), *_largest(files), *_largest(_cpu_seconds)]
    Path(path).write_text("".join(f"{seconds:8.1f} {name}\n" for name, seconds in rows))


def _largest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failed test at once, because pytest prints no summary when it is killed."""
    taken = getattr(report, "cpu_seconds", 0.0)
    _cpu_seconds[report.nodeid] = _cpu_seconds.get(report.nodeid, 0.0) + taken
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        reason = str(report.longrepr).strip().rpartition("\n")[2]
        print(f"\nFAILED {report.nodeid} ({report.when}): {reason}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Hold a lock that all workers on this machine share."""
    with Path(tempfile.gettempdir(), f"dsv4_ops_{name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


@pytest.fixture
def gpu_memory_alone() -> Iterator[None]:
    """Run tests that take 10 GB or more one at a time, so that all workers fit an 80 GB GPU."""
    with _alone("gpu_memory_" + os.environ.get("CUDA_VISIBLE_DEVICES", "")):
        yield
        _give_back_gpu_memory(0)


@pytest.fixture(autouse=True)
def _gpu_memory_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Free cached GPU memory after a test, because workers share the GPU."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        _give_back_gpu_memory(2**30)


def _give_back_gpu_memory(kept: int) -> None:
    import torch

    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > kept:
        gc.collect()
        torch.cuda.empty_cache()
