"""Kernels of index stages that a compiled graph makes by itself."""
