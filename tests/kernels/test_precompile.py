"""Workers compile the kernels that a call would launch, before it launches them."""

import importlib
import os
import pkgutil
import time
import zlib
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from triton import knobs

from dsv4_ops import kernels
from dsv4_ops.core.registry import OPS
from dsv4_ops.core.torch_compat import FakeTensorMode
from dsv4_ops.dispatch import kernel_requests as requested
from dsv4_ops.dispatch.kernel_requests import kernel_requests
from dsv4_ops.kernels import precompile
from dsv4_ops.kernels.common.triton_compat import name_alike
from dsv4_ops.kernels.kv_cache import plain
from dsv4_ops.kernels.launcher import EAGER
from dsv4_ops.kernels.mla.expand import mla_expand_kernel
from dsv4_ops.kernels.mla_context.prefill_kernel import mla_prefill_kernel
from dsv4_ops.lowering import _compat, workers as inductor
from dsv4_ops.ops import context_parallel
from dsv4_ops.testing import op_testing
from tests.support.attention_batches import GATHERED, gathered_case
from tests.support.hopper import Workers, hopper, on_cuda  # noqa: F401  # a fixture
from tests.support.mla_batches import mla_case, sparse_case


@pytest.fixture
def compiled(monkeypatch):
    """Record the kernels that this process asks Triton for, and whether the folder has them."""
    seen = []
    listener = lambda src, metadata, metadata_group, times, cache_hit: seen.append(  # noqa: E731
        (src.name, cache_hit)
    )
    monkeypatch.setattr(knobs.compilation, "listener", listener)
    return seen


def called(name, case):
    """Call an op on a simulated GPU, with fake tensors like those of a case."""
    with FakeTensorMode(), torch.no_grad():
        return OPS[name].op(*pytree.tree_map(on_cuda, case.tensors), **case.settings)


def first(op="insert_k_cache"):
    """Call the first case of an op whose kernel is small."""
    called(op, next(iter(op_testing(op).cases())))


def jobs_of_a_new_process():
    """Forget a kernel, as if this process were new, and compile it; return the number of jobs."""
    vars(plain.insert_rows_kernel).pop("_do_compile", None)
    plain.insert_rows_kernel.device_caches.clear()
    workers = Workers()
    with precompile.requests(workers.submit):
        first()
    with kernel_requests(precompile.REQUESTED):
        first()
    return len(workers.asked)


@pytest.mark.usefixtures("hopper")
def test_a_launch_reads_what_a_worker_compiled(compiled):
    """A worker compiles once, in the first wait; sizes of the same class make no other request."""
    workers = Workers()
    with precompile.requests(workers.submit):
        first()
        first()
    assert len(workers.asked) == 1
    assert workers.ran == 0
    with kernel_requests(precompile.REQUESTED):  # compiles like a launch, and launches nothing
        first()
    assert workers.ran == 1
    (worker, here) = compiled
    assert worker[0] == here[0]
    assert (worker[1], here[1]) == (False, True)


@triton.jit
def fill_kernel(out_ptr, value, SIZE: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, SIZE), value)


@pytest.mark.usefixtures("hopper")
def test_a_launch_with_options_waits_for_its_job(monkeypatch):
    """Triton's key of a kernel is a text that has the launch's options in their order."""
    workers, out = Workers(), torch.zeros(64)
    launch = (out, 7), {"SIZE": 64, "num_warps": 2, "num_stages": 1}
    with precompile.requests(workers.submit):
        precompile.REQUESTED(fill_kernel)[(1,)](*launch[0], **launch[1])
    jobs = vars(fill_kernel)["_do_compile"]
    monkeypatch.setattr(jobs, "compile", lambda *args: None)  # Triton then launches nothing
    EAGER(fill_kernel)[(1,)](*launch[0], **launch[1])
    assert (len(workers.asked), workers.ran) == (1, 1)


