"""Calls that repeat the launches of an earlier call, as Triton compiled them."""

import pytest
import torch

from dsv4_ops import testing
from dsv4_ops.core.registry import OPS, TRITON
from dsv4_ops.dispatch.define import _chosen
from dsv4_ops.kernels.launch_plans import PLANS
from dsv4_ops.testing.case import results

REPEATED = [name for name, op in OPS.items() if op.has_kernel and "group" not in op.parameters]


@pytest.mark.parametrize("name", REPEATED)
def test_a_repeated_call_has_the_same_bits(name):
    """Each named case is called twice; the first call's tensors are zeroed before the second."""
    spec = OPS[name]

    def run(case):
        made = spec.op(*case.tensors, **case.settings)
        return results(made, *(case.tensors[place] for place in spec.mutated))

    for case in testing.cases_of(name):
        first, again = (case.on("cuda").copy() for _ in range(2))
        PLANS.plans.clear()
        expected = [each.clone() for each in run(first)]
        for tensor in first.tensors:
            if tensor is not None:
                tensor.zero_()
        found, plans = run(again), list(PLANS.plans.values())
        assert None not in plans
        assert plans or _chosen(spec, case.tensors, case.settings)[0] != TRITON
        for ours, want in zip(found, expected, strict=True):
            left, right = (each.contiguous().flatten().view(torch.uint8) for each in (ours, want))
            assert torch.equal(left, right), case.name
