"""Configuration of dense MLA layers (DeepSeek-V2, V3, R1, Kimi-K2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dsv4_ops.attention.parallel import ContextParallel
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import (
    CACHE_ALIGNMENT,
    MLA_LAYOUTS,
    Layout,
    MlaDsFp8Layout,
    MlaFp8Layout,
    PlainLayout,
    mla_layout,
)
from dsv4_ops.core.registry import AUTO
from dsv4_ops.dispatch.choice import check_limit, impl_for
from dsv4_ops.dispatch.limits import Sizes
from dsv4_ops.ops.mla import PROVIDERS as DECODE_PROVIDERS
from dsv4_ops.ops.mla_context import PREFILL_PROVIDERS

CONTEXTS = ("absorbed", "chunked")
"""How prefill tokens attend: to latent rows with absorbed queries, like decodes, or to expanded
keys and values, with the context expanded chunk by chunk."""

FP8_QUERY = "fp8"
"""Value of ``MlaSpec.query`` for absorbed queries as e4m3 codes."""

_DIMS = ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
_SIZES = (*_DIMS, "block_size", "next_n", "workspace_rows")


@dataclass(frozen=True, kw_only=True)
class MlaSpec:
    """Configuration shared by all dense MLA layers of a model.

    Args:
        num_heads: Query heads of this rank.
        softmax_scale: Scale of the attention logits, including YaRN's squared mscale if the model
            has one.
        qk_nope_head_dim: Values of a query or key head that RoPE does not rotate.
        qk_rope_head_dim: Values that RoPE rotates in a query head, and in the key part that all
            heads share.
        v_head_dim: Values of a value head.
        kv_lora_rank: Values of the latent.
        block_size: Rows per block of the cache.
        layout: Layout tag of the cache: "plain", "mla_fp8" or "mla_ds_fp8".
        dtype: Dtype of queries, latents and plain caches, bfloat16 or float32.
        query: Format of absorbed queries. None keeps ``dtype``; "fp8", which needs the layout
            "mla_fp8", makes e4m3 codes with the scale ``MlaWeights.q_scale``. Expanded queries
            stay in ``dtype``.
        next_n: Maximum tokens of a decode request: 1 + speculative tokens.
        context: "absorbed" or "chunked"; see ``break_even``.
        max_decode_tokens: With the context "chunked", maximum decode tokens per step; any extra
            decode tokens are computed with the prefills. 0 makes steps without decode tokens.
        workspace_rows: With "chunked", context rows per chunk; ``mla_workspace_rows`` suggests a
            number.
        max_chunks: With "chunked", maximum chunks per step; 0 if no request has a context.
            ``max_context_chunks`` returns a number that suffices for any batch. Every layer expands
            all ``workspace_rows`` rows of the first chunk, even if it is empty, and only the used
            rows of later chunks. Tokens do not attend to contexts past the last chunk: if contexts
            may be that long, compare ``MlaStep.chunks.num_chunks`` with ``max_chunks``.
        chunk_plan: "packed" or "equal"; as for ``context_chunks``.
        batch_invariant: Whether a decode token's result is bit-identical regardless of the other
            tokens in the batch.
        impl: Implementation of the attention ops; with "auto", and where an op lacks the named
            implementation, the fastest one runs.
        parallel: Ranks that share the cache of every sequence; None if each rank has its own cache.
    """

    num_heads: int
    softmax_scale: float
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    kv_lora_rank: int = 512
    block_size: int = 64
    layout: str = PlainLayout.tag
    dtype: torch.dtype = torch.bfloat16
    query: str | None = None
    next_n: int = 1
    context: str = "absorbed"
    max_decode_tokens: int = 1
    workspace_rows: int = 65536
    max_chunks: int = 1
    chunk_plan: str = "packed"
    batch_invariant: bool = False
    impl: str = AUTO
    parallel: ContextParallel | None = None

    impls: ClassVar[tuple[str, ...]] = (AUTO, *DECODE_PROVIDERS)
    """Values of ``impl``."""

    def __post_init__(self) -> None:
        checks = Checks("MlaSpec")
        checks.at_least(1, **{name: getattr(self, name) for name in _SIZES})
        checks.at_least(0, max_chunks=self.max_chunks, max_decode_tokens=self.max_decode_tokens)
        checks.above(0, softmax_scale=self.softmax_scale)
        checks.one_of("layout", self.layout, *MLA_LAYOUTS, belongs_to="the cache has")
        checks.one_of("context", self.context, *CONTEXTS, belongs_to="prefills shall have")
        checks.one_of("chunk_plan", self.chunk_plan, "packed", "equal", belongs_to="steps have")
        checks.one_of("impl", self.impl, *self.impls, belongs_to="shall run")
        checks.flag("batch_invariant", self.batch_invariant)
        checks.instance("parallel", self.parallel, ContextParallel)
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise argument_error(
                "MlaSpec",
                "dtype",
                must="be torch.bfloat16 or torch.float32",
                got=self.dtype,
                do="Pass one of them",
                kind=TypeError,
            )
        checks.divides("a pair", 2, "qk_rope_head_dim", self.qk_rope_head_dim)
        sizes = (self.kv_lora_rank, self.width)
        required = (MlaDsFp8Layout.kv_lora_rank, MlaDsFp8Layout.width)
        if self.layout == MlaDsFp8Layout.tag and sizes != required:
            raise argument_error(
                "MlaSpec",
                "layout",
                must=f"be another than {self.layout!r} unless a latent of {required[0]} has a row "
                f"of {required[1]} values",
                got=f"{self.layout!r} for {sizes[0]} of {sizes[1]} values",
                do="Pass 'mla_fp8' or 'plain'",
                kind=NotImplementedError,
            )
        if self.layout == MlaFp8Layout.tag and self.width % CACHE_ALIGNMENT:
            raise argument_error(
                "MlaSpec",
                "layout",
                must=f"be another than {self.layout!r} unless kv_lora_rank + qk_rope_head_dim is a "
                f"multiple of {CACHE_ALIGNMENT}",
                got=f"{self.layout!r} with {self.width}",
                do="Pass 'plain'",
                kind=NotImplementedError,
            )
        if self.query is not None:
            checks.one_of("query", self.query, FP8_QUERY, belongs_to="queries shall be, or None")
            if self.layout != MlaFp8Layout.tag:
                raise argument_error(
                    "MlaSpec",
                    "query",
                    must=f"be None with layout {self.layout!r}",
                    got=repr(self.query),
                    do="Codes meet the codes of 'mla_fp8'",
                    kind=NotImplementedError,
                )
        self.check_impl("MlaSpec", 1)
        if self.block_size % self.cp_interleave:
            raise argument_error(
                "MlaSpec",
                "parallel.interleave",
                must="divide block_size",
                got=f"{self.cp_interleave} of blocks of {self.block_size} rows",
                do="Pass a power of two",
            )

    def check_impl(self, op: str, num_tokens: int, impl: str | None = None) -> None:
        """Raise an error that names ``op`` if ``impl`` does not support the spec's calls.

        The calls are decodes of ``num_tokens`` tokens, and prefills that expand contexts. ``impl``
        defaults to the spec's own."""
        impl = self.impl if impl is None else impl
        heads = self.num_heads * (1 if self.ranks is None else self.ranks.head_parts)
        dtype = self.dtype if self.query is None else torch.float8_e4m3fn
        decode = {
            "q": Sizes((num_tokens, heads, self.width), dtype),
            "layout": self.layout,
            "block_size": self.block_size,
            "kv_lora_rank": self.kv_lora_rank,
            "plan": None,
            "num_splits": 0,
            "batch_invariant": self.batch_invariant,
        }
        check_limit("mla_decode", DECODE_PROVIDERS, impl_for(DECODE_PROVIDERS, impl), decode, op)
        if self.context == "chunked":
            nope, value = self.qk_nope_head_dim, self.v_head_dim
            widths = {"q": nope + self.qk_rope_head_dim, "k_nope": nope, "v": value}
            prefill = {name: Sizes((1, 1, width), self.dtype) for name, width in widths.items()}
            chosen = impl_for(PREFILL_PROVIDERS, impl)
            check_limit("mla_prefill", PREFILL_PROVIDERS, chosen, prefill, op)

    @property
    def decode_impl(self) -> str:
        """Return the implementation of ``mla_decode``."""
        return impl_for(DECODE_PROVIDERS, self.impl)

    @property
    def prefill_impl(self) -> str:
        """Return the implementation of ``mla_prefill``."""
        return impl_for(PREFILL_PROVIDERS, self.impl)

    @classmethod
    def deepseek_v3(cls, **changed: Any) -> MlaSpec:
        """Return the spec of DeepSeek-V3 and R1: 128 heads, YaRN of factor 40; ``changed``
        overrides fields."""
        scale = 192**-0.5 * (0.1 * math.log(40.0) + 1.0) ** 2
        return cls(**{"num_heads": 128, "softmax_scale": scale, **changed})

    @property
    def ranks(self) -> ContextParallel | None:
        """``parallel``, or None if it has one rank."""
        return None if self.parallel is None or self.parallel.world_size == 1 else self.parallel

    @property
    def cp_world_size(self) -> int:
        """Ranks that share the cache."""
        return 1 if self.ranks is None else self.ranks.world_size

    @property
    def cp_interleave(self) -> int:
        """Consecutive positions on one rank."""
        return 1 if self.ranks is None else self.ranks.interleave

    @property
    def block_tokens(self) -> int:
        """Positions per block of the block table, on all ranks together."""
        return self.block_size * self.cp_world_size

    @property
    def width(self) -> int:
        """Values per cache row: the latent, then the rotated part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def break_even(self) -> int:
        """Minimum query tokens per request for which "chunked" takes less work than "absorbed": 171
        for V3.

        An absorbed query takes 2 * kv_lora_rank + qk_rope_head_dim multiplications per key and
        head. An expanded query takes qk_nope_head_dim + qk_rope_head_dim + v_head_dim, plus the
        expansion of the key. With fewer query tokens, or if absorbed queries are no wider than
        expanded queries, "absorbed" is cheaper.
        """
        expanded = self.qk_nope_head_dim + self.v_head_dim
        saved = 2 * self.kv_lora_rank - expanded
        return -(-self.kv_lora_rank * expanded // saved) if saved > 0 else 2**31

    def cache_layout(self) -> Layout:
        """Return the layout of a layer's cache."""
        if self.layout == PlainLayout.tag:
            return PlainLayout(self.block_size, self.width, self.dtype)
        return mla_layout(self.layout, self.block_size, self.width)
