"""Hugging Face's small DeepSeek-V4 or V3 beside the patched model: ``python -m examples.demo``."""