@pytest.mark.usefixtures("hopper")
def test_a_job_that_fails_costs_time_only(compiled, monkeypatch):
    def submit(function, content):
        def wait():
            raise RuntimeError("the worker died")

        return wait

    said = []
    monkeypatch.setattr(precompile._log, "info", lambda *values: said.append(values))
    with precompile.requests(submit):
        first("gather_k_cache")
    with kernel_requests(precompile.REQUESTED):
        first("gather_k_cache")
    assert [hit for _, hit in compiled] == [False]
    assert str(said[0][2]) == "the worker died"


LARGER = {
    "mla_decode": mla_case(0, [2, 1], 16),
    "mla_sparse": sparse_case(mla_case(0, [2, 1], 16)),
    GATHERED: gathered_case(0, 2, 64, 128),
}
"""Calls of kernels that do not support the small cases of their ops."""


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", [name for name, spec in OPS.items() if spec.has_kernel])
def test_every_launcher_runs_with_fake_tensors(name, monkeypatch):
    """At least one call per op launches; no launcher raises: a request would hide the error."""
    workers, launched, wrap = Workers(), [], precompile.REQUESTED.wrap
    monkeypatch.setattr(
        precompile.REQUESTED, "wrap", lambda kernel: launched.append(kernel) or wrap(kernel)
    )
    monkeypatch.setattr(requested._log, "debug", lambda text, op, exc_info: pytest.fail(text % op))
    with precompile.requests(workers.submit):
        for case in [LARGER[name]] if name in LARGER else op_testing(name).cases():
            called(name, case)
    assert launched


@pytest.mark.usefixtures("hopper")
def test_kernels_between_ranks_are_asked_for(compiled, monkeypatch):
    """Two sizes of a merge have tiles of 1 and 16 rows, and the rows of a gather are integers of 8
    bytes. A launch finds what the workers compiled."""
    monkeypatch.setattr(context_parallel, "timeout_of", lambda group, device: timedelta(minutes=10))
    monkeypatch.setattr(requested._log, "debug", lambda text, op, exc_info: pytest.fail(text % op))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        workers, group = Workers(), dist.group.WORLD.group_name
        for asking in (precompile.requests(workers.submit), kernel_requests(precompile.REQUESTED)):
            with asking, FakeTensorMode(), torch.device("cuda"):
                for tokens in (1, 256):
                    out, lse = torch.empty(tokens, 64, 512).bfloat16(), torch.empty(tokens, 64)
                    context_parallel.cp_combine(out, lse, group, via="symmetric_memory")
                context_parallel.cp_gather_rows(out, group, via="symmetric_memory")
    finally:
        dist.destroy_process_group()
    names = ["merge_ranks", "merge_ranks", "gather_ranks"]
    assert compiled == [(name, hit) for name in names for hit in (False, True)]


@pytest.mark.usefixtures("hopper")
def test_what_the_folder_has_is_not_asked_for():
    """An earlier process compiled the kernel, so no worker starts."""
    assert [jobs_of_a_new_process() for _ in range(2)] == [1, 0]


def test_a_key_does_not_depend_on_what_had_one_before():
    """Otherwise, another process would not find the kernel. Constants of equal names need equal
    values, because Triton 3.6 sorts them by addresses."""
    modules = pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")
    values = [each for m in modules for each in vars(importlib.import_module(m.name)).values()]
    functions = list(dict.fromkeys(each for each in values if isinstance(each, triton.JITFunction)))
    keys = []
    for order in (functions, functions[::-1]):
        for each in functions:
            each.hash, each.used_global_vals = None, {}
        keys.append({each.fn: name_alike(each).cache_key for each in order})
    assert keys[0] == keys[1]
    for each in functions:
        constants = {(name, repr(value)) for (name, _), (value, _) in each.used_global_vals.items()}
        assert len({name for name, _ in constants}) == len(constants), each.fn.__name__


@pytest.fixture
def pool(monkeypatch):
    """Replace Inductor's pool: return a queue of the jobs that start, and their futures."""
    started, jobs = SimpleQueue(), {}

    def submit(name, *_):
        started.put(name)
        return jobs.setdefault(name, Future())

    pools = SimpleNamespace(
        process_pool=lambda: SimpleNamespace(submit=submit), wait_pool_ready=lambda: None
    )
    monkeypatch.setattr(_compat, "AsyncCompile", pools)
    return started, jobs


