"""The description of an op (``OpSpec``) and the table of all ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dsv4_ops.core import gradient
from dsv4_ops.core.torch_compat import OpOverload

NAMESPACE = "dsv4_ops"
AUTO, TRITON, REFERENCE = "auto", "triton", "reference"
"""Values of ``impl=`` that are not libraries."""

LOWERING_KINDS = ("decompose", "pointwise", "triton", "choices")
DECOMPOSED = {"cpu": "decompose", "cuda": "decompose"}
KERNEL_ON_CUDA = {"cpu": "decompose", "cuda": "triton"}
"""Lowering for each device type, for ops that have a Triton kernel."""


class Lowering(Protocol):
    """What replaces an op in a traced graph; see ``lowering/kinds.py``."""

    kind: str
    function: Callable[..., Any]

    def trace(self, mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Replace the op in a graph that AOTAutograd traces."""


def returns_nothing() -> None:
    """Return nothing. This is the fake of every op that only mutates its arguments."""


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """Describe an op: schema, meaning and implementations.

    Args:
        stem: File name of the op in every layer.
        schema: ``name(arguments) -> results`` in the language of ``torch.library``.
        meta: Fake implementation. The fake takes only those parameters of the op that it needs.
        reference: Eager implementation on any device, which defines the op's results.
        load: Loads the op's implementation in another layer (``dispatch/layers.py``), because core
            imports no other layer.
        launch_with: Loads the function that launches our kernel or a library.
        lowering: Kind of lowering per device type, decomposition by default.
        dynamic: Names of the dimensions that may change without a recompile.
        source: Where the semantics come from.
        providers: Implementations that ``impl=`` can name. An op without ``impl`` has the
            implementations of its lowering.
        hopper_call: Name of the opaque op that a graph for Hopper calls, because Inductor compiles
            no Gluon; empty if such a graph contains the op's launches.
        gradient: How autograd treats the op, one of ``gradient.KINDS``.
    """

    stem: str
    schema: str
    meta: Callable[..., Any]
    reference: Callable[..., Any]
    load: Callable[[OpSpec, str], Any]
    launch_with: Callable[[OpSpec, str], Any]
    lowering: dict[str, str] = field(default_factory=DECOMPOSED.copy)
    dynamic: tuple[str, ...]
    source: str
    providers: tuple[str, ...] = ()
    hopper_call: str = ""
    gradient: str = gradient.REFUSED
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.schema.partition("(")[0])
        if not self.providers:
            kernel = (TRITON,) if self.lowering.get("cuda") == "triton" else ()
            object.__setattr__(self, "providers", (*kernel, REFERENCE))
        for device, kind in self.lowering.items():
            if kind not in LOWERING_KINDS:
                raise ValueError(
                    f"define_op: lowering kind must be one of {LOWERING_KINDS}, got {kind!r} "
                    f"for {device}. "
                    f"Correct the spec of {self.name}."
                )
        if self.gradient not in gradient.KINDS:
            raise ValueError(
                f"define_op: gradient must be one of {gradient.KINDS}, got {self.gradient!r}. "
                f"Correct the spec of {self.name}."
            )

    @property
    def op(self) -> OpOverload:
        """Return the registered overload."""
        overload: OpOverload = getattr(torch.ops.dsv4_ops, self.name).default
        return overload

    def implementation(self, layer: str) -> Any:
        """Return the op's part in ``layer``: ``ops``, ``meta``, ``reference``, ``kernels``,
        ``lowering`` or ``testing``."""
        return getattr(self, layer) if layer in ("meta", "reference") else self.load(self, layer)

    def launcher(self, impl: str) -> Callable[..., Any]:
        """Return the function that runs the op with our kernel or with a library."""
        function: Callable[..., Any] = self.launch_with(self, impl)
        return function

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of all parameters, in order."""
        return tuple(argument.name for argument in self.op._schema.arguments)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, defaults included."""
        names, defaults = _signature(self.op)
        return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}

    def places(self, name: str) -> list[int]:
        """Return a list with the index of a parameter; empty if the op has no such parameter."""
        return [place for place, parameter in enumerate(self.parameters) if parameter == name]

    @property
    def mutated(self) -> tuple[int, ...]:
        """Return the indices of the arguments that the op mutates."""
        return tuple(
            place
            for place, argument in enumerate(self.op._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )

    @property
    def has_kernel(self) -> bool:
        """Whether ``kernels/<stem>/`` has a launcher for CUDA."""
        return TRITON in self.providers

    @property
    def has_choice(self) -> bool:
        """Whether callers choose the implementation with ``impl``."""
        return self.lowering.get("cuda") == "choices"


@functools.cache
def _signature(op: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    schema = op._schema.arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    return tuple(each.name for each in schema), defaults


OPS: dict[str, OpSpec] = {}
"""Every op of the package by name, in the order of definition."""
