"""Gluon kernels in AOTInductor packages: launches are ops, and the ops name what they write.
tests/compile/test_export.py builds and runs such a package."""

import functools

import pytest
import torch

pytest.importorskip("triton", reason="published for Linux only")

from dsv4_ops.core.registry import OPS
from dsv4_ops.core.target import HOPPER
from dsv4_ops.kernels.aot import launch_op
from dsv4_ops.kernels.aot.compile import Argument
from dsv4_ops.kernels.common.attention import splits
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.kernels.sparse_mla import gathered
from dsv4_ops.kernels.sparse_mla.decode import hopper_split_keys_kernel
from dsv4_ops.lowering import gluon
from dsv4_ops.testing.contract.compare import equal
from tests.support.attention_batches import DECODE, GATHERED, PAGED, case_of, gathered_case
from tests.support.mla_batches import DENSE, mla_case
from tests.support.played_launch import Gathered, launch_inputs
from tests.support.prefill_batches import PREFILL, prefill_case, unsplit

emulate_gluon = pytest.importorskip("tests.gluon_emulator.emulate", reason="for Linux only")


def test_a_kernel_that_needs_memory_is_refused(monkeypatch):
    class Made:
        class metadata:
            global_scratch_size, profile_scratch_size = 0, 64

    monkeypatch.setattr(gluon.compile, "compiled", lambda *_: Made)
    monkeypatch.setattr(gluon, "_binaries", {})
    with pytest.raises(RuntimeError, match="was compiled to need memory for itself"):
        gluon.binary_of(hopper_split_keys_kernel, [Argument("i32")], {})


class Taken:
    """A kernel that records its calls, and writes twice the queries."""

    def __init__(self, name, names):
        self.__name__, self.arg_names, self.calls = name, names, []

    def __getitem__(self, grid):
        return functools.partial(self.call, grid)

    def call(self, grid, *args, **options):
        q, out = args[0], args[3]
        out.copy_(2 * q)
        self.calls.append((grid, args, options))


@pytest.fixture
def taken(monkeypatch):
    """Replace the kernel over listed rows."""
    name = "hopper_gathered_keys_kernel"
    kernel = Taken(name, launch_op.KERNELS[name].arg_names)
    monkeypatch.setattr(gathered, name, kernel)
    monkeypatch.setitem(launch_op.KERNELS, name, kernel)
    return kernel


def test_an_op_of_a_launch_is_the_launch(taken):
    """All arguments are equal, placeholders too: without a sink, the kernel gets an output."""
    pairs, kv, indices, lens, sink = launch_inputs(5)
    q = pairs[:, :, 1]
    for given in (sink, None):
        expected = gathered.launch_gathered_keys(
            Launcher(lambda kernel: kernel), q, kv, indices, lens, given, 0.25
        )
        actual = gathered.launch_gathered_keys(
            launch_op.PACKAGED, q, kv, indices, lens, given, 0.25
        )
        (grid, args, options), (again, others, rest) = taken.calls[-2:]
        assert (grid, options) == (again, rest)
        assert options == {"SOFTMAX_SCALE": 0.25, "HAS_SINK": given is not None, "num_warps": 4}
        results = dict(zip(map(id, expected), map(id, actual), strict=True))
        for one, other in zip(args, others, strict=True):
            if isinstance(one, torch.Tensor):
                assert results.get(id(one), id(one)) == id(other) or torch.equal(one, other)
            else:
                assert one == other
        assert torch.equal(actual[0], 2 * q)


@pytest.mark.slow
def test_compiled_as_python(taken):
    """To tune kernels, Inductor first runs a graph in Python."""
    gluon.register()
    given, tokens = launch_inputs(6), torch.export.Dim("tokens", min=2)
    dims = {0: tokens}
    shapes = (dims, None, dims, dims, None)
    program = torch.export.export(Gathered(), given, dynamic_shapes=shapes)
    compiled = torch.compile(program.module(), fullgraph=True, dynamic=True)
    for count in (6, 9):
        given = launch_inputs(count)
        assert torch.equal(compiled(*given)[0], 2 * given[0][:, :, 1])
        (grid, args, _) = taken.calls[-1]
        assert (grid, args[-2:]) == ((count,), (count, 8))


class Watched(Launcher):
    """A launcher that emulates kernels, and records which of their arguments change."""

    def __init__(self):
        wrap = functools.partial(WatchedKernel, self)
        super().__init__(wrap, capability=HOPPER)
        self.emulator, self.changed = emulate_gluon.Emulator(0), {}


class WatchedKernel:
    def __init__(self, launch, kernel):
        self.launch, self.kernel = launch, kernel

    def __getitem__(self, grid):
        return functools.partial(self.call, grid)

    def call(self, grid, *args, **options):
        names = zip(self.kernel.arg_names, args, strict=False)
        tensors = {name: each for name, each in names if isinstance(each, torch.Tensor)}
        before = {name: each.clone() for name, each in tensors.items()}
        self.launch.emulator(self.kernel)[grid](*args, **options)
        if self.kernel in launch_op.KERNELS.values():
            changed = {name for name in tensors if not equal(tensors[name], before[name])}
            self.launch.changed.setdefault(self.kernel.__name__, set()).update(changed)


def test_what_kernels_write_is_said(monkeypatch):
    """Inductor may reorder writes that it does not know of. No two arguments share memory."""
    monkeypatch.setattr(splits, "MIN_SCHEDULED_TILES", 1)
    launch = Watched()
    calls = [(DECODE, case_of(DECODE, 1, 3, 8, num_splits=count)) for count in (1, 3)]
    calls += [(PAGED, case_of(PAGED, 1, 3, 8))]
    prefill = prefill_case(1, 3, 8, "C4", topk=70, longest=300)
    calls += [(PREFILL, prefill), (PREFILL, unsplit(prefill))]
    calls += [(GATHERED, gathered_case(1, 3, 8, 70))]
    calls += [(DENSE, mla_case(1, [2], 8, longest=130, num_splits=count)) for count in (1, 2)]
    calls += [(DENSE, mla_case(1, [2], 8, longest=300, hint=False))]
    for name, case in calls:
        OPS[name].implementation("kernels")(launch, *case.tensors, **case.settings)
    outputs = {"out", "lse"}
    parts = {"partial", "partial_lse", "partial_scale"}
    assert launch.changed == {
        "hopper_split_keys_kernel": {*outputs, *parts, "combine_list"},
        "hopper_prefill_keys_kernel": {*outputs, *parts},
        "hopper_gathered_keys_kernel": {*outputs, "max_logits"},
        "hopper_mla_decode_kernel": {*outputs, *parts, "combine_list"},
    }
    assert set.union(*launch.changed.values()) == launch_op.WRITTEN
