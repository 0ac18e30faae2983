"""What a DeepSeek-V4 attention layer computes between its linear projections, as functions of
tensors over the ops of this package.

``build_attention_step`` makes what all layers of a step share; ``attention_layer`` computes one
layer of it: decode, speculative decode, prefill, chunks of it and mixed batches with one code, as
every stage is per token. Both belong inside the model's ``torch.compile(fullgraph=True)`` graph.
``AttentionLayer`` is the same with its parameters and caches in a module.
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
