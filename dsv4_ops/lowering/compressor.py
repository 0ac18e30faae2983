"""Lowerings of the KV compressor."""

from dsv4_ops.lowering.kinds import TritonKernel
from dsv4_ops.reference import compressor as reference

save_compressor_states = TritonKernel(reference.save_compressor_states)
compress_and_insert = TritonKernel(reference.compress_and_insert)
save_and_compress = TritonKernel(reference.save_and_compress)
