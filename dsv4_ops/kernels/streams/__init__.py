"""Launcher of hyper-connections."""

from dsv4_ops.kernels.streams.connect import hyper_connection

__all__ = ["hyper_connection"]
