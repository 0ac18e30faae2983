"""Simulate CUDA graphs on a CPU: the effects of a capture are undone, and a replay repeats the
captured ops on the tensors of the capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig

from dsv4_ops.integrations.transformers.compile_cache import precompiled
from dsv4_ops.integrations.transformers.generation import draft_generation, kept

CONFIG = CompileConfig(backend="eager")
"""Makes ``generate`` compile on a CPU too."""
CONFIG._compile_all_devices = True


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


def install(monkeypatch: Any, folder: Any) -> list[Any]:
    """Let ``generate`` capture steps on a CPU, and keep caches of at most 1 MiB. A folder stores
    compiled parts, because Dynamo cannot run during a recording. Return the captures' pools."""
    pools: list[Any] = []
    monkeypatch.setenv("DSV4_OPS_CACHE", str(folder))
    monkeypatch.setattr(precompiled, "environment", lambda settings: "here")
    monkeypatch.setattr(kept, "DEVICES", ("cpu",))
    monkeypatch.setattr(kept, "most_bytes", lambda device: 2**20)
    monkeypatch.setattr(kept, "pool_of", lambda device: "pool")
    for module in (kept, draft_generation):
        monkeypatch.setattr(
            module, "captured", lambda run, pool=None: pools.append(pool) or captured(run)
        )
    return pools


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """Replace ``kept.captured``."""
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
                    into.copy_(torch.ops._c10d_functional.wait_tensor(result))

    return torch.no_grad()(replay)
