"""Launcher of the fused inserts of a C4 layer."""

from dsv4_ops.kernels.c4_step.launch import insert_c4_step as insert_c4_step
