"""Launches in AOTInductor packages. Inductor compiles Triton kernels from the trace; the launch of
a Gluon kernel is an op, which ``lowering/gluon.py`` lowers to a call of the kernel's binary."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.kernels import opaque_op
from dsv4_ops.kernels.launcher import TRACED, Launcher
from dsv4_ops.kernels.mla.hopper.decode_kernel import hopper_mla_decode_kernel
from dsv4_ops.kernels.sparse_mla.hopper.decode_kernel import hopper_split_keys_kernel
from dsv4_ops.kernels.sparse_mla.hopper.gathered_kernel import hopper_gathered_keys_kernel
from dsv4_ops.kernels.sparse_mla.hopper.prefill_kernel import hopper_prefill_keys_kernel

_SCHEMA = (
    "(str kernel, Tensor(a!)[] written, Tensor[] read, SymInt[] numbers, SymInt[] grid, str rest) "
    "-> ()"
)

WRITTEN = frozenset(
    {"out", "lse", "max_logits", "partial", "partial_lse", "partial_scale", "combine_list"}
)
"""Parameters that the Gluon kernels write to."""

KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        hopper_gathered_keys_kernel,
        hopper_mla_decode_kernel,
        hopper_prefill_keys_kernel,
        hopper_split_keys_kernel,
    )
}
"""The Gluon kernels, keyed by the name that a launch has in a graph."""

ALIGNED = {
    "hopper_gathered_keys_kernel": ("q", "kv"),
    "hopper_mla_decode_kernel": ("q", "kv_cache"),
}
"""Parameters whose addresses must be multiples of 16 bytes, keyed by the name of the kernel. In a
package, the lowering copies misaligned tensors. The launcher cannot, because Inductor drops a
``clone`` that changes only the address."""


class Rest(NamedTuple):
    """The constants of a launch, and the order of its tensors and numbers.

    Args:
        order: For each positional argument, the list that holds it (``written``, ``read`` or
            ``numbers``), and its index in that list.
        options: Keyword arguments: constants of the kernel, and ``num_warps``.
    """

    order: list[tuple[str, int]]
    options: dict[str, Any]

    @classmethod
    def of(cls, text: str) -> Rest:
        """Parse a ``Rest`` that ``json.dumps`` wrote."""
        order, options = json.loads(text)
        return cls([(kind, index) for kind, index in order], options)

    def arguments(
        self, written: Sequence[Any], read: Sequence[Any], numbers: Sequence[Any]
    ) -> list[Any]:
        """Return the arguments in the kernel's order."""
        lists = {"written": written, "read": read, "numbers": numbers}
        return [lists[kind][index] for kind, index in self.order]


def _wrap(kernel: Any) -> Any:
    return _Launch(kernel) if kernel in KERNELS.values() else TRACED(kernel)


PACKAGED = Launcher(_wrap, aligns_inputs=True)
"""Trace launches into the graph of a package. Launches of Gluon kernels become ops;
``lowering/gluon.py`` copies their misaligned inputs."""


class _Launch:
    """A Gluon kernel with the call syntax of a Triton kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Sequence[Any]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            lists: dict[str, list[Any]] = {"written": [], "read": [], "numbers": []}
            order = [
                _list_and_index(lists, name, value)
                for name, value in zip(self.kernel.arg_names, args, strict=False)
            ]
            launch_hopper(
                self.kernel.__name__, *lists.values(), list(grid), json.dumps(Rest(order, options))
            )

        return launch


def _list_and_index(lists: dict[str, list[Any]], name: str, value: Any) -> tuple[str, int]:
    """Add an argument to a list; return the name of the list and the index.

    A tensor that a list holds already is not added again: in place of None, a launcher may pass a
    tensor that the kernel writes through another parameter.
    """
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


def _launch(
    name: str,
    written: Sequence[Tensor],
    read: Sequence[Tensor],
    numbers: Sequence[int],
    grid: Sequence[int],
    text: str,
) -> None:
    rest = Rest.of(text)
    with torch.cuda.device_of(written[0]):
        KERNELS[name][tuple(grid)](*rest.arguments(written, read, numbers), **rest.options)


launch_hopper = opaque_op.define(
    "_launch_hopper", _SCHEMA, _launch, lambda *_: None, torch.Tag.needs_exact_strides
)
"""The op that launches a Gluon kernel. The strides of the tensors are among the op's numbers, so
Inductor must not change the layouts of the tensors."""
