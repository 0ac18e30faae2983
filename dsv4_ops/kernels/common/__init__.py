"""Device functions that several stems use, and the names of Triton that moved."""
