"""Launchers of dense MLA."""

from dsv4_ops.kernels.mla.decode import mla_decode
from dsv4_ops.kernels.mla.insert import mla_insert_kv

__all__ = ["mla_decode", "mla_insert_kv"]
