"""The command line: list, show, explain, doctor, checkpoint, kernels."""
