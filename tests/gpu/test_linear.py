"""FP8 linear layers on a GPU: torch's block-wise product beside the reference."""

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch.choice import scaled_mm_obstacle
from dsv4_ops.testing.contract.compare import assert_agrees
from tests.dispatch.test_scaled_mm import W8A8, call

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("num_tokens", [1, 5, 8, 128, 300])
def test_scaled_mm_is_the_product_of_the_reference(num_tokens, compiled):
    if scaled_mm_obstacle():
        pytest.skip(scaled_mm_obstacle())
    tensors = [tensor.cuda() for tensor in call(num_tokens, 512, 1024)]

    def product(*given):
        return ops.fp8_linear(*given, **W8A8)

    torch._dynamo.reset()
    found = (torch.compile(product, fullgraph=True) if compiled else product)(*tensors)
    settings = {**W8A8, "out_dtype": torch.bfloat16}
    case = testing.Case("scaled_mm", tuple(tensors), settings)
    expected = case.run(OPS["fp8_linear"].reference)
    assert_agrees("scaled_mm", testing.op_testing("fp8_linear"), case, (found,), expected)
