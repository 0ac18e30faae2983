"""Lowering of sparse MLA for prefill: our kernel on CUDA, elsewhere gathers and products."""

from __future__ import annotations

from dsv4_ops.lowering.kinds import TritonKernel
from dsv4_ops.reference import mla_prefill as reference

sparse_mla_prefill = TritonKernel(reference.sparse_mla_prefill)
