"""Hugging Face's small DeepSeek-V4 beside the same model patched: ``python -m examples.demo``."""
