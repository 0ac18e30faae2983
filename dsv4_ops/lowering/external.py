"""Call libraries from compiled code. If a library registers ops, compiled code calls these ops, so
that a package needs nothing but the library."""

from __future__ import annotations

import sys
from typing import Any

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.registry import AUTO
from dsv4_ops.dispatch.layers import adapter
from dsv4_ops.lowering.register import inductor_is_loaded, lower_with


def packaging() -> bool:
    """Return whether the trace is for an AOTInductor package."""
    if "torch._inductor.virtualized" not in sys.modules:
        return False
    from dsv4_ops.lowering import _compat

    return _compat.V.aot_compilation is True


def launch() -> Any:
    """Return the launcher for a trace. In a package, each launch of a kernel that Inductor does not
    compile becomes an op."""
    if not packaging():
        from dsv4_ops.kernels.launcher import TRACED

        return TRACED
    from dsv4_ops.kernels.aot.launch_op import PACKAGED
    from dsv4_ops.lowering import gluon

    gluon.register()
    return PACKAGED


def fits(op: str, library: str, impl: str) -> bool:
    """Return whether compiled code can call ``library``. If it cannot, raise, unless ``impl`` is
    "auto"."""
    if not packaging() or adapter(library).packaged():
        return True
    if impl == AUTO:
        return False
    raise argument_error(
        op,
        "impl",
        must="be another in an AOTInductor package",
        got=repr(library),
        do="Its functions are no ops of torch, and a package calls nothing else",
        kind=NotImplementedError,
    )


def prepare(library: str) -> None:
    """Make Inductor call the library's ops instead of ours in a graph."""
    if inductor_is_loaded():
        for ours, library_op in adapter(library).lowered().items():
            lower_with(ours, _call_of(library_op))


def _call_of(library_op: Any) -> Any:
    from dsv4_ops.kernels.opaque_op import trailing
    from dsv4_ops.lowering import _compat

    call = _compat.fallback_handler(library_op)

    def lower(*args: Any) -> Any:
        return call(*args, *trailing(library_op, len(args)))

    return lower
