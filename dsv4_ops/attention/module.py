"""The ``nn.Module`` form of an attention layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsv4_ops.attention.layer import attention_layer
from dsv4_ops.attention.spec import LayerSpec, check_kind
from dsv4_ops.attention.step import AttentionStep
from dsv4_ops.attention.tensors import LayerCaches, LayerInputs, LayerWeights
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.types import QuantizedGroups


class AttentionLayer(nn.Module):
    """A module that holds an attention layer's parameters and caches.

    ``forward`` runs ``attention_layer``. The caches are non-persistent buffers.

    CUDA graphs and AOTInductor packages write the caches in place. The float32 parameters are those
    of ``LayerWeights`` that the kind has; norm weights are initialised to 1, all other parameters
    to 0.

    Args:
        spec: The model's attention configuration.
        kind: "window", "c4" or "c128".
        cos_sin_cache: From ``spec.rope_table``, on ``device``. Layers may share it; ``.to`` gives
            each layer its own copy.
        num_heads: Query heads.
        swa_blocks: Blocks of the window cache.
        compressed_blocks: Blocks of the compressed cache and of the indexer cache.
        state_blocks: Blocks of the compressor states and of the indexer states.
        device: Device of parameters and caches.

    Example:
        >>> from dsv4_ops.attention import AttentionLayer, LayerSpec
        >>> spec = LayerSpec.deepseek_v4_flash()
        >>> table = spec.rope_table("c128", 4096)
        >>> layer = AttentionLayer(
        ...     spec,
        ...     "c128",
        ...     table,
        ...     num_heads=64,
        ...     swa_blocks=8,
        ...     compressed_blocks=16,
        ...     state_blocks=32,
        ... )
        >>> sorted(layer.state_dict()), layer.caches.compressed.shape
        (['ape', 'attn_sink', 'norm_weight'], torch.Size([16, 1728]))
    """

    def __init__(
        self,
        spec: LayerSpec,
        kind: str,
        cos_sin_cache: Tensor,
        *,
        num_heads: int,
        swa_blocks: int,
        compressed_blocks: int = 0,
        state_blocks: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_kind("AttentionLayer", kind)
        self.spec, self.kind = spec, kind
        self.register_buffer("cos_sin_cache", cos_sin_cache, persistent=False)
        self.attn_sink = nn.Parameter(torch.zeros(num_heads, dtype=torch.float32, device=device))
        dims = {} if kind == "window" else {"": spec.head_dim}
        if kind == "c4":
            dims["indexer_"] = IndexerLayout.head_dim
        for prefix, head_dim in dims.items():
            width = spec.compressor_width(kind, head_dim)
            ape = torch.zeros(spec.ratio(kind), width, dtype=torch.float32, device=device)
            self.register_parameter(f"{prefix}ape", nn.Parameter(ape))
            norm = torch.ones(head_dim, dtype=torch.float32, device=device)
            self.register_parameter(f"{prefix}norm_weight", nn.Parameter(norm))
        self._weight_names = ("cos_sin_cache", *self._parameters)
        caches = LayerCaches.allocate(
            spec,
            kind,
            swa_blocks=swa_blocks,
            compressed_blocks=compressed_blocks,
            state_blocks=state_blocks,
            device=device,
        )
        self._cache_names = tuple(spec.layouts(kind))
        for name in self._cache_names:
            self.register_buffer(f"{name}_cache", getattr(caches, name), persistent=False)

    @property
    def weights(self) -> LayerWeights:
        """Parameters and RoPE table for ``attention_layer``."""
        return LayerWeights(**{name: getattr(self, name) for name in self._weight_names})

    @property
    def caches(self) -> LayerCaches:
        """Caches for ``attention_layer``."""
        return LayerCaches(**{name: getattr(self, f"{name}_cache") for name in self._cache_names})

    def forward(
        self,
        step: AttentionStep,
        q: Tensor,
        kv: Tensor,
        kv_score: Tensor | None = None,
        indexer_q: Tensor | None = None,
        indexer_weights: Tensor | None = None,
        indexer_kv_score: Tensor | None = None,
        *,
        schedule: str = "decode",
        state_rings: bool = True,
        save_first: bool = False,
    ) -> Tensor | QuantizedGroups:
        """Run ``attention_layer``; tensor arguments are the fields of ``LayerInputs``."""
        inputs = LayerInputs(q, kv, kv_score, indexer_q, indexer_weights, indexer_kv_score)
        tensors = (inputs, self.weights, self.caches)
        return attention_layer(
            self.spec,
            self.kind,
            *tensors,
            step,
            schedule=schedule,
            state_rings=state_rings,
            save_first=save_first,
        )

    def extra_repr(self) -> str:
        return f"{self.kind}, num_heads={self.attn_sink.shape[0]}"
