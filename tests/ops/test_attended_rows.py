"""The rows that tokens attend to, which the contract's float64 results take from the reference:
equal to plain Python, over the calls of the contract."""

import pytest
import torch

from dsv4_ops import testing
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.case import tensor_names
from dsv4_ops.testing.contract.compare import exact_results
from tests.oracles import attention as oracles
from tests.support.sampled import for_each_call, sampled

ATTENTION = (
    *("sparse_mla_decode", "sparse_mla_decode_paged", "sparse_mla_gathered"),
    *("sparse_mla_prefill", "mla_decode", "mla_sparse"),
)


@pytest.mark.parametrize("name", ATTENTION)
def test_float64_results_are_over_the_rows_of_the_oracle(name):
    spec, op_testing = OPS[name], testing.op_testing(name)
    names, attended = tensor_names(spec.reference), []

    def check(case):
        expected = oracles.attended(name, names, case)
        for exact, value in zip(exact_results(op_testing, case), expected, strict=True):
            torch.testing.assert_close(exact.value, value, rtol=1e-9, atol=1e-12, equal_nan=True)
        attended.append(bool((expected[-1] > -torch.inf).any()))

    for_each_call(name, check, sampled(100))
    assert sum(attended) >= 5  # other calls have no rows to compare
