"""Ops that torch-tensorrt traces stay whole; one whose write it would lose raises.

torch-tensorrt erases what nobody reads, and a cache write is read by a later step only. Its frames
on the stack say that it is tracing, and by which way; nothing of it is imported here, and before it
is imported no trace looks for them.
"""

from __future__ import annotations

import sys
from types import FrameType

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.registry import OpSpec
from dsv4_ops.dispatch.guards import GUARDS

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


class _TensorRtGuard:
    """Keeps ops whole in graphs of torch-tensorrt, and refuses writes that it would lose."""

    def keeps_whole(self, spec: OpSpec) -> bool:
        function = _tracing_function()
        if function:
            _refuse_lost_write(spec, function, traced=True)
        return bool(function)

    def check_fake(self, spec: OpSpec) -> None:
        if spec.mutated:
            _refuse_lost_write(spec, _tracing_function(), traced=False)


def install() -> None:
    """Have traces ask whether torch-tensorrt runs them; a second call does nothing."""
    if not any(isinstance(each, _TensorRtGuard) for each in GUARDS):
        GUARDS.append(_TensorRtGuard())


class _ImportHook:
    """Installs the guard when torch-tensorrt is imported; finds no module."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch_tensorrt":
            install()


def install_once_imported() -> None:
    """Install the guard now if torch-tensorrt is imported, or else when it is."""
    if "torch_tensorrt" in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, _ImportHook())


def _tracing_function() -> str:
    """Innermost function of torch-tensorrt that is running, "module:name"; empty if none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("torch_tensorrt."):
            return f"{module}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _refuse_lost_write(spec: OpSpec, function: str, *, traced: bool) -> None:
    """Raise if torch-tensorrt would lose what ``spec`` writes.

    Args:
        spec: An op.
        function: ``_tracing_function()``.
        traced: Whether the op itself is traced; else only its fake is asked, as for each pass over
            a graph, AOTAutograd's included.
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
    # not a RuntimeError: torch-tensorrt catches those and runs the graph without an engine
    raise argument_error(
        spec.name,
        name,
        must="be written by compiled code",
        got=f"torch-tensorrt, which would drop the write ({function})",
        do=do,
    )
