"""Eager PyTorch on any device: the definition of every op's result. No host synchronisation, no
in-place writes."""
