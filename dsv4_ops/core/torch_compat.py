"""Undocumented names of torch. Only this file and ``lowering/_compat.py`` import such names.

A comment after a name lists releases of torch that have it. ``tests/kernels/test_compat.py`` looks
for all names in the installed release.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from types import CodeType
from typing import Any, cast

import torch
import torch._functorch.config as functorch_config
from torch._functorch.utils import enable_single_level_autograd_function
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad

__all__ = [
    "FakeTensor",  # 2.11, 2.13, 2.15
    "FakeTensorMode",  # 2.11, 2.13, 2.15
    "FunctionalTensorMode",  # 2.11, 2.13, 2.15
    "OpOverload",  # 2.11, 2.13, 2.15
    "SingleLevelFunction",  # 2.11, 2.13, 2.15
    "after_autograd",  # torch._C._after_autograd_keyset: 2.11, 2.13, 2.15
    "allows_aot_compile",  # torch._dynamo.config.enable_aot_compile: 2.11, 2.13
    "any_requires_grad",  # torch._C._any_requires_grad: 2.11, 2.13, 2.15
    "aot_settings",  # torch._functorch.config.save_config_portable: 2.13
    "auto_functionalized_v2",  # torch._higher_order_ops.auto_functionalize: 2.11, 2.13
    "decomposes_triton_ops",  # decompose_custom_triton_ops: 2.11, 2.13, 2.15
    "enable_single_level_autograd_function",  # 2.11, 2.13, 2.15
    "find_schema",  # torch._C._dispatch_find_schema_or_throw: 2.11, 2.13, 2.15
    "forward_mode",  # forward_ad._current_level: 2.11, 2.13, 2.15
    "group_members",
    "group_rank",  # and _dynamo_marked_constant: 2.11, 2.13
    "group_sends",  # ProcessGroup._get_backend: 2.11, 2.13
    "group_size",  # torch.distributed.distributed_c10d._get_group_size_by_name: 2.11, 2.13
    "guard_or_false",  # torch.fx.experimental.symbolic_shapes: 2.11, 2.13, 2.15
    "has_fake_mode",  # torch._guards.detect_fake_mode: 2.11, 2.13, 2.15
    "has_function_modes",  # torch._C._len_torch_function_stack: 2.13
    "note_trace",
    "noted_trace",  # torch._guards.TracingContext, ShapeEnv.guards and var_to_sources: 2.11, 2.15
    "one_graph_for_all_sizes",  # backed_size_oblivious, use_duck_shape: 2.11, 2.15
    "only_looks_ahead",  # torch.fx.experimental.proxy_tensor.get_proxy_mode: 2.13
    "process_group",  # torch.distributed.distributed_c10d._resolve_process_group: 2.11, 2.13
    "redispatch",  # OpOverload._handle.redispatch_boxed: 2.11, 2.13, 2.15
    "sources_noted_once",  # torch._dynamo.package.SourceInfo: 2.11, 2.15
    "statically_known_true",  # torch.fx.experimental.symbolic_shapes: 2.11, 2.13, 2.15
    "sym_max",
    "sym_min",
    "symbols_in_sizes",  # create_symintnode, deferred_runtime_asserts: 2.11, 2.15
    "symmetric_workspace",  # torch.distributed._symmetric_memory: 2.11, 2.13
    "timeout_of",  # ProcessGroup._get_backend(device).options._timeout: 2.11, 2.13
    "unknown_sizes",
    "without_autocast",  # torch._C._ExcludeDispatchKeyGuard: 2.11, 2.13
    "without_kernel_table",  # torch._higher_order_ops.triton_kernel_wrap.kernel_side_table: 2.13
]

_log = logging.getLogger(__name__)

AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA")
"""Dispatch keys under which ``torch.autocast`` reaches an op."""

# torch 2.15 annotates these functions with int | SymInt; our annotations call a SymInt an int
sym_max: Callable[[int, int], int] = cast(Any, torch.sym_max)
sym_min: Callable[[int, int], int] = cast(Any, torch.sym_min)

SingleLevelFunction = torch.autograd.function._SingleLevelFunction
after_autograd = torch._C._after_autograd_keyset


def any_requires_grad(args: Sequence[Any]) -> bool:
    """Whether a tensor among ``args`` requires a gradient."""
    return bool(torch._C._any_requires_grad(*args))


def allows_aot_compile() -> AbstractContextManager[Any]:
    """Allow ``aot_compile`` on functions that ``torch.compile`` returned."""
    from torch._dynamo import config

    name = "enable_aot_compile"
    allowed: AbstractContextManager[Any] = (
        config.patch({name: True}) if hasattr(config, name) else nullcontext()
    )
    return allowed


@contextmanager
def one_graph_for_all_sizes() -> Iterator[None]:
    """Let ``torch.compile(dynamic=True)`` trace graphs that also hold for a size of 1, and for
    sizes that differ although they were equal in the trace. Python ints and floats become
    constants, because they belong to the model, not to the batch."""
    import torch._dynamo.config as dynamo
    import torch.fx.experimental._config as config

    shapes: Any = config
    with ExitStack() as stack:
        stack.enter_context(shapes.patch(backed_size_oblivious=True, use_duck_shape=False))
        stack.enter_context(dynamo.patch(specialize_float=True, specialize_int=True))
        # running a fake again is faster than looking up its result by symbolic sizes
        stack.enter_context(dynamo.patch(fake_tensor_cache_enabled=False))
        yield


@dataclass(frozen=True)
class SizeGuards:
    """The assumptions of a graph with symbolic sizes about the sizes of its inputs.

    Attributes:
        condition: Python expression of the symbols.
        symbols: For each symbol, a Python expression of its value; ``L`` holds the arguments.
    """

    condition: str
    symbols: dict[str, str]

    def hold(self, arguments: dict[str, Any]) -> bool:
        """Whether the condition holds for ``arguments``, a dictionary by name."""
        if not self.symbols:
            return True
        try:
            values = {name: eval(at, {"L": arguments}) for name, at in self.symbols.items()}
            return bool(eval(self.condition, {"math": math}, values))
        except Exception as error:  # for example, an argument lacks an attribute, or is None
            _log.info("a size is not known: %s", error)
            return False


_TRACES: ContextVar[list[Any] | None] = ContextVar("noted_trace", default=None)


@contextmanager
def noted_trace() -> Iterator[Callable[[], SizeGuards]]:
    """Yield a function that returns the guards of the trace in which ``note_trace`` ran."""
    traces: list[Any] = []
    token = _TRACES.set(traces)
    try:
        yield lambda: _size_guards(*traces)
    finally:
        _TRACES.reset(token)


def _size_guards(shapes: Any) -> SizeGuards:
    from torch.utils._sympy.printers import PythonPrinter

    printer = PythonPrinter()
    expressions = [guard.expr for guard in shapes.guards]
    used = {str(symbol): symbol for each in expressions for symbol in each.free_symbols}
    names = {each: shapes.var_to_sources[symbol][0].name for each, symbol in used.items()}
    return SizeGuards(
        " and ".join(f"({printer.doprint(each)})" for each in expressions) or "True",
        {each: name if isinstance(name, str) else name() for each, name in sorted(names.items())},
    )


def aot_settings() -> dict[str, Any]:
    """Return the settings of AOTAutograd, without those that depend on the machine."""
    return dict(functorch_config.save_config_portable())


_SOURCES: dict[tuple[str, CodeType], set[Any]] = {}


@contextmanager
def sources_noted_once() -> Iterator[None]:
    """Let torch look up the source of each function once per process, not once per call in a trace.
    Lookups, which tokenise the function and compare files, take a fifth of a trace's time."""
    from torch._dynamo import package

    kind: Any = package.SourceInfo
    # torch's own method, even if another thread has replaced it at the moment
    add_code = vars(kind.add_code).get("dsv4_ops_replaced", kind.add_code)

    def add_once(self: Any, code: CodeType) -> None:
        place = code.co_filename, code  # code objects of two files may be equal
        if place not in _SOURCES:
            add_code(found := kind(inlined_sources=set()), code)
            _SOURCES[place] = found.inlined_sources
        self.inlined_sources |= _SOURCES[place]

    vars(add_once)["dsv4_ops_replaced"] = add_code
    kind.add_code = add_once
    try:
        yield
    finally:
        kind.add_code = add_code


