"""Attention layers on a GPU: kernels against the formulas, CUDA graphs, packages. Run there with
``pytest -m gpu tests``; without a GPU the same code runs the references."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from dsv4_ops.attention import LayerSpec
from dsv4_ops.lowering import inspect
from tests.attention.test_layers import CUTS, assert_close
from tests.compile.test_compiled_layers import STEPS, Packaged, hidden
from tests.support import forked, layers
from tests.support.layers import HEADS, KINDS, LENGTH, PLAIN, SPEC, Engine, SmallLayer, in_chunks
from tests.support.prefill_batches import GRAPHS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
each_kind = pytest.mark.parametrize("kind", KINDS)
PLANNED = [*((kind, 0) for kind in KINDS), ("c128", HEADS)]
with_plans = pytest.mark.parametrize(("kind", "plan_heads"), PLANNED)


def on_device(
    kind: str, spec: LayerSpec, plan_heads: int = 0
) -> tuple[SmallLayer, list[dict[str, Tensor]]]:
    layer = SmallLayer(kind, spec, DEVICE)
    layer.plan_heads = plan_heads
    return layer, layers.projected(layer, layers.hidden_states().to(DEVICE))


@with_plans
@pytest.mark.parametrize(("spec", "budget"), [(PLAIN, 1e-5), (SPEC, 0.01)], ids=["plain", "fp8"])
def test_kernels_give_what_the_formulas_say(
    kind: str, plan_heads: int, spec: LayerSpec, budget: float
) -> None:
    """Whole and in steps. FP8 MMAs keep 14 bits of a score, so close scores are not compared."""
    layer, inputs = on_device(kind, spec, plan_heads)
    whole, cut = [[LENGTH]] * 2, [CUTS[0], CUTS[1]]
    for cuts, padding in ((whole, 0), (cut, 3)):
        outputs = in_chunks(layer, inputs[:2], cuts, padding=padding, seed=padding)
        for rows, out in zip(inputs, outputs, strict=False):
            want = layers.oracle(layer, rows)
            sure = want.margin[: len(out)] > 5e-3
            assert int(sure.sum()) >= 0.85 * len(out)
            assert_close(out.cpu()[sure], want.out[: len(out)][sure], budget)


@each_kind
def test_the_schedule_of_prefills_changes_only_rounding(kind: str) -> None:
    layer, inputs = on_device(kind, SPEC)
    layer.schedule = "prefill"
    outputs = in_chunks(layer, inputs[:2], [[LENGTH], [30, 5, 1, LENGTH - 36]])
    for rows, out in zip(inputs, outputs, strict=False):
        want = layers.oracle(layer, rows)
        sure = want.margin > 5e-3
        assert_close(out.cpu()[sure], want.out[sure], 0.01)


@each_kind
def test_cuts_pages_and_company_change_no_bit(kind: str) -> None:
    """A request has the same bits alone, among others, and in other blocks of the caches."""
    layer, inputs = on_device(kind, replace(SPEC, batch_invariant=True))
    (alone,) = in_chunks(layer, inputs[:1], CUTS[:1])
    crowded = in_chunks(layer, [*inputs[1:3], inputs[0]], [*CUTS[1:], CUTS[0]], seed=3)
    assert torch.equal(alone, crowded[2])


def steps_beside(layer: SmallLayer, call, steps) -> None:
    """Run every step with ``call``, and eagerly on an equal layer; addresses must not change."""
    twin = SmallLayer(layer.kind, layer.spec, DEVICE)
    engines = Engine(layer), Engine(twin)
    layers.poison(layer)
    layers.poison(twin)
    addresses = [cache.data_ptr() for cache in layers.caches_of(layer).values()]
    for number, (counts, padding) in enumerate(steps):
        x = hidden(counts, padding).to(DEVICE) + number
        mine, other = (engine.batch(counts, padding) for engine in engines)
        actual = call(x, *(tensor.to(DEVICE) for tensor in mine))
        expected = twin(x, *(tensor.to(DEVICE) for tensor in other))
        assert not actual[sum(counts) :].any()
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0.02, atol=0.05)
        for engine in engines:
            engine.finish(counts)
    assert addresses == [cache.data_ptr() for cache in layers.caches_of(layer).values()]


@with_plans
def test_one_graph_for_steps_of_all_sizes(kind: str, plan_heads: int) -> None:
    torch._dynamo.reset()
    counters.clear()
    layer, _ = on_device(kind, SPEC, plan_heads)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    counts, padding = STEPS[0]
    batch = [tensor.to(DEVICE) for tensor in Engine(layer).batch(counts, padding)]
    _, code = inspect.compile_and_get_code(compiled, hidden(counts, padding).to(DEVICE), *batch)
    assert inspect.opaque_calls(code) == []
    with torch._dynamo.config.patch(error_on_recompile=True):
        steps_beside(layer, compiled, STEPS)
    assert counters["stats"]["unique_graphs"] == 1


@with_plans
def test_captured_decode_steps(kind: str, plan_heads: int) -> None:
    """One CUDA graph is replayed while its inputs change in place: 20 steps across windows of 4 and
    16 tokens and over reused blocks, without a host sync."""
    torch._dynamo.reset()
    layer, _ = on_device(kind, SPEC, plan_heads)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, options=GRAPHS)
    static: list[Tensor] = []
    calls = 0

    def call(*tensors: Tensor) -> Tensor:
        nonlocal calls
        if not static:
            static.extend(tensor.clone() for tensor in tensors)
        for held, tensor in zip(static, tensors, strict=True):
            held.copy_(tensor)
        torch.cuda.synchronize()
        calls += 1
        torch.cuda.set_sync_debug_mode("error" if calls > 4 else "default")
        try:
            return compiled(*static).clone()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    steps_beside(layer, call, [([1, 1, 1, 1], 2)] * 20)
    assert calls == 20


@with_plans
def test_a_package_of_every_kind(kind: str, plan_heads: int, tmp_path: Path) -> None:
    """A layer is exported with dynamic sizes, and its package runs without dsv4_ops on the caller's
    caches. A step with a plan makes the plan in the package."""
    layer, _ = on_device(kind, SPEC, plan_heads)
    layers.poison(layer)
    engine, inputs, expected = Engine(layer), [], []
    for counts, padding in STEPS:
        batch = [tensor.to(DEVICE) for tensor in engine.batch(counts, padding)]
        caches = [cache.clone() for cache in layers.caches_of(layer).values()]
        inputs.append((hidden(counts, padding).to(DEVICE), *batch, *caches))
        expected.append(layer(*inputs[-1][:7]))
        engine.finish(counts)
    dims = tuple(dict.fromkeys(range(tensor.dim()), torch.export.Dim.AUTO) for tensor in inputs[0])
    shapes = (dims[0], dims[1:])
    program = torch.export.export(Packaged(layer), inputs[0], dynamic_shapes=shapes)
    package = inspect.build_package(program, tmp_path / f"{kind}{plan_heads}.pt2")
    paths = [tmp_path / f"{kind}{plan_heads}_{number}.pt" for number in range(len(STEPS))]
    for path, given in zip(paths, inputs, strict=True):
        torch.save(given, path)
    forked.run_package(package, *paths)
    run = inspect.load_package(package)
    for path, given, want in zip(paths, inputs, expected, strict=True):
        out, *after = torch.load(f"{path}.out")
        torch.testing.assert_close(out.float(), want.float(), rtol=0.02, atol=0.05)
        (here,) = run(*given)
        assert torch.equal(out, here)
        for left, right in zip(after[7:], given[7:], strict=True):
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))
