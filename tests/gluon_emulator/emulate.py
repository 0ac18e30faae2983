"""Run the Python source of Gluon kernels over numpy: ``Emulator()(kernel)[grid](*args,
**constexprs)``, with tensors on the CPU. The emulator also runs Triton kernels if they use no other
functions than those below.

A kernel's functions run with other globals: ``gl`` and ``tl`` are ``_Language``, called functions
are emulated too, and ``ASSEMBLY`` replaces functions with inline assembly. Layouts have no effect,
and a partition runs as one thread; Triton checks layouts and threads when it compiles the kernel.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton import JITFunction
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from dsv4_ops.core.registry import OPS
from dsv4_ops.core.tiles import PROGRAMS
from dsv4_ops.kernels.common import triton_compat
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.testing.case import Case
from tests.gluon_emulator import memory, values
from tests.gluon_emulator.memory import pointer_to
from tests.gluon_emulator.program import Program, Shared
from tests.gluon_emulator.values import EmulationError, Number, Value, elementwise, tensor


def _e4m3() -> np.ndarray:
    """Return the float32 value of every code of e4m3fn."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def _decoded(words: Value) -> np.ndarray:
    """Return the values of the codes in words, lower bytes first."""
    return _e4m3()[np.ascontiguousarray(words.data).view(np.uint8).reshape(*words.shape, 4)]


def _in_pairs(words: Value, halves: np.ndarray) -> tuple[Value, Value]:
    """Return two words for each of ``words``: four values of 16 bits."""
    pairs = np.ascontiguousarray(halves).view(np.int32)
    return words.like(pairs[..., 0]), words.like(pairs[..., 1])


def _widen_codes(words: Value, factor: Value) -> tuple[Value, Value]:
    """Emulate ``widen_codes`` of sparse MLA's dequant producer: lower bytes are earlier values."""
    halves = np.ascontiguousarray(factor.data).view(np.uint16).reshape(*factor.shape, 2)
    factors = values.widened(np.concatenate([halves, halves], -1))
    with np.errstate(all="ignore"):
        return _in_pairs(words, values.rounded_to_bf16(_decoded(words) * factors))


def _codes_to_f16(words: Value) -> tuple[Value, Value]:
    """Emulate ``codes_to_f16`` of dense MLA: float16 values."""
    return _in_pairs(words, _decoded(words).astype(np.float16))


def _scale_codes(words: Value, scale: Value) -> tuple[Value, Value]:
    """Emulate ``scale_codes`` of dense MLA: bf16 values times a float32 factor."""
    with np.errstate(all="ignore"):
        return _in_pairs(words, values.rounded_to_bf16(_decoded(words) * scale.data[..., None]))


def _multiply(left: Value, right: Value, *_: Any) -> Value:
    return left * right


def _prefetch_l2(address: Value, size: Value) -> None:
    """Emulate a prefetch: change nothing, but check that the addresses are in a tensor."""
    asked = size.data > 0
    for start, count in zip(address.data[asked], size.data[asked], strict=True):
        inside = any(
            each.start <= start and start + count <= each.start + len(each.bytes)
            for each in address.buffers
        )
        if start % 16 or count % 16 or not inside:
            raise EmulationError(f"prefetch of {count} bytes at {start}")


def _prefetch_line(address: Value, valid: Value) -> None:
    """Emulate a prefetch of 16 bytes of each line."""
    _prefetch_l2(address, valid * 16)


ASSEMBLY = {
    "prefetch_l2": _prefetch_l2,
    "prefetch_line": _prefetch_line,
    "codes_to_f16": _codes_to_f16,
    "widen_codes": _widen_codes,
    "scale_codes": _scale_codes,
    "_multiply": _multiply,
}
"""Replacements of functions with inline assembly, by name."""


class _Language:
    """``gl`` of an emulated kernel; names that are not defined here are Triton's types."""

    load, store, where = map(staticmethod, (memory.load, memory.store, values.where))
    maximum, minimum = map(staticmethod, (values.maximum, values.minimum))
    max, min, sum = map(staticmethod, (values.amax, values.smallest, values.total))
    exp2, log2, exp, log, abs = (
        staticmethod(elementwise(each)) for each in (np.exp2, np.log2, np.exp, np.log, np.abs)
    )
    full, arange, to_tensor = map(staticmethod, (values.full, values.arange, tensor))
    reshape, permute, join = map(staticmethod, (values.reshape, values.permute, values.join))
    split, expand_dims = map(staticmethod, (values.split, values.expand_dims))
    associative_scan, static_range = staticmethod(values.scanned), range
    convert_layout = staticmethod(values.convert_layout)

    def __init__(self, program: Program) -> None:
        self._program = program
        self.allocate_shared_memory = program.allocate
        self.warp_specialize = program.specialise

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *_, **__: "layout"
        found = getattr(gl, name)
        if not isinstance(found, gl.dtype | type):
            raise EmulationError(f"gl.{name} is not emulated")
        return found

    def program_id(self, axis: int) -> Value:
        return tensor(self._program.ids[axis])

    def num_programs(self, axis: int) -> Value:
        return tensor(self._program.grid[axis])

    def zeros(self, shape: Any, dtype: Any, layout: Any = None) -> Value:
        return values.full(shape, 0, dtype)

    def zeros_like(self, like: Value) -> Value:
        return values.full(like.shape, 0, like.dtype)

    def constexpr(self, value: Any) -> Any:
        return value

    def thread_barrier(self) -> None:
        """Do nothing, because a partition runs as one thread."""

    barrier = thread_barrier


