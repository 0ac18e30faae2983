"""The cache of a patched model: paged, at fixed addresses, with lengths on the device."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4_ops.attention import ContextParallel
from dsv4_ops.attention.caches import mark_static
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error, kind_of
from dsv4_ops.integrations.transformers.architectures import spec_of_config
from dsv4_ops.integrations.transformers.architectures.base import (
    draft_of,
    require_transformers,
    unpatched,
)
from dsv4_ops.integrations.transformers.cache.blocks import BlockPool, OutOfBlocks, has
from dsv4_ops.integrations.transformers.recipe import Recipe
from dsv4_ops.integrations.transformers.tensors import CacheTensors

Cache: Any = require_transformers("dsv4_ops.integrations.transformers").Cache

__all__ = ["OutOfBlocks", "PagedCache"]

DEFAULT_CHUNK = 2048
"""Default of ``max_chunk``. The rings of window keys grow with ``max_chunk``."""


@functools.cache
def cache_argument() -> str:
    """Return the name of the cache in arguments and outputs of ``forward`` and ``generate``.

    ``"cache"`` since transformers 5.24, ``"past_key_values"`` before. A patched model takes
    ``cache`` in every version.
    """
    from transformers.modeling_outputs import MoeModelOutputWithPast

    names = {field.name for field in fields(MoeModelOutputWithPast)}
    return "cache" if "cache" in names else "past_key_values"


def check_kind(op: str, name: str, cache: Any) -> None:
    """Raise if an argument of ``forward`` or ``generate`` is neither a cache nor None."""
    rule = "be a PagedCache, or another Cache of transformers"
    Checks(op).kind(name, cache, Cache, must=rule, do="Make one with PagedCache.for_model")


@dataclass(frozen=True)
class Text:
    """The prompts and answers of the last ``generate`` call.

    Attributes:
        ids: Tokens and padding, [batch, columns].
        mask: 0 for padding, [batch, columns].
        seq_lens: Lengths of the cache's rows after the call, [batch].
    """

    ids: Tensor
    mask: Tensor
    seq_lens: Tensor


class PagedCache(Cache):  # type: ignore[misc]  # transformers is partly untyped
    """KV caches of all layers, for ``max_batch_size`` requests of up to ``max_cache_len`` tokens.

    Every request owns a row. For DeepSeek-V4, a row has rings of fixed size for window keys and
    compressor states; compressed rows and indexer keys are in blocks of 256 tokens. DeepSeek-V3 and
    V2 keep latents in blocks of 64 tokens; V3.2 and GLM-5 also keep indexer keys in these blocks.
    By default, each row has its own blocks; with ``num_blocks``, rows share a pool of blocks. Sizes
    and addresses never change, so compiled steps do not recompile and CUDA graphs write in place.

    With ``input_ids``, row r of the batch uses row r of the cache. With a ``StepBatch``, requests
    use the rows that ``add`` returned. A patched model can return ``hidden_states``
    (``output_hidden_states=True``), but refuses ``output_attentions`` and
    ``output_router_logits``, which no op computes.

    Args:
        config: ``DeepseekV4Config``, ``DeepseekV3Config``, ``DeepseekV2Config``,
            ``DeepseekV32Config`` or ``GlmMoeDsaConfig``.
        max_batch_size: Number of rows. At least 1.
        max_cache_len: Maximum tokens of a request. At least 1.
        num_blocks: Blocks in the shared pool. None gives every row its own blocks for
            ``max_cache_len`` tokens.
        max_chunk: Maximum tokens of a request in one step; min(``max_cache_len``, 2048) by default.
            The memory of window keys grows with ``max_chunk`` (``docs/memory.md``).
        next_n: 1 + the maximum number of a step's tokens that speculative decoding may roll back. A
            cache without rings ignores ``next_n``.
        kv: How the cache stores keys; see ``patch``.
        precision: See ``patch``.
        parallel: See ``patch``. Each rank stores a part of the rows of every block. With n ranks, a
            block covers n times as many positions.
        draft_layer: Whether to add the caches of a draft layer (``load_mtp``).
        device: Device of the tensors.

    Raises:
        ValueError, TypeError, NotImplementedError: a size is out of range, the model is not
            supported, or the ranks of ``parallel`` pass different sizes.
        RuntimeError: the tensors do not fit into memory (on a GPU, an ``OutOfMemoryError``).

    Example:
        >>> from dsv4_ops.testing.models import small_config
        >>> from dsv4_ops.integrations.transformers import PagedCache
        >>> cache = PagedCache(small_config(), max_batch_size=4, max_cache_len=1024, num_blocks=8)
        >>> cache.add("a request", num_tokens=300), cache.num_free_blocks
        (0, 6)
        >>> cache.free("a request")
        >>> cache.num_free_blocks
        8
    """

    def __init__(
        self,
        config: Any,
        *,
        max_batch_size: int,
        max_cache_len: int,
        num_blocks: int | None = None,
        max_chunk: int | None = None,
        next_n: int = 1,
        kv: str = "fp8",
        precision: str | Recipe = "serve",
        parallel: ContextParallel | None = None,
        draft_layer: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(layers=[])
        checks = Checks("PagedCache")
        if isinstance(config, torch.nn.Module):
            raise argument_error(
                "PagedCache",
                "config",
                must="be a configuration",
                got=type(config).__name__,
                do="Call PagedCache.for_model(model, ...)",
                kind=TypeError,
            )
        checks.at_least(
            1, max_batch_size=max_batch_size, max_cache_len=max_cache_len, next_n=next_n
        )
        chunk = min(max_cache_len, DEFAULT_CHUNK) if max_chunk is None else max_chunk
        checks.at_least(1, max_chunk=chunk)
        checks.device_name("device", device)
        checks.flag("draft_layer", draft_layer)
        self.spec = spec_of_config("PagedCache", config, kv, precision, parallel=parallel)
        # private names, because transformers' Cache has properties with the public names
        self._max_batch_size, self._max_cache_len = max_batch_size, max_cache_len
        self.max_chunk = chunk
        self.device = torch.device("cpu" if device is None else device)
        self.blocks_per_row = -(-max_cache_len // self.spec.block_tokens)
        self.owns_blocks = num_blocks is None
        blocks = max_batch_size * self.blocks_per_row if num_blocks is None else num_blocks
        checks.at_least(1, num_blocks=blocks)
        if self.spec.parallel is not None:
            self.spec.parallel.agree(
                "PagedCache",
                "cache",
                self.device,
                max_batch_size=max_batch_size,
                max_cache_len=max_cache_len,
                num_blocks=blocks,
                max_chunk=chunk,
                made_for=self.spec.fingerprint,
            )
        self._pool = BlockPool(max_batch_size, blocks, self.blocks_per_row)
        self.rings = self.spec.rings(max_cache_len, chunk, next_n)
        self.text: Text | None = None
        drafts = self.spec.draft_kinds("PagedCache") if draft_layer else ()
        # ignore the caller's default device and inference mode: later steps could not write to
        # inference tensors
        try:
            with torch.inference_mode(False), torch.device("cpu"):
                self.tensors = self._tensors(blocks, drafts)
        except RuntimeError as error:
            if "allocate" not in str(error):
                raise
            raise argument_error(
                "PagedCache",
                "num_blocks",
                must=f"leave memory on {self.device}",
                got=f"{blocks} blocks of {self.spec.block_tokens} tokens",
                do="Pass a smaller max_cache_len, max_batch_size or num_blocks",
                kind=type(error),
            ) from error
        mark_static(*pytree.tree_leaves(self.tensors))

    def _tensors(self, num_blocks: int, drafts: tuple[str, ...]) -> CacheTensors:
        lens = torch.zeros(self._max_batch_size, dtype=torch.int32, device=self.device)
        return CacheTensors(
            tables=self.spec.tables(self._pool_table(), self.rings, self._max_cache_len),
            rope=self.spec.rope_tables(self._max_cache_len, self.device),
            layers=self._layers(self.spec.kinds, num_blocks),
            draft=self._layers(drafts, num_blocks),
            made_for=self.spec.fingerprint,
            dropped=torch.zeros(1, dtype=torch.int64, device=self.device),
            seq_lens=lens,
            written=torch.zeros_like(lens),
        )

    def _layers(self, kinds: tuple[str, ...], num_blocks: int) -> tuple[Any, ...]:
        sizes = (self._max_batch_size, num_blocks, self._max_cache_len, self.rings, self.device)
        return tuple(self.spec.layer_caches(kind, *sizes) for kind in kinds)

    @classmethod
    def for_model(cls, model: Any, **sizes: Any) -> PagedCache:
        """Make a cache with ``kv``, ``precision``, ``parallel`` and ``device`` of a patched model.

        If the model has a draft layer, the cache also has caches for this layer.
        """
        op, spec = "PagedCache.for_model", getattr(model, "dsv4_ops_spec", None)
        if spec is None:
            raise unpatched(op, model)
        settings = {"kv": spec.kv, "precision": spec.recipe, "device": model.device}
        settings |= {"parallel": spec.parallel, "draft_layer": draft_of(model) is not None}
        return cls(model.config, **{**settings, **sizes})

    def _pool_table(self) -> Tensor:
        """Return the block table of the pool, with -1 for blocks that are not reserved."""
        shape = self.max_batch_size, self.blocks_per_row
        owned = torch.arange(math.prod(shape), dtype=torch.int32, device=self.device).view(shape)
        return owned if self.owns_blocks else torch.full_like(owned, -1)

    # Requests

    @property
    def seq_lens(self) -> Tensor:
        """Length of the request in every row, [max_batch_size], int32, on the device.

        Model calls and steps read and write these lengths. Set a length yourself only if other code
        filled the row.
        """
        return self.tensors.seq_lens

    @property
    def written(self) -> Tensor:
        """Largest length of every row since its length was 0, [max_batch_size], int32."""
        return self.tensors.written

    @property
    def requests(self) -> dict[Hashable, int]:
        """Row of every request."""
        return dict(self._pool.rows)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no request holds."""
        return len(self._pool.free_blocks)

    def add(self, request: Hashable, num_tokens: int = 0) -> int:
        """Give a new request a row, and blocks for ``num_tokens`` tokens.

        Raises:
            OutOfBlocks: no row is free, or too few blocks are free; the cache is unchanged.
            ValueError: the request is in the cache already, or ``num_tokens`` exceeds
                ``max_cache_len``.
            TypeError: the request is not hashable.
        """
        row = self._pool.add(request, self._blocks("add", num_tokens))
        self._store_table(request)
        self._forget(row)
        return row

    def reserve(self, request: Hashable, num_tokens: int) -> None:
        """Grow a request's blocks to hold ``num_tokens`` tokens in total.

        Raises:
            OutOfBlocks: too few blocks are free; the cache is unchanged.
            ValueError: the request has no row, or ``num_tokens`` exceeds ``max_cache_len``.
        """
        before = len(self._pool.blocks[self._pool.require("reserve", request)])
        blocks = self._blocks("reserve", num_tokens)
        if blocks > before:
            self._pool.reserve(request, blocks)
            self._store_table(request)

    def lacking_blocks(self, request: Hashable, num_tokens: int) -> int:
        """Return the number of blocks that ``reserve`` would take, or that ``add`` would take for a
        new request."""
        new = not has(self._pool.blocks, "lacking_blocks", request)
        owned = 0 if new else len(self._pool.blocks[request])
        return max(self._blocks("lacking_blocks", num_tokens) - owned, 0)

    def free(self, request: Hashable) -> None:
        """Release the row and the blocks of a request."""
        row = self._pool.free(request)
        self._forget(row)
        if not self.owns_blocks:
            self.tensors.tables.pool[row] = -1

    def raise_if_dropped(self) -> None:
        """Raise if steps dropped tokens since the last call, and reset the counter.

        Steps count dropped tokens on the device, also in graphs, without synchronising. This method
        synchronises. Call the method before you use results: every step, every hundred steps, or
        at the end.

        Raises:
            RuntimeError: tokens were dropped. The logits of dropped tokens, and of later tokens of
                the same requests, are undefined. Other requests are not affected.
        """
        dropped = int(self.tensors.dropped)
        if dropped:
            self.tensors.dropped.zero_()
            raise argument_error(
                "raise_if_dropped",
                "the cache",
                must="have stored all tokens of its steps",
                got=f"{dropped} dropped",
                do="Reserve blocks, keep requests within max_cache_len, give each a row of its "
                "own in the cache, pass positions and lengths without gaps, and has_context=False "
                "only if every request begins in the step",
                kind=RuntimeError,
            )

    def _forget(self, row: int) -> None:
        self.text = None
        self.seq_lens[row] = 0
        self.written[row] = 0

    def _blocks(self, op: str, num_tokens: int) -> int:
        checks = Checks(op)
        checks.at_least(0, num_tokens=num_tokens)
        checks.at_most("num_tokens", num_tokens, "max_cache_len", self.max_cache_len)
        return 0 if self.owns_blocks else -(-num_tokens // self.spec.block_tokens)

    def _store_table(self, request: Hashable) -> None:
        blocks = self._pool.blocks[request]
        if blocks:
            row = self._pool.rows[request]
            table = torch.tensor(blocks, dtype=torch.int32, device=self.device)
            self.tensors.tables.pool[row, : len(blocks)] = table

    # Hugging Face's Cache interface

    @property
    def is_compileable(self) -> bool:
        """True: compiled calls do not recompile as the cache fills."""
        return True

    @property
    def is_linear(self) -> list[bool]:
        """False for every layer: no layer has linear attention, so ``generate`` makes no masks for
        linear attention."""
        return [False] * len(self)

    @property
    def is_initialized(self) -> bool:
        """True: all tensors are allocated at construction."""
        return True

    @property
    def max_batch_size(self) -> int:
        """Number of rows."""
        return self._max_batch_size

    @property
    def max_cache_len(self) -> int:
        """Maximum tokens of a request."""
        return self._max_cache_len

    def __len__(self) -> int:
        return len(self.tensors.layers)

    def __repr__(self) -> str:
        parts = self.memory()
        ranks = self.spec.parallel
        share = "" if ranks is None else f", one of {ranks.world_size} ranks"
        part = "" if ranks is None else f" (1/{ranks.world_size})"
        sizes = ", ".join(
            f"{name} {format_bytes(size)}{part if name in self.spec.shared_groups else ''}"
            for name, size in parts.items()
        )
        return (
            f"PagedCache({len(self)} layers, max_batch_size={self.max_batch_size}, "
            f"max_cache_len={self.max_cache_len}, "
            f"num_blocks={self.num_blocks}, max_chunk={self.max_chunk}, kv={self.spec.kv!r}, "
            f"device={str(self.device)!r}{share}; {format_bytes(sum(parts.values()))}: {sizes})"
        )

    def memory(self) -> dict[str, int]:
        """Return the number of bytes of each group of tensors.

        Returns:
            "window": window keys, which grow with ``max_batch_size`` and ``max_chunk``.
            "compressed" and "indexer": compressed rows and indexer keys, which grow with
            ``num_blocks``. "states": compressor states, which grow with ``max_batch_size``. In
            place of these four groups, DeepSeek-V3 and V2 have "latents", and V3.2 and GLM-5 have
            "latents" and "indexer". "draft": caches of the draft layer, if there is one. "tables":
            RoPE tables, block tables, lengths.

        Example:
            >>> from dsv4_ops.testing.models import small_config
            >>> from dsv4_ops.integrations.transformers import PagedCache
            >>> PagedCache(small_config(), max_batch_size=1, max_cache_len=256).memory()["window"]
            449280
        """
        groups = self.spec.memory_groups
        names = ("draft",) if self.tensors.draft else ()
        parts = dict.fromkeys((*groups.values(), *names, "tables"), 0)
        for tensor in pytree.tree_leaves(self.tensors.draft):
            parts["draft"] += tensor.nbytes
        for layer in self.tensors.layers:
            for name, tensor in vars(layer).items():
                if tensor is not None:
                    parts[groups[name]] += tensor.nbytes
        others = (self.tensors.tables, self.tensors.rope, self.tensors.dropped, self.seq_lens)
        parts["tables"] = sum(leaf.nbytes for leaf in pytree.tree_leaves((*others, self.written)))
        return parts

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Return the length of the longest request, as a 0-d tensor."""
        return self.seq_lens.amax()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the maximum tokens of a request."""
        return self.max_cache_len

    get_max_cache_shape = get_max_length

    def update(self, *_: Any, **__: Any) -> Any:
        """Raise: a patched model writes to the cache itself."""
        raise argument_error(
            "PagedCache", "model", must="be patched", got="an unpatched one", do="Call patch first"
        )

    get_mask_sizes = update

    def reset(self) -> None:
        """Drop all tokens; requests keep their rows and blocks."""
        self.text = None
        self.seq_lens.zero_()
        self.written.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Raise: rows do not share blocks, so a new order of beams would need copies."""
        raise argument_error(
            "PagedCache",
            "beams",
            must="not reorder its rows",
            got="beam search",
            do="Search without beams, or pass cache_implementation='dynamic'",
            kind=NotImplementedError,
        )

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` works. Rings prevent ``crop``, because a ring may have overwritten keys
        that earlier positions read."""
        return not self.rings

    def crop(self, tokens_to_remove: int) -> None:
        """Shorten all rows, as assisted decoding does when it rejects drafts.

        Args:
            tokens_to_remove: Minus the number of tokens to remove from every row. A positive number
                is the maximum length to keep, as in transformers before 5.24.

        Raises:
            NotImplementedError: the cache keeps recent keys in rings, as for DeepSeek-V4.
        """
        if self.rings:
            raise argument_error(
                "PagedCache",
                "crop",
                must="be called on a cache that keeps every key",
                got="a cache that overwrites old window keys and compressor states",
                do="To take back drafts, make the cache with next_n = 1 + their number and pass "
                "position_ids from the first rejected one; to begin anew, call reset",
                kind=NotImplementedError,
            )
        try:
            count = operator.index(tokens_to_remove)
        except TypeError as error:
            raise argument_error(
                "crop",
                "tokens_to_remove",
                must="be an int",
                got=kind_of(tokens_to_remove),
                do="Pass minus the number of tokens to remove",
                kind=TypeError,
            ) from error
        lens = self.seq_lens
        lens.copy_(lens.clamp(max=count) if count > 0 else (lens + count).clamp(min=0))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raise: the number of rows is fixed."""
        self._refuse("batch_repeat_interleave", "Make a cache with as many rows")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Raise: rows do not move."""
        self._refuse("batch_select_indices", "Free the requests that have ended")

    def _refuse(self, name: str, advice: str) -> None:
        raise argument_error(
            "PagedCache",
            name,
            must="be of another cache",
            got="a PagedCache",
            do=advice,
            kind=NotImplementedError,
        )


def format_bytes(size: int) -> str:
    """Format a number of bytes in B, KiB, MiB or GiB."""
    unit = min(max(size.bit_length() - 1, 0) // 10, 3)
    return f"{size / 1024**unit:.{1 if unit else 0}f} {('B', 'KiB', 'MiB', 'GiB')[unit]}"
