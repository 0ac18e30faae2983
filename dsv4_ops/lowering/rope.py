"""Lowerings of rotary embeddings and the fused query norm."""

from dsv4_ops.lowering.kinds import Decompose, TritonKernel
from dsv4_ops.reference import rope as reference

apply_rope = Decompose(reference.apply_rope)
inverse_rope_group = TritonKernel(reference.inverse_rope_group)
inverse_rope_group_quantize = TritonKernel(reference.inverse_rope_group_quantize)
qnorm_rope_kv_insert = TritonKernel(reference.qnorm_rope_kv_insert)