def without_autocast() -> AbstractContextManager[Any]:
    """Disable autocast for ops of torch that are called inside the context."""
    keys = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for key in AUTOCAST_KEYS]
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(keys[0] | keys[1])
    return guard


@contextmanager
def without_kernel_table() -> Iterator[None]:
    """While functions are saved, empty the table of the Triton kernels that this process traced.

    Saved code of Inductor contains the kernels anyway. The table refers to kernels by number: a
    process that loaded another process's table would launch wrong kernels in the next graph that it
    traces.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as table

    kernels, constants = table.id_to_kernel, table.constant_args
    table.id_to_kernel, table.constant_args = {}, {}
    try:
        yield
    finally:
        table.id_to_kernel, table.constant_args = kernels, constants


def has_fake_mode() -> bool:
    """Whether tensors that calls return are fake."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode() is not None


def has_function_modes() -> bool:
    """Whether a mode, for example ``torch.set_default_device``, intercepts calls of torch."""
    return bool(torch._C._len_torch_function_stack())


def decomposes_triton_ops() -> bool:
    """Whether this trace decomposes ``torch.library.triton_op``, as only a compiler's traces do."""
    return bool(functorch_config.decompose_custom_triton_ops)


def find_schema(qualified: str) -> bool:
    """Whether an op of this name is registered."""
    try:
        torch._C._dispatch_find_schema_or_throw(qualified, "")
    except RuntimeError:
        return False
    return True


