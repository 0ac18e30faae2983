"""Compare Hugging Face's small models with patched models: ``python -m examples.demo``."""
