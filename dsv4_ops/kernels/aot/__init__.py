"""Gluon kernels inside AOTInductor packages."""
