"""DeepSeek attention layers, without their linear projections.

``build_attention_step`` builds the metadata that all layers of a step share; ``attention_layer``
runs one layer. Every stage computes each token separately, so the same code serves decode,
speculative decode, (chunked) prefill and mixed batches. Call both functions inside the model's
``torch.compile(fullgraph=True)`` graph. ``AttentionLayer`` is an ``nn.Module`` that runs
``attention_layer``. These three names are for DeepSeek-V4; ``build_mla_step`` and ``mla_layer`` are
for V2, V3, R1 and Kimi-K2; ``build_mla_step`` and ``dsa_layer`` are for V3.2 and GLM-5.
"""

from dsv4_ops.attention.dsa_layer import dsa_layer as dsa_layer
from dsv4_ops.attention.dsa_spec import DsaSpec as DsaSpec
from dsv4_ops.attention.layer import attention_layer as attention_layer
from dsv4_ops.attention.mla_layer import mla_layer as mla_layer
from dsv4_ops.attention.mla_spec import MlaSpec as MlaSpec
from dsv4_ops.attention.mla_step import (
    MlaStep as MlaStep,
    build_mla_step as build_mla_step,
    mla_step_of_tokens as mla_step_of_tokens,
)
from dsv4_ops.attention.module import AttentionLayer as AttentionLayer
from dsv4_ops.attention.parallel import ContextParallel as ContextParallel
from dsv4_ops.attention.spec import (
    KINDS as KINDS,
    LayerSpec as LayerSpec,
)
from dsv4_ops.attention.step import (
    AttentionStep as AttentionStep,
    CompressedStep as CompressedStep,
    RankShare as RankShare,
    StateTables as StateTables,
    attention_step as attention_step,
    attention_step_of_tokens as attention_step_of_tokens,
    build_attention_step as build_attention_step,
)
from dsv4_ops.attention.tensors import (
    DsaAttention as DsaAttention,
    DsaCache as DsaCache,
    IndexerInputs as IndexerInputs,
    LayerCaches as LayerCaches,
    LayerInputs as LayerInputs,
    LayerWeights as LayerWeights,
    MlaCache as MlaCache,
    MlaInputs as MlaInputs,
    MlaWeights as MlaWeights,
)
from dsv4_ops.core.public import public_names as _public_names

__all__ = _public_names(globals())
