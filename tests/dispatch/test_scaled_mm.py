"""``impl="scaled_mm"``: the arguments of torch's product, with a fake that refuses what cublasLt
would refuse. tests/gpu/test_linear.py runs the product."""

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops.dispatch import choice
from dsv4_ops.dispatch.providers import choice_of
from dsv4_ops.kernels.external import scaled_mm
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.float64.linear import block_values, fp8_weight
from tests.helpers import assert_right

W8A8 = {"activations": "fp8", "impl": "scaled_mm"}
BF16_OUT = {**W8A8, "out_dtype": torch.bfloat16}


def call(num_tokens, rows=256, columns=512):
    seed = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, columns, generator=seed).to(torch.bfloat16)
    return x, *fp8_weight(seed, rows, columns, ue8m0=True)


def stand_in(x, weight, x_scale, scale, out_dtype):
    """Check the scales' strides: 1 over tokens for x, and 1 over columns for the weight."""
    (rows, columns), count = x.shape, weight.shape[1]
    blocks = columns // 128
    assert rows % 8 == 0
    assert x.dtype == weight.dtype == torch.float8_e4m3fn
    assert (x.stride(), weight.stride()) == ((columns, 1), (1, columns))
    assert x_scale.dtype == scale.dtype == torch.float32
    assert (x_scale.shape, x_scale.stride()) == ((rows, blocks), (1, rows))
    assert (scale.shape, scale.stride()) == ((blocks, count // 128), (1, blocks))
    assert out_dtype == torch.bfloat16
    values = block_values(weight.t(), scale.t(), 128, 128)
    return (block_values(x, x_scale, 1, 128) @ values.t()).to(out_dtype)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(choice, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(choice, "scaled_mm_obstacle", lambda: "")
    monkeypatch.setattr(scaled_mm, "block_product", stand_in)


@pytest.mark.parametrize("num_tokens", [0, 1, 8, 13])
def test_the_product_is_that_of_the_reference(on_cpu, num_tokens):
    x, weight, scale = call(num_tokens)
    found = ops.fp8_linear(x, weight, scale, **W8A8)
    assert_right("fp8_linear", Case("eager", (x, weight, scale), BF16_OUT), (found,))
    rows = ops.quantize_rows(x)
    given = ops.fp8_linear(rows.values, weight, scale.view(torch.float8_e8m0fnu).float(),
                           rows.scales, impl="scaled_mm")  # fmt: skip
    assert torch.equal(given, found)


@pytest.mark.parametrize("num_tokens", [0, 1, 8, 13])
def test_products_of_groups_are_those_of_the_reference(on_cpu, num_tokens):
    x, weight, scale = call(num_tokens, 512, 1024)
    x, weight, scale = x.unflatten(1, (2, -1)), weight[:, :512], scale[:, :4]
    found = ops.fp8_grouped_linear(x, weight, scale, **W8A8)
    assert_right("fp8_grouped_linear", Case("eager", (x, weight, scale), BF16_OUT), (found,))
    rows = ops.quantize_rows(x.transpose(0, 1).flatten(0, 1))
    codes, scales = (each.unflatten(0, (2, num_tokens)) for each in rows)
    given = ops.fp8_grouped_linear(codes, weight, scale, scales, impl="scaled_mm")
    assert torch.equal(given, found)


@pytest.mark.parametrize(
    ("columns", "settings", "message"),
    [
        (384, {}, "with in_features 384, got 'scaled_mm'. scaled_mm takes multiples of 512."),
        (512, {"activations": "bf16"}, "with activations 'bf16', got 'scaled_mm'. scaled_mm "
         "multiplies FP8 by FP8."),
        (512, {"out_dtype": torch.float32}, "with out_dtype torch.float32, got 'scaled_mm'. "
         "scaled_mm returns torch.bfloat16."),
    ],
    ids=["scales that torch would pad", "bf16", "float32"],
)  # fmt: skip
def test_what_it_does_not_take_is_refused(on_cpu, columns, settings, message):
    with pytest.raises(NotImplementedError) as error:
        ops.fp8_linear(*call(3, 128, columns), **{**W8A8, **settings})
    assert str(error.value) == f"fp8_linear: impl must be 'auto', 'triton' or 'reference' {message}"


def test_it_raises_where_it_does_not_run(monkeypatch):
    monkeypatch.setattr(choice, "DEVICES", ("cuda", "cpu"))
    choice.scaled_mm_obstacle.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError) as error:
        ops.fp8_linear(*call(3), **W8A8)
    choice.scaled_mm_obstacle.cache_clear()
    assert str(error.value) == (
        "fp8_linear: impl must be one that runs here, got 'scaled_mm'. "
        "It needs a Hopper GPU, compute capability 9.0."
    )


def test_auto_takes_it_from_so_many_tokens_on(on_cpu):
    """From these sizes on, torch's product was faster when measured. It needs FP8 activations."""
    most = choice.SCALED_MM_TOKENS["fp8_linear"]
    assert choice_of("fp8_linear", *call(most), activations="fp8").impl == "scaled_mm"
    assert choice_of("fp8_linear", *call(most - 1), activations="fp8").impl == "triton"
    assert choice_of("fp8_linear", *call(most)).impl == "triton"
    assert choice_of("fp8_linear", *call(3), **W8A8) == ("scaled_mm", "asked for")
    x, weight, scale = call(4096)
    both = (x[:, None].expand(-1, 2, -1), weight, scale)
    assert choice_of("fp8_grouped_linear", *both, activations="fp8").impl == "triton"


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_scaled_mm_v2"), reason="torch has none")
def test_torch_knows_such_a_product():
    """Torch's own fake refuses other layouts of the scales."""
    tensors = (tensor.to("meta") for tensor in call(13))
    product = scaled_mm.fp8_linear(None, *tensors, None, **BF16_OUT)
    assert (product.shape, product.dtype) == ((13, 256), torch.bfloat16)
