"""Kernels and their launchers. Most modules import triton.

The launcher of an op is a function that takes a ``launcher.Launcher`` and the op's parameters.
"""
