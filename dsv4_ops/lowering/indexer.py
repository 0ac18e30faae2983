"""Lowerings of the lightning indexer's queries and logits: our kernels or DeepGEMM on CUDA,
elsewhere the references."""

from dsv4_ops.lowering.kinds import Choices, TritonKernel
from dsv4_ops.reference import indexer as reference

indexer_quantize_q = TritonKernel(reference.indexer_quantize_q)
indexer_logits = Choices(reference.indexer_logits)
indexer_logits_ragged = TritonKernel(reference.indexer_logits_ragged)
