"""DeepSeek-V4 attention layers between their linear projections.

``build_attention_step`` builds the metadata that all layers of a step share; ``attention_layer``
runs one layer. Every stage is per token, so the same code serves decode, speculative decode,
(chunked) prefill and mixed batches. Call both inside the model's
``torch.compile(fullgraph=True)`` graph. ``AttentionLayer`` is the ``nn.Module`` form.
"""

from dsv4_ops.attention.layer import attention_layer
from dsv4_ops.attention.module import AttentionLayer
from dsv4_ops.attention.spec import KINDS, LayerSpec
from dsv4_ops.attention.step import (
    AttentionStep,
    CompressedStep,
    StateTables,
    attention_step,
    attention_step_of_tokens,
    build_attention_step,
)
from dsv4_ops.attention.tensors import LayerCaches, LayerInputs, LayerWeights

__all__ = [
    "KINDS",
    "AttentionLayer",
    "AttentionStep",
    "CompressedStep",
    "LayerCaches",
    "LayerInputs",
    "LayerSpec",
    "LayerWeights",
    "StateTables",
    "attention_layer",
    "attention_step",
    "attention_step_of_tokens",
    "build_attention_step",
]
