"""Argument checks of the public functions.

Checks read shapes, dtypes, devices and Python values, never values on a GPU. So they do not
synchronise the device, and work on symbolic sizes. Checks also run under ``torch.compile``, except
inside ``checks_are_done``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor

from dsv4_ops.core.errors import argument_error, kind_of, plain_int
from dsv4_ops.core.ints import above, at_least, fits_dtype
from dsv4_ops.core.layout import (
    CACHE_ALIGNMENT,
    Layout,
    MlaFp8Layout,
    StateLayout,
)
from dsv4_ops.core.torch_compat import constant_in_traces
from dsv4_ops.core.types import INT32_MAX, MAX_REQUESTS

_DIMENSIONS = {
    "num_reqs": "the requests of the batch, padding requests included",
    "num_tokens": "the tokens of the padded batch",
    "next_n": "the tokens of a request",
    "max_blocks": "the blocks of the longest request",
    "topk": "the selected rows of a token",
    "num_blocks": "the blocks of the cache",
    "num_rows": "the rows that are given or read",
    "num_k": "the gathered keys",
    "cp_world_size": "the ranks that share a sequence",
    "width": "the values of a row",
    "head_dim": "the values of a compressed row",
    "num_heads": "the heads of the queries",
    "num_parts": "the parts of the keys",
    "num_candidates": "the rows that a rank found",
    "num_streams": "the residual streams",
    "num_index_heads": "the heads of the indexer's queries",
    "swa_width": "the window rows of a token",
    "extra_width": "the compressed rows of a token",
    "num_swa_blocks": "the blocks of the window's cache",
    "num_extra_blocks": "the blocks of the compressed cache",
    "swa_block_size": "the rows of a page of the window's cache",
    "extra_block_size": "the rows of a page of the compressed cache",
    "block_size": "the rows of a page",
    "page_bytes": "the bytes of a page",
    "row_bytes": "the bytes of a row",
    "kv_lora_rank": "the values of a latent",
    "qk_nope_head_dim": "the values of a query without RoPE",
    "in_features": "the values of a row that is multiplied",
    "out_features": "the values of a product",
    "num_groups": "the groups of a row",
    "hidden_size": "the values of a token's hidden state",
    "num_experts": "the experts on this device",
    "num_decode_tokens": "the decode tokens, which come first",
    "num_drafts": "the drafted tokens of a request",
    "vocab_size": "the tokens of the vocabulary",
    "batch_size": "the rows of a padded batch",
    "sequence_length": "the columns of a padded batch",
}

_ALIGNED = f"start at multiples of {CACHE_ALIGNMENT} bytes"
_ORDERS = ((0, 1, 2), (1, 0, 2), (0, 2, 1), (1, 2, 0), (2, 0, 1), (2, 1, 0))
_Dtypes = torch.dtype | tuple[torch.dtype, ...]
_ARE_DONE: ContextVar[bool] = ContextVar("checks_are_done", default=False)


@contextmanager
def checks_are_done() -> Iterator[None]:
    """Leave checks out of Dynamo's traces; the caller must have run them before, with fake tensors.

    Dynamo takes longer to trace a layer's checks than to trace the layer. Comparisons of sizes
    stay, because they tell the compiler which symbols are equal.
    """
    token = _ARE_DONE.set(True)
    try:
        yield
    finally:
        _ARE_DONE.reset(token)


@constant_in_traces
def _are_done() -> bool:
    return _ARE_DONE.get()


class Checks:
    """Check the arguments of one call; remember the size of each named dimension.

    Args:
        op: Public function that was called.
        device: Device of the op's cache, if the cache is not among the checked tensors.
    """

    def __init__(self, op: str, device: torch.device | None = None) -> None:
        self.op = op
        self.sizes: dict[str, int] = {}
        self.owners: dict[str, str] = {}
        self.device, self.device_owner = device, "the cache"
        self.skips = torch.compiler.is_dynamo_compiling() and _are_done()

    def tensor(self, name: str, value: Tensor | None, dtype: _Dtypes, *dims: str | int) -> None:
        """Check the dtype, the sizes and the device of ``value``.

        ``dtype`` may be a tuple of allowed dtypes. All tensors of a call must be on one device."""
        if not self.skips:
            self._is_dense(name, value, dtype)
        assert value is not None
        if value.dim() != len(dims):
            do = f"Pass a tensor of {_dimensions(dims)}"
            raise self._wrong_shape(name, value, dims, do=do)
        for axis in range(len(dims)):
            self._dimension(name, value, dims, axis)
        if self.skips:
            return
        if self.device is None:
            self.device, self.device_owner = value.device, name
        elif value.device != self.device:
            raise self.error(
                name,
                must=f"be on {self.device} like {self.device_owner}",
                got=value.device,
                do="Move all tensors of a call to one device",
            )

    def _is_dense(self, name: str, value: Tensor | None, dtype: _Dtypes) -> None:
        """Check that ``value`` is a dense tensor of ``dtype``, which may be a tuple of dtypes."""
        if isinstance(dtype, tuple):
            self.floats(name, value, *dtype)
        if not isinstance(value, Tensor):
            raise self._not_a_tensor(name, value, do=f"Pass a {dtype} tensor")
        dtype = value.dtype if isinstance(dtype, tuple) else dtype
        if value.layout is not torch.strided or value.is_nested:
            raise self.error(
                name,
                must="be a dense tensor",
                got="a nested one" if value.is_nested else f"a {value.layout}",
                do="Pass .to_dense() of a sparse one, or .values() of a nested one",
                kind=TypeError,
            )
        if value.dtype != dtype:
            raise self.error(
                name,
                must=f"be {dtype}",
                got=value.dtype,
                do=_conversion(value.dtype, dtype),
                kind=TypeError,
            )

    def error(
        self, name: str, *, must: str, got: object, do: str, kind: type[Exception] = ValueError
    ) -> Exception:
        """Make the ``argument_error`` of this call's op."""
        return argument_error(self.op, name, must=must, got=got, do=do, kind=kind)

    def _not_a_tensor(self, name: str, value: object, *, do: str) -> Exception:
        got = type(value).__name__
        return self.error(name, must="be a tensor", got=got, do=do, kind=TypeError)

    def _wrong_shape(
        self, name: str, value: Tensor, dims: tuple[str | int, ...], *, do: str, sizes: str = ""
    ) -> Exception:
        must = f"have shape {_shape(dims)}{sizes}"
        return self.error(name, must=must, got=list(value.shape), do=do)

    def optional(self, name: str, value: Tensor | None, dtype: _Dtypes, *dims: str | int) -> None:
        """Check that ``value`` is None or passes the check ``tensor``."""
        if value is not None:
            self.tensor(name, value, dtype, *dims)

    def tokens(self, positions: Tensor, req_indices: Tensor, *block_table: Tensor) -> None:
        """Check the positions and requests of the tokens, and the block table if one is passed."""
        self.tensor("positions", positions, torch.int64, "num_tokens")
        self.tensor("req_indices", req_indices, torch.int32, "num_tokens")
        for table in block_table:
            self.tensor("block_table", table, torch.int32, "num_reqs", "max_blocks")

    def by_token(self, name: str, value: Tensor, dtype: torch.dtype) -> None:
        """Check that ``value`` has one entry per token, [num_tokens] or [num_reqs, next_n].

        An earlier check must have set the number of tokens."""
        if not isinstance(value, Tensor) or value.dim() != 2:
            self.tensor(name, value, dtype, "num_tokens")
            return
        dims = ("num_reqs", "next_n")
        self.tensor(name, value, dtype, *dims)
        if value.shape[0] * value.shape[1] != self.sizes["num_tokens"]:
            sizes = f" of {self._num_tokens('entries')}"
            raise self._wrong_shape(name, value, dims, do="Pass one per token", sizes=sizes)

    def _dimension(self, name: str, value: Tensor, dims: tuple[str | int, ...], axis: int) -> None:
        size, dim = value.shape[axis], dims[axis]
        if isinstance(dim, int):
            if size != dim:
                do = f"Pass exactly {dim} entries in dimension {axis}"
                raise self._wrong_shape(name, value, dims, do=do)
            return
        word, _, extra = dim.partition(" + ")
        if extra:  # never subtract 0: Dynamo would trace the difference
            offset = int(extra)
            if size < offset:
                do = f"Pass at least {offset} entry, even for an empty batch"
                raise self._wrong_shape(name, value, dims, do=do)
            size = size - offset
        if word not in self.sizes:
            self.sizes[word], self.owners[word] = size, name
        elif self.sizes[word] != size:
            do = f"Make them agree: {word} counts {_DIMENSIONS[word]}"
            sizes = f" with {word} = {self.sizes[word]} as in {self.owners[word]}"
            raise self._wrong_shape(name, value, dims, do=do, sizes=sizes)

    def floats(self, name: str, value: Tensor | None, *allowed: torch.dtype, do: str = "") -> None:
        """Check that ``value`` is a tensor of an ``allowed`` dtype. ``do`` is the advice in the
        error."""
        if self.skips:
            return
        if not isinstance(value, Tensor):
            raise self._not_a_tensor(name, value, do=do or f"Pass a {allowed[0]} tensor")
        if value.dtype not in allowed:
            do = do or f"Cast it with .to({allowed[0]})"
            raise self.error(
                name,
                must="be " + " or ".join([str(dtype) for dtype in allowed]),
                got=value.dtype,
                do=do,
                kind=TypeError,
            )

    def rows_of(self, name: str, value: Tensor, *dims: str) -> None:
        """Check that ``value`` is a tensor of any dtype; ``dims`` name its leading sizes."""
        if not isinstance(value, Tensor):
            raise self._not_a_tensor(name, value, do="Pass a tensor of any dtype")
        if value.dim() < len(dims):
            do = f"Pass a tensor of at least {_dimensions(dims)}"
            raise self._wrong_shape(name, value, (*dims, "..."), do=do)
        trailing = [f"size {axis}" for axis in range(len(dims), value.dim())]
        self.tensor(name, value, value.dtype, *dims, *trailing)

    def value_of(self, name: str, value: float, owner: str, dtype: torch.dtype) -> None:
        """Check that ``dtype``, the dtype of the tensor ``owner``, can represent ``value``."""
        if not self.skips:
            fits_dtype(self.op, name, value, owner, dtype)

    def at_least(self, minimum: int, *, most: int = INT32_MAX, **values: int) -> None:
        """Check that every value is an int from ``minimum`` to ``most``."""
        at_least(self.op, minimum, most=most, **values)

    def at_most(self, name: str, value: int, limit_name: str, limit: int) -> None:
        """Check that ``value`` is at most ``limit``, the value of ``limit_name``."""
        if value > limit:
            raise self.error(
                name,
                must=f"be at most {limit_name} = {plain_int(limit)}",
                got=plain_int(value),
                do=f"Lower {name}, or raise {limit_name}",
            )

    def equal(self, name: str, value: int, required: int, partner: str) -> None:
        """Check that ``value`` is ``required``, the only value that ``partner`` supports."""
        if value != required:
            raise self.error(
                name,
                must=f"be {plain_int(required)} with {partner}",
                got=plain_int(value),
                do=f"Pass {plain_int(required)}",
            )

    def columns(self, name: str, value: Tensor, limit_name: str, limit: int) -> None:
        """Check that ``value`` has at least ``limit`` columns. ``limit`` is the value of
        ``limit_name``."""
        if value.shape[1] < limit:
            raise self.error(
                name,
                must=f"have at least {limit_name} = {plain_int(limit)} columns",
                got=plain_int(value.shape[1]),
                do=f"Widen it with columns of -1, or lower {limit_name}",
            )

    def columns_of(self, name: str, value: Tensor, multiple: int) -> None:
        """Check that the number of columns of ``value`` is a multiple of ``multiple``."""
        if value.shape[1] % multiple != 0:
            raise self.error(
                name,
                must=f"have a multiple of {multiple} columns",
                got=value.shape[1],
                do="Widen it with columns of -1",
            )

    def comes_with(self, name: str, partner_name: str, partner: Tensor | None) -> None:
        """Check that ``partner`` is not None, because the argument ``name`` needs it."""
        if partner is None:
            raise self.error(
                name,
                must=f"be None without {partner_name}",
                got="a tensor",
                do="Pass both or neither",
            )

    def all_or_none(self, **values: Tensor | None) -> None:
        """Check that all ``values`` are tensors, or all are None."""
        if self.skips:
            return
        missing = [name for name, value in values.items() if value is None]
        present = [name for name, value in values.items() if value is not None]
        if missing and present:
            self.comes_with(present[0], missing[0], None)

    def without(self, name: str, value: object, neutral: object, partner: str) -> None:
        """Check that ``value`` is ``neutral``, because the caller passed ``partner``."""
        if value != neutral:
            raise self.error(
                name, must=f"be {neutral} with {partner}", got=value, do="Pass one of the two"
            )

    def one_of(
        self,
        name: str,
        value: str,
        *allowed: str,
        belongs_to: str = "the cache was written with",
    ) -> None:
        """Check that ``value`` is an ``allowed`` string. The error's advice ends with
        ``belongs_to``."""
        if self.skips:
            return
        if not isinstance(value, str):
            raise self.error(
                name,
                must="be a str",
                got=type(value).__name__,
                do=f"Pass the {name} that {belongs_to}",
                kind=TypeError,
            )
        if value not in allowed:
            raise self.error(
                name,
                must="be " + " or ".join(repr(word) for word in allowed),
                got=repr(value),
                do=f"Pass the {name} that {belongs_to}",
            )

    def storage(
        self, name: str, cache: Tensor, made_by: str, tag: str, *allowed: torch.dtype
    ) -> None:
        """Check that ``cache`` is a tensor of an ``allowed`` dtype.

        The error does not suggest a cast: the op would write to the copy, not to the cache."""
        if self.skips:
            return
        if not isinstance(cache, Tensor):
            raise self._not_a_tensor(name, cache, do=_made_by(made_by))
        if cache.dtype not in allowed:
            words = " or ".join([str(dtype) for dtype in allowed])
            raise self.error(
                name,
                must=f"be {words} for layout {tag!r}",
                got=cache.dtype,
                do=_made_by(made_by),
                kind=TypeError,
            )

    def rows_for_tokens(self, name: str, value: Tensor) -> None:
        """Check that ``value`` has a row for every token; ops ignore extra rows."""
        if value.shape[0] < self.sizes["num_tokens"]:
            raise self.error(
                name,
                must=f"have at least {self._num_tokens('rows')}",
                got=value.shape[0],
                do="Pass a row for every token",
            )

    def no_more_than_tokens(self, name: str, value: Tensor) -> None:
        """Check that ``value`` has at most ``num_tokens`` entries: one for each of the first
        tokens."""
        if value.shape[0] > self.sizes["num_tokens"]:
            raise self.error(
                name,
                must=f"have at most {self._num_tokens('entries')}",
                got=value.shape[0],
                do="Pass one per token, or fewer",
            )

    def _num_tokens(self, what: str) -> str:
        return f"num_tokens = {self.sizes['num_tokens']} {what} as in {self.owners['num_tokens']}"

    def pages(
        self,
        name: str,
        cache: Tensor,
        layout: Layout,
        dims: tuple[str, ...] = ("num_blocks", "page_bytes"),
        size_name: str = "block_size",
    ) -> None:
        """Check that ``cache`` is a paged cache of ``layout``.

        The attention libraries misread other layouts without an error. ``dims`` are the names of
        the cache's sizes; ``size_name`` names the argument that holds the rows per block."""
        self.storage(name, cache, type(layout).__name__, layout.tag, layout.storage_dtype)
        self.tensor(name, cache, layout.storage_dtype, *dims)
        _, *sizes = layout.shape(0)
        if any(size != expected for size, expected in zip(cache.shape[1:], sizes, strict=True)):
            entries = ", ".join([str(plain_int(size)) for size in sizes])
            of_layout = f"layout {layout.tag!r} with {size_name} = {plain_int(layout.block_size)}"
            raise self.error(
                name,
                must=f"have shape [{dims[0]}, {entries}] for {of_layout}",
                got=list(cache.shape),
                do=f"{_allocate(layout)}, or correct {size_name}",
            )
        page, *strides = cache.stride()
        row_strides = [*sizes[1:], 1]  # strides of the rows in a block
        is_dense = all(stride == each for stride, each in zip(strides, row_strides, strict=True))
        inside = sizes[0] * row_strides[0]
        if not is_dense or page < inside or page * cache.itemsize % CACHE_ALIGNMENT != 0:
            raise self.error(
                name,
                must=f"have dense pages, none inside another, that {_ALIGNED}",
                got=f"strides {list(cache.stride())}",
                do=_allocate(layout),
            )
        if not torch.compiler.is_dynamo_compiling():  # Dynamo cannot trace storage_offset
            self.page_start(name, cache, layout)  # launchers call it for compiled code

    def page_start(self, name: str, cache: Tensor, layout: Layout) -> None:
        """Check that ``cache`` starts at a multiple of 16 bytes in its storage."""
        if cache.storage_offset() * cache.itemsize % CACHE_ALIGNMENT != 0:
            raise self.error(
                name,
                must=f"have pages that {_ALIGNED}",
                got=f"storage offset {cache.storage_offset()}",
                do=_allocate(layout),
            )

    def bytes_of_row(self, name: str, cache: Tensor) -> int:
        """Check a cache of ``MlaFp8Layout``. Return the bytes per row, which differ between caches
        of this layout."""
        self.storage(name, cache, "MlaFp8Layout", MlaFp8Layout.tag, torch.uint8)
        self.tensor(name, cache, torch.uint8, "num_blocks", "block_size", "row_bytes")
        return int(cache.shape[2])

    def rows(
        self,
        name: str,
        cache: Tensor,
        block_size: int | None = None,
        dims: tuple[str, str, str] = ("num_blocks", "block_size", "width"),
        size_name: str = "block_size",
        dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32),
    ) -> None:
        """Check that ``cache`` is a plain paged cache of one of the ``dtypes``.

        ``dims`` are the names of the cache's sizes; ``size_name`` names the argument that holds the
        rows per block."""
        self.storage(name, cache, "PlainLayout", "plain", *dtypes)
        self.tensor(name, cache, cache.dtype, *dims)
        if cache.shape[1] < 1:
            raise self.error(
                name,
                must="have pages of at least 1 row",
                got=list(cache.shape),
                do=_made_by("PlainLayout"),
            )
        if block_size is not None and cache.shape[1] != block_size:
            raise self.error(
                name,
                must=f"have pages of {size_name} = {plain_int(block_size)} rows",
                got=list(cache.shape),
                do=f"Correct {size_name}, or pass the cache that it belongs to",
            )
        if cache.stride(2) != 1:
            raise self.error(
                name,
                must="have dense rows",
                got=f"strides {list(cache.stride())}",
                do=_made_by("PlainLayout"),
            )

    def apart(self, name: str, value: Tensor, do: str = "") -> None:
        """Check that no two elements of ``value``, a mutated tensor, share memory."""
        if not any(_nested(value, order) for order in _ORDERS):
            raise self.error(
                name,
                must="have no row inside another, as it is written to",
                got=f"strides {list(value.stride())}",
                do=do or _made_by("PlainLayout"),
            )

    def divides(self, divisor_name: str, divisor: int, name: str, value: int) -> None:
        """Check that ``value`` is a multiple of ``divisor``."""
        if value % divisor != 0:
            raise self.error(
                name,
                must=f"be a multiple of {divisor_name} = {plain_int(divisor)}",
                got=plain_int(value),
                do=f"Use {name} = {plain_int(value + divisor - value % divisor)}",
            )

    def divisor(self, name: str, value: int, whole_name: str, whole: int) -> None:
        """Check that ``value`` divides ``whole``, the value of ``whole_name``."""
        if whole % value != 0:
            raise self.error(
                name,
                must=f"divide {whole_name} = {plain_int(whole)}",
                got=plain_int(value),
                do=f"Use a power of two up to {plain_int(whole)}",
            )

    def above(self, limit: int, **values: float) -> None:
        """Check that every value is a finite number above ``limit``."""
        if not self.skips:
            above(self.op, limit, **values)

    def host_lens(self, name: str, values: Sequence[int] | Tensor) -> list[int]:
        """Check that the lengths ``values`` are ints of at least 0; return them as a list."""
        lens = list(values.tolist() if isinstance(values, Tensor) else values)
        for index, length in enumerate(lens):
            if isinstance(length, bool) or not isinstance(length, int):
                raise self.error(
                    name,
                    must="hold ints",
                    got=f"{type(length).__name__} at index {index}",
                    do="Convert the lengths with int()",
                    kind=TypeError,
                )
            if length < 0:
                raise self.error(
                    name,
                    must="be non-negative",
                    got=f"{length} at index {index}",
                    do="Give padding requests length 0",
                )
        return lens

    def instance(self, name: str, value: object, kind: type) -> None:
        """Check that ``value`` is None or a ``kind``."""
        if value is not None and not isinstance(value, kind):
            raise self.error(
                name,
                must=f"be a {kind.__name__} or None",
                got=type(value).__name__,
                do=f"Pass {kind.__name__}(...), or leave it out",
                kind=TypeError,
            )

    def kind(
        self, name: str, value: object, kind: type | tuple[type, ...], *, must: str, do: str
    ) -> None:
        """Check that ``value`` is None or a ``kind``. ``must`` names the kind in the error."""
        if value is not None and not isinstance(value, kind):
            raise self.error(name, must=must, got=kind_of(value), do=do, kind=TypeError)

    def device_name(self, name: str, value: torch.device | str | None) -> None:
        """Check that ``value`` is None or names a device; if it names a GPU, torch must see it."""
        try:
            if isinstance(value, (bool, float)):
                raise TypeError(value)
            device = torch.device("cpu" if value is None else value)
        except (RuntimeError, TypeError) as error:
            raise self.error(
                name,
                must="be a device",
                got=repr(value),
                do="Pass a torch.device, its name, or None",
            ) from error
        if torch.compiler.is_compiling() or device.type != "cuda":
            return
        if (device.index or 0) >= torch.cuda.device_count():
            raise self.error(
                name, must="be one that torch sees", got=device, do="Leave it out, or pass cpu"
            )

    def even(self, name: str, value: Tensor, most_name: str, most: int) -> None:
        """Check that the last dimension of ``value`` is even and at most ``most``, the value of
        ``most_name``."""
        size = int(value.shape[-1])  # the model fixes the width, so compiled code may fix it too
        if size % 2 != 0 or size > int(most):
            raise self.error(
                name,
                must=f"have an even number of columns, at most {most_name} = {plain_int(most)}",
                got=list(value.shape),
                do="Pass [cos | sin] of the rotated pairs",
            )

    def rotation(
        self, positions: Tensor, cos_sin_cache: Tensor, rope_dim: str | int = "rope_dim"
    ) -> None:
        """Check ``positions`` and ``cos_sin_cache``, a RoPE table with ``rope_dim`` columns."""
        self.tensor("positions", positions, torch.int64, "num_tokens")
        self.tensor("cos_sin_cache", cos_sin_cache, torch.float32, "num_positions", rope_dim)

    def path(self, name: str, value: str | os.PathLike[str]) -> Path:
        """Return ``value`` as a ``Path``; check that it is a str or a path."""
        if not isinstance(value, (str, os.PathLike)):
            raise self.error(
                name,
                must="be a str or a path",
                got=type(value).__name__,
                do="Name a file or a folder",
                kind=TypeError,
            )
        return Path(value)

    def flag(self, name: str, value: bool) -> None:
        """Check that ``value`` is a bool."""
        if self.skips:
            return
        if not isinstance(value, bool):
            raise self.error(
                name,
                must="be a bool",
                got=type(value).__name__,
                do="Pass True or False",
                kind=TypeError,
            )

    def request_limit(self, name: str = "num_reqs") -> None:
        """Check that the size ``name`` is at most what compiled binary searches support."""
        if self.sizes[name] > MAX_REQUESTS:
            raise self.error(
                name, must=f"be at most {MAX_REQUESTS}", got=self.sizes[name], do="Split the batch"
            )


