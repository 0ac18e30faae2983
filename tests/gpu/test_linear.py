"""FP8 linear layers on a GPU: our kernels and torch's block-wise product against the reference."""

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops.dispatch.choice import scaled_mm_obstacle
from dsv4_ops.testing.case import Case
from tests.dispatch.test_scaled_mm import BF16_OUT, W8A8, call
from tests.helpers import assert_right


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
    assert_right("fp8_linear", Case("scaled_mm", tuple(tensors), BF16_OUT), (found,))


@pytest.mark.parametrize("given", ["bf16", "codes"])
@pytest.mark.parametrize("num_tokens", [1, 16, 20, 64, 70, 300])
def test_kernels_of_every_tile_are_the_product_of_the_reference(num_tokens, given):
    """The number of tokens decides the tiles, the splits of K, and how activations are ordered."""
    x, weight, scale = call(num_tokens, 256, 1024)
    settings = {"activations": "bf16", "out_dtype": torch.bfloat16, "impl": "triton"}
    tensors = (x, weight, scale)
    if given == "codes":
        rows = ops.quantize_rows(x)
        tensors = (rows.values, weight, scale, rows.scales * 1.5)
    tensors = tuple(tensor.cuda() for tensor in tensors)
    case = Case("triton", tensors, settings)
    assert_right("fp8_linear", case, case.run(ops.fp8_linear))
    pairs = enumerate(tensors)
    groups = [each.unflatten(1, (2, -1)) if place in (0, 3) else each for place, each in pairs]
    if given == "codes":
        groups[0], groups[3] = groups[0].transpose(0, 1), groups[3].transpose(0, 1)
    groups[1], groups[2] = groups[1][:, :512].contiguous(), groups[2][:, :4].contiguous()
    case = Case("groups", tuple(groups), settings)
    assert_right("fp8_grouped_linear", case, case.run(ops.fp8_grouped_linear))
