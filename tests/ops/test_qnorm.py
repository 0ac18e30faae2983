"""Norm, rotation and insert in one op: bytes of the cache, order of the writes, and queries."""

import pytest
import torch
from hypothesis import given

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.lowering.inspect import compile_and_get_code
from dsv4_ops.testing.contract.compare import assert_agrees
from tests.compile.test_compiled_cache import cache_sized_buffers
from tests.helpers import i64, nightly
from tests.ops.test_contract import one_nan, patterns
from tests.ops.test_rope import normal
from tests.oracles import rope as oracles
from tests.support.sampled import sampled

TABLE = ops.rope_cos_sin_cache(200, theta=160000.0, scaling=ops.YarnScaling())
FP8 = {"eps": 1e-6, "block_size": 64}
SLOTS = i64([3, 70, -1, 100, 319, 320, 5])
WHERE = i64([0, 199, 7, 200, -1, 128, 64])


def garbage(layout: str) -> torch.Tensor:
    if layout == "plain":
        return normal(5, 64, 512, seed=9)
    generator = torch.Generator().manual_seed(9)
    return torch.randint(0, 256, MainLayout(64).shape(5), generator=generator, dtype=torch.uint8)


def arguments(layout: str = "v4_fp8", heads: int = 3) -> list[torch.Tensor]:
    return [normal(7, heads, 512), normal(7, 512, seed=1), garbage(layout), SLOTS, WHERE, TABLE]


@pytest.mark.parametrize("layout", ["v4_fp8", "plain"])
def test_cache_has_the_bytes_of_the_oracle(layout):
    """All bytes of the cache are equal, over batches with NaN, infinities and adversarial slots."""
    spec = OPS["qnorm_rope_kv_insert"]
    options = {"eps": 1e-6, "block_size": 2, "layout": layout}

    @sampled(60)
    @given(spec.implementation("testing").strategy(settings=options))
    def compare(case):
        _, cache = case.run(spec.op, spec.mutated)
        _, kv, before, slots, where, table = case.tensors
        rows = patterns(kv)[: len(slots)], patterns(before), slots.tolist()
        positions = where.tolist()[: len(slots)]
        expected = oracles.inserted(*rows, positions, table.tolist(), block_size=2, layout=layout)
        if layout == "plain":
            assert one_nan(patterns(cache)) == one_nan(expected)
        else:
            assert cache.tolist() == expected

    compare()


def test_queries_are_normalised_without_a_rounding_between():
    """A cast between norm and rotation would round twice; every head has a mean square of 1."""
    q, *rest = arguments(heads=64)
    actual = ops.qnorm_rope_kv_insert(q * 7, *rest, **FP8)
    norms = actual.double().square().mean(-1)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=2e-3, atol=0)
    values = (q * 7).double()
    normed = values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    cos, sin = TABLE.double()[WHERE.clamp(0, 199)].chunk(2, 1)
    inside = ((WHERE >= 0) & (WHERE < 200))[:, None, None]
    even, odd = normed[..., 448::2], normed[..., 449::2]
    pairs = even * cos[:, None] - odd * sin[:, None], odd * cos[:, None] + even * sin[:, None]
    tail = torch.where(inside, torch.stack(pairs, -1).flatten(-2), normed[..., 448:])
    exact = torch.cat([normed[..., :448], tail], -1)
    once = exact.to(torch.bfloat16)
    assert (actual != once).float().mean() < 1e-3, "float32 decides few ties otherwise"
    twice = ops.apply_rope(normed.to(torch.bfloat16), WHERE, TABLE)
    assert (twice != once)[..., 448:].float().mean() > 0.1


def test_values_beyond_float32_become_zero():
    q = torch.full((1, 1, 512), 3e38, dtype=torch.bfloat16)
    where, rest = i64([5]), (normal(1, 512), garbage("v4_fp8"), i64([-1]))
    assert not ops.qnorm_rope_kv_insert(q, *rest, where, TABLE, **FP8).any()
    zero = ops.qnorm_rope_kv_insert(torch.zeros_like(q), *rest, where, TABLE, **FP8)
    assert not zero.any()
    assert not zero.isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["v4_fp8", *nightly("the other layout", "plain")])
def test_compiled_it_writes_the_cache_where_it_is(layout):
    torch._dynamo.reset()
    settings = {**FP8, "layout": layout}
    given, expected = arguments(layout), arguments(layout)
    case = testing.Case("called", tuple(arguments(layout)), settings)
    queries = ops.qnorm_rope_kv_insert(*expected, **settings)
    address = given[2].data_ptr()

    def call(*tensors):
        return ops.qnorm_rope_kv_insert(*tensors, **settings)

    compiled = torch.compile(call, fullgraph=True, dynamic=False)
    found, code = compile_and_get_code(compiled, *given)
    assert given[2].data_ptr() == address
    outcomes = (found, given[2]), (queries, expected[2])
    assert_agrees("compiled", testing.op_testing("qnorm_rope_kv_insert"), case, *outcomes)
    assert cache_sized_buffers(code, given[2]) == []
    assert ".copy_(" not in code


@pytest.mark.slow
def test_epsilon_is_a_constant_of_the_graph():
    """With dynamic shapes, Dynamo would otherwise make epsilon a symbol at its second value."""
    torch._dynamo.reset()
    for eps in (1e-6, 0.25):

        def call(*tensors, eps=eps):
            return ops.qnorm_rope_kv_insert(*tensors, eps=eps, block_size=64)

        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
        expected = call(*arguments())
        torch.testing.assert_close(compiled(*arguments()), expected, rtol=2**-7, atol=0)


def test_one_launch_covers_heads_and_keys():
    """The launch's first programs have four keys each, the others four heads of a token."""
    pytest.importorskip("triton", reason="published for Linux only")
    from dsv4_ops.kernels.rope import qnorm_rope_insert
    from tests.support.launches import Launches

    def programs(num_tokens: int, num_heads: int, num_slots: int) -> list[int]:
        q = torch.empty(num_tokens, num_heads, 512, dtype=torch.bfloat16)
        cache, slots = MainLayout(64).allocate(1), torch.zeros(num_slots, dtype=torch.int64)
        where = torch.zeros(num_tokens, dtype=torch.int64)
        settings, launch = {**FP8, "layout": "v4_fp8"}, Launches()
        qnorm_rope_insert.qnorm_rope_kv_insert(
            launch, q, q[:, 0], cache, slots, where, TABLE, **settings
        )
        assert {name for name, _ in launch.made} <= {"qnorm_rope_kv_insert_kernel"}
        return [grid[0] for _, grid in launch.made]

    assert programs(5, 64, 5) == [5 * 16 + 2]
    assert programs(70000, 1, 0) == [70000]
    assert programs(3, 7, 1) == [3 * 2 + 1]
    assert programs(0, 64, 0) == []
