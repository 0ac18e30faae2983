"""Register the public ops, each by one call of ``define_op``.

How a lowering takes effect without importing Inductor, and without a call by the user
----------------------------------------------------------------------------------------
``torch.library.register_torch_dispatch`` attaches a rule to the pair (op,
``FunctionalTensorMode``). Every graph that AOTAutograd traces - for ``torch.compile`` and for
AOTInductor - passes through that mode before Inductor lowers anything, so the rule is the first
code that sees the op inside a compiler. The rule loads the op's lowering, and then either traces
the decomposition instead of the op or registers the lowering with Inductor. Importing ``dsv4_ops``
therefore loads torch only, and the first compilation of a process still uses the lowerings.

``torch.export`` keeps the op whole: an exported program names the op, and is lowered when it is
compiled. The rule asks ``decomposes_triton_ops`` whether a compiler traces, because
``torch.compiler.is_exporting()`` is also true while AOTInductor compiles.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from dsv4_ops.core import gradient
from dsv4_ops.core.registry import (
    NAMESPACE,
    OPS,
    REFERENCE,
    TRITON,
    Lowering,
    OpSpec,
    returns_nothing,
)
from dsv4_ops.core.torch_compat import (
    AUTOCAST_KEYS,
    FunctionalTensorMode,
    OpOverload,
    decomposes_triton_ops,
    only_looks_ahead,
    without_autocast,
)
from dsv4_ops.dispatch import choice, in_pool, kernel_requests, layers, limits
from dsv4_ops.dispatch.guards import GUARDS

_library = torch.library.Library(NAMESPACE, "DEF")
gradient.define(_library)


def define_op(stem: str, schema: str, **fields: Any) -> OpOverload:
    """Register an op, and return the overload to call.

    ``fields`` are the other fields of ``OpSpec``. By default, ``meta`` and ``reference`` are the
    functions with the op's name in the layers ``meta`` and ``reference``. The fake of an op without
    results returns nothing.
    """
    name = schema.partition("(")[0]
    if schema.endswith("-> ()"):
        fields.setdefault("meta", returns_nothing)
    for layer in {"meta", "reference"} - fields.keys():
        fields[layer] = layers.function_of(layer, stem, name)
    fields |= {"load": layers.load, "launch_with": layers.launcher}
    return register(OpSpec(stem=stem, schema=schema, **fields))


def register(spec: OpSpec) -> OpOverload:
    """Register schema, reference, fake and trace rule of ``spec``; return the overload to call."""
    if spec.name in OPS:
        raise ValueError(
            f"define_op: name must be new, got {spec.name!r} twice. Rename one of the two ops."
        )
    _library.define(spec.schema, tags=(torch.Tag.pt2_compliant_tag,))
    anywhere = _launch_rule(spec) if spec.has_choice else spec.reference
    _library.impl(spec.name, anywhere, "CompositeExplicitAutograd")
    if spec.has_kernel and not spec.has_choice:
        _library.impl(spec.name, _launch_rule(spec), "CUDA")
    for key in AUTOCAST_KEYS:
        _library.impl(spec.name, _autocast_rule(spec), key)
    qualified = f"{NAMESPACE}::{spec.name}"
    torch.library.register_fake(qualified, _fake_rule(spec), lib=_library)
    torch.library.register_torch_dispatch(
        qualified, FunctionalTensorMode, _trace_rule(spec), lib=_library
    )
    if spec.gradient != gradient.INTEGERS:
        rule = gradient.autograd_rule(spec.name, spec.op, spec.gradient, spec.reference)
        _library.impl(spec.name, rule, "Autograd", with_keyset=True)
    OPS[spec.name] = spec
    return spec.op


def _autocast_rule(spec: OpSpec) -> Callable[..., Any]:
    """Run the op without ``torch.autocast``, because the op takes no other dtypes than its own."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            return spec.op(*args, **kwargs)

    return rule


