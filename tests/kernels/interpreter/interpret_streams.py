"""Hyper-connections of many tokens, whose programs go on to other columns, in Triton's
interpreter: cases and sampled calls as if few tokens were many."""

from dsv4_ops.kernels.streams import connect
from tests.kernels.interpreter import interpret_kernels

if __name__ == "__main__":
    connect.FEW_TOKENS, connect.PROGRAMS, connect.MANY = 0, 1, (16, 16, 4)
    connect.STEPS, connect.PARTS[True] = (2, 8), 2
    interpret_kernels.main(20, "hyper_connection")
