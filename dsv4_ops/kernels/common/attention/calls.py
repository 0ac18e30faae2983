"""Arguments and results of sparse MLA's ops, for our kernels and for FlashMLA. This module does not
import triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.reference.bf16_workspace import Prefill, Source
from dsv4_ops.reference.sanitize import Listed


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialised ``out`` and ``lse``."""
    rows = (q.shape[0], int(q.shape[1]))
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32)


class GatheredCall(NamedTuple):
    """Arguments of ``sparse_mla_gathered``."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    lens: Tensor
    attn_sink: Tensor | None
    softmax_scale: float


def _is_fp8(call: DecodeCall | PrefillCall) -> bool:
    """Return whether the caches hold FP8 rows."""
    return call.layout == MainLayout.tag


def _caches(call: DecodeCall | PrefillCall) -> tuple[Tensor, Tensor]:
    """Return the window cache and the cache of compressed rows. Without compressed rows, return the
    window cache twice."""
    return call.swa_cache, call.swa_cache if call.extra_cache is None else call.extra_cache


class DecodeCall(NamedTuple):
    """Arguments of ``sparse_mla_decode``. If ``req_indices`` is not None, ``extra_indices`` is a
    block table."""

    q: Tensor
    swa_cache: Tensor
    swa_indices: Tensor
    swa_lens: Tensor
    extra_cache: Tensor | None
    extra_indices: Tensor | None
    extra_lens: Tensor | None
    attn_sink: Tensor | None
    plan: Tensor | None
    positions: Tensor | None
    cos_sin_cache: Tensor | None
    softmax_scale: float
    swa_block_size: int
    extra_block_size: int
    layout: str
    num_splits: int
    batch_invariant: bool
    req_indices: Tensor | None = None

    @classmethod
    def of_pages(
        cls,
        q: Tensor,
        swa_cache: Tensor,
        swa_indices: Tensor,
        swa_lens: Tensor,
        extra_cache: Tensor,
        extra_lens: Tensor,
        req_indices: Tensor,
        extra_block_table: Tensor,
        *rest: Tensor | None,
        **named: Any,
    ) -> DecodeCall:
        """Make a call from the arguments of ``sparse_mla_decode_paged``."""
        swa, extra = (
            (swa_cache, swa_indices, swa_lens),
            (extra_cache, extra_block_table, extra_lens),
        )
        return cls(q, *swa, *extra, *rest, req_indices=req_indices, **named)

    is_fp8, caches = property(_is_fp8), property(_caches)

    @property
    def window(self) -> Listed:
        """Return the rows of the window."""
        lists = (self.swa_indices, self.swa_lens)
        return Listed(*lists, self.swa_cache.shape[0], self.swa_block_size)

    @property
    def extra(self) -> Listed | None:
        """Return the compressed rows, if any."""
        if self.extra_cache is None or self.extra_indices is None or self.extra_lens is None:
            return None
        sizes = (self.extra_cache.shape[0], self.extra_block_size)
        return Listed(self.extra_indices, self.extra_lens, *sizes, self.req_indices)


class PrefillCall(NamedTuple):
    """Arguments of ``sparse_mla_prefill``."""

    q: Tensor
    swa_cache: Tensor
    positions: Tensor
    req_indices: Tensor
    swa_block_table: Tensor
    extra_cache: Tensor | None
    extra_block_table: Tensor | None
    topk_indices: Tensor | None
    attn_sink: Tensor | None
    softmax_scale: float
    window_size: int
    compress_ratio: int
    swa_block_size: int
    extra_block_size: int
    layout: str

    is_fp8, caches = property(_is_fp8), property(_caches)

    @property
    def seen(self) -> Prefill:
        """Return the arguments that determine which keys the tokens see."""
        swa, extra = Source(self.swa_cache, self.swa_block_table, self.swa_block_size), None
        if self.extra_cache is not None and self.extra_block_table is not None:
            extra = Source(self.extra_cache, self.extra_block_table, self.extra_block_size)
        tokens, numbers = (
            (self.positions, self.req_indices),
            (self.window_size, self.compress_ratio),
        )
        return Prefill(*tokens, swa, extra, self.topk_indices, *numbers)
