"""Argument checks of the public functions: with ``ints`` the only place that words an error.

Every message reads ``{op}: {argument} must {rule}, got {actual}. {what to do}``. A check looks at
shapes, dtypes, devices and Python ints, never at tensor values, so it costs no device
synchronisation, works on symbolic sizes, and stays on under ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_ops.core.ints import above, at_least, held, known
from dsv4_ops.core.layout import CACHE_ALIGNMENT, Layout, MlaFp8Layout, StateLayout
from dsv4_ops.core.types import INT32_MAX, MAX_REQUESTS

_DIMENSIONS = {
    "num_reqs": "the requests of the batch, padding requests included",
    "num_tokens": "the tokens of the padded batch",
    "max_blocks": "the pages of the longest request",
    "topk": "the selected rows of a token",
    "num_blocks": "the pages of the cache",
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
    "num_swa_blocks": "the pages of the window's cache",
    "num_extra_blocks": "the pages of the compressed cache",
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
                f"{self.op}: {name} must be {dtype}, got {value.dtype}. "
                f"{_conversion(value.dtype, dtype)}."
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

    def floats(self, name: str, value: Tensor, *allowed: torch.dtype, advice: str = "") -> None:
        """``value`` is a tensor of one of the ``allowed`` dtypes; ``advice`` says where to get
        it."""
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{self.op}: {name} must be a tensor, got {type(value).__name__}. "
                f"{advice or f'Pass a {allowed[0]} tensor'}."
            )
        if value.dtype not in allowed:
            words = " or ".join([str(dtype) for dtype in allowed])
            raise TypeError(
                f"{self.op}: {name} must be {words}, got {value.dtype}. "
                f"{advice or f'Cast it with .to({allowed[0]})'}."
            )

    def rows_of(self, name: str, value: Tensor, *dims: str) -> None:
        """``value`` is a tensor of any dtype whose first sizes are the named ones."""
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{self.op}: {name} must be a tensor, got {type(value).__name__}. "
                "Pass a tensor of any dtype."
            )
        if value.dim() < len(dims):
            plural = "s" if len(dims) > 1 else ""
            raise ValueError(
                f"{self.op}: {name} must have shape {_shape((*dims, '...'))}, got "
                f"{list(value.shape)}. Pass a tensor of at least {len(dims)} dimension{plural}."
            )
        trailing = [f"size {axis}" for axis in range(len(dims), value.dim())]
        self.tensor(name, value, value.dtype, *dims, *trailing)

    def value_of(self, name: str, value: float, owner: str, dtype: torch.dtype) -> None:
        """``value`` is a number that ``dtype``, that of ``owner``, has."""
        held(self.op, name, value, owner, dtype)

    def at_least(self, minimum: int, *, most: int = INT32_MAX, **values: int) -> None:
        """Every value is an int of at least ``minimum`` and at most ``most``."""
        at_least(self.op, minimum, most=most, **values)

    def at_most(self, name: str, value: int, limit_name: str, limit: int) -> None:
        """``value`` is at most ``limit``, which is what ``limit_name`` says."""
        if value > limit:
            raise ValueError(
                f"{self.op}: {name} must be at most {limit_name} = {known(limit)}, got "
                f"{known(value)}. Lower {name}, or raise {limit_name}."
            )

    def equal(self, name: str, value: int, wanted: int, partner: str) -> None:
        """``value`` is ``wanted``, the only one that ``partner`` takes."""
        if value != wanted:
            raise ValueError(
                f"{self.op}: {name} must be {known(wanted)} with {partner}, got {known(value)}. "
                f"Pass {known(wanted)}."
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

    def without(self, name: str, value: object, neutral: object, partner: str) -> None:
        """``name`` is left at ``neutral``, because ``partner`` was given."""
        if value != neutral:
            raise ValueError(
                f"{self.op}: {name} must be {neutral} with {partner}, got {value}. "
                "Pass one of the two."
            )

    def one_of(
        self,
        name: str,
        value: str,
        *allowed: str,
        belongs_to: str = "the cache was written with",
    ) -> None:
        """``value`` is one of the ``allowed`` strings, the one that ``belongs_to``."""
        if not isinstance(value, str):
            raise TypeError(
                f"{self.op}: {name} must be a str, got {type(value).__name__}. "
                f"Pass the {name} that {belongs_to}."
            )
        if value not in allowed:
            rule = " or ".join(repr(word) for word in allowed)
            raise ValueError(
                f"{self.op}: {name} must be {rule}, got {value!r}. "
                f"Pass the {name} that {belongs_to}."
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

    def no_more_than_tokens(self, name: str, value: Tensor) -> None:
        """``value`` has an entry for each of the first tokens, and no more of them."""
        if value.shape[0] > self.sizes["num_tokens"]:
            raise ValueError(
                f"{self.op}: {name} must have at most num_tokens = {self.sizes['num_tokens']} "
                f"entries as in {self.owners['num_tokens']}, got {value.shape[0]}. "
                "Pass one per token, or fewer."
            )

    def pages(
        self,
        name: str,
        cache: Tensor,
        layout: Layout,
        dims: tuple[str, ...] = ("num_blocks", "page_bytes"),
        size_name: str = "block_size",
    ) -> None:
        """``cache`` is a paged cache of ``layout``: bytes that the attention libraries would
        misread without complaint if they were laid out otherwise. ``dims`` name its sizes,
        ``size_name`` the argument with the rows of a block."""
        self.storage(name, cache, type(layout).__name__, layout.tag, layout.storage_dtype)
        self.tensor(name, cache, layout.storage_dtype, *dims)
        _, *sizes = layout.shape(0)
        if any(size != wanted for size, wanted in zip(cache.shape[1:], sizes, strict=True)):
            entries = ", ".join([str(known(size)) for size in sizes])
            raise ValueError(
                f"{self.op}: {name} must have shape [{dims[0]}, {entries}] for "
                f"layout {layout.tag!r} with {size_name} = {known(layout.block_size)}, got "
                f"{list(cache.shape)}. Allocate it with {_allocate(layout)}, or correct "
                f"{size_name}."
            )
        page, *strides = cache.stride()
        wanted = [*sizes[1:], 1]  # of a row in its block, if there are rows
        is_dense = all(stride == each for stride, each in zip(strides, wanted, strict=True))
        inside = sizes[0] * wanted[0]
        if not is_dense or page < inside or page * cache.itemsize % CACHE_ALIGNMENT != 0:
            raise ValueError(
                f"{self.op}: {name} must have dense pages, none inside another, that start at "
                f"multiples of {CACHE_ALIGNMENT} bytes, got strides {list(cache.stride())}. "
                f"Allocate it with {_allocate(layout)}."
            )
        if not torch.compiler.is_dynamo_compiling():  # it cannot trace storage_offset: the
            self.page_start(name, cache, layout)  # launcher asks while it is traced

    def page_start(self, name: str, cache: Tensor, layout: Layout) -> None:
        """``cache`` starts at a multiple of 16 bytes of its storage."""
        if cache.storage_offset() * cache.itemsize % CACHE_ALIGNMENT != 0:
            raise ValueError(
                f"{self.op}: {name} must have pages that start at multiples of {CACHE_ALIGNMENT} "
                f"bytes, got storage offset {cache.storage_offset()}. "
                f"Allocate it with {_allocate(layout)}."
            )

    def bytes_of_row(self, name: str, cache: Tensor) -> int:
        """Bytes of a row of ``cache``, whose layout does not say."""
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
        """``cache`` is a plain paged cache of rows of one of the ``dtypes``; ``dims`` name its
        sizes, ``size_name`` the argument with the rows of a block."""
        self.storage(name, cache, "PlainLayout", "plain", *dtypes)
        self.tensor(name, cache, cache.dtype, *dims)
        if cache.shape[1] < 1:
            raise ValueError(
                f"{self.op}: {name} must have pages of at least 1 row, got {list(cache.shape)}. "
                "Allocate it with PlainLayout(block_size).allocate(num_blocks)."
            )
        if block_size is not None and cache.shape[1] != block_size:
            raise ValueError(
                f"{self.op}: {name} must have pages of {size_name} = {known(block_size)} rows, got "
                f"{list(cache.shape)}. Correct {size_name}, or pass the cache that it belongs to."
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

    def divisor(self, name: str, value: int, whole_name: str, whole: int) -> None:
        """``value`` divides ``whole``, which is what ``whole_name`` says."""
        if whole % value != 0:
            raise ValueError(
                f"{self.op}: {name} must divide {whole_name} = {known(whole)}, got {known(value)}. "
                f"Use a power of two up to {known(whole)}."
            )

    def above(self, limit: int, **values: float) -> None:
        """Every value is a finite number above ``limit``."""
        above(self.op, limit, **values)

    def host_lens(self, name: str, values: Sequence[int] | Tensor) -> list[int]:
        """``values``, lengths that are known on the host, as ints of at least 0."""
        lens = list(values.tolist() if isinstance(values, Tensor) else values)
        for index, length in enumerate(lens):
            if isinstance(length, bool) or not isinstance(length, int):
                raise TypeError(
                    f"{self.op}: {name} must hold ints, got {type(length).__name__} at index "
                    f"{index}. Convert the lengths with int()."
                )
            if length < 0:
                raise ValueError(
                    f"{self.op}: {name} must be non-negative, got {length} at index {index}. "
                    "Give padding requests length 0."
                )
        return lens

    def instance(self, name: str, value: object, kind: type) -> None:
        """``value`` is a ``kind``, or None."""
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"{self.op}: {name} must be a {kind.__name__} or None, got "
                f"{type(value).__name__}. Pass {kind.__name__}(...), or leave it out."
            )

    def device_name(self, name: str, value: torch.device | str | None) -> None:
        """``value`` names a device, or is None."""
        try:
            torch.device("cpu" if value is None else value)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"{self.op}: {name} must be a device, got {value!r}. "
                "Pass a torch.device, its name, or None."
            ) from error

    def even(self, name: str, value: Tensor, most_name: str, most: int) -> None:
        """The last dimension of ``value`` is a number of pairs, at most ``most``, which is what
        ``most_name`` says."""
        size = int(value.shape[-1])  # of a row, so configuration: a constant in compiled code
        if size % 2 != 0 or size > int(most):
            raise ValueError(
                f"{self.op}: {name} must have an even number of columns, at most {most_name} = "
                f"{known(most)}, got {list(value.shape)}. Pass [cos | sin] of the rotated pairs."
            )

    def rotation(
        self, positions: Tensor, cos_sin_cache: Tensor, rope_dim: str | int = "rope_dim"
    ) -> None:
        """``positions`` and a table of rope_dim columns to look them up in."""
        self.tensor("positions", positions, torch.int64, "num_tokens")
        self.tensor("cos_sin_cache", cos_sin_cache, torch.float32, "num_positions", rope_dim)

    def flag(self, name: str, value: bool) -> None:
        """``value`` is a bool."""
        if not isinstance(value, bool):
            raise TypeError(
                f"{self.op}: {name} must be a bool, got {type(value).__name__}. Pass True or False."
            )

    def request_limit(self, name: str = "num_reqs") -> None:
        """The batch has no more requests, or whatever is searched, than the compiled searches
        cover."""
        if self.sizes[name] > MAX_REQUESTS:
            raise ValueError(
                f"{self.op}: {name} must be at most {MAX_REQUESTS}, got {self.sizes[name]}. "
                "Split the batch."
            )


def _allocate(layout: Layout) -> str:
    """The call that makes a cache of ``layout``. Dynamo cannot trace its repr."""
    width = ""
    if isinstance(layout, (StateLayout, MlaFp8Layout)):
        width = f", width={known(layout.width)}"
    size = f"block_size={known(layout.block_size)}"
    return f"{type(layout).__name__}({size}{width}).allocate(num_blocks)"


def _conversion(actual: torch.dtype, wanted: torch.dtype) -> str:
    """How to get ``wanted``: codes and their values are the same bytes."""
    if (actual, wanted) in ((torch.uint8, torch.float8_e4m3fn), (torch.float8_e4m3fn, torch.uint8)):
        return f"Read its bytes with .view({wanted})"
    return f"Cast it with .to({wanted})"


def _shape(dims: tuple[str | int, ...]) -> str:
    return "[" + ", ".join(str(dim) for dim in dims) + "]"
