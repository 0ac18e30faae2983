"""Configuration of the attention layers of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.attention.metadata import AttentionSpec
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout, Layout, MainLayout, PlainLayout, StateLayout
from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.registry import AUTO
from dsv4_ops.core.yarn import YarnScaling
from dsv4_ops.dispatch.choice import IMPLS
from dsv4_ops.dispatch.libraries import DEEP_GEMM, FLASH_MLA
from dsv4_ops.ops.rope import ROPE_DIM, rope_cos_sin_cache

KINDS = ("window", "c4", "c128")
"""Kinds of layers: "window" attends to the window only; "c4" also to the compressed rows that its
indexer selects, "c128" to all compressed rows."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What the attention layers of a model share: configuration, never a batch.

    Args:
        attention: Window, ratios, page sizes, selected rows: what metadata depends on.
        num_groups: Groups of heads of the output projection.
        head_dim: Values of a key; 512 for the layout "v4_fp8".
        rope_dim: Rotated values at the end of a key and of an indexer key; 64 for "v4_fp8".
        eps: Added to the mean square in every RMSNorm.
        c4_state_page_size: Rows (tokens) per page of the states of C4 layers, indexer included.
        c128_state_page_size: The same for C128 layers.
        rope_theta: Base of the frequencies of layers with a window only.
        compress_rope_theta: Base of the frequencies of layers with a compressor.
        yarn: YaRN of layers with a compressor, or None.
        layout: Tag of the layout of window and compressed caches, "v4_fp8" or "plain".
        indexer_layout: Tag of the layout of the indexer's cache, "v4_indexer_fp8" or "plain".
        dtype: Dtype of plain caches and, if ``layout`` is "plain", of queries and keys: bfloat16,
            or float32 for a reference.
        scale_layout: None for an output of the dtype of the queries; else it is quantised, with
            scales as ``inverse_rope_group_quantize`` lays them out.
        batch_invariant: Whether a token's result has the same bits whatever else is in the step.
        impl: What runs those of the layer's ops that have this execution, the selection and the
            attention: "triton", "flash_mla", "deep_gemm" or "reference". The others, and with
            "auto" all, run what is fastest, or ours with ``batch_invariant``.
        schedule_sms: SMs that a step makes DeepGEMM's schedule for, which its C4 layers then share:
            ``providers.deep_gemm_num_sms()``. 0 for none; each layer then makes its own. Only with
            the impl "deep_gemm".
        sm_parts: Parts that a step makes FlashMLA's tile scheduler metadata for, one for every
            kind of layer, which its layers in the schedule "decode" then share:
            ``providers.flash_mla_num_sm_parts(num_heads)``. 0 for none; FlashMLA then plans in
            each layer. Only with the impl "flash_mla".
    """

    attention: AttentionSpec = field(default_factory=AttentionSpec)
    num_groups: int = 8
    head_dim: int = MainLayout.head_dim
    rope_dim: int = ROPE_DIM
    eps: float = 1e-6
    c4_state_page_size: int = 4
    c128_state_page_size: int = 8
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: YarnScaling | None = field(default_factory=YarnScaling)
    layout: str = MainLayout.tag
    indexer_layout: str = IndexerLayout.tag
    dtype: torch.dtype = torch.bfloat16
    scale_layout: str | None = None
    batch_invariant: bool = False
    impl: str = AUTO
    schedule_sms: int = 0
    sm_parts: int = 0

    def __post_init__(self) -> None:
        checks = Checks("LayerSpec")
        checks.at_least(
            1,
            num_groups=self.num_groups,
            head_dim=self.head_dim,
            rope_dim=self.rope_dim,
            c4_state_page_size=self.c4_state_page_size,
            c128_state_page_size=self.c128_state_page_size,
        )
        checks.above(0, eps=self.eps)
        checks.instance("yarn", self.yarn, YarnScaling)
        checks.flag("batch_invariant", self.batch_invariant)
        checks.one_of("impl", self.impl, *IMPLS, belongs_to="shall run")
        checks.at_least(0, schedule_sms=self.schedule_sms, sm_parts=self.sm_parts)
        if self.schedule_sms and self.impl != DEEP_GEMM:
            rule, advice = f"be 0 for impl {self.impl!r}", "Only DeepGEMM goes by a schedule"
            raise refusal(ValueError, "LayerSpec", "schedule_sms", rule, self.schedule_sms, advice)
        if self.sm_parts and self.impl != FLASH_MLA:
            rule, advice = f"be 0 for impl {self.impl!r}", "Only FlashMLA goes by its metadata"
            raise refusal(ValueError, "LayerSpec", "sm_parts", rule, self.sm_parts, advice)
        if self.impl == FLASH_MLA:
            taken = {"layout": self.layout, "batch_invariant": self.batch_invariant}
            for name, other in (("layout", MainLayout.tag), ("batch_invariant", False)):
                if taken[name] != other:
                    rule = f"be {other!r} for impl 'flash_mla'"
                    advice = "FlashMLA runs nothing else"
                    refused = repr(taken[name])
                    raise refusal(NotImplementedError, "LayerSpec", name, rule, refused, advice)
        of_cache = "the caches have"
        plain = PlainLayout.tag
        checks.one_of("layout", self.layout, MainLayout.tag, plain, belongs_to=of_cache)
        checks.one_of(
            "indexer_layout", self.indexer_layout, IndexerLayout.tag, plain, belongs_to=of_cache
        )

    @classmethod
    def deepseek_v4_flash(
        cls, *, next_n: int = 1, max_model_len: int = 1048576, **changed: Any
    ) -> LayerSpec:
        """DeepSeek-V4-Flash: 64 heads in 8 groups, 512 selected rows; ``changed`` replaces fields
        of this class."""
        attention = AttentionSpec.deepseek_v4_flash(next_n=next_n, max_model_len=max_model_len)
        return cls(attention=attention, **{"num_groups": 8, **changed})

    @classmethod
    def deepseek_v4_pro(
        cls, *, next_n: int = 1, max_model_len: int = 1048576, **changed: Any
    ) -> LayerSpec:
        """DeepSeek-V4-Pro: 128 heads in 16 groups, 1024 selected rows."""
        attention = AttentionSpec.deepseek_v4_pro(next_n=next_n, max_model_len=max_model_len)
        return cls(attention=attention, **{"num_groups": 16, **changed})

    @property
    def softmax_scale(self) -> float:
        """What q . k is multiplied by: YaRN does not scale it."""
        return float(self.head_dim**-0.5)

    def ratio(self, kind: str) -> int:
        """Positions per compressed row of a "c4" or "c128" layer."""
        return self.attention.c4_ratio if kind == "c4" else self.attention.c128_ratio

    def block_size(self, kind: str) -> int:
        """Rows per page of the compressed cache (and of the indexer's) of such a layer."""
        return self.attention.block_tokens // self.ratio(kind)

    def state_block_size(self, kind: str) -> int:
        """Rows per page of the states of such a layer."""
        return self.c4_state_page_size if kind == "c4" else self.c128_state_page_size

    def compressor_width(self, kind: str, head_dim: int) -> int:
        """Values that such a layer's compressor projects a token to, of kv and of score each."""
        return 2 * head_dim if kind == "c4" else head_dim

    def layouts(self, kind: str) -> dict[str, Layout]:
        """Layout of every cache that a layer of this kind has, by the names of ``LayerCaches``."""
        check_kind("LayerSpec.layouts", kind)
        sizes = {"swa": self.attention.swa_block_size}
        if kind != "window":
            sizes["compressed"] = self.block_size(kind)
        found: dict[str, Layout] = {
            name: MainLayout(size)
            if self.layout == MainLayout.tag
            else PlainLayout(size, self.head_dim, self.dtype)
            for name, size in sizes.items()
        }
        if kind != "window":
            found["states"] = self._states(kind, self.head_dim)
        if kind == "c4":
            found["indexer"] = (
                IndexerLayout(self.block_size(kind))
                if self.indexer_layout == IndexerLayout.tag
                else PlainLayout(self.block_size(kind), IndexerLayout.head_dim, self.dtype)
            )
            found["indexer_states"] = self._states(kind, IndexerLayout.head_dim)
        return found

    def _states(self, kind: str, head_dim: int) -> StateLayout:
        return StateLayout(self.state_block_size(kind), 2 * self.compressor_width(kind, head_dim))

    def rope_table(
        self, kind: str, num_positions: int, device: torch.device | str | None = None
    ) -> Tensor:
        """Cosines and sines for layers of a kind: one table for all layers with a window only, one
        for all others."""
        check_kind("LayerSpec.rope_table", kind)
        compressed = kind != "window"
        return rope_cos_sin_cache(
            num_positions,
            theta=self.compress_rope_theta if compressed else self.rope_theta,
            rope_dim=self.rope_dim,
            scaling=self.yarn if compressed else None,
            device=device,
        )


def check_kind(op: str, kind: str) -> None:
    """Raise unless ``kind`` is a kind of layer."""
    Checks(op).one_of("kind", kind, *KINDS, belongs_to="the layer has")
