"""AOTInductor packages run without dsv4_ops, in Python and in C++ that links libtorch only."""

import subprocess
import zipfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from dsv4_ops.core.registry import OPS, OpSpec
from dsv4_ops.lowering.inspect import build_package
from dsv4_ops.testing.case import Case, results
from dsv4_ops.testing.contract import checks
from dsv4_ops.testing.contract.compare import assert_agrees
from dsv4_ops.testing.strategies.calls import as_case, op_testing, reference
from tests.helpers import NIGHTLY, nightly
from tests.support import forked
from tests.support.cpp import build_cpp_runner, read_tensors, write_tensors

try:
    from tests.support import played_launch
    from tests.support.played_launch import Launch, played
except ImportError:  # triton is published for Linux only
    played_launch = None

pytestmark = pytest.mark.slow


QUICKLY = {"aot_inductor.debug_compile": True, "cpp.simdlen": 1}
"""Compile with -O0, with checks of the inputs, and without SIMD, which takes a fraction of the
time. test_contract.py and test_indexer.py compile as users do."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> Path:
    """Build the C++ program once for all tests of this file."""
    made = build_cpp_runner(tmp_path_factory.mktemp("runner"))
    assert "libtorch_cpu" in linked(made)
    assert_without_python(made)
    return made


def linked(binary: Path) -> str:
    return subprocess.run(["ldd", binary], check=True, capture_output=True, text=True).stdout


def assert_without_python(binary: Path) -> None:
    assert "libpython" not in linked(binary)
    assert "libtorch_python" not in linked(binary)


def writes(spec: OpSpec, case: Case) -> bool:
    """Return whether a call changes every argument that the op writes to."""
    outcome = reference(spec, case)
    changed = outcome[len(outcome) - len(spec.mutated) :]
    given = (case.tensors[place] for place in spec.mutated)
    return not any(map(checks.equal, given, changed))


class Packaged:
    """An op in a package of several ops."""

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        self.call, self.inputs = checks.bound_call(spec, keep=partial(writes, spec))
        self.case = as_case(spec, dict(op_testing(spec).settings[0]), self.inputs)
        self.expected = reference(spec, self.case)
        self.num_results = len(self.expected) - len(spec.mutated)

    def assert_agrees(self, runtime: str, returned, inputs) -> None:
        """Assert the results of the package, and the values that it wrote to its inputs."""
        what = f"{self.spec.name}, {runtime}"
        written = [inputs[place] for place in self.spec.mutated]
        agreed = (*returned, *written), self.expected
        assert_agrees(what, op_testing(self.spec), self.case, *agreed)
        for place, (before, after) in enumerate(zip(self.inputs, inputs, strict=True)):
            changes = place in self.spec.mutated
            assert checks.equal(before, after) != changes, f"{what}: argument {place}"


PACKAGED = [
    "dequantize_and_gather_k_cache",
    "prefill_row_bounds",
    "quantize_and_insert_k_cache",
    "save_compressor_states",
    "swa_indices_and_lens",
]
"""At least one op of every kind: IR, decomposed, bytes, states, several results, and writes to the
first, the second or the third argument. `make demo` packages a model with attention."""


OTHERS = [name for name in OPS if name not in PACKAGED]


@pytest.mark.parametrize(
    "name", [*PACKAGED, *nightly("one of every kind; test_opcheck traces the others", *OTHERS)]
)
def test_every_op_survives_export(name):
    """The program contains the op, and runs it for all sizes, on the caller's tensors."""
    op = Packaged(OPS[name])
    program = checks.export_dynamic(op.call, op.inputs)
    assert op.spec.op in {node.target for node in program.graph.nodes}
    given = [tensor.clone() for tensor in op.inputs]
    op.assert_agrees("exported", program.module()(*given), given)
    _, other = checks.bound_call(op.spec, skip=1)
    case = as_case(op.spec, dict(op_testing(op.spec).settings[0]), other)
    expected = reference(op.spec, case)
    returned = program.module()(*other)
    actual = (*returned, *(other[place] for place in op.spec.mutated))
    assert_agrees(f"{name}, other sizes", op_testing(op.spec), case, actual, expected)


PARTS = 4


def packages():
    every = "test_opcheck traces every op; one of every kind is in the package beside this"
    parts = ([*OPS][part::PARTS] for part in range(PARTS))
    nightly = pytest.mark.nightly(every)
    return [
        pytest.param(PACKAGED, id="one of every kind"),
        *(pytest.param(names, id=str(part), marks=nightly) for part, names in enumerate(parts)),
    ]


@pytest.mark.parametrize("names", packages())
def test_ops_survive_packages(names, request, tmp_path):
    """A package of many ops runs without registrations, and writes to the caller's tensors, in
    Python and (nightly) in C++. The package also launches a Gluon kernel, whose binary it contains.
    The package links no library of Python."""
    ops = [Packaged(OPS[name]) for name in names]
    launches = [] if names is not PACKAGED or played_launch is None else [*map(Launch, (7, 2, 200))]
    ops += launches[:1]
    inputs = [tensor for op in ops for tensor in op.inputs]

    def run_ops(*tensors):
        rest = iter(tensors)
        given = [[next(rest) for _ in op.inputs] for op in ops]
        return sum((results(op.call(*own)) for op, own in zip(ops, given, strict=True)), ())

    program = checks.export_dynamic(run_ops, inputs)
    with torch._inductor.config.patch(QUICKLY), played() if launches else nullcontext():
        package = build_package(program, tmp_path / "part.pt2")
    with zipfile.ZipFile(package) as files:
        (library,) = (name for name in files.namelist() if name.endswith(".so"))
        assert_without_python(Path(files.extract(library, tmp_path)))
    torch.save(tuple(inputs), tmp_path / "in.pt")
    paths = [tmp_path / "in.pt", *(tmp_path / f"{at}.pt" for at in range(len(launches[1:])))]
    for launch, path in zip(launches[1:], paths[1:], strict=True):
        torch.save((*inputs[: -len(launch.inputs)], *launch.inputs), path)
    forked.run_package(package, *paths)
    found = {"Python": torch.load(tmp_path / "in.pt.out")}
    if NIGHTLY:
        write_tensors(tmp_path / "inputs", inputs)
        runner = request.getfixturevalue("runner")
        subprocess.run([runner, package, tmp_path / "inputs", tmp_path / "outputs"], check=True)
        found["C++"] = read_tensors(tmp_path / "outputs")
    for runtime, outputs in found.items():
        rest = iter(outputs)
        returned = [[next(rest) for _ in range(op.num_results)] for op in ops]
        left = [[next(rest) for _ in op.inputs] for op in ops]
        assert next(rest, None) is None
        for op, *found in zip(ops, returned, left, strict=True):
            op.assert_agrees(runtime, *found)
    first = sum(op.num_results for op in ops[:-1])
    for launch, path in zip(launches[1:], paths[1:], strict=True):
        returned = torch.load(f"{path}.out")[first : first + launch.num_results]
        launch.assert_agrees("other sizes", returned, launch.inputs)
