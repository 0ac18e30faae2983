"""DeepSeek-V3.2 and GLM-5: latent attention to the rows that an indexer selects."""

from dsv4_ops.integrations.transformers.architectures.deepseek_v32.spec import DsaModelSpec

__all__ = ["DsaModelSpec"]
