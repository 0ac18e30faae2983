"""Launchers of dense MLA."""

from dsv4_ops.kernels.mla.decode import mla_decode

__all__ = ["mla_decode"]
