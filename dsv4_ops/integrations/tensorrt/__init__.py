"""Let torch-tensorrt compile models that contain ops of this package."""

from dsv4_ops.integrations.tensorrt.enabling import enable
from dsv4_ops.integrations.tensorrt.plugins import register_plugins

__all__ = ["enable", "register_plugins"]
