"""Lowerings of the prefill chunking stages: their references trace to masked loads and pointwise
aten, which Inductor fuses."""

from dsv4_ops.lowering.kinds import Decompose
from dsv4_ops.reference import chunking as reference

split_prefill_chunks = Decompose(reference.split_prefill_chunks)
prefill_row_bounds = Decompose(reference.prefill_row_bounds)
prefill_chunk_row_bounds = Decompose(reference.prefill_chunk_row_bounds)
