"""Benchmarks: ``python -m benchmarks NAME``; see ``benchmarks/README.md``."""
