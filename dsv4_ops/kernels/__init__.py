"""Triton kernels and their launchers; importing one of the modules imports triton.

A launcher has the parameters of its op after ``launch``, which is the identity when it is called
and ``torch.library.wrap_triton`` when it is traced.
"""
