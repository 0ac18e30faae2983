"""Lowering of everything that a C4 layer writes before it selects rows: our kernels on CUDA,
elsewhere the reference."""

from dsv4_ops.lowering.kinds import TritonKernel
from dsv4_ops.reference import c4_step as reference

insert_c4_step = TritonKernel(reference.insert_c4_step)
