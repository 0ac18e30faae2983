"""Checks that every op of the registry must pass.

Each ``check_*`` raises AssertionError with the name of the op and the difference.
``assert_contract`` runs all checks; the check of the capture in a CUDA graph runs only on a GPU.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
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
    hopper_calls,
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
    samples,
    sized_tensors,
    stays_determined,
    with_sizes,
)


def assert_contract(
    op: str, *, device: str = "cpu", examples: int = 50, package: bool = True
) -> None:
    """Check all promises of ``op``.

    Args:
        op: Name in the registry.
        device: Device of the calls; "cuda" also checks the capture in a CUDA graph.
        examples: Number of sampled batches for which the compiled op must agree with the reference.
        package: Whether to also build and run an AOTInductor package, which takes ten seconds.

    Raises:
        AssertionError: the op breaks a promise; the message names the promise.
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
    compiled = CompiledOps([spec], device)
    compiled.check_cases()
    compiled.fuzz(examples)
    check_fusion(spec, device)
    if package:
        check_package(spec, device)
    if device == "cuda":
        check_cuda_graph(spec)


def check_cases(spec: OpSpec, device: str = "cpu") -> None:
    """Check that the op returns the hand-computed numbers; on a CPU, also for strided inputs."""
    computed = [case for case in op_testing(spec).cases() if case.expected is not None]
    assert computed, f"{spec.name}: no case with a hand-computed result"
    for case in computed:
        assert case.expected is not None
        outcome = case.on(device).run(spec.op, spec.mutated)
        if device != "cpu" and op_testing(spec).precise is not None:
            _assert_outcome(f"{spec.name}, {case.name}", spec, case.on(device), outcome)
            continue
        for actual in (outcome, _strided_outcome(spec, case)) if device == "cpu" else (outcome,):
            values = tuple(result.tolist() for result in actual)
            assert values == tuple(case.expected), (
                f"{spec.name}, {case.name}: {values} != {case.expected}"
            )


def _strided_outcome(spec: OpSpec, case: Case) -> Results:
    def apart(tensor: Tensor) -> Tensor:
        if tensor.dtype not in (torch.int32, torch.int64):
            return strided_copy(tensor)
        return torch.stack((tensor, torch.full_like(tensor, 77)), -1)[..., 0]

    tensors = case.copy(apart).tensors
    returned = spec.op(*tensors, **case.settings)
    return results(returned, *(tensors[index] for index in spec.mutated))


def check_opcheck(
    spec: OpSpec, device: str = "cpu", *, traces: int | None = None, compiled: bool = False
) -> None:
    """Check with ``torch.library.opcheck`` that schema, fake and AOT dispatch agree with the op.

    Args:
        traces: Maximum calls to check under AOT dispatch, which takes nearly all of the time.
        compiled: Whether ``CompiledOps`` checks the op too. ``CompiledOps`` checks AOT dispatch of
            the first configuration, so this function then skips that check.
    """
    first = op_testing(spec).settings[0]
    traced: set[tuple[Any, ...]] = set()
    for case in op_testing(spec).cases():
        moved = case.on(device).copy()
        checks = _opchecks(moved.tensors)
        # CompiledOps compares the results of every case
        call = _traced_as(case)
        is_covered = compiled and all(first[key] == case.settings.get(key) for key in first)
        is_traced = (
            not is_covered and call not in traced and (traces is None or len(traced) < traces)
        )
        if is_traced and not _has_nan(case.on(device).run(spec.op, spec.mutated)):
            checks += ("test_aot_dispatch_dynamic",)
            traced.add(call)
        torch.library.opcheck(spec.op, moved.tensors, moved.settings, test_utils=checks)


def _opchecks(tensors: Sequence[Tensor | None]) -> tuple[str, ...]:
    """Return the parts of opcheck except for AOT dispatch. test_schema needs allclose, which float8
    lacks."""
    every = ("test_schema", "test_autograd_registration", "test_faketensor")
    float8 = any(tensor is not None and tensor.dtype == torch.float8_e4m3fn for tensor in tensors)
    return every[1:] if float8 else every


