"""Kernels and their launchers; importing most of the modules imports triton.

A launcher takes ``launch``, a ``launcher.Launcher``, and then the parameters of its op.
"""
