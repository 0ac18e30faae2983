"""Launcher of hyper-connections."""

from dsv4_ops.kernels.streams.connect import hyper_connection as hyper_connection
