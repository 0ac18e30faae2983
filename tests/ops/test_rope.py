"""The rotation: tables, pairs, the inverse, and its FP8 form."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.registry import OPS
from dsv4_ops.lowering.inspect import compile_and_get_code
from dsv4_ops.testing.contract.compare import assert_precise
from tests.helpers import i64
from tests.ops.test_contract import patterns
from tests.oracles import rope as oracles
from tests.oracles.compressor import single, value_of
from tests.support.sampled import sampled

YARN = {"theta": 160000.0, "scaling": ops.YarnScaling()}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_table_of_window_layers():
    """With theta 10000, pair 0 turns by a radian per position, and pair 16 by a hundredth."""
    table = ops.rope_cos_sin_cache(4096, theta=10000.0)
    assert table.shape == (4096, 64)
    assert table.dtype == torch.float32
    assert table[0].tolist() == [1.0] * 32 + [0.0] * 32
    for position, (pair, turn) in product((1, 2, 4095), ((0, 1.0), (8, 0.1), (16, 0.01))):
        assert table[position, pair].item() == single(math.cos(position * turn))
        assert table[position, 32 + pair].item() == single(math.sin(position * turn))


def test_slowdowns_of_yarn():
    """64 ln(65536 / 64 pi) / 2 ln(160000) is 15.45, and 64 ln(65536 / 2 pi) / 2 ln(160000) is
    24.71: pairs up to 15 keep their frequency, those from 25 on get 1/16, with a ramp between."""
    slowdowns = ops.YarnScaling().slowdowns(64, 160000.0)
    assert slowdowns[:16] == [1.0] * 16
    assert slowdowns[25:] == [0.0625] * 7
    expected = [1 - ramp / 10 * 15 / 16 for ramp in range(1, 10)]
    assert slowdowns[16:25] == pytest.approx(expected, rel=1e-15)
    table = ops.rope_cos_sin_cache(2, **YARN)
    frequency = 160000.0 ** (-40 / 64) * 0.53125
    assert table[1, 52].item() == pytest.approx(math.sin(frequency), rel=1e-7)


def transformers_frequencies(base, dim, factor, original, fast, slow):
    """Compute YaRN in transformers' form: a blend of interpolated and extrapolated frequencies."""

    def correction(rotations):
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low = max(math.floor(correction(fast)), 0)
    high = min(math.ceil(correction(slow)), dim - 1)
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    extrapolation = 1 - ramp
    return 1 / (factor * powers) * (1 - extrapolation) + 1 / powers * extrapolation


@pytest.mark.parametrize(
    "numbers",
    [
        (160000.0, 64, 16.0, 65536, 32.0, 1.0),
        (10000.0, 64, 40.0, 4096, 32.0, 1.0),
        (500000.0, 128, 8.0, 8192, 4.0, 1.0),
        (1000.0, 8, 2.0, 300, 64.0, 0.5),
        (1.5, 64, 4.0, 10**9, 32.0, 1.0),  # the ramp begins past the last pair
        (10000.0, 64, 4.0, 2, 32.0, 1.0),  # the ramp ends before the first pair
    ],
)
def test_table_is_that_of_transformers(numbers):
    base, dim, factor, original, fast, slow = numbers
    scaling = ops.YarnScaling(factor, original, fast, slow)
    table = ops.rope_cos_sin_cache(1000, theta=base, rope_dim=dim, scaling=scaling)
    angles = torch.arange(1000, dtype=torch.float64)[:, None] * transformers_frequencies(*numbers)
    expected = torch.cat([angles.cos(), angles.sin()], 1)
    torch.testing.assert_close(table.double(), expected, atol=6e-8, rtol=0)


def test_a_ramp_of_no_width_is_a_step():
    step = ops.YarnScaling(factor=4.0, original_positions=10**9, beta_fast=32.0)
    assert step.slowdowns(2, 10000.0) == [1.0]
    slow = ops.YarnScaling(factor=4.0, original_positions=1)
    assert slow.slowdowns(8, 10000.0) == [1.0, 0.25, 0.25, 0.25]


def test_late_positions_have_exact_angles():
    """At 1048575 a float32 angle is off by up to 0.03; our table is right to the last bit."""
    late = 2**20 - 1
    row = ops.rope_cos_sin_cache(late + 1, theta=10000.0, rope_dim=4)[late].tolist()
    angles = [float(late), late / 100]
    expected = [*map(math.cos, angles), *map(math.sin, angles)]
    assert row == [single(value) for value in expected]