def _stand_ins(program: Program) -> dict[int, Any]:
    """Return replacements, by id, of objects that a kernel's module may have imported."""
    barriers = types.SimpleNamespace(
        init=program.init,
        arrive=program.arrive,
        wait=program.wait,
        MBarrierLayout=lambda *_: "layout",
    )
    copies = types.SimpleNamespace(
        mbarrier_arrive=program.copies_arrive,
        commit_group=program.commit_copies,
        wait_group=program.wait_copies,
    )
    language = _Language(program)
    return {
        id(gl): language,
        id(tl): language,
        id(hopper.mbarrier): barriers,
        id(async_copy): copies,
        id(triton_compat.async_load): program.copy,
        id(triton_compat.reinterpret): Shared.reinterpret,
        id(hopper.fence_async_shared): program.fence,
        id(hopper.warpgroup_mma): program.product,
        id(hopper.warpgroup_mma_wait): program.wait_products,
    }


class _Assignments(ast.NodeTransformer):
    """Turns assigned numbers into tensors, except for annotated names."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        value = ast.Call(ast.Name("_assigned", ast.Load()), [node.value], [])
        return ast.copy_location(ast.Assign(node.targets, value), node)


def _assigned(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_assigned, value))
    return tensor(value) if isinstance(value, Number) else value


@functools.cache
def _code(function: JITFunction[Any]) -> types.CodeType:
    """Compile a module that defines the function, with the line numbers of its file."""
    source = function.fn.__code__
    tree = ast.increment_lineno(function.parse(), source.co_firstlineno)
    tree = ast.fix_missing_locations(_Assignments().visit(tree))
    return compile(tree, source.co_filename, "exec")


@functools.cache
def _names(function: JITFunction[Any]) -> frozenset[str]:
    """Return the names that the function may look up in its module."""
    found, codes = set(), [_code(function)]
    for code in codes:
        found.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(found - {function.fn.__name__})


@functools.cache
def _aggregate(source: Any) -> type:
    """Turn an aggregate into a class of values that kernels can read but not change."""
    fields = source.__aggregate_fields__
    return dataclasses.make_dataclass(source.__name__, fields, frozen=True, eq=False)


class _Translated:
    """Translates functions of kernels into functions of emulated values."""

    def __init__(self, program: Program) -> None:
        self.stand_ins = _stand_ins(program)
        self.functions: dict[int, Callable[..., Any]] = {}

    def value(self, value: Any) -> Any:
        if isinstance(value, JITFunction):
            return self.function(value)
        if isinstance(value, tl.constexpr):
            return value.value
        if getattr(value, "__triton_aggregate__", False):
            return _aggregate(value)
        return self.stand_ins.get(id(value), value)

    def function(self, source: JITFunction[Any]) -> Callable[..., Any]:
        name = source.fn.__name__
        if name in ASSEMBLY:
            return ASSEMBLY[name]
        if id(source) not in self.functions:
            made: dict[str, Any] = {}
            found = source.fn.__globals__
            used = {name: self.value(found[name]) for name in _names(source) if name in found}
            exec(_code(source), {"_assigned": _assigned, **used}, made)
            self.functions[id(source)] = made[name]
        return self.functions[id(source)]


def _argument(name: str, value: Any) -> Any:
    """Pass an argument as Triton does: the int 1 becomes a constant of the compiled kernel."""
    if isinstance(value, torch.Tensor):
        return pointer_to(name, value)
    return value if value is None or value == 1 else tensor(value)


class _Emulated:
    def __init__(self, kernel: Any, random: Random) -> None:
        self.kernel, self.random = kernel, random

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **constants: Any) -> None:
            names = self.kernel.arg_names
            given = {name: _argument(name, value) for name, value in zip(names, args, strict=False)}
            given |= {name: value for name, value in constants.items() if name in names}
            program = Program(grid, self.random)
            function = _Translated(program).function(self.kernel)
            for ids in itertools.product(*map(range, grid)):
                program.begin(ids)
                with np.errstate(all="ignore"):
                    function(**given)
                program.finish(program.running)

        return run


def results_of(
    name: str, case: Case, seed: int = 0, num_sms: int = PROGRAMS
) -> tuple[tuple[torch.Tensor, ...], list[str]]:
    """Run an op's launcher with emulated kernels; return its results, and the names of launched
    kernels. Memory that no kernel writes is NaN."""
    emulator = Emulator(seed, num_sms)
    torch.use_deterministic_algorithms(True)
    try:
        results = OPS[name].implementation("kernels")(emulator, *case.tensors, **case.settings)
    finally:
        torch.use_deterministic_algorithms(False)
    return tuple(results), emulator.launched


class Emulator(Launcher):
    """A launcher that emulates kernels on an H200 with ``num_sms``. ``seed`` decides the order in
    which partitions run."""

    def __init__(self, seed: int = 0, num_sms: int = PROGRAMS) -> None:
        super().__init__(self._emulated, capability=(9, 0), num_sms=num_sms)
        self.random = Random(seed)
        self.launched: list[str] = []

    def _emulated(self, kernel: Any) -> _Emulated:
        self.launched.append(kernel.__name__)
        return _Emulated(kernel, self.random)