def _has_nan(outcome: Results) -> bool:
    """Whether results have NaN, which opcheck's check of AOT dispatch never accepts as equal."""
    return any(bool(each.isnan().any()) for each in outcome if each.is_floating_point())


def _traced_as(case: Case) -> tuple[Any, ...]:
    """Return the properties of ``case`` on which a dynamic trace depends. A trace specialises sizes
    of 0 and 1."""
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


def check_fake(spec: OpSpec, device: str = "cpu", *, traces: int | None = None) -> None:
    """Check that fake results have the metadata of real results, for dense and strided inputs.

    Args:
        traces: Maximum calls to check with symbolic sizes, which takes nearly all of the time.
    """
    traced: set[tuple[Any, ...]] = set()
    for case in op_testing(spec).cases():
        moved = case.on(device)
        for variant in (moved.copy(), moved.copy(strided_copy)):
            real = list(map(_metadata, results(spec.op(*variant.tensors, **variant.settings))))
            call = _traced_as(variant)
            is_traced = call not in traced and (traces is None or len(traced) < traces)
            for symbolic in (False, True) if is_traced else (False,):
                fake = _fake_metadata(spec, variant, symbolic)
                assert fake == real, f"{spec.name}, {case.name}: fake {fake} != real {real}"
            traced.add(call)


class CompiledOps:
    """Ops compiled into one graph, without opaque calls and recompiles, and with in-place writes.

    For each op of ``fused``, the graph also has a call between a producer of its inputs and a
    consumer of its results. Only such a call shows that generated code reads a computed value at a
    wrong index.
    """

    def __init__(
        self,
        specs: Sequence[OpSpec],
        device: str = "cpu",
        *,
        fused: Sequence[OpSpec] = (),
        layout: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        layout = layout or torch.clone  # if an input were a view, Dynamo would guard its base
        self.parts = [_Part(spec, device, layout) for spec in specs]
        self.parts += [_Fused(spec, device, layout) for spec in fused]
        torch._dynamo.reset()
        self.compiled = torch.compile(self._graph(), fullgraph=True, dynamic=True)
        first = [part.inputs(part.first) for part in self.parts]
        before = _copies(first)
        # sizes that are equal by chance in the first call must not share a symbol; a float that
        # starts as a symbol and ends as a constant would cause a second trace
        with (
            torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined] # methods of config modules are made at import
            torch._dynamo.config.patch(specialize_float=True),
        ):
            outcome, self.code = compile_and_get_code(self.compiled, first)
        opaque, launches = opaque_calls(self.code), hopper_calls(self.code)
        assert not opaque, f"{self.name}: opaque in the compiled code: {opaque}"
        declared = Counter(part.spec.hopper_call for part in self.parts)
        assert launches <= declared, f"{self.name}: opaque launches {launches}, of {declared}"
        self._compare(range(len(self.parts)), outcome, first, before)

    @property
    def name(self) -> str:
        return ", ".join(part.what for part in self.parts)

    def _graph(self) -> Callable[[Sequence[Results]], Results]:
        calls = [part.call for part in self.parts]

        def call(inputs: Sequence[Results]) -> Results:
            outputs: Results = ()
            for part, tensors in zip(calls, inputs, strict=True):
                outputs += results(part(*tensors))
            return outputs

        return call

    def check(self, cases: Sequence[Case | None]) -> None:
        """Check that every op agrees with its reference in one call, without a recompile.

        Args:
            cases: A call for each part. None repeats the first call of the part without a
                comparison.
        """
        inputs = [
            part.inputs(case or part.first) for part, case in zip(self.parts, cases, strict=True)
        ]
        before = _copies(inputs)
        addresses = [tensor.data_ptr() for tensors in inputs for tensor in tensors]
        with torch._dynamo.config.patch(error_on_recompile=True):
            actual = self.compiled(inputs)
        after = [tensor.data_ptr() for tensors in inputs for tensor in tensors]
        assert addresses == after, f"{self.name}: an argument has moved"
        compared = [index for index, case in enumerate(cases) if case is not None]
        self._compare(compared, actual, inputs, before)

    def _compare(
        self,
        compared: Iterable[int],
        actual: Any,
        inputs: Sequence[Results],
        before: Sequence[Results],
    ) -> None:
        actual = results(actual)
        for index, part in enumerate(self.parts):
            count = part.num_results
            mine, actual = actual[:count], actual[count:]
            if index in compared:
                part.compare(mine, inputs[index], before[index])

    def check_cases(self) -> None:
        """Check the named cases that the compiled code can run without a recompile."""
        for cases in zip_longest(*(part.cases() for part in self.parts)):
            self.check(cases)

    def fuzz(self, examples: int, *, derandomize: bool = True) -> None:
        """Check ``examples`` sampled batches of every op; without ``derandomize``, the batches
        differ between runs."""
        sampled = (
            samples(part.testing, part.settings, examples, derandomize=derandomize)
            for part in self.parts
        )
        for cases in zip(*sampled, strict=True):
            self.check(cases)


