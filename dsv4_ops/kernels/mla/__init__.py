"""Launchers of dense MLA."""

from dsv4_ops.kernels.mla.decode import mla_decode as mla_decode, mla_sparse as mla_sparse
from dsv4_ops.kernels.mla.expand import mla_expand_kv as mla_expand_kv
from dsv4_ops.kernels.mla.insert import mla_insert_kv as mla_insert_kv
