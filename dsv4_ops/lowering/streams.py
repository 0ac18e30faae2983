"""Lowering of hyper-connections."""

from dsv4_ops.lowering.kinds import TritonKernel
from dsv4_ops.reference import streams as reference

hyper_connection = TritonKernel(reference.hyper_connection)
