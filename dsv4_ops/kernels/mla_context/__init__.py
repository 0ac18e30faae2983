"""Launcher of attention over a context that is read in chunks."""

from dsv4_ops.kernels.mla_context.prefill import mla_prefill as mla_prefill
