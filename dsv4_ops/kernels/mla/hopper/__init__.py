"""Kernels of dense MLA for Hopper."""
