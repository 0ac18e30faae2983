"""Lowerings of sparse MLA: our kernels on CUDA, elsewhere the reference as gathers and products."""

from __future__ import annotations

from dsv4_ops.lowering.kinds import Decompose, TritonKernel
from dsv4_ops.reference import sparse_mla as reference

sparse_mla_decode = TritonKernel(reference.sparse_mla_decode)
sparse_mla_decode_paged = TritonKernel(reference.sparse_mla_decode_paged)
sparse_mla_gathered = Decompose(reference.sparse_mla_gathered)
