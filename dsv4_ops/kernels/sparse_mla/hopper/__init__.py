"""The kernels of sparse MLA in Gluon, for Hopper."""
