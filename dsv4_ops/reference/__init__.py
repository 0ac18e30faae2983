"""Eager PyTorch functions, for any device, that define the result of every op."""
