"""What an AOTInductor package has of kernels in Gluon: their binaries, and C++ that calls them. The
GPU is played by C++ that does what can be told of every argument."""

import functools

import pytest
import torch

pytest.importorskip("triton", reason="published for Linux only")

from dsv4_ops.core.registry import OPS
from dsv4_ops.kernels.aot import launch_op
from dsv4_ops.kernels.aot.compile import Argument
from dsv4_ops.kernels.common.attention import splits
from dsv4_ops.kernels.common.hopper import support
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.kernels.sparse_mla import gathered
from dsv4_ops.kernels.sparse_mla.decode import hopper_split_keys_kernel
from dsv4_ops.lowering import gluon
from dsv4_ops.lowering.inspect import build_package, load_package
from dsv4_ops.testing.contract.compare import equal
from tests.support.attention_batches import (
    DECODE,
    GATHERED,
    PAGED,
    case_of,
    gathered_case,
    generator,
    integers,
)
from tests.support.mla_batches import DENSE, mla_case
from tests.support.prefill_batches import PREFILL, prefill_case, unsplit

emulate_gluon = pytest.importorskip(
    "tests.gluon_emulator.emulate", reason="triton is published for Linux only"
)

PLAYED = """
#include <algorithm>
#include <string>
using CUfunction = const void*;
static CUfunction loadKernel(const void* start, const std::string& name, uint32_t shared) {
    bool elf = !std::memcmp(start, "\\177ELF", 4);
    return elf && name == "hopper_gathered_keys_kernel" && shared > 200000 ? start : nullptr;
}
template <class T> static T value(void** all, int place) { return *static_cast<T*>(all[place]); }
static float wide(uint16_t bits) {
    uint32_t word = uint32_t(bits) << 16;
    float made;
    std::memcpy(&made, &word, 4);
    return made;
}
static void launchKernel(CUfunction kernel, uint32_t x, uint32_t y, uint32_t z, uint32_t warps,
                         uint32_t shared, void** all, void*) {
    if (!kernel) return;
    auto q = value<uint16_t*>(all, 0), out = value<uint16_t*>(all, 3);
    auto lse = value<float*>(all, 4), largest = value<float*>(all, 5);
    auto sink = value<float*>(all, 6);
    auto kv = value<uint16_t*>(all, 7);
    auto indices = value<int32_t*>(all, 10), lens = value<int32_t*>(all, 12);
    int32_t stride = value<int32_t>(all, 1), head = value<int32_t>(all, 2);
    int32_t tokens = value<int32_t>(all, 14), heads = value<int32_t>(all, 15);
    for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < heads; ++h) {
            int place = t * heads + h;
            std::copy_n(q + t * stride + h * head, 512, out + place * 512);
            int row = indices[t * value<int32_t>(all, 11)];
            lse[place] = wide(kv[row * value<int32_t>(all, 8)]) + sink[h];
            largest[place] = lens[t] + 1e3f * value<int32_t>(all, 13) + value<int32_t>(all, 9);
        }
    bool well = shared > 200000 && !value<void*>(all, 16) && !value<void*>(all, 17);
    well &= (reinterpret_cast<uintptr_t>(q) | reinterpret_cast<uintptr_t>(kv)) % 16 == 0;
    lse[0] = well ? x + 1000.0f * y + 10000.0f * z + 100000.0f * warps : 0;
}
"""
"""Results say what it was given: a launch of a token too few, of other strides, of another address
or with arguments in another order shows."""


@pytest.fixture
def played(monkeypatch):
    """The driver, in C++."""
    definition = gluon.definition
    monkeypatch.setattr(gluon, "definition", lambda made: [*PLAYED.splitlines(), *definition(made)])
    gluon.register()


class Gathered(torch.nn.Module):
    """As the trace of a package calls it."""

    def forward(self, q, kv, indices, lens, sink):
        rows = (q, kv, indices[:, 1:], lens)
        return gathered.launch_gathered_keys(launch_op.PACKAGED, *rows, sink, 0.1)


def rows_of(tokens, heads=8, width=65, rows=40):
    made = generator(tokens)
    q = torch.randn(tokens, heads, 2, 512, generator=made).bfloat16()[:, :, 1]
    kv = torch.randn(rows, 512, generator=made).bfloat16()
    indices, lens = integers(made, 0, rows, tokens, width), integers(made, 0, width, tokens)
    return q, kv, indices, lens, torch.randn(heads, generator=made)


@pytest.mark.slow
def test_a_package_launches_the_binary(played, tmp_path):
    """For any number of tokens, of which 132 programs take turns; queries have gaps."""
    given, tokens = rows_of(7), torch.export.Dim("tokens", min=2)
    dims = {0: tokens}
    program = torch.export.export(Gathered(), given, dynamic_shapes=(dims, None, dims, dims, None))
    run = load_package(build_package(program, tmp_path / "gathered.pt2"))
    for count in (7, 2, 200):
        q, kv, indices, lens, sink = given = rows_of(count)
        out, row_max, lse = run(*given)
        assert torch.equal(out, q)
        assert torch.equal(row_max, (lens + 1e3 * 64 + 40)[:, None].expand(-1, 8))
        assert lse[0, 0] == min(count, 132) + 1000 + 10000 + 12 * 100000
        want = kv[indices[:, 1].long(), 0].float()[:, None] + sink
        assert torch.equal(lse.flatten()[1:], want.flatten()[1:])


def test_a_kernel_that_needs_memory_is_refused(monkeypatch):
    class Made:
        class metadata:
            global_scratch_size, profile_scratch_size = 0, 64

    monkeypatch.setattr(gluon.compile, "compiled", lambda *_: Made)
    monkeypatch.setattr(gluon, "_binaries", {})
    with pytest.raises(RuntimeError, match="was compiled to need memory for itself"):
        gluon.binary_of(hopper_split_keys_kernel, [Argument("i32")], {})


class Taken:
    """A kernel that takes down what it is called with, and doubles queries."""

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
    """In the place of the kernel over listed rows."""
    name = "hopper_gathered_keys_kernel"
    kernel = Taken(name, launch_op.KERNELS[name].arg_names)
    monkeypatch.setattr(gathered, name, kernel)
    monkeypatch.setitem(launch_op.KERNELS, name, kernel)
    return kernel


def test_an_op_of_a_launch_is_the_launch(taken):
    """Every argument in its place, the ones that stand for none too: without a sink the kernel is
    given a tensor that it writes to."""
    q, kv, indices, lens, sink = rows_of(5)
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
    """Inductor runs a graph in Python first where it is told to tune kernels then."""
    gluon.register()
    given, tokens = rows_of(6), torch.export.Dim("tokens", min=2)
    dims = {0: tokens}
    shapes = (dims, None, dims, dims, None)
    program = torch.export.export(Gathered(), given, dynamic_shapes=shapes)
    compiled = torch.compile(program.module(), fullgraph=True, dynamic=True)
    for count in (6, 9):
        given = rows_of(count)
        assert torch.equal(compiled(*given)[0], 2 * given[0])
        (grid, args, _) = taken.calls[-1]
        assert (grid, args[-2:]) == ((count,), (count, 8))


class Watched(Launcher):
    """A launcher whose kernels are emulated, that takes down which arguments of them change."""

    def __init__(self):
        wrap = functools.partial(WatchedKernel, self)
        super().__init__(wrap, capability=support.CAPABILITY)
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
    """Inductor reorders what it is not told of. Every argument has memory of its own."""
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
