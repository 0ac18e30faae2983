"""Attention layers as compiled graphs and as an AOTInductor package. Graph and package
hold metadata, projections and attention, have dynamic sizes, and write caches in place.

On a CPU, Inductor takes a minute for one C4 layer. So only this layer is packaged, a window layer
is compiled, and the others are only traced. On a GPU, all layers are compiled and packaged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import dsv4_ops as ops
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.torch_compat import one_graph_for_all_sizes
from dsv4_ops.lowering.inspect import compile_and_get_code, opaque_calls
from tests.compile.test_compiled_cache import cache_sized_buffers
from tests.helpers import nightly
from tests.support.layers import HEADS, HIDDEN, SPEC, Engine, SmallLayer, caches_of, poison

pytestmark = pytest.mark.slow
# tokens of each request, and padding: prefill, a mixture, decodes, speculative decodes
STEPS = (([5, 2, 0, 9], 3), ([1, 17, 6, 1], 0), ([1, 1, 1, 1], 2), ([3, 3, 2, 0], 0))


@contextmanager
def scalar_code() -> Iterator[None]:
    """Compile without SIMD: g++ then takes half the time, and these tests measure no speed."""
    once = {"cpp.simdlen": 1, "aot_inductor.debug_compile": True}  # a package with -O0
    with torch._inductor.config.patch(once):
        yield


def hidden(counts: list[int], padding: int) -> Tensor:
    tokens = sum(counts) + padding
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))


def run_beside(layer: SmallLayer, call: Any) -> None:
    """Run every step with ``call``, and eagerly on an equal layer. Codes may differ, because
    compiled code keeps some values in float32 that eager code rounds to bf16."""
    twin = SmallLayer(layer.kind, layer.spec)
    engines = Engine(layer), Engine(twin)
    poison(layer)
    poison(twin)
    addresses = {name: cache.data_ptr() for name, cache in caches_of(layer).items()}
    for counts, padding in STEPS:
        x = hidden(counts, padding)
        batches = [engine.batch(counts, padding) for engine in engines]
        actual, expected = call(x, *batches[0]), twin(x, *batches[1])
        assert not actual[sum(counts) :].any()
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0.02, atol=0.03)
        for engine in engines:
            engine.finish(counts)
    assert addresses == {name: cache.data_ptr() for name, cache in caches_of(layer).items()}
    for name, cache in caches_of(layer).items():
        left = caches_of(twin)[name]
        if cache.dtype == torch.float32:
            torch.testing.assert_close(cache, left, rtol=1e-5, atol=1e-5, equal_nan=True)
        else:
            assert int((cache != left).sum()) < int((left != 0xFF).sum()) // 20


@pytest.mark.parametrize(
    ("kind", "plan_heads"),
    [
        *nightly("every other layer has a window too", ("window", 0)),
        ("c4", 0),
        *nightly("C4; test_compiled_plans.py", ("c128", 0)),
        *nightly("test_compiled_plans.py", ("c128", HEADS)),
    ],
)
def test_one_graph_for_steps_of_all_sizes(kind: str, plan_heads: int) -> None:
    """The graph has no opaque call, no break, no recompile and no copy of a cache."""
    torch._dynamo.reset()
    counters.clear()
    layer = SmallLayer(kind, SPEC)
    layer.plan_heads = plan_heads
    how = {"window": "inductor", "c4": "eager", "c128": "aot_eager"}[kind]
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=how)
    counts, padding = STEPS[0]
    batch = Engine(layer).batch(counts, padding)
    # Dynamo would trace twice if a float begins as a symbol and ends as a constant
    settings = {"error_on_recompile": True, "specialize_float": True}
    with scalar_code(), torch._dynamo.config.patch(settings):
        if kind == "window":
            _, code = compile_and_get_code(compiled, hidden(counts, padding), *batch)
            assert opaque_calls(code) == []
            assert cache_sized_buffers(code, layer.attention.swa_cache) == []
        run_beside(layer, compiled)
    assert counters["stats"]["unique_graphs"] == 1


class Packaged(torch.nn.Module):
    """The layer as a function of a batch and its caches."""

    def __init__(self, layer: SmallLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *tensors: Tensor) -> tuple[Tensor]:
        return (self.layer.on_caches(x, tensors[:6], tensors[6:]),)


@pytest.mark.nightly("steps of one token on a GPU; the C++ of this takes g++ a minute")
def test_one_token_has_the_graph_of_several():
    """On a CPU, graphs of references that slice rows or multiply in groups also hold for size 1."""
    weight, scale = torch.ones(256, 512).to(torch.float8_e4m3fn), torch.full((2, 4), 127).byte()
    cos_sin, w_uv = torch.randn(16, 64), torch.randn(2, 512, 16).bfloat16()

    def step(q, kv, cache, slots):
        q = ops.qnorm_rope_kv_insert(q, kv, cache, slots, slots, cos_sin, eps=1e-6, block_size=16)
        return ops.fp8_grouped_linear(q, weight, scale), ops.mla_v_up(q, w_uv)

    counters.clear()
    compiled = torch.compile(step, dynamic=True, fullgraph=True)
    with scalar_code(), one_graph_for_all_sizes():
        for tokens in (3, 1, 2):
            q, kv = torch.randn(tokens, 2, 512).bfloat16(), torch.randn(tokens, 512).bfloat16()
            slots, caches = torch.arange(tokens), [MainLayout(16).allocate(1).zero_() for _ in "ab"]
            found, expected = compiled(q, kv, caches[0], slots), step(q, kv, caches[1], slots)
            torch.testing.assert_close(found, expected)
            assert torch.equal(*caches)
            assert caches[0].any()
    assert counters["stats"]["unique_graphs"] == 1
