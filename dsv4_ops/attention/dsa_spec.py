"""Configuration of MLA layers whose tokens attend to selected rows (DeepSeek-V3.2, GLM-5)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dsv4_ops.attention.mla_spec import MlaSpec
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import IndexerLayout, Layout, MlaDsFp8Layout, PlainLayout
from dsv4_ops.core.registry import AUTO, TRITON
from dsv4_ops.dispatch.choice import IMPLS, check_limit, impl_for
from dsv4_ops.dispatch.libraries import LIBRARIES
from dsv4_ops.dispatch.limits import Sizes, limit
from dsv4_ops.ops.indexer import PROVIDERS as INDEXER_PROVIDERS
from dsv4_ops.ops.mla import PROVIDERS as SPARSE_PROVIDERS


@dataclass(frozen=True, kw_only=True)
class DsaSpec(MlaSpec):
    """Configuration shared by all layers of a model with DeepSeek sparse attention.

    The spec also has the fields of ``MlaSpec``; ``layout`` must be "plain" or "mla_ds_fp8", and
    ``query`` must be None. Ranks of ``parallel`` may have parts of the attention heads, but each
    rank has all heads of the indexer: they are few, and all ranks must select the same rows.

    Args:
        index_topk: Rows that the indexer selects for a token. The token attends to no other rows.
        index_heads: Query heads of the indexer.
        indexer_layout: Layout tag of the indexer's keys, "v4_indexer_fp8" or "plain"; plain keys
            have the spec's dtype.
        interleaved: Whether the indexer's RoPE rotates pairs (2 i, 2 i + 1), as GLM-5's does,
            rather than (i, i + qk_rope_head_dim / 2).

    Example:
        >>> from dsv4_ops.attention import DsaSpec
        >>> spec = DsaSpec(num_heads=128, softmax_scale=192**-0.5, layout="mla_ds_fp8")
        >>> spec.cache_layout().shape(8), spec.index_cache_layout().shape(8)
        ((8, 64, 656), (8, 8640))
    """

    index_topk: int = 2048
    index_heads: int = 64
    indexer_layout: str = IndexerLayout.tag
    interleaved: bool = False

    impls: ClassVar[tuple[str, ...]] = IMPLS

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks("DsaSpec")
        checks.at_least(1, index_topk=self.index_topk, index_heads=self.index_heads)
        checks.flag("interleaved", self.interleaved)
        if self.qk_rope_head_dim > self.index_dim:
            raise checks.error(
                "qk_rope_head_dim",
                must=f"be at most the {self.index_dim} values of an indexer key",
                got=self.qk_rope_head_dim,
                do="Lower qk_rope_head_dim",
            )
        tags = (PlainLayout.tag, MlaDsFp8Layout.tag)
        checks.one_of("layout", self.layout, *tags, belongs_to="the cache has")
        tags = (IndexerLayout.tag, PlainLayout.tag)
        checks.one_of("indexer_layout", self.indexer_layout, *tags, belongs_to="the keys have")
        if self.ranks is not None and self.ranks.shards_index_heads:
            raise argument_error(
                "DsaSpec",
                "parallel.shards_index_heads",
                must="be False",
                got=True,
                do="Give every rank the indexer whole",
                kind=NotImplementedError,
            )

    @property
    def index_dim(self) -> int:
        """Values per indexer key."""
        return IndexerLayout.head_dim

    def index_cache_layout(self) -> Layout:
        """Return the layout of a layer's indexer keys."""
        if self.indexer_layout == PlainLayout.tag:
            return PlainLayout(self.block_size, self.index_dim, self.dtype)
        return IndexerLayout(self.block_size)

    @property
    def dense(self) -> MlaSpec:
        """The spec for steps whose tokens attend to every row. Such steps are possible while
        requests have at most index_topk tokens."""
        return replace(self, impl=AUTO) if self.impl in LIBRARIES else self

    @property
    def expands(self) -> bool:
        """Whether our kernel of ``mla_prefill`` supports expanded keys and values of these sizes in
        bfloat16. GLM-5's are too wide."""
        nope, value = self.qk_nope_head_dim, self.v_head_dim
        widths = {"q": nope + self.qk_rope_head_dim, "k_nope": nope, "v": value}
        sizes = {name: Sizes((1, 1, width), torch.bfloat16) for name, width in widths.items()}
        return limit("mla_prefill", TRITON, sizes, asking=False) is None

    def check_impl(self, op: str, num_tokens: int, impl: str | None = None) -> None:
        """Raise an error that names ``op`` if ``impl`` does not support the spec's calls.

        The calls are those of the spec ``dense``, the selection, and the attention to the selected
        rows."""
        impl = self.impl if impl is None else impl
        expands = self.context == "absorbed" or self.expands
        dense = self if expands else replace(self, context="absorbed")
        super(DsaSpec, dense).check_impl(op, num_tokens, AUTO if impl in LIBRARIES else impl)
        select = {
            "q": Sizes((num_tokens, self.index_heads, self.index_dim), self.dtype),
            "layout": self.indexer_layout,
            "block_size": self.block_size,
            "topk": self.index_topk,
        }
        chosen = impl_for(INDEXER_PROVIDERS, impl)
        check_limit("indexer_select", INDEXER_PROVIDERS, chosen, select, op)
        heads = self.num_heads * (1 if self.ranks is None else self.ranks.head_parts)
        attend = {
            "q": Sizes((num_tokens, heads, self.width), self.dtype),
            "layout": self.layout,
            "block_size": self.block_size,
            "kv_lora_rank": self.kv_lora_rank,
            "num_splits": 0,
            "batch_invariant": self.batch_invariant,
        }
        chosen = impl_for(SPARSE_PROVIDERS, impl)
        check_limit("mla_sparse", SPARSE_PROVIDERS, chosen, attend, op)
