"""Run hyper-connections of many tokens in Triton's interpreter, on cases and sampled calls: every
batch counts as large, so that programs take several column steps."""

import importlib

from tests.kernels.interpreter import interpret_kernels

kernels = importlib.import_module("dsv4_ops.kernels.streams.hyper_connection")  # not the launcher

if __name__ == "__main__":
    kernels.FEW_TOKENS, kernels.PROGRAMS, kernels.MANY = 0, 1, (16, 16, 4)
    kernels.STEPS, kernels.PARTS[True] = (2, 8), 2
    interpret_kernels.main(8, "hyper_connection")
