"""Lowerings of paged caches of keys."""

from dsv4_ops.lowering.kinds import TritonKernel
from dsv4_ops.reference import kv_cache as reference

quantize_and_insert_k_cache = TritonKernel(reference.quantize_and_insert_k_cache)
dequantize_and_gather_k_cache = TritonKernel(reference.dequantize_and_gather_k_cache)
gather_k_cache = TritonKernel(reference.gather_k_cache)
insert_k_cache = TritonKernel(reference.insert_k_cache)
