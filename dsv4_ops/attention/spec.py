"""Configuration of the attention layers of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.attention.metadata import AttentionSpec
from dsv4_ops.attention.parallel import ContextParallel
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import IndexerLayout, Layout, MainLayout, PlainLayout, StateLayout
from dsv4_ops.core.registry import AUTO
from dsv4_ops.core.yarn import YarnScaling
from dsv4_ops.dispatch.choice import IMPLS
from dsv4_ops.dispatch.libraries import DEEP_GEMM, FLASH_MLA
from dsv4_ops.ops.rope import ROPE_DIM, SCALE_LAYOUTS, rope_cos_sin_cache

KINDS = ("window", "c4", "c128")
"""Layer kinds: "window" attends to the sliding window only; "c4" (CSA, ratio 4) also attends to the
compressed rows that its indexer selects; "c128" (HCA, ratio 128) also attends to every compressed
row.
"""

_SIZES = ("num_groups", "head_dim", "rope_dim", "c4_state_block_size", "c128_state_block_size")


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Configuration shared by all attention layers of a model.

    Args:
        attention: Window, ratios, block sizes and top-k: the settings that step metadata depends
            on.
        num_groups: Head groups of the output projection.
        head_dim: Values per key; 512 for the layout "v4_fp8".
        rope_dim: Trailing values of keys and indexer keys that RoPE rotates; 64 for "v4_fp8".
        eps: Epsilon of every RMSNorm.
        c4_state_block_size: Tokens per block of the compressor states of C4 layers and indexers.
        c128_state_block_size: Tokens per block of the compressor states of C128 layers.
        rope_theta: RoPE base of window layers.
        compress_rope_theta: RoPE base of layers with a compressor.
        yarn: YaRN scaling of layers with a compressor, or None.
        layout: Layout tag of the window and compressed caches, "v4_fp8" or "plain".
        indexer_layout: Layout tag of the indexer cache, "v4_indexer_fp8" or "plain".
        dtype: Dtype of plain caches and, if ``layout`` is "plain", of queries and keys: bfloat16,
            or float32 for reference computations.
        scale_layout: None for an output in the dtype of the queries; otherwise the output is
            quantised, with scales in this layout of ``inverse_rope_group_quantize``.
        batch_invariant: Whether a token's result is bit-identical regardless of the rest of the
            step.
        impl: Implementation of indexer selection and attention: "triton", "flash_mla", "deep_gemm",
            "reference" or "auto". With "auto", and where an op lacks the named implementation, the
            fastest one runs (with ``batch_invariant``, our kernels).
        schedule_sms: SMs for which a step builds the DeepGEMM schedule that its C4 layers share:
            ``providers.deep_gemm_num_sms()``. With 0, each layer builds its own schedule. Requires
            impl "deep_gemm".
        sm_parts: SM parts for which a step builds FlashMLA's tile scheduler metadata, once per
            layer kind, for the schedule "decode": ``providers.flash_mla_num_sm_parts(num_heads)``.
            With 0, each layer builds its own metadata. Requires impl "flash_mla".
        parallel: Ranks that share the compressed rows and indexer keys of every request; None if
            each rank has its own rows and keys. Every rank stores all windows and compressor
            states. If ranks shard heads, ``num_groups`` and the heads of queries and sink are those
            of one rank. The indexer's heads may be those of one rank or of all ranks.
        kinds: Kinds of the model's layers. A step makes plans for these kinds; a layer of another
            kind makes a plan in every call.
    """

    attention: AttentionSpec = field(default_factory=AttentionSpec)
    num_groups: int = 8
    head_dim: int = MainLayout.head_dim
    rope_dim: int = ROPE_DIM
    eps: float = 1e-6
    c4_state_block_size: int = 4
    c128_state_block_size: int = 8
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
    parallel: ContextParallel | None = None
    kinds: tuple[str, ...] = KINDS

    def __post_init__(self) -> None:
        checks = Checks("LayerSpec")
        if not isinstance(self.kinds, tuple):
            raise argument_error(
                "LayerSpec",
                "kinds",
                must="be a tuple",
                got=type(self.kinds).__name__,
                do="Pass some of KINDS",
                kind=TypeError,
            )
        for each in self.kinds:
            checks.one_of("kinds", each, *KINDS, belongs_to="the layers have")
        checks.at_least(1, **{name: getattr(self, name) for name in _SIZES})
        checks.above(0, eps=self.eps)
        checks.instance("yarn", self.yarn, YarnScaling)
        checks.instance("parallel", self.parallel, ContextParallel)
        checks.flag("batch_invariant", self.batch_invariant)
        checks.one_of("impl", self.impl, *IMPLS, belongs_to="shall run")
        checks.at_least(0, schedule_sms=self.schedule_sms, sm_parts=self.sm_parts)
        for name, fp8 in (("layout", MainLayout.tag), ("indexer_layout", IndexerLayout.tag)):
            value = getattr(self, name)
            checks.one_of(name, value, fp8, PlainLayout.tag, belongs_to="the caches have")
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise argument_error(
                "LayerSpec",
                "dtype",
                must="be torch.bfloat16 or torch.float32",
                got=self.dtype,
                do="Pass one of them",
                kind=TypeError,
            )
        self._check_sizes(checks)
        if self.schedule_sms and self.impl != DEEP_GEMM:
            raise argument_error(
                "LayerSpec",
                "schedule_sms",
                must=f"be 0 for impl {self.impl!r}",
                got=self.schedule_sms,
                do="Only DeepGEMM takes a schedule",
            )
        if self.sm_parts and self.impl != FLASH_MLA:
            raise argument_error(
                "LayerSpec",
                "sm_parts",
                must=f"be 0 for impl {self.impl!r}",
                got=self.sm_parts,
                do="Only FlashMLA takes this metadata",
            )
        if self.ranks is not None:
            for name in ("c4_block_size", "c128_block_size"):  # a block holds whole turns of ranks
                rows = getattr(self.attention, name)
                checks.divisor("parallel.interleave", self.ranks.interleave, name, rows)
        if self.sm_parts and self.ranks is not None:
            raise argument_error(
                "LayerSpec",
                "sm_parts",
                must="be 0 on several ranks",
                got=self.sm_parts,
                do="A step does not know which rows a rank selects",
                kind=NotImplementedError,
            )
        if self.impl == FLASH_MLA:
            for name, required in (("layout", MainLayout.tag), ("batch_invariant", False)):
                got = getattr(self, name)
                if got != required:
                    raise argument_error(
                        "LayerSpec",
                        name,
                        must=f"be {required!r} for impl 'flash_mla'",
                        got=repr(got),
                        do="FlashMLA runs nothing else",
                        kind=NotImplementedError,
                    )

    def _check_sizes(self, checks: Checks) -> None:
        """Check the sizes that must have a fixed value with FP8 keys or FP8 outputs."""
        checks.divides("a pair", 2, "rope_dim", self.rope_dim)
        for name in ("head_dim", "index_head_dim"):
            most = self.head_dim if name == "head_dim" else IndexerLayout.head_dim
            checks.at_most("rope_dim", self.rope_dim, name, most)
        if self.layout == MainLayout.tag:
            partner = f"layout {self.layout!r}"
        elif self.scale_layout is not None:
            partner = f"scale_layout {self.scale_layout!r}"
        else:
            return
        checks.equal("head_dim", self.head_dim, MainLayout.head_dim, partner)
        checks.equal("rope_dim", self.rope_dim, ROPE_DIM, partner)
        if self.scale_layout is None:
            return
        checks.one_of("scale_layout", self.scale_layout, *SCALE_LAYOUTS, belongs_to="outputs have")
        if self.layout == PlainLayout.tag and self.dtype != torch.bfloat16:
            raise argument_error(
                "LayerSpec",
                "dtype",
                must=f"be torch.bfloat16 with {partner}",
                got=self.dtype,
                do="Quantised outputs are of bfloat16",
                kind=TypeError,
            )

    @classmethod
    def deepseek_v4_flash(
        cls, *, next_n: int = 1, max_model_len: int = 1048576, **changed: Any
    ) -> LayerSpec:
        """Return the spec of DeepSeek-V4-Flash: 64 heads in 8 groups, top-512; ``changed``
        overrides fields."""
        attention = AttentionSpec.deepseek_v4_flash(next_n=next_n, max_model_len=max_model_len)
        return cls(attention=attention, **{"num_groups": 8, **changed})

    @classmethod
    def deepseek_v4_pro(
        cls, *, next_n: int = 1, max_model_len: int = 1048576, **changed: Any
    ) -> LayerSpec:
        """Return the spec of DeepSeek-V4-Pro: 128 heads in 16 groups, top-1024; ``changed``
        overrides fields."""
        attention = AttentionSpec.deepseek_v4_pro(next_n=next_n, max_model_len=max_model_len)
        return cls(attention=attention, **{"num_groups": 16, **changed})

    @property
    def ranks(self) -> ContextParallel | None:
        """``parallel``, or None if it has one rank."""
        return None if self.parallel is None or self.parallel.world_size == 1 else self.parallel

    @property
    def softmax_scale(self) -> float:
        """Scale of the attention logits; YaRN does not change it."""
        return float(self.head_dim**-0.5)

    def ratio(self, kind: str) -> int:
        """Return the positions per compressed row of a "c4" or "c128" layer."""
        return self.attention.c4_ratio if kind == "c4" else self.attention.c128_ratio

    def block_size(self, kind: str) -> int:
        """Return the rows per block of the compressed cache (and indexer cache) of a kind."""
        return self.attention.block_tokens // self.ratio(kind)

    def state_block_size(self, kind: str) -> int:
        """Return the tokens per block of the compressor states of a kind."""
        return self.c4_state_block_size if kind == "c4" else self.c128_state_block_size

    def compressor_width(self, kind: str, head_dim: int) -> int:
        """Return the width of a compressor's kv projection; its score projection is as wide."""
        return 2 * head_dim if kind == "c4" else head_dim

    def layouts(self, kind: str) -> dict[str, Layout]:
        """Return the layouts of a layer's caches, by the field names of ``LayerCaches``."""
        check_kind("LayerSpec.layouts", kind)
        layouts_of: dict[str, Layout] = {"swa": self._keys(self.attention.swa_block_size)}
        if kind != "window":
            layouts_of["compressed"] = self._keys(self.block_size(kind))
            layouts_of["states"] = self._states(kind, self.head_dim)
        if kind == "c4":
            size, head_dim = self.block_size(kind), IndexerLayout.head_dim
            fp8 = self.indexer_layout == IndexerLayout.tag
            layouts_of["indexer"] = (
                IndexerLayout(size) if fp8 else PlainLayout(size, head_dim, self.dtype)
            )
            layouts_of["indexer_states"] = self._states(kind, head_dim)
        return layouts_of

    def _keys(self, block_size: int) -> Layout:
        if self.layout == MainLayout.tag:
            return MainLayout(block_size)
        return PlainLayout(block_size, self.head_dim, self.dtype)

    def _states(self, kind: str, head_dim: int) -> StateLayout:
        return StateLayout(self.state_block_size(kind), 2 * self.compressor_width(kind, head_dim))

    def rope_table(
        self, kind: str, num_positions: int, device: torch.device | str | None = None
    ) -> Tensor:
        """Return the RoPE table for layers of a kind; "c4" and "c128" layers share a table."""
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
    """Raise unless ``kind`` is one of ``KINDS``."""
    Checks(op).one_of("kind", kind, *KINDS, belongs_to="the layer has")
