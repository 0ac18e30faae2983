"""Results and intermediate values of ops do not depend on ``torch.set_default_dtype``, which models
in bfloat16 often set, nor on ``torch.autocast``."""

import contextlib
from functools import partial

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


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype)


@pytest.mark.check
@pytest.mark.parametrize(
    "under",
    [
        partial(default_dtype, torch.float64),
        autocast,
        *nightly(
            "the same under float64",
            partial(default_dtype, torch.bfloat16),
            partial(autocast, torch.float16),
        ),
    ],
    ids=["float64", "autocast", "bfloat16", "autocast to float16"],
)
@pytest.mark.parametrize("name", OPS)
def test_results_are_those_of_float32(name, under):
    spec = OPS[name]
    for case in cases_of(name):
        want = case.run(spec.op, spec.mutated)
        with under():
            got = case.run(spec.op, spec.mutated)
        assert_same(f"{name}, {case.name}", got, want)


def test_a_graph_has_the_results_of_one_without_autocast():
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


@pytest.mark.parametrize("dtype", [DTYPES[0], *nightly("the same under float64", *DTYPES[1:])])
def test_a_graph_has_the_results_of_float32(dtype):
    """The lowering of this op is not its reference, but torch's attention with a mask."""
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
