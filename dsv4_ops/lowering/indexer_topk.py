"""Lowerings of the lightning indexer's selection: our kernels on CUDA, elsewhere the references,
whose matrix product, topk and sort are calls of torch's own kernels."""

from dsv4_ops.lowering.kinds import Choices, TritonKernel
from dsv4_ops.reference import indexer_topk as reference

indexer_topk = TritonKernel(reference.indexer_topk)
indexer_select = Choices(reference.indexer_select)
