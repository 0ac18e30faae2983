"""Ops that write in place, return what they wrote, and run after earlier readers.

torch-tensorrt partitions a functional graph into engines and PyTorch segments, and orders engines
and segments only by data dependencies. Therefore an op that ``write_op`` defines returns the caches
that it wrote, and later readers use these results instead of the arguments. The argument ``after``
of the op holds results of earlier readers, so that the op runs after them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.registry import OPS
from dsv4_ops.core.torch_compat import OpOverload

NAMESPACE = "dsv4_ops_tensorrt"
_library = torch.library.Library(NAMESPACE, "DEF")


def _define(name: str, schema: str, function: Any) -> OpOverload:
    # tagged as random: torch-tensorrt neither folds random ops nor runs them at compile time
    _library.define(f"{name}{schema}", tags=(torch.Tag.nondeterministic_seeded,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", function, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


@functools.cache
def write_op(name: str) -> OpOverload:
    """Return an op that runs the op ``name``, and returns its results and mutated arguments."""
    spec = OPS[name]
    arguments = spec.schema.removeprefix(spec.name).rpartition(" -> ")[0][1:-1]
    after = "Tensor[] after" if "*" in arguments.split(", ") else "*, Tensor[] after"
    written = [f"Tensor({chr(ord('a') + place)}!)" for place in range(len(spec.mutated))]
    returned = ["Tensor"] * len(spec.op._schema.returns) + written
    result = returned[0] if len(returned) == 1 else f"({', '.join(returned)})"

    def run(*args: Any, after: list[Tensor], **kwargs: Any) -> Any:
        values = spec.arguments(args, kwargs)
        made = spec.op(**values)
        made = () if made is None else made if isinstance(made, tuple) else (made,)
        every = (*made, *(values[spec.parameters[place]] for place in spec.mutated))
        return every if len(every) > 1 else every[0]

    return _define(spec.name, f"({arguments}, {after}) -> {result}", run)


def _copy_back(written: Tensor, source: Tensor, after: list[Tensor]) -> Tensor:
    return written.copy_(source)


def _state(buffer: Tensor) -> Tensor:
    return buffer


copy_back = _define(
    "copy_back", "(Tensor(a!) written, Tensor source, Tensor[] after) -> Tensor(a!)", _copy_back
)
"""Run ``written.copy_(source)`` after the readers of the old values."""

state = _define("state", "(Tensor(a) buffer) -> Tensor(a)", _state)
"""Return a buffer to which a graph writes, so that the graph does not treat the buffer as a
constant."""
