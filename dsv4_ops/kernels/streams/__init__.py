"""Launcher of hyper-connections."""

from dsv4_ops.kernels.streams.hyper_connection import hyper_connection as hyper_connection
