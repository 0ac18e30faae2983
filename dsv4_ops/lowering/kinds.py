"""The kinds of lowering: what AOTAutograd does when it traces an op (see ``dispatch/define.py``).

An op has its kind's default lowering, made from the op's reference, unless ``lowering/<stem>.py``
defines a lowering for the op. The stem is the name of the files that define the op.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_ops.core.registry import OPS, REFERENCE, TRITON, Lowering, OpSpec
from dsv4_ops.dispatch import choice, libraries, run_time_launches
from dsv4_ops.dispatch.layers import module_of
from dsv4_ops.lowering.register import inductor_is_loaded, lower_with
from dsv4_ops.reference.common import buffers_by


@dataclass(frozen=True)
class Decompose:
    """Trace ``function`` into the graph instead of the op; Inductor lowers and fuses its aten
    ops."""

    function: Callable[..., Any]
    kind = "decompose"

    def trace(self, mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _traced(mode, self.function, args, kwargs)


def _traced(mode: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    from dsv4_ops.lowering.materialize import materialize

    if inductor_is_loaded():
        from dsv4_ops.lowering.inductor_fixes import fix_scheduler, fix_while_loop

        fix_scheduler()
        fix_while_loop()
    with mode, buffers_by(materialize):
        return function(*args, **kwargs)


@dataclass(frozen=True)
class PointwiseIR:
    """Keep the op in the graph; Inductor lowers it with ``function``, which returns Inductor IR."""

    function: Callable[..., Any]
    kind = "pointwise"

    def trace(self, mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        lower_with(op, self.function)
        return mode.__torch_dispatch__(op, types, args, kwargs)


def _launches_when_it_runs(values: Mapping[str, Any]) -> bool:
    """Return whether the op stays in the graph as a call: if ``run_time_launches`` is on and a size
    is symbolic, except in a package."""
    from dsv4_ops.lowering import external

    tensors = (value for value in values.values() if isinstance(value, torch.Tensor))
    return (
        run_time_launches.are_on()
        and any(isinstance(size, torch.SymInt) for each in tensors for size in each.shape)
        and not external.packaging()
    )


@dataclass(frozen=True)
class TritonKernel:
    """On CUDA, trace the launcher in ``kernels/<stem>``, whose kernel Inductor compiles into the
    graph, or keep the op (see ``run_time_launches``). On other devices, and for calls that the
    kernel does not support, trace ``function``."""

    function: Callable[..., Any]
    kind = "triton"

    def trace(self, mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        spec = OPS[op._schema.name.partition("::")[2]]
        values = spec.arguments(args, kwargs)
        off_gpu = choice.subject(values).device.type != "cuda"  # as in eager mode
        if off_gpu or choice.choose(spec, values).impl == REFERENCE:
            return _traced(mode, self.function, (), values)
        for name in (spec.parameters[place] for place in spec.mutated):
            _refuse_misplaced(spec, name, values[name])
        if _launches_when_it_runs(values):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        from dsv4_ops.lowering import external

        with mode:
            return spec.implementation("kernels")(external.launch(), *args, **kwargs)


@dataclass(frozen=True)
class Choices:
    """Trace the implementation that ``choice`` selects: our kernel, a library's op, or
    ``function``. Instead of our kernel, the graph may keep the op (see ``run_time_launches``)."""

    function: Callable[..., Any]
    kind = "choices"

    def trace(self, mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        spec = OPS[op._schema.name.partition("::")[2]]
        values = spec.arguments(args, kwargs)
        impl = self._impl(spec, values)
        if impl == REFERENCE:
            return _traced(mode, self.function, (), values)
        if impl == TRITON and _launches_when_it_runs(values):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        from dsv4_ops.lowering import external

        with mode:
            return spec.launcher(impl)(external.launch(), **values)

    def _impl(self, spec: OpSpec, values: Any) -> str:
        impl = choice.choose(spec, values).impl
        if impl in libraries.LIBRARIES:
            from dsv4_ops.lowering import external

            if not external.fits(spec.name, impl, values["impl"]):
                return choice.own(spec, values, "").impl
            external.prepare(impl)
        return impl


_DEFAULTS: dict[str, Any] = {kind.kind: kind for kind in (Decompose, TritonKernel, Choices)}


def lowering_of(spec: OpSpec) -> Lowering:
    """Return the op's lowering in ``lowering/<stem>.py``, or the default of the op's kind.

    Raises:
        AttributeError: the op has no lowering of its own, and its kind has no default.
    """
    own = own_lowering(spec)
    if own is not None:
        return own
    kinds = [kind for kind in spec.lowering.values() if kind != Decompose.kind]
    kind = kinds[0] if kinds else Decompose.kind
    if kind not in _DEFAULTS:
        raise AttributeError(f"lowering/{spec.stem}.py has no {spec.name}, of kind {kind!r}")
    default: Lowering = _DEFAULTS[kind](spec.reference)
    return default


def own_lowering(spec: OpSpec) -> Lowering | None:
    """Return the op's lowering in ``lowering/<stem>.py``, or None."""
    name = module_of("lowering", spec.stem)
    if importlib.util.find_spec(name) is None:
        return None
    lowering: Lowering | None = getattr(importlib.import_module(name), spec.name, None)
    return lowering


def _refuse_misplaced(spec: OpSpec, name: str, written: Any) -> None:
    """Raise if the graph makes the view ``written`` at a symbolic offset: torch would rebuild the
    view at offset 0, and the kernel would write to another layer
    (tests/compile/test_upstream.py)."""
    offset = written.storage_offset()
    if not written.is_base_tensor() and isinstance(offset, torch.SymInt):
        raise ValueError(
            f"{spec.name}: {name} must be at a constant offset of its storage when compiled, got "
            f"offset {offset}. Pass one tensor per layer, such as those of "
            "dsv4_ops.attention.caches.KVCacheBuffers, or compile with dynamic=False."
        )
