"""Parts of a step that other processes compile."""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from pickle import PicklingError
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.compile_cache.calls import (
    has_replaced_functions,
    packed,
    unpacked,
)
from dsv4_ops.integrations.transformers.compile_cache.precompiled import environment, loaded, state
from dsv4_ops.integrations.transformers.steps import compiled, part_processes
from dsv4_ops.integrations.transformers.steps.compiled import structure_of_call
from dsv4_ops.integrations.transformers.steps.part_process import Job, compiled_part
from dsv4_ops.integrations.transformers.steps.part_processes import PartProcesses, num_processes
from dsv4_ops.lowering import workers
from dsv4_ops.testing.mla_checkpoint import write_mla_checkpoint
from dsv4_ops.testing.models import small_mla_model

SUPPORT = "import tests.support.once, tests.support.quick, tests.support.unprobed"
SCALE = 2.0
CPU, SETTINGS = torch.device("cpu"), {"fullgraph": True, "dynamic": True}
READY = "import pickle; pickle.dump('ready', sys.stdout.buffer); sys.stdout.flush(); "
LINEAR = nn.Linear(4, 3).requires_grad_(False), (torch.zeros(7, 4),), {}
"""A call; a process cannot import the classes of this file."""


def job():
    with torch.no_grad(), compiled.traces_for_all_sizes():
        return Job(
            name="linear", call=packed(LINEAR), described=compiled.described_call(LINEAR),
            settings=SETTINGS, environment=environment(SETTINGS), device=CPU, state=state(CPU),
            precision="highest",
        )  # fmt: skip


def test_calls_arrive_as_they_were_sent(tmp_path):
    """This holds for all parts of a patched FP8 V3, whose buffers share memory with its weights."""
    model = v4.patch(v4.load_quantized(write_mla_checkpoint(tmp_path / "v3", "v3")))
    cache = v4.PagedCache.for_model(model, max_batch_size=1, max_cache_len=64)
    step = v4.compile_step(model, mode="regional", dynamic=True)
    step._follow()
    calls = step._dry_runs.calls(step.model, cache.tensors, 1, 1, {})
    assert len(calls) == 5
    (_, _, rest) = calls["DeepseekV3MLP"]
    context = rest["dsv4_ops"]
    # None is only for steps of one token per request, and the part serves all steps
    assert context.step.decode_start_loc is not None
    other = replace(context, step=replace(context.step, decode_start_loc=None))
    structures = [structure_of_call((0, (), {"dsv4_ops": each})) for each in (context, other)]
    assert structures[0] != structures[1]
    for call in calls.values():
        assert compiled.described_call(unpacked(packed(call))) == compiled.described_call(call)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * SCALE


def test_a_call_that_reads_variables_of_other_packages_is_not_sent(monkeypatch):
    linear, x = nn.Linear(4, 3), torch.zeros(7, 4)
    linear.weight.scale = 2.0
    assert unpacked(packed(linear)).weight.scale == 2.0
    for value in (Scaled(4, 3), lambda x: x, torch.zeros(2, 2).to_sparse()):
        with pytest.raises(PicklingError):
            packed((linear, (x, value), {}))
    monkeypatch.setattr(nn.Linear, "forward", Scaled.forward)
    with pytest.raises(PicklingError, match="forward of another package"):
        packed(linear)
    assert not has_replaced_functions()
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x: x)
    assert has_replaced_functions()


def test_a_part_is_compiled_only_if_both_processes_describe_it_alike():
    part, x = loaded(compiled_part(job()), vars(compiled)), torch.randn(5, 4)
    torch.testing.assert_close(part.run(LINEAR[0], (x,), {}), LINEAR[0](x))
    for name, value in (("described", "other"), ("environment", "other"), ("state", (None,))):
        with pytest.raises(RuntimeError, match=f"{name} differs"):
            compiled_part(replace(job(), **{name: value}))


@pytest.mark.parametrize("program", ["1 / 0", READY, READY + "print()", "sys.stdin.read()"])
def test_this_process_compiles_what_no_process_can(program, monkeypatch):
    """A process ends at once, ends in its job, sends no answer but a line, or is never ready."""
    monkeypatch.setattr(part_processes, "num_processes", lambda _: 1)
    monkeypatch.setattr(part_processes, "_PROGRAM", f"import sys; {program} # {{}}")
    processes = PartProcesses(CPU)
    assert processes.start()
    (process,) = processes._processes
    processes.send({"linear": job()})
    assert processes.take("linear") is processes.take("unknown") is None
    processes.close()
    assert process.poll() is not None


def run_twice():
    """Let a process compile all parts but the first; a second step loads all parts."""
    starts, start = [], part_processes._started
    program = part_processes._PROGRAM.replace("from dsv4", f"{SUPPORT}; from dsv4", 1)
    patch = pytest.MonkeyPatch()
    patch.setattr(part_processes, "_PROGRAM", program)
    patch.setattr(part_processes.Future, "cancel", lambda self: False)  # wait for imports
    patch.setattr(part_processes, "num_processes", lambda _: 1)
    patch.setattr(part_processes, "_started", lambda: starts.append(1) or start())
    model = v4.patch(small_mla_model(num_hidden_layers=1), kv="fp32", precision="reference")
    for _ in range(2):
        cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=64)
        rows = torch.tensor([cache.add(name, num_tokens=1) for name in "ab"]).int()
        batch = v4.StepBatch(torch.tensor([7, 8]), *map(torch.IntTensor, ([0, 1, 2], [1, 1])), rows)
        step = v4.compile_step(model, mode="regional", dynamic=True)
        found = step(batch, cache)
        torch.testing.assert_close(found, v4.decode_step(model, batch, cache))
        assert list(step.parts) == ["metadata", "DeepseekV3MLP", "norm", "head"]
        assert (counters["stats"]["unique_graphs"], starts) == (1, [1])


def test_processes_compile_all_parts_but_the_first(tmp_path):
    """This runs in a process of its own, because other tests change what parts depend on."""
    program = f"{SUPPORT}; from {__name__} import run_twice; run_twice()"
    environment = os.environ | {"DSV4_OPS_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    folder = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=folder)


@pytest.mark.parametrize(
    ("cores", "free", "count"), [(16, 9, 4), (64, 9, 4), (8, 9, 2), (7, 9, 0), (16, 1, 1)]
)
def test_the_number_of_processes(cores, free, count, monkeypatch):
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(workers, "available_cores", lambda: cores)
    monkeypatch.setattr(workers, "compile_workers", lambda: print)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free << 30, 100 << 30))
    assert (num_processes(gpu), num_processes(CPU)) == (count, 0)
    monkeypatch.setenv("DSV4_OPS_COMPILE_PROCESSES", "1")
    assert num_processes(gpu) == min(count, 1)
    for name, match in (("off", None), ("-1", "COMPILE_PROCESSES must be a number of processes")):
        monkeypatch.setenv("DSV4_OPS_COMPILE_PROCESSES", name)
        with pytest.raises(ValueError, match=match) if match else nullcontext():
            assert num_processes(gpu) == 0
    monkeypatch.setattr(workers, "compile_workers", lambda: None)
    assert num_processes(gpu) == 0