def test_table_on_a_device():
    table = ops.rope_cos_sin_cache(3, theta=10000.0, device="meta")
    assert (table.device.type, table.shape) == ("meta", (3, 64))
    assert ops.rope_cos_sin_cache(0, theta=10000.0, rope_dim=2).shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotation_is_float32_with_one_cast(dtype):
    """The bits are those of two rounded products, a rounded sum and a cast, in Python."""
    table, x = ops.rope_cos_sin_cache(70000, **YARN), normal(9, 96, seed=1, dtype=dtype)
    positions = i64([0, 1, 2, 127, 128, 65535, 69999, 70000, -1])
    actual = ops.apply_rope(x, positions, table).tolist()
    rows = table[positions.clamp(0, 69999)].tolist()
    for token, position in enumerate(positions.tolist()):
        values = x[token].tolist()
        tail = oracles.rotated(values[32:], rows[token] if position in range(70000) else [])
        if dtype == torch.bfloat16:
            tail = [value_of(oracles.bf16_bits(value) << 16) for value in tail]
        assert actual[token] == values[:32] + tail


LAYOUTS = ("row", "column_padded", "ue8m0_packed")


@pytest.mark.parametrize("scale_layout", LAYOUTS)
def test_fp8_form_has_the_bytes_of_the_oracle(scale_layout):
    """Codes and scales equal those of ``inverse_rope_group``'s bf16 rows; some rows are special."""
    options = {"num_groups": 2, "scale_layout": scale_layout}

    @sampled(40)
    @given(OPS["inverse_rope_group_quantize"].implementation("testing").strategy(settings=options))
    def compare(case):
        values, scales = case.run(OPS["inverse_rope_group_quantize"].op)
        rows = patterns(ops.inverse_rope_group(*case.tensors, num_groups=2))
        num_tokens = len(rows)
        assert scales.is_contiguous()
        by_token = scales if scale_layout == "row" else scales.transpose(1, 2)
        padded = num_tokens if scale_layout == "row" else -(-num_tokens // 4) * 4
        assert by_token.shape[1] == padded
        assert not by_token[:, num_tokens:].any()
        for token, group in product(range(num_tokens), range(2)):
            codes, expected = oracles.quantized(rows[token][group])
            assert values.view(torch.uint8)[group, token].tolist() == codes
            stored = by_token[group, token].clone(memory_format=torch.contiguous_format)
            if scale_layout == "ue8m0_packed":
                assert stored.view(torch.uint8).tolist() == expected
            else:
                assert stored.tolist() == [2.0 ** (byte - 127) for byte in expected]

    compare()


@pytest.mark.slow
def test_rotation_compiles_to_one_loop():
    """A producer, the rotation and a consumer are one kernel, without copy or concatenation."""
    torch._dynamo.reset()

    def call(x, where, table):
        return -ops.apply_rope(x * 2, where, table)  # exact, whatever is rounded between

    arguments = (normal(5, 4, 512), torch.arange(5), ops.rope_cos_sin_cache(9, **YARN))
    compiled = torch.compile(call, fullgraph=True)
    result, code = compile_and_get_code(compiled, *arguments)
    assert code.count("async_compile.cpp_pybinding") == 1
    assert code.count("= empty_strided_cpu(") == 1
    assert torch.equal(result, call(*arguments))


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, torch.int16), (torch.float32, torch.int32)]
)
def test_precise_is_tight(dtype, bits):
    """An error that exceeds a rounding by a few units in the last place is noticed."""
    x, table = normal(4, 1, 128, dtype=dtype), ops.rope_cos_sin_cache(9, **YARN)
    case = testing.Case("called", (x, torch.arange(4), table), {"inverse": False})
    rotated = ops.apply_rope(*case.tensors)
    op_testing = testing.op_testing("apply_rope")
    assert_precise("right", op_testing, case, (rotated,))
    steps = (2 if dtype == torch.bfloat16 else 16) * (torch.arange(128) == 100)
    off = rotated.view(bits) + steps.to(bits)
    with pytest.raises(AssertionError, match="budgets from float64"):
        assert_precise("wrong", op_testing, case, (off.view(dtype),))
