"""Launches in AOTInductor packages: kernels in Triton are traced, and Inductor compiles them; a
launch of one in Gluon is an op, which ``lowering/gluon.py`` makes a call of the kernel's binary."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.kernels import opaque_op
from dsv4_ops.kernels.common.hopper import support
from dsv4_ops.kernels.launcher import TRACED, Launcher

_SCHEMA = (
    "(str kernel, Tensor(a!)[] written, Tensor[] read, SymInt[] numbers, SymInt[] grid, str rest) "
    "-> ()"
)

WRITTEN = frozenset(
    {"out", "lse", "max_logits", "partial", "partial_lse", "partial_scale", "combine_list"}
)
"""Parameters of the kernels in Gluon that they write to."""

ALIGNED = {"gathered": ("q", "kv"), "mla": ("q", "kv_cache")}
"""Parameters that have to be at multiples of 16 bytes, by kernel: in a package the lowering copies
those that are not, as Inductor drops a ``clone`` that changes nothing but the address."""


class Rest(NamedTuple):
    """What of a launch is no tensor and no number that may be a symbol.

    Args:
        order: For every argument the list that it is in and its index there.
        options: Keyword arguments: constants of the kernel, and warps.
    """

    order: list[tuple[str, int]]
    options: dict[str, Any]

    @classmethod
    def of(cls, text: str) -> Rest:
        """What ``json.dumps`` made of one."""
        order, options = json.loads(text)
        return cls([(kind, index) for kind, index in order], options)

    def arguments(
        self, written: Sequence[Any], read: Sequence[Any], numbers: Sequence[Any]
    ) -> list[Any]:
        """The arguments in the kernel's order."""
        lists = {"written": written, "read": read, "numbers": numbers}
        return [lists[kind][index] for kind, index in self.order]


def _wrap(kernel: Any) -> Any:
    return _Launch(kernel) if kernel in _kernels().values() else TRACED(kernel)


PACKAGED = Launcher(_wrap, aligns_inputs=True)
"""Keep launches in the graph of a package, those of Gluon kernels as ops; ``lowering/gluon.py``
copies inputs that are not aligned."""


class _Launch:
    """A kernel that is called as Triton's are."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Sequence[Any]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            found: dict[str, list[Any]] = {"written": [], "read": [], "numbers": []}
            order = [
                _held(found, name, value)
                for name, value in zip(self.kernel.arg_names, args, strict=False)
            ]
            name = next(name for name, each in _kernels().items() if each is self.kernel)
            launch_hopper(name, *found.values(), list(grid), json.dumps(Rest(order, options)))

        return launch


def _held(lists: dict[str, list[Any]], name: str, value: Any) -> tuple[str, int]:
    """The list that holds an argument, and its index there. What is written is not read too: those
    are tensors that nobody reads, in lieu of ones that were not given."""
    if not isinstance(value, Tensor):
        lists["numbers"].append(value)
        return "numbers", len(lists["numbers"]) - 1
    for kind in ("written", "read"):
        for index, each in enumerate(lists[kind]):
            if each is value:
                return kind, index
    kind = "written" if name in WRITTEN else "read"
    lists[kind].append(value)
    return kind, len(lists[kind]) - 1


def _kernels() -> dict[str, Any]:
    found = support.kernels()
    return {} if found is None else found._asdict()


def kernel_of(name: str) -> Any:
    """The kernel of a launch."""
    return _kernels()[name]


def _call(
    name: str,
    written: Sequence[Tensor],
    read: Sequence[Tensor],
    numbers: Sequence[int],
    grid: Sequence[int],
    text: str,
) -> None:
    rest = Rest.of(text)
    with torch.cuda.device_of(written[0]):
        kernel_of(name)[tuple(grid)](*rest.arguments(written, read, numbers), **rest.options)


launch_hopper = opaque_op.define(
    "_launch_hopper", _SCHEMA, _call, lambda *_: None, torch.Tag.needs_exact_strides
)
"""Strides are among its numbers: Inductor must not choose others."""
