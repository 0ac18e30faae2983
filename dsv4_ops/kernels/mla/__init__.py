"""Launchers of dense MLA."""

from dsv4_ops.kernels.mla.decode import mla_decode
from dsv4_ops.kernels.mla.expand import mla_expand_kv
from dsv4_ops.kernels.mla.insert import mla_insert_kv

__all__ = ["mla_decode", "mla_expand_kv", "mla_insert_kv"]
