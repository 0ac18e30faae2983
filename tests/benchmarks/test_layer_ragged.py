"""The benchmark's C128 layers of requests of very different length, without and with a plan."""

import functools

import pytest
import torch

import dsv4_ops
from benchmarks import layer
from benchmarks.baselines.layer import Libraries
from benchmarks.cases import layer_cases
from benchmarks.cases.layer_cases import Requests, cost, layer_work, parts_of
from benchmarks.harness import measure, timing
from benchmarks.harness.work import Case
from benchmarks.layer import Bench, chosen_cases
from tests.benchmarks.test_layer import BASELINES, CPU, STAGES, OnePlan, SparseDecode, vllm
from tests.fakes.timing import pretend
from tests.fakes.vllm_ops import fakes

CONTEXTS = (384, 128, 1024)
each_plan = pytest.mark.parametrize("plan", [False, True], ids=["bare", "planned"])


def work_of(plan):
    return layer_work("c128", layer._SMALL, Requests(CONTEXTS, 2048, plan), CPU)


@each_plan
def test_every_request_is_at_the_end_of_a_window_of_its_own_pages(plan):
    step = parts_of(work_of(plan).sets[0])[3]
    assert step.positions.tolist() == [383, 127, 1023]
    assert step.c128.lens.tolist() == [3, 1, 8]
    assert step.c128.block_table.shape == (3, 8)
    assert (step.c128.block_table >= 0).sum(1).tolist() == [2, 1, 4]
    assert (step.swa_lens == 128).all()
    assert (step.swa_indices >= 0).all()
    for slots in (step.slot_mapping, step.c128.slot_mapping, step.c128.state_slot_mapping):
        assert (slots >= 0).all()
        assert len(slots.unique()) == 3
    used = step.c128.block_table[step.c128.block_table >= 0]
    assert len(used.unique()) == len(used)


def test_the_plan_is_that_of_the_step():
    step = parts_of(work_of(True).sets[0])[3]
    plan = dsv4_ops.sparse_mla_plan(step.swa_lens, step.c128.lens, num_heads=4)
    assert torch.equal(step.c128.plan, plan)
    bare = parts_of(work_of(False).sets[0])[3]
    assert (bare.c128.plan, step.c4.plan) == (None, None)


def test_costs_are_those_of_each_request():
    alone = [cost("c128", layer._SMALL, (context,)) for context in CONTEXTS]
    assert cost("c128", layer._SMALL, CONTEXTS) == tuple(map(sum, zip(*alone, strict=True)))


@each_plan
def test_a_row_is_checked_and_adds_up(monkeypatch, plan):
    """With the baselines' stages, which take requests of any length."""
    monkeypatch.setattr(measure, "compiled_op", lambda function: function)
    monkeypatch.setattr(layer, "host_us", lambda call: timing.Timing(6.0, 5.0, 7.0))
    bench = pretend(monkeypatch, Bench(CPU, None, budget_s=0.0), layer_cases)
    bench.modules = Libraries(vllm(), OnePlan(), SparseDecode(), **fakes())
    variant = "planned" if plan else ""
    build = functools.partial(layer_work, "c128", layer._SMALL, Requests(CONTEXTS, 2048, plan))
    labels = {"context": 2048, "heads": 4}
    row = bench.measure(Case("c128", "ragged", build, 3, 3, variant, labels=labels))
    assert row.error is row.baseline_error is None
    assert row.variant == variant
    assert (row.compiled_us, row.baseline_us, row.baseline_agrees) == (4.0, 4.0, True)
    assert (list(row.stages), list(row.baseline_stages)) == (STAGES["c128"], BASELINES["c128"])


def test_pairs_of_cases_differ_in_their_plan_only():
    cases = [case for case in chosen_cases(("c128",), smoke=False) if " to " in case.shape]
    assert [(case.requests, case.variant) for case in cases] == [
        (8, ""), (8, "planned"), (64, ""), (64, "planned"),
    ]  # fmt: skip
    for bare, planned in zip(cases[::2], cases[1::2], strict=True):
        assert bare.shape == planned.shape
        assert (bare.plotted, planned.plotted) == (False, False)
        requests = [case.build.args[2] for case in (bare, planned)]
        assert requests[0].contexts == requests[1].contexts
        assert [each.plan for each in requests] == [False, True]
        assert all(context % 128 == 0 and context <= 131072 for context in requests[0].contexts)
