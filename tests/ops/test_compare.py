"""The error budget of floats: results that it accepts and refuses."""

import pytest
import torch

from dsv4_ops.testing.case import Case, Exact, OpTesting
from dsv4_ops.testing.contract.compare import assert_agrees, assert_precise


def op_testing(value, magnitude=1.0, unit=None):
    value = torch.tensor(value, dtype=torch.float64)
    exact = Exact(value, torch.tensor(magnitude, dtype=torch.float64), unit)
    return OpTesting(cases=lambda: [], settings=({},), make=None, precise=lambda *_, **__: (exact,))


CASE = Case("called", (torch.zeros(1),))
ULP = 2.0**-23  # of float32 at 1


def agrees(actual, reference, testing):
    pair = (torch.tensor(values, dtype=torch.float32) for values in (actual, reference))
    assert_agrees("op", testing, CASE, *([tensor] for tensor in pair))


def test_one_rounding_and_a_half_is_allowed_though_the_reference_is_perfect():
    agrees([1 + ULP / 2, 2.0], [1.0, 2.0], op_testing([1.0, 2.0]))  # 1 + ULP / 2 is 1 in float32
    with pytest.raises(AssertionError, match="budgets from float64"):
        agrees([1 + ULP, 2.0], [1.0, 2.0], op_testing([1.0, 2.0]))


def test_half_as_much_again_as_the_reference_in_the_row_is_allowed():
    reference = [1.0, 2 + 8 * ULP]
    agrees([1 + 12 * ULP, 2.0], reference, op_testing([1.0, 2.0]))
    with pytest.raises(AssertionError, match=r"1\.08 budgets from float64 at \[0\]"):
        agrees([1 + 13 * ULP, 2.0], reference, op_testing([1.0, 2.0]))


def test_the_error_of_another_row_does_not_count():
    exact = op_testing([[1.0], [2.0]])
    with pytest.raises(AssertionError, match="budgets"):
        agrees([[1 + 8 * ULP], [2.0]], [[1.0], [2 + 8 * ULP]], exact)


def test_a_sum_that_cancels_is_measured_in_its_terms():
    agrees([100 * ULP], [0.0], op_testing([0.0], magnitude=200.0))
    with pytest.raises(AssertionError, match="budgets"):
        agrees([100 * ULP], [0.0], op_testing([0.0], magnitude=0.0))


def test_a_coarser_unit():
    agrees([1.09], [1.0], op_testing([1.0], unit=2**-4))
    with pytest.raises(AssertionError, match="budgets"):
        agrees([1.1], [1.0], op_testing([1.0], unit=2**-4))


@pytest.mark.parametrize("wrong", [0.0, float("inf"), float("-inf")])
def test_nan_must_be_nan(wrong):
    agrees([float("nan"), 1.0], [float("nan"), 1.0], op_testing([float("nan"), 1.0]))
    with pytest.raises(AssertionError, match="NaN or infinities"):
        agrees([wrong, 1.0], [float("nan"), 1.0], op_testing([float("nan"), 1.0]))


def test_infinities_keep_their_sign_and_numbers_stay_numbers():
    agrees([float("-inf"), 1.0], [float("-inf"), 1.0], op_testing([float("-inf"), 1.0]))
    for wrong in ([float("inf"), 1.0], [float("-inf"), float("nan")], [-3e38, 1.0]):
        with pytest.raises(AssertionError):
            agrees(wrong, [float("-inf"), 1.0], op_testing([float("-inf"), 1.0]))


def test_without_precise_every_bit_counts():
    exact = OpTesting(cases=lambda: [], settings=({},), make=lambda *_: None)
    agrees([1.0], [1.0], exact)
    with pytest.raises(AssertionError, match="differs"):
        agrees([1 + ULP], [1.0], exact)


def test_the_reference_itself_is_held_against_float64():
    assert_precise("op", op_testing([1.0]), CASE, [torch.tensor([1.0])])
    with pytest.raises(AssertionError, match="budgets"):
        assert_precise("op", op_testing([1.0]), CASE, [torch.tensor([1 + 2 * ULP])])
