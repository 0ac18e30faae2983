"""Ops that torch-tensorrt traces stay whole; one whose write it would lose raises.

torch-tensorrt erases what nobody reads, and a cache write is read by a later step only. Its frames
on the stack say that it is tracing, and by which way; nothing of it is imported here.
"""

from __future__ import annotations

import sys
from types import FrameType

from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.registry import OpSpec

SUPPORTED = ((2, 11), (2, 15))
"""First supported and first unsupported version of torch-tensorrt; pyproject.toml says the same."""
PLUGINS_SINCE = (2, 13)
"""First version whose plugins ours fit."""
AOT_BACKEND = "torch_tensorrt.dynamo.backend.backends:aot_torch_tensorrt_aten_backend"
"""AOTAutograd's caller, whose graphs return what they write: no write is lost."""
COMPILER = "torch_tensorrt.dynamo._compiler"
"""Compiles exported programs; ``integrations.tensorrt.enable`` mends what it makes of them."""

_ENABLED = [False]


def set_enabled(enabled: bool) -> None:
    """Say whether ``integrations.tensorrt`` keeps writes in exported programs."""
    _ENABLED[0] = enabled


def is_enabled() -> bool:
    """Whether ``integrations.tensorrt.enable`` was called."""
    return _ENABLED[0]


def tracing_function() -> str:
    """Innermost function of torch-tensorrt that is running, "module:name"; empty if none is."""
    if "torch_tensorrt" not in sys.modules:
        return ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("torch_tensorrt."):
            return f"{module}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def refuse_lost_write(spec: OpSpec, function: str, *, traced: bool) -> None:
    """Raise if torch-tensorrt would lose what ``spec`` writes.

    Args:
        spec: An op.
        function: ``tracing_function()``.
        traced: Whether the op itself is traced; else only its fake is asked, as for each pass over
            a graph, AOTAutograd's included.
    """
    exported = function.partition(":")[0] == COMPILER
    lost = not _ENABLED[0] if exported else traced and function not in ("", AOT_BACKEND)
    if not lost or not spec.mutated:
        return
    name = spec.parameters[spec.mutated[0]]
    rule = "be written by compiled code"
    found = f"torch-tensorrt, which would drop the write ({function})"
    advice = "Call dsv4_ops.integrations.tensorrt.enable() before compiling"
    if _ENABLED[0]:
        advice = (
            'Compile with torch.compile(backend="torch_tensorrt"), or an exported program with '
            "torch_tensorrt.dynamo.compile"
        )
    # not a RuntimeError: torch-tensorrt catches those and runs the graph without an engine
    raise refusal(ValueError, spec.name, name, rule, found, advice)
