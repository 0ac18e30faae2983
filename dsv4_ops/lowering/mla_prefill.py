"""Lowering of sparse MLA for prefill: our kernel or FlashMLA on CUDA, elsewhere gathers
and products."""

from __future__ import annotations

from dsv4_ops.lowering.kinds import Choices
from dsv4_ops.reference import mla_prefill as reference

sparse_mla_prefill = Choices(reference.sparse_mla_prefill)
