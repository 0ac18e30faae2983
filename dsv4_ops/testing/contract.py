"""The contract every op is under, driven from the registry: a new op gets all of it for free.

Each ``check_*`` raises AssertionError with the name of the op and what differs. ``assert_contract``
runs all that this machine can: on a GPU also CUDA graphs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
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
from dsv4_ops.testing.case import Case, OpTesting

Results = tuple[Tensor, ...]


def assert_contract(
    op: str, *, device: str = "cpu", examples: int = 50, package: bool = True
) -> None:
    """Check everything that ``op`` promises.

    Args:
        op: Name in the registry.
        device: Where the compiled code runs; "cuda" adds CUDA graph capture.
        examples: Drawn batches that the compiled op must agree with the reference on.
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
    computed = [case for case in _station(spec).cases() if case.expected is not None]
    assert computed, f"{spec.name}: no case with a hand-computed result"
    for case in computed:
        assert case.expected is not None
        results = case.on(device).run(spec.op)
        values = tuple(result.tolist() for result in results)
        assert values == tuple(case.expected), (
            f"{spec.name}, {case.name}: {values} != {case.expected}"
        )


def check_opcheck(spec: OpSpec, device: str = "cpu") -> None:
    """Schema, fake and AOT dispatch agree with the op, as ``torch.library.opcheck`` sees it."""
    for case in _station(spec).cases():
        moved = case.on(device)
        torch.library.opcheck(spec.op, moved.tensors, moved.settings)


def check_fake(spec: OpSpec, device: str = "cpu") -> None:
    """Fake results have the metadata of real ones: dense, strided, empty and size-1 inputs, plain
    and symbolic sizes."""
    for case in _station(spec).cases():
        moved = case.on(device)
        for tensors in (moved.tensors, tuple(strided_copy(tensor) for tensor in moved.tensors)):
            variant = Case(case.name, tensors, case.settings)
            real = [_metadata(result) for result in _results(spec.op(*tensors, **case.settings))]
            for symbolic in (False, True):
                fake = _fake_metadata(spec, variant, symbolic)
                assert fake == real, f"{spec.name}, {case.name}: fake {fake} != real {real}"


class CompiledOp:
    """One op as one compiled callable: a single graph, nothing opaque, no recompile over sizes and
    contents."""

    def __init__(
        self, spec: OpSpec, device: str = "cpu", *, layout: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.spec, self.device = spec, device
        self.layout = layout or torch.clone  # a view would be guarded on its base
        self.settings = dict(_station(spec).settings[0])
        torch._dynamo.reset()
        self.compiled = torch.compile(
            _with_sizes(spec, self.settings), fullgraph=True, dynamic=True
        )
        first = self._inputs(_primer(_station(spec), self.settings))
        # sizes that happen to be equal in the first call must not be taken for one
        with torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined] # methods of config modules are made at import
            result, self.code = compile_and_get_code(self.compiled, *first)
        opaque = [] if spec.opaque_because else opaque_calls(self.code)
        assert not opaque, f"{spec.name}: opaque in the compiled code: {opaque}"
        assert_same(spec.name, result, _with_sizes(spec, self.settings)(*first))

    def _inputs(self, case: Case) -> tuple[Tensor, ...]:
        return tuple(self.layout(tensor) for tensor in _sized_tensors(case.on(self.device)))

    def check(self, case: Case) -> None:
        """The compiled op gives exactly what the reference gives, and does not recompile for it."""
        inputs = self._inputs(case)
        before = [tensor.clone() for tensor in inputs]
        expected = _with_sizes(self.spec, self.settings)(*inputs)
        with torch._dynamo.config.patch(error_on_recompile=True):
            actual = self.compiled(*inputs)
        assert_same(f"{self.spec.name}, compiled", actual, expected)
        for tensor, copy in zip(inputs, before, strict=True):
            assert torch.equal(tensor, copy), f"{self.spec.name}: an input was modified"

    def check_cases(self) -> None:
        """Every named case of the compiled configuration whose sizes torch.compile does not
        specialise on."""
        for case in _station(self.spec).cases():
            same = all(self.settings[key] == case.settings.get(key) for key in self.settings)
            if same and all(size > 1 for tensor in case.tensors for size in tensor.shape):
                self.check(case)

    def fuzz(self, examples: int, *, derandomize: bool = True) -> None:
        """``examples`` drawn batches."""
        from hypothesis import HealthCheck, Verbosity, given, settings

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=derandomize,
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
        )
        @given(_station(self.spec).strategy(settings=self.settings, min_size=2))
        def check(case: Case) -> None:
            self.check(case)

        check()


def check_fusion(spec: OpSpec, device: str = "cpu") -> None:
    """Compiled between a producer of its inputs and a consumer of its results, the op is right.

    IR that reads a computed value in the wrong place fails only then.
    """
    call, inputs = bound_call(spec, device)

    def between(*tensors: Tensor) -> Results:
        results = _results(call(*(tensor * 2 - tensor for tensor in tensors)))
        return tuple(result * 3 + 1 for result in results)

    torch._dynamo.reset()
    compiled = torch.compile(between, fullgraph=True, dynamic=True)
    assert_same(f"{spec.name}, fused", compiled(*inputs), between(*inputs))


