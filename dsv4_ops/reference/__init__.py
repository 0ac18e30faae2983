"""Eager PyTorch for any device: these functions define every op's result. They neither synchronise
with the host nor write in place."""
