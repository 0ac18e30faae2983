"""A scheduler and a workload for ``05_continuous_batching.py``."""
