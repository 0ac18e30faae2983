"""Kernels of dense MLA for any GPU."""
