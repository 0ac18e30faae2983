"""Launcher of the fused query norm, RoPE and insert."""

from dsv4_ops.kernels.rope.qnorm_rope_insert import qnorm_rope_kv_insert as qnorm_rope_kv_insert
