"""Count the bytes that a call holds at once, on any device, including meta."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that ops return, but not the allocations inside kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: int = 0
        self.peak: int = 0
        self._held: set[int] = set()

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = {_storage(leaf)._cdata for leaf in _tensors((args, kwargs))}
        found = function(*args, **(kwargs or {}))
        for leaf in _tensors(found):
            storage = _storage(leaf)
            if storage._cdata not in given | self._held:
                self._hold(storage)
        return found

    def _hold(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._held.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.live -= size


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the maximum bytes that ``call`` holds at once; earlier tensors do not count."""
    counted = LiveBytes()
    with torch.no_grad(), counted:
        call()
    return counted.peak


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()
