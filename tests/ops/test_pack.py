"""Ragged requests as a rectangle: dtypes, adversarial boundaries, and unpacking."""

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops.core.registry import OPS
from dsv4_ops.lowering.inspect import compile_and_get_code
from dsv4_ops.testing.contract import checks
from dsv4_ops.testing.contract.compare import equal
from tests.helpers import i32, nightly

STARTS = i32([0, 3, 3, 4, 9, 9])
FP8 = torch.float8_e4m3fn


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype == FP8:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(FP8)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32,
        torch.uint8, torch.bool, FP8,
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("trailing", [(), (4,), (2, 3), (0,)])
def test_unpacked_is_what_was_packed(dtype, trailing):
    """All bits of all rows return if next_n is at least the longest request; padding is zeros."""
    x = rows(11, *trailing, dtype=dtype)
    packed = ops.pack_seq(x, STARTS, next_n=5)
    assert packed.shape == (5, 5, *trailing)
    assert packed.dtype == dtype
    assert equal(packed[3], x[4:9])
    assert not packed[:, 3:][:3].float().any()
    back = ops.unpack_seq(packed, STARTS, num_tokens=11)
    assert equal(back[:9], x[:9])
    assert not back[9:].float().any()


ADVERSARIAL = (
    [0, 3, 2, 9, 9, 9],
    [-5, -2, 4, 2**31 - 1, 2**31 - 1, 2**31 - 1],
    [-(2**31), -(2**31), 0, 2, 2**31 - 1, 2**31 - 1],
    [9, 9, 9, 9, 9, 0],
    [2**31 - 2, 2**31 - 1, 2**31 - 1, -(2**31), 3, 5],
)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_adversarial_boundaries_read_nothing_outside(compiled):
    """Sentinels surround the input, and every row in the result is a row of the input."""
    torch._dynamo.reset()
    memory = torch.full((30,), -1.0)
    memory[10:19] = torch.arange(1.0, 10.0)
    packed_memory = torch.full((40,), -1.0)
    packed_memory[10:25] = torch.arange(1.0, 16.0)
    x, packed = memory[10:19], packed_memory[10:25].view(5, 3)

    def call(x, packed, where):
        return (
            ops.pack_seq(x, where, next_n=3, pad=0.0),
            ops.unpack_seq(packed, where, num_tokens=9),
        )

    run = torch.compile(call, fullgraph=True) if compiled else call
    for starts in ADVERSARIAL:
        forward, back = run(x, packed, i32(starts))
        assert set(forward.flatten().tolist()) <= {0.0, *x.tolist()}
        assert set(back.tolist()) <= {0.0, *packed.flatten().tolist()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [FP8, *nightly("codes", torch.bfloat16, torch.int32, torch.bool)], ids=str
)
def test_compiled_for_every_kind_of_dtype(dtype):
    """One graph serves all sizes; packing and unpacking have one loop each."""
    torch._dynamo.reset()

    def call(x, starts):
        packed = ops.pack_seq(x, starts, next_n=4)
        return packed, ops.unpack_seq(packed, starts, num_tokens=x.shape[0])

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    first = (rows(11, 7, dtype=dtype), STARTS)
    result, code = compile_and_get_code(compiled, *first)
    assert code.count("async_compile.cpp_pybinding") <= 3
    checks.assert_same("compiled", result, call(*first))
    other = (rows(21, 7, dtype=dtype), i32([0, 2, 2, 9, 9, 9, 13, 18]))
    with torch._dynamo.config.patch(error_on_recompile=True):
        checks.assert_same("compiled", compiled(*other), call(*other))


def test_padding_of_every_float():
    x = rows(2, 3, dtype=torch.float32)
    for pad in (float("-inf"), float("inf"), float("nan"), -0.0, 1e-40):
        packed = ops.pack_seq(x, i32([0, 1, 2]), next_n=2, pad=pad)
        expected = torch.full((2, 3), pad).view(torch.int32)
        assert torch.equal(packed[:, 1].contiguous().view(torch.int32), expected)


def test_schemas_name_no_size_that_depends_on_values():
    assert "SymInt num_tokens" in OPS["unpack_seq"].schema
    assert "SymInt" not in OPS["pack_seq"].schema