def _nested(value: Tensor, order: tuple[int, ...]) -> bool:
    """Whether each dimension's stride is at least the extent of all inner dimensions; ``order``
    begins with the outermost dimension."""
    extent = 1
    for axis in reversed(order):
        size, stride = value.shape[axis], value.stride(axis)
        # for a dense tensor ``stride < extent`` is false for all sizes, so no guard is added
        if stride < extent and size > 1:
            return False
        extent += (size - 1) * stride
    return True


def _allocate(layout: Layout) -> str:
    """Say how to allocate a cache of ``layout``, without its repr, which Dynamo cannot trace."""
    width = ""
    if isinstance(layout, (StateLayout, MlaFp8Layout)):
        width = f", width={plain_int(layout.width)}"
    size = f"block_size={plain_int(layout.block_size)}"
    return _made_by(type(layout).__name__, f"{size}{width}")


def _made_by(layout: str, sizes: str = "block_size") -> str:
    return f"Allocate it with {layout}({sizes}).allocate(num_blocks)"


def _conversion(actual: torch.dtype, dtype: torch.dtype) -> str:
    """Say how to convert a tensor to ``dtype``. uint8 and e4m3 tensors hold the same bytes."""
    if (actual, dtype) in ((torch.uint8, torch.float8_e4m3fn), (torch.float8_e4m3fn, torch.uint8)):
        return f"Read its bytes with .view({dtype})"
    return f"Cast it with .to({dtype})"


def _dimensions(dims: tuple[str | int, ...]) -> str:
    return f"{len(dims)} dimension{'s' if len(dims) > 1 else ''}"


def _shape(dims: tuple[str | int, ...]) -> str:
    return "[" + ", ".join(str(dim) for dim in dims) + "]"
