"""CUDA graphs on a CPU: what a capture runs is undone, and a replay repeats its ops on the tensors
that the capture saw, whatever Python holds by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.written: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                leaves = [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]
                self.written += [(each, each.clone()) for each in leaves]
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


def captured(run: Callable[[], None], pool: Any = None) -> Callable[[], None]:
    """Stand for ``kept.captured``."""
    recording = _Recording()
    with recording:
        run()
    for tensor, before in reversed(recording.written):
        tensor.copy_(before)

    def replay() -> None:
        for func, args, kwargs, out in recording.calls:
            new = func(*args, **kwargs)
            for into, result in zip(pytree.tree_leaves(out), pytree.tree_leaves(new), strict=True):
                if isinstance(into, Tensor) and into.data_ptr() != result.data_ptr():
                    into.copy_(result)

    return torch.no_grad()(replay)
