"""FP8 linear layers: codes of the official recipe, scales, groups, and memory of compiled code."""

import pytest
import torch
from hypothesis import given

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.lowering.inspect import compile_and_get_code
from dsv4_ops.testing.float64.linear import fp8_weight
from tests.helpers import assert_right
from tests.ops.test_contract import patterns
from tests.oracles import kv as oracles
from tests.support.sampled import sampled

SEED = torch.Generator().manual_seed(7)
OFFICIAL = testing.op_testing("quantize_rows").settings[0]


def weight_and_scale(rows, columns):
    return fp8_weight(torch.Generator().manual_seed(rows + columns), rows, columns, ue8m0=True)


def bf16(*shape):
    return torch.randn(shape, generator=SEED).to(torch.bfloat16)


@pytest.mark.check
@sampled(40)
@given(testing.op_testing("quantize_rows").strategy(settings=OFFICIAL))
def test_codes_of_the_official_recipe_are_those_of_the_oracle(case):
    """The recipe's lower bound of 1e-4 gives the smallest scale of the caches, 2^-22."""
    values, scales = case.run(ops.quantize_rows)
    for row, codes, bytes_of_row in zip(
        patterns(case.tensors[0]),
        patterns(values),
        (scales.view(torch.int32) >> 23).tolist(),
        strict=True,
    ):
        blocks = [oracles.quantize(row[first : first + 128]) for first in range(0, len(row), 128)]
        assert bytes_of_row == [byte for byte, _ in blocks]
        assert codes == [code for _, block in blocks for code in block]


def test_w8a8_is_the_product_of_what_quantize_rows_returns():
    x, (weight, scale) = bf16(5, 256), weight_and_scale(128, 256)
    rows = ops.quantize_rows(x)
    given = ops.fp8_linear(rows.values, weight, scale, rows.scales)
    assert torch.equal(given, ops.fp8_linear(x, weight, scale, activations="fp8"))
    assert not torch.equal(given, ops.fp8_linear(x, weight, scale))


def test_scales_are_the_bytes_of_e8m0_or_its_values():
    x, (weight, scale) = bf16(3, 128), weight_and_scale(256, 128)
    scale[0] = torch.tensor([0])  # 2^-127 is a subnormal float32
    loaded = scale.view(torch.float8_e8m0fnu)
    by_bytes = ops.fp8_linear(x, weight, loaded.view(torch.uint8))
    assert torch.equal(by_bytes, ops.fp8_linear(x, weight, loaded.float()))
    assert loaded.float()[0].item() == 2.0**-127


def test_a_scale_of_nan_stays_in_its_outputs():
    x, (weight, scale) = bf16(2, 256), weight_and_scale(256, 256)
    scale[1, 1] = 255
    product = ops.fp8_linear(x, weight, scale)
    assert product[:, 128:].isnan().all()
    assert product[:, :128].isfinite().all()


def test_norm_quantisation_and_product_compile_to_one_graph():
    """The norm is fused with the quantisation; the graph contains no op of ours."""
    weight, scale = weight_and_scale(128, 256)

    def layer(x, gamma):
        rms = torch.rsqrt((x.float() ** 2).mean(-1, keepdim=True) + 1e-6)
        normed = (x.float() * rms * gamma).to(torch.bfloat16)
        return normed, ops.fp8_linear(normed, weight, scale, activations="fp8")

    x, gamma = bf16(5, 256), torch.rand(256)
    torch._dynamo.reset()
    (normed, product), code = compile_and_get_code(torch.compile(layer, fullgraph=True), x, gamma)
    assert "torch.ops.dsv4_ops" not in "".join(
        line for line in code.splitlines() if not line.strip().startswith("#")
    )
    assert_right("fp8_linear", testing.Case("fused", (normed, weight, scale), W8A8), (product,))


W8A8 = testing.op_testing("fp8_linear").settings[1]
