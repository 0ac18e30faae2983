"""Caches that are views of one pool of bytes, and the writes of compiled code to such caches.

A graph has one input for all caches, the pool. ``pool_view`` makes each cache inside the graph. If
an op writes to a view, a compiler rebuilds the pool from the view, and so copies a cache or the
whole pool. So the graph calls ``in_pool`` on the pool instead of an op that writes to such a view.
When the graph runs, ``in_pool`` makes the views and calls the op.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.registry import NAMESPACE, OPS, OpSpec
from dsv4_ops.core.torch_compat import FunctionalTensorMode

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


class _Place(NamedTuple):
    """The arguments of ``pool_view`` after the pool; ``offset`` may be symbolic."""

    block_stride: int
    offset: int
    page: Sequence[int]
    dtype: str


_MADE: Any = WeakIdKeyDictionary()
"""The pool and the arguments of every view that ``pool_view`` has made in a trace."""


def pages(pool: Tensor, block_stride: int, offset: int, page: Sequence[int], dtype: str) -> Tensor:
    """Return the blocks of a cache, [num_blocks, *page], as a view that compilers can invert."""
    of_dtype = getattr(torch, dtype)
    typed, size = pool.view(of_dtype), of_dtype.itemsize
    num_blocks = pool.shape[0] if pool.dim() == 2 else pool.shape[0] // block_stride
    strides = [1]
    for each in page[:0:-1]:
        strides.insert(0, strides[0] * each)
    # not a slice: torch 2.11 does not trace the storage offset of a slice with a symbolic start
    start = typed.storage_offset() + offset // size
    return typed.as_strided((num_blocks, *page), (block_stride // size, *strides), start)


def _traced_pages(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    pool, *place = args
    # if the pool is a view, a write would copy its base; if the pool starts inside its storage,
    # code of torch 2.11's Inductor reads the views at wrong addresses
    if not pool.is_base_tensor() or pool.storage_offset() != 0:
        raise argument_error(
            "pool_view",
            "pool",
            must="be an argument of the compiled function, and share no memory with another",
            got="a view of another tensor",
            do="Make it before the call, and pass no view of it",
        )
    with mode:
        view = pages(pool, *place)
    _MADE[view] = pool, _Place(*place)
    return view


_library.define(
    "pool_view(Tensor(a) pool, int block_stride, SymInt offset, int[] page, str dtype)"
    " -> Tensor(a)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("pool_view", pages, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::pool_view", pages, lib=_library)
torch.library.register_torch_dispatch(
    f"{NAMESPACE}::pool_view", FunctionalTensorMode, _traced_pages, lib=_library
)


def view(pool: Tensor, block_stride: int, offset: int, page: Sequence[int], dtype: str) -> Tensor:
    """Call ``pages`` as one op, so that a trace sees which cache is a view of which pool."""
    blocks: Tensor = torch.ops.dsv4_ops.pool_view(pool, block_stride, offset, page, dtype)
    return blocks


def writes_to_pool(spec: OpSpec, values: Mapping[str, Any]) -> bool:
    """Whether a traced call writes to a view of a pool."""
    return any(values[spec.parameters[place]] in _MADE for place in spec.mutated)


def trace(mode: Any, spec: OpSpec, values: Mapping[str, Any]) -> Any:
    """Put a call of ``in_pool`` into the graph instead of the op; return the op's results."""
    mutated = {spec.parameters[place] for place in spec.mutated}
    written: list[Tensor] = []
    read: list[Tensor] = []
    offsets: list[int] = []
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, Tensor):
            arguments[name] = value
        elif value in _MADE:
            pool, place = _MADE[value]
            numbers = _number(pool, written), len(offsets)
            arguments[name] = ("view", numbers, (place.block_stride, place.page, place.dtype))
            offsets.append(place.offset)
        else:
            kind, tensors = ("written", written) if name in mutated else ("read", read)
            arguments[name] = (kind, _number(value, tensors))
    wanted = inspect.signature(spec.meta).parameters
    with mode:
        returned = spec.meta(**{name: values[name] for name in wanted})
        written += _tensors(returned)
        torch.ops.dsv4_ops.in_pool(written, read, offsets, spec.name, repr(arguments))
    return returned


def _number(tensor: Tensor, tensors: list[Tensor]) -> int:
    """Return the index of ``tensor`` in ``tensors``; append the tensor if it is new."""
    for number, other in enumerate(tensors):
        if other is tensor:
            return number
    tensors.append(tensor)
    return len(tensors) - 1


def _tensors(returned: Any) -> list[Tensor]:
    if returned is None:
        return []
    return [returned] if isinstance(returned, Tensor) else list(returned)


def _run(
    written: Sequence[Tensor],
    read: Sequence[Tensor],
    offsets: Sequence[int],
    op: str,
    arguments: str,
) -> None:
    """Run ``op`` with the arguments that ``trace`` described. The last tensors of ``written``
    receive the results."""
    values = {}
    for name, value in ast.literal_eval(arguments).items():
        if not isinstance(value, tuple):
            values[name] = value
        elif value[0] == "view":
            (pool, offset), (block_stride, page, dtype) = value[1:]
            values[name] = pages(written[pool], block_stride, offsets[offset], page, dtype)
        else:
            values[name] = (written if value[0] == "written" else read)[value[1]]
    results = _tensors(OPS[op].op(**values))
    for out, result in zip(written[len(written) - len(results) :], results, strict=True):
        out.copy_(result)


_library.define(
    "in_pool(Tensor(a!)[] written, Tensor[] read, SymInt[] offsets, str op, str arguments) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("in_pool", _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::in_pool", lambda *_: None, lib=_library)
