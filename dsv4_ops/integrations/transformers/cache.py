"""The cache of a patched model: paged, of fixed addresses, with its lengths on the device."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4_ops.attention import LayerCaches
from dsv4_ops.cache import mark_static
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.refusal import refusal
from dsv4_ops.integrations.transformers.config import ModelSpec, require_transformers
from dsv4_ops.integrations.transformers.pages import OutOfPages, PagePool
from dsv4_ops.integrations.transformers.recipe import Recipe
from dsv4_ops.integrations.transformers.tensors import CacheTensors, PageTables, RopeTables

Cache: Any = require_transformers("dsv4_ops.integrations.transformers").Cache

__all__ = ["OutOfPages", "PagedCache"]


class PagedCache(Cache):  # type: ignore[misc]  # transformers is partly untyped
    """Caches of all layers of a model, for ``max_batch`` requests of up to ``max_len`` tokens.

    Every request has a row. Keys of the window and states of the compressors live in rings of fixed
    size, one per row; compressed rows and the indexer's keys in pages of 256 tokens, from a pool
    that all rows share or, by default, each row's own. All sizes are fixed at construction and all
    tensors keep their addresses: a compiled step never recompiles, and CUDA graphs write in place.

    Used as ``past_key_values`` of a patched model, row r belongs to row r of ``input_ids``; used
    with ``StepBatch``, rows are those that ``add`` gives.

    Args:
        config: ``DeepseekV4Config``.
        max_batch: Rows. At least 1.
        max_len: Most tokens of a request. At least 1.
        num_pages: Pages of the pool; None gives every row its own pages for ``max_len`` tokens, so
            that none can run out.
        max_chunk: Most tokens of a request in one step, ``max_len`` by default. Memory of the
            window's keys grows with it.
        next_n: Most tokens of a step that may be taken back (speculative decoding), plus one.
        kv: "fp8", "bf16" or "fp32": what keys are stored as; that of ``patch``.
        precision: That of ``patch``.
        device: Where the tensors live.

    Raises:
        ValueError, TypeError, NotImplementedError: sizes out of range, or a model that this version
            does not know.

    Example:
        >>> from dsv4_ops.demo.model import small_config
        >>> from dsv4_ops.integrations.transformers import PagedCache
        >>> cache = PagedCache(small_config(), max_batch=4, max_len=1024, num_pages=8)
        >>> cache.add("a request", num_tokens=300), cache.num_free_pages
        (0, 6)
        >>> cache.free("a request")
        >>> cache.num_free_pages
        8
    """

    def __init__(
        self,
        config: Any,
        *,
        max_batch: int,
        max_len: int,
        num_pages: int | None = None,
        max_chunk: int | None = None,
        next_n: int = 1,
        kv: str = "fp8",
        precision: str | Recipe = "serve",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(layers=[])
        checks = Checks("PagedCache")
        checks.at_least(1, max_batch=max_batch, max_len=max_len, next_n=next_n)
        chunk = max_len if max_chunk is None else max_chunk
        checks.at_least(1, max_chunk=chunk)
        checks.device_name("device", device)
        self.spec = ModelSpec.of("PagedCache", config, kv, precision)
        self.max_batch, self.max_len, self.max_chunk = max_batch, max_len, chunk
        self.device = torch.device("cpu" if device is None else device)
        self.blocks_per_row = -(-max_len // self.spec.layers.attention.page_tokens)
        self.owns_pages = num_pages is None
        pages = max_batch * self.blocks_per_row if num_pages is None else num_pages
        checks.at_least(1, num_pages=pages)
        self._pool = PagePool(max_batch, pages, self.blocks_per_row)
        self.rings = ring_pages(self.spec, max_len, chunk, next_n)
        self.seq_lens = torch.zeros(max_batch, dtype=torch.int32, device=self.device)
        self.tensors = CacheTensors(
            tables=self._tables(),
            rope=RopeTables(
                window=self.spec.rope_table("window", max_len, self.device),
                compressed=self.spec.rope_table("c4", max_len, self.device),
            ),
            layers=tuple(self._layer(kind, pages) for kind in self.spec.kinds),
            made_for=self.spec.fingerprint,
        )
        mark_static(self.seq_lens, *pytree.tree_leaves(self.tensors))

    @classmethod
    def for_model(cls, model: Any, **sizes: Any) -> PagedCache:
        """A cache for a patched model: ``kv``, ``precision`` and ``device`` are the model's."""
        spec = getattr(model, "dsv4_ops_spec", None)
        if spec is None:
            rule = "be patched"
            raise refusal(
                ValueError, "PagedCache.for_model", "model", rule, "another", "Call patch first"
            )
        given = {"kv": spec.kv, "precision": spec.recipe, "device": model.device}
        return cls(model.config, **{**given, **sizes})

    def _tables(self) -> PageTables:
        sizes = {
            "swa": self.spec.layers.attention.swa_page_size,
            "c4_states": self.spec.layers.c4_state_page_size,
            "c128_states": self.spec.layers.c128_state_page_size,
        }
        row = torch.arange(self.max_batch, dtype=torch.int32)[:, None]
        tables = {}
        for name, page in sizes.items():
            block = torch.arange(-(-self.max_len // page), dtype=torch.int32)
            tables[name] = (row * self.rings[name] + block % self.rings[name]).to(self.device)
        blocks = torch.arange(self.blocks_per_row, dtype=torch.int32)
        owned = row * self.blocks_per_row + blocks
        compressed = owned if self.owns_pages else torch.full_like(owned, -1)
        return PageTables(compressed=compressed.to(self.device), **tables)

    def _layer(self, kind: str, pages: int) -> LayerCaches:
        states = 0 if kind == "window" else self.rings[f"{kind}_states"]
        return LayerCaches.allocate(
            self.spec.layers,
            kind,
            swa_pages=self.max_batch * self.rings["swa"],
            compressed_pages=pages,
            state_pages=self.max_batch * states,
            device=self.device,
        )

    # Requests

    @property
    def requests(self) -> dict[Hashable, int]:
        """Row of every request."""
        return dict(self._pool.rows)

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._pool.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages of the pool that no request has."""
        return len(self._pool.free_pages)

    def add(self, request: Hashable, num_tokens: int = 0) -> int:
        """Give a new request a row, and pages for ``num_tokens`` tokens.

        Raises:
            OutOfPages: no row or not enough pages are left; the cache is as it was.
            ValueError: the cache has the request already, or ``num_tokens`` exceeds ``max_len``.
        """
        row = self._pool.add(request, self._blocks("add", num_tokens))
        self._store_pages(request)
        self.seq_lens[row] = 0
        return row

    def reserve(self, request: Hashable, num_tokens: int) -> None:
        """Make sure that a request has pages for ``num_tokens`` tokens in total.

        Raises:
            OutOfPages: not enough pages are left; the cache is as it was.
            ValueError: no such request, or more than ``max_len`` tokens.
        """
        before = len(self._pool.pages[self._pool.known("reserve", request)])
        blocks = self._blocks("reserve", num_tokens)
        if blocks > before:
            self._pool.reserve(request, blocks)
            self._store_pages(request)

    def lacking_pages(self, request: Hashable, num_tokens: int) -> int:
        """Pages that ``reserve`` would take, or that ``add`` would for a request not added yet."""
        owned = len(self._pool.pages.get(request, ()))
        return max(self._blocks("lacking_pages", num_tokens) - owned, 0)

    def free(self, request: Hashable) -> None:
        """Take back the row and the pages of a request."""
        row = self._pool.free(request)
        self.seq_lens[row] = 0
        if not self.owns_pages:
            self.tensors.tables.compressed[row] = -1

    def _blocks(self, op: str, num_tokens: int) -> int:
        checks = Checks(op)
        checks.at_least(0, num_tokens=num_tokens)
        checks.at_most("num_tokens", num_tokens, "max_len", self.max_len)
        return 0 if self.owns_pages else -(-num_tokens // self.spec.layers.attention.page_tokens)

    def _store_pages(self, request: Hashable) -> None:
        pages = self._pool.pages[request]
        if pages:
            row = self._pool.rows[request]
            stored = torch.tensor(pages, dtype=torch.int32)
            self.tensors.tables.compressed[row, : len(pages)] = stored.to(self.device)

    # What Hugging Face asks of a cache

    @property
    def is_compileable(self) -> bool:
        """Whether compiled calls keep working as the cache fills."""
        return True

    @property
    def is_initialized(self) -> bool:
        """Whether all tensors are there."""
        return True

    @property
    def max_batch_size(self) -> int:
        """Rows."""
        return self.max_batch

    def __len__(self) -> int:
        return len(self.tensors.layers)

    def __repr__(self) -> str:
        return (
            f"PagedCache({len(self)} layers, max_batch={self.max_batch}, max_len={self.max_len}, "
            f"num_pages={self.num_pages}, kv={self.spec.kv!r}, device={str(self.device)!r})"
        )

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Tokens of the longest row, a tensor of no dimension."""
        return self.seq_lens.amax()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Most tokens of a request."""
        return self.max_len

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """The same, by its older name."""
        return self.max_len

    def update(self, *_: Any, **__: Any) -> Any:
        """Refuse: only a patched model writes here, and does so itself."""
        raise refusal(
            ValueError, "PagedCache", "model", "be patched", "another", "Call patch first"
        )

    get_mask_sizes = update

    def reset(self) -> None:
        """Forget all tokens; requests keep their rows and pages."""
        self.seq_lens.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuse: rows share no pages, so that beams would have to be copied."""
        rule = "not reorder its rows"
        advice = "Search without beams, or pass cache_implementation='dynamic'"
        raise refusal(NotImplementedError, "PagedCache", "beams", rule, "beam search", advice)


def ring_pages(spec: ModelSpec, max_len: int, max_chunk: int, next_n: int) -> dict[str, int]:
    """Pages per row of the window's keys and of the compressors' states.

    A chunk is stored before its first token's window is read, so that the window's ring holds both.
    States are read before those of the step are stored, or lie in other rows of the ring, and of a
    step only the last ones are stored.
    """
    attention, layers = spec.layers.attention, spec.layers
    spans = {
        "swa": (max_chunk + attention.window_size - 1, attention.swa_page_size),
        "c4_states": (kept_states(spec, "c4", next_n), layers.c4_state_page_size),
        "c128_states": (kept_states(spec, "c128", next_n), layers.c128_state_page_size),
    }
    # a span that begins within a page touches one page more than it fills
    return {
        name: min((span - 1) // page + 2, -(-max_len // page))
        for name, (span, page) in spans.items()
    }


def kept_states(spec: ModelSpec, kind: str, next_n: int) -> int:
    """Last positions of a request whose states later steps may read."""
    windows = 2 if kind == "c4" else 1
    return windows * spec.layers.ratio(kind) + next_n - 1
