"""DeepSeek attention layers between their linear projections.

``build_attention_step`` builds the metadata that all layers of a step share; ``attention_layer``
runs one layer. Every stage is per token, so the same code serves decode, speculative decode,
(chunked) prefill and mixed batches. Call both inside the model's
``torch.compile(fullgraph=True)`` graph. ``AttentionLayer`` is the ``nn.Module`` form. These are
DeepSeek-V4's; ``build_mla_step`` and ``mla_layer`` are those of V2, V3, R1 and Kimi-K2.
"""

from dsv4_ops.attention.layer import attention_layer
from dsv4_ops.attention.mla_layer import mla_layer
from dsv4_ops.attention.mla_spec import MlaSpec
from dsv4_ops.attention.mla_step import MlaStep, build_mla_step, mla_step_of_tokens
from dsv4_ops.attention.module import AttentionLayer
from dsv4_ops.attention.parallel import ContextParallel
from dsv4_ops.attention.spec import KINDS, LayerSpec
from dsv4_ops.attention.step import (
    AttentionStep,
    CompressedStep,
    RankShare,
    StateTables,
    attention_step,
    attention_step_of_tokens,
    build_attention_step,
)
from dsv4_ops.attention.tensors import (
    LayerCaches,
    LayerInputs,
    LayerWeights,
    MlaCache,
    MlaInputs,
    MlaWeights,
)

__all__ = [
    "KINDS",
    "AttentionLayer",
    "AttentionStep",
    "CompressedStep",
    "ContextParallel",
    "LayerCaches",
    "LayerInputs",
    "LayerSpec",
    "LayerWeights",
    "MlaCache",
    "MlaInputs",
    "MlaSpec",
    "MlaStep",
    "MlaWeights",
    "RankShare",
    "StateTables",
    "attention_layer",
    "attention_step",
    "attention_step_of_tokens",
    "build_attention_step",
    "build_mla_step",
    "mla_layer",
    "mla_step_of_tokens",
]
