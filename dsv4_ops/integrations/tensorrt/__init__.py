"""Compile models that hold ops of this package with torch-tensorrt."""

from dsv4_ops.integrations.tensorrt.enabling import enable
from dsv4_ops.integrations.tensorrt.plugins import register_plugins

__all__ = ["enable", "register_plugins"]
