"""The caches of a layer in an engine's pool, as arguments of a compiled layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.attention.caches import pool_view
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import CACHE_ALIGNMENT, Layout
from dsv4_ops.integrations.transformers.architectures.base import LayerContext


@dataclass(frozen=True)
class PooledCaches:
    """The caches of a layer in a pool. A graph takes the pool as an argument, and makes the caches
    as views of the pool.

    Attributes:
        pool: All bytes, [num_blocks, bytes of a block], uint8.
        layouts: Layout of each cache, by the cache's name.
        offsets: For each cache, an empty tensor whose first dimension is the cache's offset in a
            block, in units of 16 bytes. A graph is compiled for one value of an int, but for any
            size of a tensor, so all layers of a kind share one graph.
        make: Function that makes the caches of a layer from its tensors by name.
    """

    pool: Tensor
    layouts: dict[str, Layout]
    offsets: dict[str, Tensor]
    make: Callable[[Mapping[str, Tensor]], Any]

    def caches(self) -> Any:
        """Make the caches. Only the graph that writes to the caches may call this method."""
        return self.make(
            {
                name: pool_view(
                    self.pool,
                    layout,
                    block_stride=self.pool.shape[1],
                    offset=self.offsets[name].shape[0] * CACHE_ALIGNMENT,
                )
                for name, layout in self.layouts.items()
            }
        )


def pooled(
    layers: Sequence[Mapping[str, Tensor]],
    layouts: Sequence[dict[str, Layout]],
    make: Callable[[Mapping[str, Tensor]], Any],
) -> list[PooledCaches]:
    """Return the caches of each layer as parts of one pool. The tensors must be views of the pool.

    Raises:
        NotImplementedError: the tensors are not in one pool whose blocks have one size.
    """
    first = next(iter(layers[0].values()))
    storage, stride = first.untyped_storage(), first.stride(0) * first.itemsize
    num_blocks, rest = divmod(storage.nbytes(), stride)
    _check("caches", not rest, "of whole blocks")
    with torch.inference_mode(False):
        pool = torch.empty(0, dtype=torch.uint8, device=first.device)
        pool.set_(storage, 0, (num_blocks, stride), (stride, 1))
    made = []
    for views, of_layer in zip(layers, layouts, strict=True):
        offsets = {}
        for name, view in views.items():
            start = view.data_ptr() - storage.data_ptr()
            shared = view.untyped_storage().data_ptr() == storage.data_ptr()
            _check(name, shared and view.stride(0) * view.itemsize == stride, "in the same blocks")
            _check(name, start < stride and start % CACHE_ALIGNMENT == 0, "in the first block")
            offsets[name] = torch.empty(start // CACHE_ALIGNMENT, 0)
        made.append(PooledCaches(pool, of_layer, offsets, make))
    return made


class CompiledParts:
    """Parts of steps, each compiled once for all sizes.

    Args:
        backend: Backend of ``torch.compile``.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.parts: dict[str, Callable[..., Any]] = {}

    def run(
        self, schedule: str, name: str, function: Callable[..., Any], *args: Any, **rest: Any
    ) -> Any:
        """Run a part of a step with this schedule, as a ``Runner`` does."""
        name = f"{schedule}_{name}"
        if name not in self.parts:
            # each part has its own code object, as Dynamo tries all cache entries of a code object
            part = FunctionType(_part.__code__.replace(co_name=name), globals())
            self.parts[name] = torch.compile(
                part, fullgraph=True, dynamic=True, backend=self.backend
            )
        return self.parts[name](function, args, rest)


def _part(function: Callable[..., Any], args: tuple[Any, ...], rest: dict[str, Any]) -> Any:
    return function(
        *map(_with_views, args), **{name: _with_views(each) for name, each in rest.items()}
    )


def _with_views(value: Any) -> Any:
    """Make the caches of a layer's context in the graph; return any other argument without a
    change."""
    if isinstance(value, LayerContext):
        return replace(value, caches=value.caches.caches())
    return value


def _check(name: str, fulfilled: bool, must: str) -> None:
    if not fulfilled:
        raise argument_error(
            "DeepseekForCausalLM",
            name,
            must=f"be {must}, if layers are compiled",
            got="another place",
            do="Pass --enforce-eager",
            kind=NotImplementedError,
        )
