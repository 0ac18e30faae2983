"""The kernels in Triton, for GPUs other than Hopper and for plain caches."""
