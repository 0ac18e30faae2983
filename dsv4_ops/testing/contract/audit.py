"""Check that an op has all layers, the same parameters in each layer, documentation and tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from dsv4_ops.core.registry import OpSpec
from dsv4_ops.testing.case import OpTesting

SECTIONS = ("Args:", "Returns:", "Mutates:", "Raises:", "Compile:", "Source:", "Example:")
DEVICES = ("cpu", "cuda")


def audit(spec: OpSpec) -> list[str]:
    """Return the problems of an op's spec; the list is empty if the spec is complete."""
    problems = [
        f"no lowering kind for {device}" for device in DEVICES if device not in spec.lowering
    ]
    if not spec.source:
        problems.append("no source of the semantics")
    layers = {}
    for layer in ("ops", "lowering", "testing"):
        try:
            layers[layer] = spec.implementation(layer)
        except (ImportError, AttributeError) as error:  # noqa: PERF203 # check the others, too
            problems.append(f"no {layer} implementation: {error}")
    schema = _schema_parameters(spec)
    functions: dict[str, Callable[..., Any]] = {"meta": spec.meta, "reference": spec.reference}
    if "ops" in layers:
        functions["ops"] = layers["ops"]
        problems += _docstring_problems(layers["ops"])
    if "lowering" in layers:
        functions["lowering"] = layers["lowering"].function
        if layers["lowering"].kind not in spec.lowering.values():
            problems.append(
                f"the lowering is {layers['lowering'].kind}, the spec says {spec.lowering}"
            )
    fake = list(inspect.signature(functions.pop("meta")).parameters)
    if not set(fake) <= set(schema):
        problems.append(f"parameters of meta are {fake}, not among {schema}")
    for layer, function in functions.items():
        if list(inspect.signature(function).parameters) != schema:
            problems.append(
                f"parameters of {layer} are {list(inspect.signature(function).parameters)}, "
                f"not {schema}"
            )
    if "testing" in layers:
        problems += _testing_problems(layers["testing"])
    return problems


def _schema_parameters(spec: OpSpec) -> list[str]:
    schema = torch._C.parse_schema(f"dsv4_ops::{spec.schema}")
    return [argument.name for argument in schema.arguments]


def _docstring_problems(function: Callable[..., Any]) -> list[str]:
    text = inspect.getdoc(function) or ""
    return [f"docstring has no {section!r}" for section in SECTIONS if section not in text]


def _testing_problems(op_testing: OpTesting) -> list[str]:
    problems = []
    if not any(case.expected is not None for case in op_testing.cases()):
        problems.append("no case with a hand-computed result")
    if not op_testing.settings:
        problems.append("no configuration to draw")
    if not callable(op_testing.make):
        problems.append("no hypothesis strategy")
    return problems