def awaited(wait, sender, queued):
    """Wait in a thread that does not keep a failed test alive; return its result's future, after
    ``queued`` jobs are in the queue."""
    found, deadline = Future(), time.monotonic() + 9
    Thread(target=lambda: found.set_result(wait()), daemon=True).start()
    while sender._jobs.qsize() < queued and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_urgent_jobs_start_first(pool):
    """Three of four workers take our jobs. A job that a launch waits for starts next."""
    started, jobs = pool
    sender = inductor._Sender(4)
    waits = [sender.send(name, (), name in "abcf") for name in "abcdef"]
    assert [started.get(timeout=9) for _ in "abc"] == [*"abc"]
    jobs["a"].set_result(None)
    assert started.get(timeout=9) == "f"
    found = awaited(waits[4], sender, 3)  # d, e, and e again
    for name, following in zip("bc", "ed", strict=True):
        jobs[name].set_result(None)
        assert started.get(timeout=9) == following
    jobs["e"].set_result(7)
    assert found.result(timeout=9) == 7


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_begin_with_different_jobs(pool, rank, monkeypatch):
    """Two ranks share 8 cores and Triton's folder, so one sends 3 jobs, and its half of them first.
    A job that a launch waits for starts next."""
    started, jobs = pool
    monkeypatch.setattr(inductor, "_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    halves = [[], []]
    for name in "abcdefghijklmnop":
        halves[zlib.crc32(f"('{name}',)".encode()) % 2].append(name)
    (*first, last), others = halves[rank][:4], halves[1 - rank][:2]
    sender = inductor._Sender(32)
    waits = [sender.send(name, (name,), True) for name in (*first, *others, last)]
    assert [started.get(timeout=9) for _ in first] == first
    found = awaited(waits[4], sender, 4)  # both others, the last, and an other again
    for name, following in zip(first, (others[1], last, others[0]), strict=True):
        jobs[name].set_result(None)
        assert started.get(timeout=9) == following
    jobs[others[1]].set_result(7)
    assert found.result(timeout=9) == 7


@pytest.mark.parametrize(
    ("rank", "ranks", "found"),
    [
        ("1", "2", (1, 2)), ("0", "1", (0, 1)),
        ("2", "2", (0, 1)), ("-1", "2", (0, 1)), ("0", "0", (0, 1)), ("x", "2", (0, 1)),
        ("1", None, (0, 1)), (None, "2", (0, 1)),
    ],
)  # fmt: skip
def test_ranks_without_sense_are_one_rank(rank, ranks, found, monkeypatch):
    for name, value in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", ranks)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    assert inductor._local_ranks() == found


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("starts", [True, False])
def test_inductor_waits_for_workers_that_start(monkeypatch, starts):
    """Inductor waits only while a thread compiles our parts; if no worker starts, it waits once."""
    waited = []

    class Compiler:
        def wait_pool_ready(self, timeout):
            waited.append(timeout)
            if not starts:
                raise TimeoutError(timeout)

        def triton(self, name):
            return name, len(waited)

    monkeypatch.setattr(_compat, "AsyncCompile", Compiler)
    method, parts = Compiler.triton, [inductor.kernels_in_workers() for _ in range(2)]
    for part in parts:  # the first ends before the second, as in two threads
        part.__enter__()
    assert list(map(Compiler().triton, "ab")) == [("a", 1), ("b", 1 + starts)]
    for part in parts:
        part.__exit__(None, None, None)
    assert Compiler.triton is method


def test_a_fork_starts_a_thread_of_its_own():
    sender = inductor._sender(2)
    child = os.fork()
    if child == 0:
        os._exit(inductor._sender(2) is sender)
    assert os.waitpid(child, 0) == (child, 0)


@pytest.mark.parametrize(
    ("kernel", "name"), [(mla_prefill_kernel, "cu_seq_lens"), (mla_expand_kernel, "num_valid")]
)
def test_bounds_of_a_later_chunk_need_no_other_kernel(kernel, name):
    """Chunk 1 of 32 requests begins 132 bytes into the table, which no dry run knows."""
    assert next(each for each in kernel.params if each.name == name).do_not_specialize
