"""Kernels and their launchers. Most modules import triton.

A launcher takes ``launch``, a ``launcher.Launcher``, and then the parameters of its op.
"""
