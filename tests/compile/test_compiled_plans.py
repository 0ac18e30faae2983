"""Steps with a plan as inputs and results of compiled, exported and packaged code; and kernels with
the plans of layers, in Triton's interpreter."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv4_ops.attention import AttentionStep, LayerCaches, LayerInputs, attention_layer
from dsv4_ops.lowering.inspect import build_package, load_package
from tests.compile.test_compiled_layers import STEPS, hidden, scalar_code
from tests.helpers import NIGHTLY
from tests.support.layers import HEADS, PLAIN, SPEC, Engine, SmallLayer, caches_of, changed, poison

pytestmark = pytest.mark.slow


class OfStep(nn.Module):
    """A layer as a function of hidden states, a step, and caches."""

    def __init__(self, layer: SmallLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, step: AttentionStep, caches: tuple[Tensor, ...]) -> Tensor:
        layer = self.layer
        given, held = LayerInputs(**layer.project(x)), LayerCaches(*caches)
        return attention_layer(layer.spec, "c128", given, layer.attention.weights, held, step)


def any_size(tree: Any) -> Any:
    """Return ``dynamic_shapes`` for dataclasses and tuples of tensors."""
    if isinstance(tree, Tensor):
        return dict.fromkeys(range(tree.dim()), torch.export.Dim.AUTO)
    if isinstance(tree, tuple):
        return tuple(map(any_size, tree))
    held = [getattr(tree, field.name) for field in fields(tree)]
    return [any_size(value) for value in held if value is not None]


@pytest.mark.parametrize(
    "heads",
    [
        pytest.param(0, id="none", marks=pytest.mark.nightly("a step with a plan is one too")),
        pytest.param(HEADS, id="a plan"),
    ],
)
def test_steps_of_any_size_are_inputs_of_an_exported_layer(heads: int, tmp_path: Path) -> None:
    """A plan has a row per token (a symbol) and per program. Nightly, a package runs, too."""
    layer = SmallLayer("c128", PLAIN)
    poison(layer)
    caches, inputs = tuple(cache.clone() for cache in caches_of(layer).values()), []
    with changed(layer, plan_heads=heads):
        for counts, padding in (([5, 2, 0, 9], 3), ([1, 1, 1, 1], 0)):
            batch = Engine(layer).batch(counts, padding)
            inputs.append((hidden(counts, padding), layer.step(*batch), caches))
    shapes = any_size(inputs[0])
    program = torch.export.export(OfStep(layer), inputs[0], dynamic_shapes=shapes, strict=False)
    calls = [OfStep(layer), program.module(check_guards=False)]
    if NIGHTLY:
        with scalar_code():
            calls.append(load_package(build_package(program, tmp_path / "layer.pt2")))
    for x, step, _ in inputs:
        results = []
        for call in calls:
            own = tuple(cache.clone() for cache in caches)
            results.append((call(x, step, own), *(cache.view(torch.uint8) for cache in own)))
        expected, *others = results
        for out, *written in others:
            torch.testing.assert_close(out, expected[0], rtol=0, atol=3e-6)
            assert all(map(torch.equal, written, expected[1:]))


def test_steps_of_any_size_are_inputs_of_one_graph() -> None:
    torch._dynamo.reset()
    layer = SmallLayer("c128", SPEC)
    poison(layer)
    held = tuple(caches_of(layer).values())
    compiled = torch.compile(OfStep(layer), fullgraph=True, dynamic=True, backend="eager")
    with changed(layer, plan_heads=HEADS), torch._dynamo.config.patch(error_on_recompile=True):
        for counts, padding in STEPS:
            step = layer.step(*Engine(layer).batch(counts, padding))
            x, ours, other = hidden(counts, padding), *(map(torch.clone, held) for _ in range(2))
            actual = compiled(x, step, tuple(ours))
            assert torch.equal(actual, OfStep(layer)(x, step, tuple(other)))