def _fake_rule(spec: OpSpec) -> Callable[..., Any]:
    """Return the op's fake, which also loads what the compiled code of the call needs."""
    wanted = _parameters(spec.meta)

    @functools.wraps(spec.meta)
    def rule(*args: Any, **kwargs: Any) -> Any:
        values = spec.arguments(args, kwargs)
        for guard in GUARDS:
            guard.check_fake(spec)
        if spec.has_choice:
            for library in choice.prepare(spec, values):
                spec.launcher(library)  # defines the op that the compiled code calls
        if spec.has_kernel and _on_cuda(args, kwargs):
            _load_kernels(spec.stem)
            if kernel_requests.are_on():
                kernel_requests.request(spec, *_chosen(spec, args, kwargs))
        return spec.meta(**{name: values[name] for name in wanted})

    return rule


def _on_cuda(args: Any, kwargs: Any) -> bool:
    tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
    return next(tensors).device.type == "cuda"


@functools.cache
def _load_kernels(stem: str) -> None:
    """Define the ops that the launchers of ``stem`` trace.

    Compiled code from a cache calls these ops although this process has traced nothing.
    """
    with contextlib.suppress(ModuleNotFoundError):  # Triton is missing: a launch will raise
        layers.load_kernels(stem)


def _launch_rule(spec: OpSpec) -> Callable[..., Any]:
    """Outside a compiler, run the implementation that ``choice.choose`` selects.

    On a GPU, a call that differs from an earlier call only in the values of tensors repeats the
    launches of that call, because choosing launches takes longer than running them.
    """
    repeats = "group" not in spec.parameters  # the memory of other ranks may move

    def choose(args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any, Any, bool]:
        impl, args, kwargs = _chosen(spec, args, kwargs)
        if impl == REFERENCE:
            return spec.reference, args, kwargs, False
        function = spec.launcher(impl)
        if impl == TRITON:
            return function, args, kwargs, True
        return functools.partial(function, _eager()), args, kwargs, False

    def rule(*args: Any, **kwargs: Any) -> Any:
        first = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        if repeats and first.is_cuda:
            with torch.cuda.device_of(first):
                return _plans().run(spec.name, choose, args, kwargs)
        function, args, kwargs, is_ours = choose(args, kwargs)
        if function is spec.reference:
            return function(*args, **kwargs)
        with torch.cuda.device_of(first):
            return function(*((_eager(),) if is_ours else ()), *args, **kwargs)

    return rule


def _chosen(spec: OpSpec, args: Any, kwargs: Any) -> tuple[str, Any, Any]:
    """Return the implementation that runs a call, and the arguments to run it with."""
    if not spec.has_choice and spec.name not in limits.WORDS:
        return REFERENCE if limits.no_triton() else TRITON, args, kwargs
    values = spec.arguments(args, kwargs)
    return choice.choose(spec, values).impl, (), values


_eager = functools.cache(layers.eager)
_plans = functools.cache(layers.launch_plans)


def _trace_rule(spec: OpSpec) -> Callable[..., Any]:
    def rule(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        values = spec.arguments(args, kwargs or {})
        if in_pool.writes_to_pool(spec, values):
            return in_pool.trace(mode, spec, values)
        kept_whole = any(guard.keeps_whole(spec) for guard in GUARDS)
        if kept_whole or not decomposes_triton_ops():
            return mode.__torch_dispatch__(op, types, args, kwargs)
        if only_looks_ahead():
            return _looked_ahead(spec, mode, args, kwargs or {})
        lowering: Lowering = spec.implementation("lowering")
        return lowering.trace(mode, op, types, args, kwargs or {})

    return rule


def _looked_ahead(spec: OpSpec, mode: Any, args: Any, kwargs: Any) -> Any:
    """Return what AOTAutograd reads before it traces: the results' metadata, and which arguments
    are mutated.

    The fake returns the metadata, and the schema says what is mutated. A trace of the lowering
    would take much longer.
    """
    values = spec.arguments(args, kwargs)
    with mode:
        for place in spec.mutated:
            written = values[spec.parameters[place]]
            written.copy_(written)  # shows autograd the write that the lowering will trace
        return spec.meta(**{name: values[name] for name in _parameters(spec.meta)})


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
