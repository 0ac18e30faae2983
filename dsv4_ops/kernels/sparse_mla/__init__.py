"""Launchers of sparse MLA."""

from dsv4_ops.kernels.sparse_mla.decode import (
    sparse_mla_decode as sparse_mla_decode,
    sparse_mla_decode_paged as sparse_mla_decode_paged,
    sparse_mla_gathered as sparse_mla_gathered,
)
from dsv4_ops.kernels.sparse_mla.metadata import flash_mla_metadata as flash_mla_metadata
from dsv4_ops.kernels.sparse_mla.prefill import sparse_mla_prefill as sparse_mla_prefill
from dsv4_ops.kernels.sparse_mla.schedule import sparse_mla_plan as sparse_mla_plan
