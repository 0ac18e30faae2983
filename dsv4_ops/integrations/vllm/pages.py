"""Register the caches of a model as layers of vLLM, so that vLLM allocates and assigns blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import PAGE_ALIGNMENT, MlaLayout, PlainLayout, StateLayout
from dsv4_ops.integrations.vllm._compat import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayerBase,
    AttentionMetadataBuilder,
    KVCacheLayout,
    MLAAttentionSpec,
    MultipleOf,
    SlidingWindowMLASpec,
    get_current_vllm_config,
)
from dsv4_ops.integrations.vllm.steps import CacheSpec, GroupTensors


class Builder(AttentionMetadataBuilder):
    """Pass on the tensors of a cache group. The model's graph builds all other metadata."""

    _cudagraph_support = AttentionCGSupport.ALWAYS  # the host reads no value

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> GroupTensors:
        """Return the four tensors of the group, and the maximum query length, which is an int."""
        return GroupTensors(
            common_attn_metadata.query_start_loc,
            common_attn_metadata.seq_lens,
            common_attn_metadata.block_table_tensor,
            common_attn_metadata.slot_mapping,
            common_attn_metadata.max_query_len,
        )


class Backend(AttentionBackend):
    """Tell vLLM the shape of blocks and the builder of metadata; the model runs its own
    attention."""

    @staticmethod
    def get_name() -> str:
        return "DSV4_OPS"

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_impl_cls() -> type[Any]:
        raise NotImplementedError("the model runs its own attention")

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1 if kv_cache_spec is None else kv_cache_spec.block_size)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the number of tokens per block of compressed rows or latent rows."""
        layers = get_current_vllm_config().compilation_config.static_forward_context.values()
        sizes = [each.cache.block_tokens for each in layers if isinstance(each, Pages)]
        return max(sizes, default=default_block_size)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return (KVCacheLayout.BLHNC,)


class Pages(nn.Module, AttentionLayerBase):
    """One cache of one layer.

    Args:
        name: Name of the cache in vLLM.
        cache: How vLLM allocates the cache.
        on_bind: Function to call when vLLM has allocated the cache.
    """

    def __init__(
        self, name: str, cache: CacheSpec, on_bind: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.layer_name, self.cache, self._on_bind = name, cache, on_bind
        self.kv_cache = torch.empty(0)
        self.owner: tuple[Any, ...] = ()  # the model; nn.Module does not look into tuples
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if name in layers:
            raise argument_error(
                "Pages", "name", must="be new", got=name, do="Make one model in an engine"
            )
        layers[name] = self

    def get_attn_backend(self) -> type[Backend]:
        return Backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Return vLLM's spec for this cache."""
        size = vllm_config.cache_config.block_size
        if self.cache.window is None and size != self.cache.block_tokens:
            raise argument_error(
                "DeepseekForCausalLM",
                "block_size",
                must=f"be {self.cache.block_tokens}",
                got=size,
                do=f"Pass --block-size {self.cache.block_tokens}",
            )
        return kv_cache_spec(self.cache)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Store vLLM's view [num_blocks, 1, rows, values] as blocks of our layout."""
        layout = self.cache.layout
        if kv_cache.dtype != layout.storage_dtype:
            raise argument_error(
                "Pages.bind_kv_cache",
                self.layer_name,
                must=f"be {layout.storage_dtype}",
                got=kv_cache.dtype,
                do="Report the release of vLLM",
                kind=TypeError,
            )
        shape = layout.shape(kv_cache.shape[0])
        strides = torch.empty(shape, device="meta").stride()
        self.kv_cache = kv_cache.as_strided(shape, (kv_cache.stride(0), *strides[1:]))
        self._on_bind()


def kv_cache_spec(cache: CacheSpec) -> Any:
    """Return vLLM's spec for a cache. vLLM's blocks have the size of our blocks, including
    padding."""
    layout = cache.layout
    values: dict[str, Any] = {
        "block_size": cache.block_tokens,
        "num_kv_heads": 1,
        "max_tp_shards": 1,
        "dtype": layout.storage_dtype,
    }
    if isinstance(layout, PlainLayout | StateLayout):
        values["head_size"] = layout.width
    else:
        values |= {"head_size": layout.row_bytes, "state_content_bytes": layout.row_bytes}
    if not isinstance(layout, PlainLayout | MlaLayout):
        values["alignment"] = PAGE_ALIGNMENT
    if cache.window is None:
        return MLAAttentionSpec(tokens_per_state=cache.ratio, **values)
    return SlidingWindowMLASpec(sliding_window=cache.window, **values)
