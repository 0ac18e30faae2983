"""DeepSeek-V3, R1 and Kimi-K2, and DeepSeek-V2: dense multi-head latent attention."""

from dsv4_ops.integrations.transformers.architectures.deepseek_v3.spec import MlaModelSpec
from dsv4_ops.integrations.transformers.architectures.deepseek_v3.tensors import (
    MlaRope,
    MlaTables,
    ShardedMlaTables,
)

__all__ = ["MlaModelSpec", "MlaRope", "MlaTables", "ShardedMlaTables"]
