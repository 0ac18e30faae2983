"""Triton kernels and their launchers; importing one of the modules imports triton.

A launcher has the parameters of its op after ``launch``, which is the identity when it is called;
``launch.py`` says what it is when it is traced.
"""
