"""Hugging Face's small DeepSeek-V4, or V3, beside it patched: ``python -m examples.demo``."""
