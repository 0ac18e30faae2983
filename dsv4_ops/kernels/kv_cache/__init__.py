"""Launchers of the cache ops."""

from dsv4_ops.kernels.kv_cache.launch import (
    dequantize_and_gather_k_cache as dequantize_and_gather_k_cache,
    gather_k_cache as gather_k_cache,
    quantize_and_insert_k_cache as quantize_and_insert_k_cache,
)
from dsv4_ops.kernels.kv_cache.plain import insert_k_cache as insert_k_cache