class _Part:
    """One op's part of a compiled graph."""

    form = "compiled"

    def __init__(self, spec: OpSpec, device: str, layout: Callable[[Tensor], Tensor]) -> None:
        self.spec, self.device, self.layout = spec, device, layout
        self.testing = op_testing(spec)
        self.settings = dict(self.testing.settings[0])
        self.first = primer(self.testing, self.settings)
        self.public = with_sizes(spec, self.settings)
        self.what = f"{spec.name}, {self.form}"
        self.num_results = len(spec.op._schema.returns)
        self.configured = self._configured(sized_tensors(self.first))

    def call(self, *tensors: Tensor) -> Any:
        return self.public(*tensors)

    def inputs(self, case: Case) -> Results:
        return tuple(self.layout(tensor) for tensor in sized_tensors(case.on(self.device)))

    def _configured(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the properties for which a compiled function is specialised: all dtypes, and the
        shapes of caches and of float tensors without their first dimension."""
        caches = [tensors[index] for index in self.spec.places("k_cache")]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        sizes = [tensor.shape[1:] for tensor in (*caches, *floats)]
        return [*(tensor.dtype for tensor in tensors), *sizes]

    def cases(self) -> list[Case]:
        sampled = []
        for case in self.testing.cases():
            same = all(self.settings[key] == case.settings.get(key) for key in self.settings)
            smallest = [0 if tensor is None else min(tensor.shape) for tensor in case.tensors]
            alike = self.configured == self._configured(sized_tensors(case))
            if same and alike and min(smallest) > 1:
                sampled.append(case)
        return sampled

    def compare(self, actual: Results, inputs: Results, before: Results) -> None:
        """Compare the results and the mutated inputs of a call with the reference, which gets the
        inputs as they were before the call."""
        for index, (tensor, copy) in enumerate(zip(inputs, before, strict=True)):
            if index not in self.spec.mutated:
                assert equal(tensor, copy), f"{self.what}: an input was modified"
        case = as_case(self.spec, self.settings, before)
        written = tuple(inputs[index] for index in self.spec.mutated)
        self._assert_agrees(case, actual, written, reference(self.spec, case))

    def _assert_agrees(
        self, case: Case, actual: Results, written: Results, expected: Results
    ) -> None:
        assert_agrees(self.what, self.testing, case, (*actual, *written), expected)


class _Fused(_Part):
    """An op between a producer and a consumer. The consumer also reads what the op wrote."""

    form = "fused"

    def __init__(self, spec: OpSpec, device: str, layout: Callable[[Tensor], Tensor]) -> None:
        super().__init__(spec, device, layout)
        count = len(sized_tensors(self.first))
        # bools, as under dynamic=True Dynamo turns captured ints into symbols, which break `in`
        self.writes = tuple(index in spec.mutated for index in range(count))
        self.num_results += len(spec.mutated)

    def call(self, *tensors: Tensor) -> Any:
        arguments = tuple(map(_produced, tensors, self.writes))
        written = (tensor for tensor, write in zip(arguments, self.writes, strict=True) if write)
        return tuple(map(_consumed, results(self.public(*arguments), *written)))

    def _assert_agrees(
        self, case: Case, actual: Results, written: Results, expected: Results
    ) -> None:
        restored = []
        for left, right in zip(actual, expected, strict=True):
            if not right.is_floating_point():
                assert_same(self.what, left, _consumed(right))
            restored.append(_consumed(left) if right.is_floating_point() else right)
        returned = restored[: len(restored) - len(written)]
        for outcome in (restored, [*returned, *written]):
            assert_agrees(self.what, self.testing, case, outcome, expected)


def _produced(tensor: Tensor, written: bool) -> Tensor:
    if written or tensor.dtype == torch.float8_e4m3fn:
        return tensor
    # for floats, a product with 2 could overflow, and products with -1 are exact
    return tensor * -1 * -1 if tensor.is_floating_point() else tensor * 2 - tensor


def _consumed(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.float8_e4m3fn:
        return (tensor.to(torch.float32) * -1).to(tensor.dtype)
    # not -tensor: in Triton that is 0 - tensor, which is +0 for both zeros
    return tensor * -1 if tensor.is_floating_point() else tensor * 3 + 1


def _copies(inputs: Sequence[Results]) -> list[Results]:
    return [tuple(tensor.clone() for tensor in tensors) for tensors in inputs]


def check_fusion(spec: OpSpec, device: str = "cpu") -> None:
    """Check the op compiled with a producer of its inputs and a consumer of its results."""
    CompiledOps([], device, fused=[spec])


def bound_call(
    spec: OpSpec,
    device: str = "cpu",
    *,
    skip: int = 0,
    keep: Callable[[Case], bool] | None = None,
) -> tuple[Callable[..., Any], Results]:
    """Bind the settings to the public function; return the bound function and its arguments."""
    testing = op_testing(spec)
    settings = dict(testing.settings[0])
    case = primer(testing, settings, skip=skip, keep=keep).on(device)
    return with_sizes(spec, settings), tuple(tensor.clone() for tensor in sized_tensors(case))


def check_package(spec: OpSpec, device: str = "cpu") -> None:
    """Check that a package with dynamic sizes agrees with the reference and mutates its
    arguments."""
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
    """Check that a CUDA graph follows inputs that change in place, without a host sync."""
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
    """Export ``call``; every dimension that the program does not specialise is dynamic."""

    class Call(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Results:
            return results(call(*tensors))  # packages cannot return a NamedTuple

    dims = tuple(dict.fromkeys(range(tensor.dim()), torch.export.Dim.AUTO) for tensor in inputs)
    return torch.export.export(Call(), tuple(inputs), dynamic_shapes=(dims,))


def strided_copy(tensor: Tensor) -> Tensor:
    """Return the same values as a column slice of a wider tensor, as schedulers pass their tables.

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
    """Return the results of a call and its mutated arguments."""
    return results(result, *(arguments[index] for index in spec.mutated))


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    shape, stride = (tuple(map(int, numbers)) for numbers in (tensor.shape, tensor.stride()))
    return shape, stride, tensor.dtype, tensor.device.type, tensor.storage_offset()


def _fake_metadata(spec: OpSpec, case: Case, symbolic: bool) -> list[tuple[Any, ...]]:
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
    with mode:
        fakes = [
            None if tensor is None else mode.from_tensor(tensor, static_shapes=not symbolic)
            for tensor in case.tensors
        ]
        returned = results(spec.op(*fakes, **case.settings))
    return list(map(_metadata, returned))
