"""Ops under ``torch.autocast``: dtypes are exact, so nothing inside of an op is cast."""

import pytest
import torch

from dsv4_ops.core.registry import OPS
from dsv4_ops.testing import cases_of
from dsv4_ops.testing.case import results
from dsv4_ops.testing.contract.compare import assert_same
from tests.helpers import nightly


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *nightly("bfloat16", torch.float16)])
@pytest.mark.parametrize("name", OPS)
def test_results_are_those_without_it(name, dtype):
    spec = OPS[name]
    for case in cases_of(name):
        want = case.run(spec.op, spec.mutated)
        with autocast(dtype):
            got = case.run(spec.op, spec.mutated)
        assert_same(f"{name}, {case.name}", got, want)


def test_a_graph_has_the_results_of_one_without_it():
    op, case = OPS["mla_v_up"].op, cases_of("mla_v_up")[-1]
    call = torch.compile(lambda *tensors: op(*tensors, **case.settings), fullgraph=True)
    want = results(call(*case.tensors))
    with autocast():
        got = results(call(*case.tensors))
    assert_same(case.name, got, want)


def test_what_is_around_an_op_is_cast():
    case = cases_of("sinkhorn")[0]
    (logits,) = case.tensors
    with autocast():
        mixed = torch.ops.dsv4_ops.sinkhorn(logits, **case.settings)
        assert (mixed.flatten(1) @ logits.flatten(1).mT).dtype == torch.bfloat16
    assert mixed.dtype == logits.dtype
