"""Ops under ``torch.set_default_dtype``, as models in bfloat16 are often run: neither results nor
what is computed between follow it."""

import contextlib

import pytest
import torch

from dsv4_ops.attention import AttentionLayer
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing import cases_of
from dsv4_ops.testing.case import results
from dsv4_ops.testing.contract.compare import assert_same
from tests.helpers import nightly
from tests.support.layers import SPEC

DTYPES = [torch.float64, torch.bfloat16]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.check
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        pytest.param(torch.bfloat16, marks=pytest.mark.nightly("the same under float64")),
    ],
)
@pytest.mark.parametrize("name", OPS)
def test_results_are_those_of_float32(name, dtype):
    spec = OPS[name]
    for case in cases_of(name):
        want = case.run(spec.op, spec.mutated)
        with default_dtype(dtype):
            got = case.run(spec.op, spec.mutated)
        assert_same(f"{name}, {case.name}", got, want)


@pytest.mark.parametrize("dtype", [DTYPES[0], *nightly("the same under float64", *DTYPES[1:])])
def test_a_graph_has_the_results_of_float32(dtype):
    """Of the op whose lowering is not its reference, but torch's attention and a mask for it."""
    op, case = OPS["mla_prefill"].op, cases_of("mla_prefill")[0]
    want = results(op(*case.tensors, **case.settings))
    with default_dtype(dtype):
        call = torch.compile(lambda *tensors: op(*tensors, **case.settings), fullgraph=True)
        got = results(call(*case.tensors))
    assert_same(case.name, got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_a_layer_are_what_it_takes(dtype):
    table = SPEC.rope_table("c4", 64)
    with default_dtype(dtype):
        layer = AttentionLayer(
            SPEC, "c4", table, num_heads=2, swa_blocks=1, compressed_blocks=1, state_blocks=1
        )
    assert {weight.dtype for weight in layer.parameters()} == {torch.float32}
