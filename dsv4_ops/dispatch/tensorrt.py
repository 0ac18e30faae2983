"""Keep ops whole in traces of torch-tensorrt; raise an error for ops whose writes would be lost.

torch-tensorrt removes nodes whose results are not read in the graph. Only a later step reads what
an op writes to a cache, so such writes would be lost. Frames of torch-tensorrt on the stack show
that torch-tensorrt is tracing, and in which mode. This module does not import torch-tensorrt, and
traces look for the frames only if something else has imported torch-tensorrt.
"""

from __future__ import annotations

import sys
from types import FrameType

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.registry import OpSpec
from dsv4_ops.dispatch.guards import GUARDS

SUPPORTED = ((2, 11), (2, 15))
"""First supported and first unsupported version of torch-tensorrt, as in pyproject.toml."""
PLUGINS_SINCE = (2, 13)
"""First version with the plugin API that we use."""
AOT_BACKEND = "torch_tensorrt.dynamo.backend.backends:aot_torch_tensorrt_aten_backend"
"""torch-tensorrt's function that calls AOTAutograd. Graphs of AOTAutograd return what they write,
so no write is lost."""
COMPILER = "torch_tensorrt.dynamo._compiler"
"""The module that compiles exported programs. ``integrations.tensorrt.enable`` makes these programs
keep their writes."""

_ENABLED = [False]


def set_enabled(enabled: bool) -> None:
    """Record whether ``integrations.tensorrt`` keeps writes in exported programs."""
    _ENABLED[0] = enabled


def is_enabled() -> bool:
    """Whether ``integrations.tensorrt.enable`` was called."""
    return _ENABLED[0]


class _TensorRtGuard:
    """Keeps ops whole in graphs of torch-tensorrt, and raises for writes that would be lost."""

    def keeps_whole(self, spec: OpSpec) -> bool:
        function = _tracing_function()
        if function:
            _refuse_lost_write(spec, function, traced=True)
        return bool(function)

    def check_fake(self, spec: OpSpec) -> None:
        if spec.mutated:
            _refuse_lost_write(spec, _tracing_function(), traced=False)


def install() -> None:
    """Let traces check whether torch-tensorrt runs them; a second call does nothing."""
    if not any(isinstance(each, _TensorRtGuard) for each in GUARDS):
        GUARDS.append(_TensorRtGuard())


class _ImportHook:
    """An import hook that installs the guard when torch-tensorrt is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch_tensorrt":
            install()


def install_once_imported() -> None:
    """Install the guard now if torch-tensorrt is already imported, otherwise at its import."""
    if "torch_tensorrt" in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, _ImportHook())


def _tracing_function() -> str:
    """Return torch-tensorrt's innermost function on the stack, "module:name"; empty if none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("torch_tensorrt."):
            return f"{module}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _refuse_lost_write(spec: OpSpec, function: str, *, traced: bool) -> None:
    """Raise if torch-tensorrt would lose a write of ``spec``.

    Args:
        spec: An op.
        function: Result of ``_tracing_function()``.
        traced: Whether the op itself is traced. Otherwise only the op's fake runs, as in every pass
            over a graph, including the passes of AOTAutograd.
    """
    exported = function.partition(":")[0] == COMPILER
    lost = not _ENABLED[0] if exported else traced and function not in ("", AOT_BACKEND)
    if not lost or not spec.mutated:
        return
    name = spec.parameters[spec.mutated[0]]
    do = "Call dsv4_ops.integrations.tensorrt.enable() before compiling"
    if _ENABLED[0]:
        do = (
            'Compile with torch.compile(backend="torch_tensorrt"), or an exported program with '
            "torch_tensorrt.dynamo.compile"
        )
    # not a RuntimeError, which torch-tensorrt catches to run the graph without an engine
    raise argument_error(
        spec.name,
        name,
        must="be written by compiled code",
        got=f"torch-tensorrt, which would drop the write ({function})",
        do=do,
    )
