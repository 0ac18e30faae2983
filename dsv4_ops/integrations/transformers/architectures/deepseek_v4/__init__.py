"""DeepSeek-V4: sliding window, compressed sparse and heavily compressed attention."""

from dsv4_ops.integrations.transformers.architectures.deepseek_v4.spec import DeepseekV4Spec

__all__ = ["DeepseekV4Spec"]