def bound_call(
    spec: OpSpec, device: str = "cpu", *, skip: int = 0
) -> tuple[Callable[..., Any], Results]:
    """The public function as a function of tensors only, and tensors to call it with."""
    station = _station(spec)
    settings = dict(station.settings[0])
    case = _primer(station, settings, skip=skip).on(device)
    return _with_sizes(spec, settings), tuple(tensor.clone() for tensor in _sized_tensors(case))


def check_package(spec: OpSpec, device: str = "cpu") -> None:
    """Exported with dynamic sizes and packaged, the op gives what the reference gives, at other
    sizes too."""
    call, inputs = bound_call(spec, device)
    program = export_dynamic(call, inputs)
    named = [node.target for node in program.graph.nodes if node.target is spec.op]
    assert named, f"{spec.name}: the exported program does not name the op"
    with tempfile.TemporaryDirectory() as folder:
        run = load_package(build_package(program, Path(folder) / f"{spec.name}.pt2"))
        for skip in range(5):
            _, other = bound_call(spec, device, skip=skip)
            assert_same(f"{spec.name}, packaged", run(*other), call(*other))


def check_cuda_graph(spec: OpSpec) -> None:
    """Captured by torch.compile's CUDA graphs, the op is right after its inputs change in place,
    without a host sync."""
    call, inputs = bound_call(spec, "cuda")
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
        for (
            tensor
        ) in inputs:  # keeps query_start_loc non-decreasing; other contents may be anything
            tensor.copy_(torch.div(tensor * 2, 3, rounding_mode="floor"))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            actual = compiled(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_same(f"{spec.name}, CUDA graph", actual, call(*inputs))


def export_dynamic(
    call: Callable[..., Any], inputs: Sequence[Tensor]
) -> torch.export.ExportedProgram:
    """Export ``call`` with every dimension of every input dynamic that the program does not fix."""

    class Call(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return call(*tensors)

    dims = tuple(dict.fromkeys(range(tensor.dim()), torch.export.Dim.AUTO) for tensor in inputs)
    return torch.export.export(Call(), tuple(inputs), dynamic_shapes=(dims,))


def assert_same(what: str, actual: Any, expected: Any) -> None:
    """Equal in number, shape, dtype, device and every value."""
    pairs = list(zip(_results(actual), _results(expected), strict=True))
    for index, (left, right) in enumerate(pairs):
        assert (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device), (
            f"{what}: result {index} is {left.shape} {left.dtype} {left.device}, "
            f"not {right.shape} {right.dtype} {right.device}"
        )
        assert torch.equal(left, right), (
            f"{what}: result {index} differs:\n{left}\nexpected\n{right}"
        )


def strided_copy(tensor: Tensor) -> Tensor:
    """The same values in a view with gaps: a column slice of something wider, as schedulers pass
    their tables."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] + 3)
    wide = tensor.new_full(shape, 77)
    wide[..., 1:-2] = tensor
    return wide[..., 1:-2]


def _station(spec: OpSpec) -> OpTesting:
    station: OpTesting = spec.station("testing")
    return station


def _results(result: Any) -> Results:
    return (result,) if isinstance(result, Tensor) else tuple(result)


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
        fakes = [mode.from_tensor(tensor, static_shapes=not symbolic) for tensor in case.tensors]
        results = _results(spec.op(*fakes, **case.settings))
    found = []
    for result in results:
        shape, stride, *rest = _metadata(result)
        found.append((tuple(map(int, shape)), tuple(map(int, stride)), *rest))
    return found


def _with_sizes(spec: OpSpec, settings: dict[str, Any]) -> Callable[..., Any]:
    """The public function with ``settings`` bound; ``num_tokens``, a size, comes from the length of
    one more tensor."""
    public = spec.station("ops")
    if "num_tokens" not in spec.schema.partition("*")[2]:
        return lambda *tensors: public(*tensors, **settings)
    return lambda *tensors: public(*tensors[:-1], **settings, num_tokens=tensors[-1].shape[0])


def _sized_tensors(case: Case) -> tuple[Tensor, ...]:
    if "num_tokens" not in case.settings:
        return case.tensors
    device = case.tensors[0].device
    return (
        *case.tensors,
        torch.empty(case.settings["num_tokens"], dtype=torch.uint8, device=device),
    )


def _primer(station: OpTesting, settings: dict[str, Any], *, skip: int = 0) -> Case:
    """A drawn call in which as many sizes differ as can: export takes equal sizes for one."""
    from hypothesis import HealthCheck, Phase, given
    from hypothesis import settings as profile

    drawn: list[Case] = []

    @profile(
        max_examples=100,
        database=None,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(station.strategy(settings=settings, min_size=2))
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()

    def sizes(case: Case) -> int:
        return len({size for tensor in _sized_tensors(case) for size in tensor.shape})

    return sorted(drawn, key=sizes, reverse=True)[skip]