def forward_mode() -> bool:
    """Whether forward-mode autograd is on."""
    return forward_ad._current_level >= 0


def constant_in_traces(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo call ``function`` and take its result as a constant. Unlike
    ``torch.compiler.assume_constant_result``, this decorator does not import Dynamo."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


@constant_in_traces
def note_trace() -> None:
    """Pass the current trace to ``noted_trace``."""
    from torch._guards import TracingContext

    context, traces = TracingContext.try_get(), _TRACES.get()
    if traces is not None and context is not None and context.fake_mode is not None:
        traces[:] = [context.fake_mode.shape_env]


def group_members(name: str) -> list[int]:
    """Return the global ranks of the members of a process group, in the group's order."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d.get_process_group_ranks(process_group(name)))


@constant_in_traces
def group_rank(name: str) -> int:
    """Return the rank of this process in a process group."""
    return int(process_group(name).rank())


def group_sends(name: str, device: str) -> bool:
    """Whether a process group has a backend for tensors on ``device``."""
    try:
        process_group(name)._get_backend(torch.device(device))
    except RuntimeError:
        return False
    return True


def group_size(name: str) -> int:
    """Return the number of ranks of a process group; RuntimeError if there is none."""
    from torch.distributed import distributed_c10d

    size: Any = distributed_c10d._get_group_size_by_name
    return int(size(name))


def guard_or_false(condition: Any) -> bool:
    """Evaluate ``condition`` with a guard; return False if it cannot be evaluated."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy

    return guard_or_false(condition)


def only_looks_ahead() -> bool:
    """Whether a compiler runs a function on fake tensors without tracing it. AOTAutograd does so
    first, to find out what the graph returns and mutates."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # imports sympy

    return get_proxy_mode() is None and has_fake_mode()


def process_group(name: str) -> Any:
    """Return the process group of this name; RuntimeError if there is none."""
    from torch.distributed import distributed_c10d

    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    return resolve(name)


def redispatch(op: OpOverload, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the implementation of ``op`` below autograd."""
    return op._handle.redispatch_boxed(keyset & after_autograd, *args, **kwargs)


_UNKNOWN: ContextVar[bool] = ContextVar("unknown_sizes", default=False)


@contextmanager
def unknown_sizes() -> Iterator[None]:
    """Let ``statically_known_true`` answer as in a trace with symbolic sizes, without a trace."""
    token = _UNKNOWN.set(True)
    try:
        yield
    finally:
        _UNKNOWN.reset(token)


@constant_in_traces
def _are_unknown() -> bool:
    return _UNKNOWN.get()


def statically_known_true(condition: Any) -> bool:
    """Whether ``condition`` holds for all values of its symbols; adds no guard."""
    if _are_unknown():
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(condition)


def symbols_in_sizes(*tensors: torch.Tensor) -> list[torch.SymInt]:
    """Return the symbols that occur in sizes and strides of tensors but are no size or stride, and
    the symbols that limit them."""
    numbers = [number for each in tensors for number in (*each.shape, *each.stride())]
    nodes: list[Any] = [number.node for number in numbers if isinstance(number, torch.SymInt)]
    found = {symbol: node.shape_env for node in nodes for symbol in node.expr.free_symbols}
    for node in nodes:
        found.pop(node.expr, None)
    for symbol, shapes in list(found.items()):
        for limit in shapes.deferred_runtime_asserts.get(symbol, ()):
            found |= dict.fromkeys(limit.expr.free_symbols, shapes)
    return [shapes.create_symintnode(symbol, hint=None) for symbol, shapes in found.items()]


def symmetric_workspace(group: str, nbytes: int, device: torch.device) -> Any:
    """Allocate zeroed symmetric memory that all ranks of a group map.

    Return the memory and its handle, which has ``rank``, ``world_size`` and ``buffer_ptrs``. The
    call is collective: when it returns on one rank, all ranks have zeroed their memory.
    """
    from torch.distributed import _symmetric_memory

    memory: Any = _symmetric_memory
    workspace = memory.empty(nbytes, dtype=torch.uint8, device=device)
    workspace.zero_()
    torch.cuda.synchronize(device)
    return workspace, memory.rendezvous(workspace, group)


def timeout_of(group: str, device: torch.device) -> timedelta:
    """Return the timeout of a process group."""
    timeout: timedelta = process_group(group)._get_backend(device).options._timeout
    return timeout
