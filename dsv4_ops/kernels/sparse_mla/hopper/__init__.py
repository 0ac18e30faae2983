"""The kernels in Gluon, for Hopper."""
