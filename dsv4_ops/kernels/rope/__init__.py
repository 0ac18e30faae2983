"""Launchers of the kernel for query norm, RoPE and insert, and of the kernel for inverse RoPE."""

from dsv4_ops.kernels.rope.inverse_rope_group import (
    inverse_rope_group as inverse_rope_group,
    inverse_rope_group_quantize as inverse_rope_group_quantize,
)
from dsv4_ops.kernels.rope.qnorm_rope_insert import qnorm_rope_kv_insert as qnorm_rope_kv_insert
