"""The kernels of sparse MLA in Triton, for GPUs other than Hopper and for plain caches."""
