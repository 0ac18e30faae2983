"""Names that the model imports from vLLM. ``register`` refuses releases that may lack a name."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config as get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import (
    AttentionLayerBase as AttentionLayerBase,
)
from vllm.v1.attention.backend import (
    AttentionBackend as AttentionBackend,
    AttentionCGSupport as AttentionCGSupport,
    AttentionMetadataBuilder as AttentionMetadataBuilder,
    MultipleOf as MultipleOf,
)
from vllm.v1.kv_cache_interface import (
    MLAAttentionSpec as MLAAttentionSpec,
    SlidingWindowMLASpec as SlidingWindowMLASpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout as KVCacheLayout


def group_tensors() -> Any:
    """Return the metadata of the current step by cache name, or None in a profiling run."""
    return get_forward_context().attn_metadata
