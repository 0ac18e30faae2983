"""Triton kernels and their launchers; importing one of the modules imports triton.

The launch of an op has the parameters of the op after ``launch``, a ``launcher.Launcher``.
"""
