"""Lowerings of the mixed index matrices: their references trace to masked loads and pointwise aten,
which Inductor fuses."""

from dsv4_ops.lowering.kinds import Decompose
from dsv4_ops.reference import sparse_indices as reference

combine_topk_swa_indices = Decompose(reference.combine_topk_swa_indices)
mixed_sparse_indices = Decompose(reference.mixed_sparse_indices)
