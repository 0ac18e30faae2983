"""Lowerings of sparse MLA: on CUDA our kernels or FlashMLA, elsewhere the reference as gathers and
products."""

from __future__ import annotations

from dsv4_ops.lowering.kinds import Choices
from dsv4_ops.reference import sparse_mla as reference

sparse_mla_decode = Choices(reference.sparse_mla_decode)
sparse_mla_decode_paged = Choices(reference.sparse_mla_decode_paged)
sparse_mla_gathered = Choices(reference.sparse_mla_gathered)
