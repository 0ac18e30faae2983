"""Checks that every op of the registry must pass.

Each ``check_*`` raises AssertionError with the name of the op and the difference.
``assert_contract`` runs all checks, on a GPU also CUDA graph capture.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dsv4_ops.core.registry import OPS, OpSpec
from dsv4_ops.lowering.inspect import (
    build_package,
    compile_and_get_code,
    load_package,
    opaque_calls,
)
from dsv4_ops.testing.case import Case, results
from dsv4_ops.testing.contract.compare import assert_agrees, assert_same, equal
from dsv4_ops.testing.contract.gradient import check_gradient
from dsv4_ops.testing.strategies.calls import (
    Results,
    as_case,
    changed,
    op_testing,
    primer,
    reference,
    sized_tensors,
    stays_determined,
    with_sizes,
)


def assert_contract(
    op: str, *, device: str = "cpu", examples: int = 50, package: bool = True
) -> None:
    """Check everything that ``op`` promises.

    Args:
        op: Name in the registry.
        device: Where the compiled code runs; "cuda" adds CUDA graph capture.
        examples: Sampled batches that the compiled op must agree with the reference on.
        package: Also build and run an AOTInductor package (some ten seconds).

    Raises:
        AssertionError: a promise is broken; the message names it.
        ValueError: no op has that name.
    """
    if op not in OPS:
        raise ValueError(
            f"assert_contract: op must be a name in the registry, got {op!r}. "
            "See `python -m dsv4_ops list`."
        )
    spec = OPS[op]
    check_cases(spec, device)
    check_opcheck(spec, device)
    check_fake(spec, device)
    check_gradient(spec, device)
    compiled = CompiledOp(spec, device)
    compiled.check_cases()
    compiled.fuzz(examples)
    check_fusion(spec, device)
    if package:
        check_package(spec, device)
    if device == "cuda":
        check_cuda_graph(spec)


def check_cases(spec: OpSpec, device: str = "cpu") -> None:
    """The reference gives the hand-computed numbers."""
    computed = [case for case in op_testing(spec).cases() if case.expected is not None]
    assert computed, f"{spec.name}: no case with a hand-computed result"
    for case in computed:
        assert case.expected is not None
        outcome = case.on(device).run(spec.op, spec.mutated)
        if device != "cpu" and op_testing(spec).precise is not None:
            _assert_outcome(f"{spec.name}, {case.name}", spec, case.on(device), outcome)
            continue
        values = tuple(result.tolist() for result in outcome)
        assert values == tuple(case.expected), (
            f"{spec.name}, {case.name}: {values} != {case.expected}"
        )


def check_opcheck(spec: OpSpec, device: str = "cpu", *, traces: int | None = None) -> None:
    """``torch.library.opcheck`` passes: schema, fake and AOT dispatch agree with the op.

    ``traces`` bounds the calls checked under AOT dispatch, which takes nearly all of the time.
    """
    traced: set[tuple[Any, ...]] = set()
    for case in op_testing(spec).cases():
        moved = case.on(device).copy()
        checks = _opchecks(moved.tensors)
        # check_compiled compares the results of every case
        call = _traced_as(case)
        if call not in traced and (traces is None or len(traced) < traces):
            checks += ("test_aot_dispatch_dynamic",)
            traced.add(call)
        torch.library.opcheck(spec.op, moved.tensors, moved.settings, test_utils=checks)


def _opchecks(tensors: Sequence[Tensor | None]) -> tuple[str, ...]:
    """The parts of opcheck besides AOT dispatch; test_schema needs allclose, which float8 lacks."""
    every = ("test_schema", "test_autograd_registration", "test_faketensor")
    float8 = any(tensor is not None and tensor.dtype == torch.float8_e4m3fn for tensor in tensors)
    return every[1:] if float8 else every


def _traced_as(case: Case) -> tuple[Any, ...]:
    """What a dynamic trace of ``case`` depends on; it specialises sizes 0 and 1."""
    inputs = (
        None
        if tensor is None
        else (
            tensor.dtype,
            *(min(size, 2) for size in tensor.shape),
            tensor.is_contiguous(),
            tensor.storage_offset() > 0,
        )
        for tensor in case.tensors
    )
    return (*inputs, *sorted(case.settings.items()))


def check_fake(spec: OpSpec, device: str = "cpu") -> None:
    """Fake results have the metadata of real ones, for dense and strided inputs of any size."""
    for case in op_testing(spec).cases():
        moved = case.on(device)
        for variant in (moved.copy(), moved.copy(strided_copy)):
            real = [
                _metadata(result)
                for result in results(spec.op(*variant.tensors, **variant.settings))
            ]
            for symbolic in (False, True):
                fake = _fake_metadata(spec, variant, symbolic)
                assert fake == real, f"{spec.name}, {case.name}: fake {fake} != real {real}"


class CompiledOp:
    """An op compiled once: a single graph, no opaque calls, no recompiles, in-place writes."""

    def __init__(
        self, spec: OpSpec, device: str = "cpu", *, layout: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.spec, self.device = spec, device
        self.layout = layout or torch.clone  # a view would be guarded on its base
        self.settings = dict(op_testing(spec).settings[0])
        self.call = with_sizes(spec, self.settings)
        torch._dynamo.reset()
        self.compiled = torch.compile(self.call, fullgraph=True, dynamic=True)
        first = self._inputs(primer(op_testing(spec), self.settings))
        self.configured = self._configured(first)
        case = as_case(spec, self.settings, first)
        # sizes that are equal by chance in the first call must not share a symbol
        with torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined] # methods of config modules are made at import
            result, self.code = compile_and_get_code(self.compiled, *first)
        opaque = [] if spec.opaque_because else opaque_calls(self.code)
        assert not opaque, f"{spec.name}: opaque in the compiled code: {opaque}"
        _assert_outcome(spec.name, spec, case, _outcome(spec, result, first))

    def _configured(self, tensors: Sequence[Tensor]) -> list[Any]:
        """What a compiled function is specialised on: dtypes, block shapes and float widths."""
        caches = [tensors[index] for index in self.spec.places("k_cache")]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        sizes = [tensor.shape[1:] for tensor in (*caches, *floats)]
        return [*(tensor.dtype for tensor in tensors), *sizes]

    def _inputs(self, case: Case) -> Results:
        return tuple(self.layout(tensor) for tensor in sized_tensors(case.on(self.device)))

    def check(self, case: Case) -> None:
        """The compiled op agrees with the reference and does not recompile."""
        inputs = self._inputs(case)
        before = [tensor.clone() for tensor in inputs]
        addresses = [tensor.data_ptr() for tensor in inputs]
        with torch._dynamo.config.patch(error_on_recompile=True):
            actual = _outcome(self.spec, self.compiled(*inputs), inputs)
        called = as_case(self.spec, self.settings, before)
        _assert_outcome(f"{self.spec.name}, compiled", self.spec, called, actual)
        assert addresses == [tensor.data_ptr() for tensor in inputs], "an argument has moved"
        for index, (tensor, copy) in enumerate(zip(inputs, before, strict=True)):
            if index not in self.spec.mutated:
                assert equal(tensor, copy), f"{self.spec.name}: an input was modified"

    def check_cases(self) -> None:
        """Check named cases of this configuration whose sizes torch.compile keeps dynamic."""
        for case in op_testing(self.spec).cases():
            same = all(self.settings[key] == case.settings.get(key) for key in self.settings)
            smallest = [0 if tensor is None else min(tensor.shape) for tensor in case.tensors]
            alike = self.configured == self._configured(sized_tensors(case))
            if same and alike and min(smallest) > 1:
                self.check(case)

    def fuzz(self, examples: int, *, derandomize: bool = True) -> None:
        """``examples`` sampled batches."""
        from hypothesis import HealthCheck, Verbosity, given, settings

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=derandomize,
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
        )
        @given(op_testing(self.spec).strategy(settings=self.settings, min_size=2))
        def check(case: Case) -> None:
            self.check(case)

        check()


def check_fusion(spec: OpSpec, device: str = "cpu") -> None:
    """The op is right when compiled with a producer of its inputs and a consumer of its results.

    IR that reads a computed value at the wrong index fails only then.
    """
    call, inputs = bound_call(spec, device)
    # bools: under dynamic=True Dynamo turns captured ints into symbols, which break `in`
    writes = tuple(index in spec.mutated for index in range(len(inputs)))

    def produced(tensor: Tensor, written: bool) -> Tensor:
        if written or tensor.dtype == torch.float8_e4m3fn:
            return tensor
        # exact in floating point, where a larger intermediate could overflow
        return tensor * -1 * -1 if tensor.is_floating_point() else tensor * 2 - tensor

    def consumed(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.float8_e4m3fn:
            return (tensor.to(torch.float32) * -1).to(tensor.dtype)
        # not -tensor: in Triton that is 0 - tensor, which is +0 for both zeros
        return tensor * -1 if tensor.is_floating_point() else tensor * 3 + 1

    def between(*tensors: Tensor) -> Results:
        arguments = tuple(map(produced, tensors, writes))
        written = (tensor for tensor, write in zip(arguments, writes, strict=True) if write)
        return tuple(map(consumed, results(call(*arguments), *written)))

    torch._dynamo.reset()
    compiled = torch.compile(between, fullgraph=True, dynamic=True)
    case = as_case(spec, dict(op_testing(spec).settings[0]), inputs)
    actual = compiled(*inputs)
    expected = reference(spec, case)
    agreed = partial(assert_agrees, f"{spec.name}, fused", op_testing(spec), case)
    restored = []
    for left, right in zip(actual, expected, strict=True):
        if not right.is_floating_point():
            assert_same(f"{spec.name}, fused", left, consumed(right))
        restored.append(consumed(left) if right.is_floating_point() else right)
    agreed(restored, expected)
    in_place = [inputs[index] for index in spec.mutated]
    agreed([*restored[: len(restored) - len(in_place)], *in_place], expected)


def bound_call(
    spec: OpSpec,
    device: str = "cpu",
    *,
    skip: int = 0,
    keep: Callable[[Case], bool] | None = None,
) -> tuple[Callable[..., Any], Results]:
    """The public function with its settings bound, and tensors to call it with."""
    testing = op_testing(spec)
    settings = dict(testing.settings[0])
    case = primer(testing, settings, skip=skip, keep=keep).on(device)
    return with_sizes(spec, settings), tuple(tensor.clone() for tensor in sized_tensors(case))


def check_package(spec: OpSpec, device: str = "cpu") -> None:
    """A package with dynamic sizes agrees with the reference and writes to its arguments."""
    call, inputs = bound_call(spec, device)
    program = export_dynamic(call, inputs)
    named = [node.target for node in program.graph.nodes if node.target is spec.op]
    assert named, f"{spec.name}: the exported program does not name the op"
    with tempfile.TemporaryDirectory() as folder:
        run = load_package(build_package(program, Path(folder) / f"{spec.name}.pt2"))
        for skip in range(5):
            _, other = bound_call(spec, device, skip=skip)
            case = as_case(spec, dict(op_testing(spec).settings[0]), other)
            actual = _outcome(spec, run(*other), other)
            _assert_outcome(f"{spec.name}, packaged", spec, case, actual)


def check_cuda_graph(spec: OpSpec) -> None:
    """A CUDA graph replay is right after its inputs change in place, without a host sync."""
    call, inputs = bound_call(spec, "cuda", keep=partial(stays_determined, spec))
    for tensor in inputs:
        torch._dynamo.mark_static_address(tensor)
    torch._dynamo.reset()
    compiled = torch.compile(
        call,
        fullgraph=True,
        dynamic=True,
        options={"triton.cudagraphs": True, "triton.cudagraph_or_error": True},
    )
    for _ in range(3):
        compiled(*inputs)
    for _ in range(3):
        for tensor in inputs:
            tensor.copy_(changed(spec, tensor))
        case = as_case(spec, dict(op_testing(spec).settings[0]), inputs)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            actual = compiled(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        _assert_outcome(f"{spec.name}, CUDA graph", spec, case, _outcome(spec, actual, inputs))


def export_dynamic(
    call: Callable[..., Any], inputs: Sequence[Tensor]
) -> torch.export.ExportedProgram:
    """Export ``call`` with every dimension dynamic that the program does not specialise."""

    class Call(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Results:
            return results(call(*tensors))  # packages cannot return a NamedTuple

    dims = tuple(dict.fromkeys(range(tensor.dim()), torch.export.Dim.AUTO) for tensor in inputs)
    return torch.export.export(Call(), tuple(inputs), dynamic_shapes=(dims,))


def strided_copy(tensor: Tensor) -> Tensor:
    """The same values as a column slice of a wider tensor, as schedulers pass their tables.

    Rows of bytes and floats stay aligned to 16 bytes.
    """
    before = 1 if not tensor.is_floating_point() else 16 // tensor.itemsize
    if tensor.dtype == torch.uint8:
        before = 16
    after = 2 * before
    shape = (*tensor.shape[:-1], tensor.shape[-1] + before + after)
    wide = tensor.new_full(shape, 77)
    wide[..., before:-after] = tensor
    return wide[..., before:-after]


def _assert_outcome(what: str, spec: OpSpec, case: Case, actual: Results) -> None:
    assert_agrees(what, op_testing(spec), case, actual, reference(spec, case))


def _outcome(spec: OpSpec, result: Any, arguments: Sequence[Tensor]) -> Results:
    """Results of a call, and the arguments that it wrote to."""
    return results(result, *(arguments[index] for index in spec.mutated))


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device.type,
        tensor.storage_offset(),
    )


def _fake_metadata(spec: OpSpec, case: Case, symbolic: bool) -> list[tuple[Any, ...]]:
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
    with mode:
        fakes = [
            None if tensor is None else mode.from_tensor(tensor, static_shapes=not symbolic)
            for tensor in case.tensors
        ]
        returned = results(spec.op(*fakes, **case.settings))
    found = []
    for result in returned:
        shape, stride, *rest = _metadata(result)
        found.append((tuple(map(int, shape)), tuple(map(int, stride)), *rest))
    return found
