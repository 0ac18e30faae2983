"""Hugging Face's continuous batching, run from one ``PagedCache``."""
