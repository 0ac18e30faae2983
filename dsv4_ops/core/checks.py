"""Argument checks of the public functions: with ``ints`` the only place that words an error.

Every message reads ``{op}: {argument} must {rule}, got {actual}. {what to do}``. A check looks at
shapes, dtypes, devices and Python ints, never at tensor values, so it costs no device
synchronisation, works on symbolic sizes, and stays on under ``torch.compile``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.ints import at_least, known
from dsv4_ops.core.layout import CACHE_ALIGNMENT, Layout
from dsv4_ops.core.types import INT32_MAX, MAX_REQUESTS

_DIMENSIONS = {
    "num_reqs": "the requests of the batch, padding requests included",
    "num_tokens": "the tokens of the padded batch",
    "max_blocks": "the pages of the longest request",
    "topk": "the selected rows of a token",
    "num_blocks": "the pages of the cache",
    "num_rows": "the rows of the result",
    "width": "the values of a row",
    "block_size": "the rows of a page",
    "page_bytes": "the bytes of a page",
    "num_decode_tokens": "the decode tokens, which come first",
}


class Checks:
    """Checks the arguments of one call and remembers the sizes that dimension names got."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, int] = {}
        self.owners: dict[str, str] = {}
        self.device: torch.device | None = None
        self.device_owner = ""

    def tensor(self, name: str, value: Tensor, dtype: torch.dtype, *dims: str | int) -> None:
        """``value`` is a tensor of ``dtype``, with the named sizes, on the device of the tensors
        before it."""
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{self.op}: {name} must be a tensor, got {type(value).__name__}. Pass a "
                f"{dtype} tensor."
            )
        if value.dtype != dtype:
            raise TypeError(
                f"{self.op}: {name} must be {dtype}, got {value.dtype}. Cast it with .to({dtype})."
            )
        if value.dim() != len(dims):
            raise ValueError(
                f"{self.op}: {name} must have shape {_shape(dims)}, got {list(value.shape)}. "
                f"Pass a tensor of {len(dims)} dimension{'s' if len(dims) > 1 else ''}."
            )
        for axis, dim in enumerate(dims):
            self._dimension(name, value, dims, axis, dim)
        if self.device is None:
            self.device, self.device_owner = value.device, name
        elif value.device != self.device:
            raise ValueError(
                f"{self.op}: {name} must be on {self.device} like {self.device_owner}, got "
                f"{value.device}. "
                "Move all tensors of a call to one device."
            )

    def _dimension(
        self, name: str, value: Tensor, dims: tuple[str | int, ...], axis: int, dim: str | int
    ) -> None:
        size = value.shape[axis]
        if isinstance(dim, int):
            if size != dim:
                raise ValueError(
                    f"{self.op}: {name} must have shape {_shape(dims)}, got {list(value.shape)}. "
                    f"Pass exactly {dim} entries in dimension {axis}."
                )
            return
        word, _, extra = dim.partition(" + ")
        offset = int(extra) if extra else 0
        if size < offset:
            raise ValueError(
                f"{self.op}: {name} must have shape {_shape(dims)}, got {list(value.shape)}. "
                f"Pass at least {offset} entry, even for an empty batch."
            )
        if word not in self.sizes:
            self.sizes[word], self.owners[word] = size - offset, name
        elif self.sizes[word] != size - offset:
            raise ValueError(
                f"{self.op}: {name} must have shape {_shape(dims)} with {word} = "
                f"{self.sizes[word]} as in "
                f"{self.owners[word]}, got {list(value.shape)}. "
                f"Make them agree: {word} counts {_DIMENSIONS[word]}."
            )

    def at_least(self, minimum: int, **values: int) -> None:
        """Every value is an int of at least ``minimum``."""
        at_least(self.op, minimum, **values)

    def at_most(self, name: str, value: int, limit_name: str, limit: int) -> None:
        """``value`` is at most ``limit``, which is what ``limit_name`` says."""
        if value > limit:
            raise ValueError(
                f"{self.op}: {name} must be at most {limit_name} = {known(limit)}, got "
                f"{known(value)}. Lower {name}, or raise {limit_name}."
            )

    def fits_int32(self, **values: int) -> None:
        """Every value is at most 2^31 - 1, so that what it multiplies stays within 64 bits."""
        for name, value in values.items():
            if value > INT32_MAX:
                raise ValueError(
                    f"{self.op}: {name} must be at most {INT32_MAX}, got {known(value)}. "
                    "Indices are int32, so that larger ones address nothing."
                )

    def columns(self, name: str, value: Tensor, limit_name: str, limit: int) -> None:
        """``value`` has at least ``limit`` columns, which is what ``limit_name`` says."""
        if value.shape[1] < limit:
            raise ValueError(
                f"{self.op}: {name} must have at least {limit_name} = {known(limit)} columns, got "
                f"{known(value.shape[1])}. Widen it with columns of -1, or lower {limit_name}."
            )

    def columns_of(self, name: str, value: Tensor, multiple: int) -> None:
        """The number of columns of ``value`` is a multiple of ``multiple``."""
        if value.shape[1] % multiple != 0:
            raise ValueError(
                f"{self.op}: {name} must have a multiple of {multiple} columns, got "
                f"{value.shape[1]}. Widen it with columns of -1."
            )

    def comes_with(self, name: str, partner_name: str, partner: Tensor | None) -> None:
        """``name`` was given, so ``partner`` must be too."""
        if partner is None:
            raise ValueError(
                f"{self.op}: {name} must be None without {partner_name}, got a tensor. "
                "Pass both or neither."
            )

    def one_of(self, name: str, value: str, *allowed: str) -> None:
        """``value`` is one of the ``allowed`` strings."""
        if not isinstance(value, str):
            raise TypeError(
                f"{self.op}: {name} must be a str, got {type(value).__name__}. "
                f"Pass the {name} that the cache was written with."
            )
        if value not in allowed:
            rule = " or ".join(repr(word) for word in allowed)
            raise ValueError(
                f"{self.op}: {name} must be {rule}, got {value!r}. "
                f"Pass the {name} that the cache was written with."
            )

    def storage(
        self, name: str, cache: Tensor, made_by: str, tag: str, *allowed: torch.dtype
    ) -> None:
        """``cache`` is a tensor of one of the ``allowed`` dtypes, and of no other cast to it: ops
        would write to the copy."""
        if not isinstance(cache, Tensor):
            raise TypeError(
                f"{self.op}: {name} must be a tensor, got {type(cache).__name__}. Allocate it with "
                f"{made_by}(block_size).allocate(num_blocks)."
            )
        if cache.dtype not in allowed:
            words = " or ".join([str(dtype) for dtype in allowed])
            raise TypeError(
                f"{self.op}: {name} must be {words} for layout {tag!r}, got {cache.dtype}. "
                f"Allocate it with {made_by}(block_size).allocate(num_blocks)."
            )

    def rows_for_tokens(self, name: str, value: Tensor) -> None:
        """``value`` has a row for every token; more are ignored."""
        if value.shape[0] < self.sizes["num_tokens"]:
            raise ValueError(
                f"{self.op}: {name} must have at least num_tokens = {self.sizes['num_tokens']} "
                f"rows as in {self.owners['num_tokens']}, got {value.shape[0]}. "
                "Pass a row for every token."
            )

    def pages(self, name: str, cache: Tensor, layout: Layout) -> None:
        """``cache`` is a paged cache of ``layout``: bytes that the attention libraries would
        misread without complaint if they were laid out otherwise."""
        self.storage(name, cache, type(layout).__name__, layout.tag, layout.storage_dtype)
        self.tensor(name, cache, layout.storage_dtype, "num_blocks", "page_bytes")
        if cache.shape[1] != layout.page_bytes:
            raise ValueError(
                f"{self.op}: {name} must have shape [num_blocks, {known(layout.page_bytes)}] for "
                f"layout {layout.tag!r} with block_size = {known(layout.block_size)}, got "
                f"{list(cache.shape)}. Allocate it with {_allocate(layout)}, or correct block_size."
            )
        page, byte = cache.stride()
        if byte != 1 or page < layout.page_bytes or page % CACHE_ALIGNMENT != 0:
            raise ValueError(
                f"{self.op}: {name} must have dense pages, none inside another, that start at "
                f"multiples of {CACHE_ALIGNMENT} bytes, got strides {list(cache.stride())}. "
                f"Allocate it with {_allocate(layout)}."
            )
        if not torch.compiler.is_dynamo_compiling():  # it cannot trace storage_offset: the
            self.page_start(name, cache, layout)  # launcher asks while it is traced

    def page_start(self, name: str, cache: Tensor, layout: Layout) -> None:
        """``cache`` starts at a multiple of 16 bytes of its storage."""
        if cache.storage_offset() % CACHE_ALIGNMENT != 0:
            raise ValueError(
                f"{self.op}: {name} must have pages that start at multiples of {CACHE_ALIGNMENT} "
                f"bytes, got storage offset {cache.storage_offset()}. "
                f"Allocate it with {_allocate(layout)}."
            )

    def rows(self, name: str, cache: Tensor, block_size: int | None = None) -> None:
        """``cache`` is a plain paged cache [num_blocks, block_size, width] of bf16 or fp32 rows."""
        self.storage(name, cache, "PlainLayout", "plain", torch.bfloat16, torch.float32)
        self.tensor(name, cache, cache.dtype, "num_blocks", "block_size", "width")
        if cache.shape[1] < 1:
            raise ValueError(
                f"{self.op}: {name} must have pages of at least 1 row, got {list(cache.shape)}. "
                "Allocate it with PlainLayout(block_size).allocate(num_blocks)."
            )
        if block_size is not None and cache.shape[1] != block_size:
            raise ValueError(
                f"{self.op}: {name} must have pages of block_size = {known(block_size)} rows, got "
                f"{list(cache.shape)}. Correct block_size, or pass the cache that it belongs to."
            )
        if cache.stride(2) != 1:
            raise ValueError(
                f"{self.op}: {name} must have dense rows, got strides {list(cache.stride())}. "
                "Allocate it with PlainLayout(block_size).allocate(num_blocks)."
            )

    def divides(self, divisor_name: str, divisor: int, name: str, value: int) -> None:
        """``value`` is a multiple of ``divisor``."""
        if value % divisor != 0:
            raise ValueError(
                f"{self.op}: {name} must be a multiple of {divisor_name} = {known(divisor)}, got "
                f"{known(value)}. Use {name} = {known(value + divisor - value % divisor)}."
            )

    def flag(self, name: str, value: bool) -> None:
        """``value`` is a bool."""
        if not isinstance(value, bool):
            raise TypeError(
                f"{self.op}: {name} must be a bool, got {type(value).__name__}. Pass True or False."
            )

    def request_limit(self) -> None:
        """The batch has no more requests than the compiled searches cover."""
        if self.sizes["num_reqs"] > MAX_REQUESTS:
            raise ValueError(
                f"{self.op}: num_reqs must be at most {MAX_REQUESTS}, got "
                f"{self.sizes['num_reqs']}. "
                "Split the batch."
            )


def _allocate(layout: Layout) -> str:
    """The call that makes a cache of ``layout``. Dynamo cannot trace its repr."""
    return f"{type(layout).__name__}(block_size={known(layout.block_size)}).allocate(num_blocks)"


def _shape(dims: tuple[str | int, ...]) -> str:
    return "[" + ", ".join(str(dim) for dim in dims) + "]"
