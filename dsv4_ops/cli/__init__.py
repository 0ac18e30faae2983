"""The command line: list, show, explain, doctor, kernels."""
