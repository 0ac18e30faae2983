"""Tests without torch-tensorrt: the schemas that it supports, and which traces are refused."""

import sys
from pathlib import Path

import pytest
import torch

from dsv4_ops.cli import doctor
from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch import probes, tensorrt as guard
from dsv4_ops.dispatch.guards import GUARDS
from dsv4_ops.integrations import tensorrt

ARGUMENTS = {"Tensor", "Optional[Tensor]", "int", "Optional[int]", "float", "bool", "str"}
RESERVED = {"outputs", "stream", "tactic"}

FUNCTION = "def {name}(call):\n    return call()\n"


def inside(module, name, call):
    """Run ``call`` in a function whose module and name look like torch-tensorrt's."""
    guard.install()
    namespace = {"__name__": module}
    exec(FUNCTION.format(name=name), namespace)
    try:
        return namespace[name](call)
    finally:
        GUARDS.clear()


class Writes(torch.nn.Module):
    def forward(self, k, cache, slots):
        torch.ops.dsv4_ops.insert_k_cache(k, cache, slots)
        return k + 1


INPUTS = torch.ones(3, 8), torch.zeros(4, 2, 8), torch.tensor([1, 5, -1])


def decompose():
    return torch.export.export(Writes(), INPUTS).run_decompositions()


@pytest.mark.parametrize("name", OPS)
def test_schemas_fit(name):
    """Tensors come first, then plain values; no lists, and no name that TensorRT reserves."""
    schema = OPS[name].op._schema
    kinds = [str(argument.type) for argument in schema.arguments]
    assert set(kinds) <= ARGUMENTS
    tensors = ["Tensor" in kind for kind in kinds]
    assert tensors == sorted(tensors, reverse=True)
    assert not RESERVED & {argument.name for argument in schema.arguments}
    assert {str(result.type) for result in schema.returns} <= {"Tensor"}
    assert all(kinds[place] == "Tensor" for place in OPS[name].mutated)


def test_a_write_in_an_exported_program_raises():
    with pytest.raises(ValueError, match="insert_k_cache: k_cache must be written") as caught:
        inside(guard.COMPILER, "compile", decompose)
    assert "enable()" in str(caught.value)


def test_a_write_that_was_decomposed_before_raises():
    program = decompose()
    with pytest.raises(ValueError, match="insert_k_cache: k_cache must be written"):
        inside(guard.COMPILER, "compile", program.run_decompositions)


def test_after_enable_an_exported_program_is_taken(monkeypatch):
    monkeypatch.setattr(guard, "_ENABLED", [True])
    program = inside(guard.COMPILER, "compile", decompose)
    assert "auto_functionalized_v2" in str(program.graph)


def test_an_unknown_way_is_refused_even_after_enable(monkeypatch):
    """A later torch-tensorrt may trace elsewhere: traces that may not preserve writes raise."""
    monkeypatch.setattr(guard, "_ENABLED", [True])
    with pytest.raises(ValueError, match="Compile with"):
        inside("torch_tensorrt.dynamo.new", "trace", decompose)


def test_ops_that_write_nothing_stay_whole():
    """Whichever compiler traces, engines contain no decompositions of our ops."""

    def traced():
        def call(starts, lens):
            return torch.ops.dsv4_ops.flatten_decode(starts, lens, num_tokens=4, compress_ratio=1)

        graphs = []

        def compiler(gm, inputs):
            graphs.append(gm)
            return gm

        from torch._dynamo.backends.common import aot_autograd

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=compiler)
        starts, lens = torch.tensor([0, 2]).int(), torch.tensor([5]).int()
        torch.compile(call, backend=backend)(starts, lens)
        return str(graphs[0].graph)

    function = guard.AOT_BACKEND.partition(":")
    assert "dsv4_ops.flatten_decode" in inside(function[0], function[2], traced)
    assert "dsv4_ops.flatten_decode" not in traced()


def test_enable_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    with pytest.raises(ImportError, match="enable: torch_tensorrt must be installed"):
        tensorrt.enable()
    assert not guard.is_enabled()


def test_the_supported_range_is_that_of_pyproject():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (first, last) = (f"{major}.{minor}" for major, minor in guard.SUPPORTED)
    assert f'"torch-tensorrt>={first},<{last}"' in text


@pytest.mark.parametrize(("version", "supported"), [("2.13.0", True), ("2.15.0", False)])
def test_doctor_says_what_works(monkeypatch, version, supported):
    versions = {"torch-tensorrt": version, "tensorrt-cu13": "11.0.0"}
    monkeypatch.setattr(probes, "distribution_version", versions.get)
    problems = []
    section = doctor._tensorrt(problems)
    assert (section["version"], section["TensorRT"]) == (version, "11.0.0")
    assert section["supported"] is supported
    assert section["cache writes"].startswith("kept after" if supported else "refused")
    assert bool(problems) is not supported


def test_doctor_without_torch_tensorrt_is_content(monkeypatch):
    monkeypatch.setattr(probes, "distribution_version", {}.get)
    problems = []
    assert doctor._tensorrt(problems) == {"installed": False}
    assert not problems
