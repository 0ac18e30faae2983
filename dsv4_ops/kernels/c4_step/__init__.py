"""Launches of the C4 layer's fused inserts."""

from dsv4_ops.kernels.c4_step.launch import insert_c4_step as insert_c4_step
