"""Parts of the Gluon kernels for Hopper that several ops share."""
