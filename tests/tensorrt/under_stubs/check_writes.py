"""What becomes of writes: for each way to compile, target of the write, and order of reads."""

import inspect

import pytest
import torch
import torch_tensorrt
from torch import nn

from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch import tensorrt as guard
from dsv4_ops.integrations.tensorrt import _compat, enable, passes, writes

DRY = {"dryrun": True, "min_block_size": 1}
insert = torch.ops.dsv4_ops.insert_k_cache.default


@torch.library.custom_op("dsv4_ops_tests::inserted", mutates_args=())
def inserted(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Read the whole cache, outside of engines."""
    copied = cache.clone()
    insert(k, copied, slots)
    return copied


@inserted.register_fake
def _(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(cache)


def rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 8, generator=generator), torch.tensor([1, 5, -1])


class OnlyWrites(nn.Module):
    def forward(self, k, slots, cache):
        made = (k * 2).relu()
        insert(made, cache, slots)
        return made + 1


class ReadsAfter(nn.Module):
    def forward(self, k, slots, cache):
        made = (k * 2).relu()
        insert(made, cache, slots)
        return (cache * 2).sum() + made


class ReadsBefore(nn.Module):
    """Only the second read waits for an engine; an added input orders the write behind the read."""

    def forward(self, k, slots, cache):
        first = inserted(k, cache, slots)
        made = (k * 2 + first.sum()).relu()
        before = inserted(made[:1], cache, slots[:1])
        insert(k, cache, slots)
        return before.sum() + made


class WritesTwice(nn.Module):
    def forward(self, k, slots, cache):
        insert(k, cache, slots)
        before = cache * 2
        insert(k.relu(), cache, slots + 1)
        return before.sum() + (cache + 1).sum()


class ThroughView(nn.Module):
    def forward(self, k, slots, cache):
        insert((k * 2).relu(), cache[1:], slots)
        return (cache * 2).sum() + k


class Counts(nn.Module):
    """Adds to a counter by torch's own op, as a step does that counts dropped tokens."""

    def forward(self, k, slots, cache):
        insert((k * 2).relu(), cache, slots)
        slots.add_((k > 0).sum())
        return k + 1


MODULES = (OnlyWrites, ReadsAfter, ReadsBefore, WritesTwice, ThroughView, Counts)


class Buffers(nn.Module):
    """All inputs of the write are constants of the graph."""

    def __init__(self):
        super().__init__()
        k, slots = rows()
        self.register_buffer("cache", torch.zeros(4, 2, 8))
        self.register_buffer("k", k)
        self.register_buffer("slots", slots)

    def forward(self, x):
        before = (self.cache * 2).sum()
        insert(self.k, self.cache, self.slots)
        return x + before, (self.cache * 2).sum() + x


def by_export(module, *inputs, decomposed=False, fast=True, **options):
    program = torch.export.export(module, tuple(each.clone() for each in inputs), **options)
    if decomposed:
        program = program.run_decompositions()
    settings = {**DRY, "use_fast_partitioner": fast}
    return torch_tensorrt.dynamo.compile(program, arg_inputs=inputs, **settings)


def by_compile(module, *inputs, dynamic=False, backend="torch_tensorrt", **more):
    torch._dynamo.reset()
    options = {**DRY, "pass_through_build_failures": True, **more}
    return torch.compile(module, backend=backend, dynamic=dynamic, options=options)


def twice(*inputs, **options):
    return by_export(*inputs, decomposed=True, **options)


def whole(*inputs, **options):
    return by_export(*inputs, fast=False, **options)


def dynamic(*inputs, **options):
    return by_compile(*inputs, dynamic=True, **options)


PAIRS = [(compiled, module) for compiled in (by_export, by_compile) for module in MODULES] + [
    (whole, ReadsBefore), (whole, ReadsAfter), (twice, OnlyWrites), (twice, ThroughView), (dynamic,
    ReadsAfter), (dynamic, ThroughView),
]  # fmt: skip


@pytest.fixture
def plain(monkeypatch):
    """Use torch-tensorrt without ``enable``."""
    names = _compat.load("test")
    stock = [each for each in names["passes"].passes if each is not passes.keep_writes]
    if passes.remove_unread in stock:
        stock[stock.index(passes.remove_unread)] = names["remove_unread"]
    backend = inspect.unwrap(names["aot_backend"])
    monkeypatch.setattr(names["passes"], "passes", stock)
    monkeypatch.setattr(names["backends"], "aot_torch_tensorrt_aten_backend", backend)
    monkeypatch.setattr(guard, "_ENABLED", [False])


@pytest.mark.parametrize("compiled", [by_export, twice, by_compile])
def test_a_write_that_would_be_lost_raises(plain, compiled):
    k, slots = rows()
    inputs = (k, slots, torch.zeros(4, 2, 8))
    with pytest.raises(Exception, match=r"insert_k_cache: k_cache must be written") as caught:
        compiled(OnlyWrites(), *inputs)(*inputs)
    assert "integrations.tensorrt.enable()" in str(caught.value)


def test_without_the_guard_the_write_would_be_lost(plain, monkeypatch):
    """This shows what the guard protects from, and that the test above can fail."""
    monkeypatch.setattr(guard, "_tracing_function", lambda: "")
    k, slots = rows()
    for compiled in (by_export, by_compile):
        cache = torch.zeros(4, 2, 8)
        with torch.no_grad():
            compiled(OnlyWrites(), k, slots, cache)(k, slots, cache)
        assert not cache.any(), "fixed upstream: the guard and the passes can go"


def test_the_way_of_torch_tensorrt_that_keeps_writes_is_not_refused(plain):
    k, slots = rows()
    cache, wanted = torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)
    OnlyWrites()(k, slots, wanted)
    with torch.no_grad():
        by_compile(OnlyWrites(), use_distributed_mode_trace=True)(k, slots, cache)
    assert cache.any()
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize(("compiled", "module"), PAIRS)
def test_writes_are_kept_and_ordered(compiled, module):
    enable()
    k, slots = rows()
    first, second = ((k.clone(), slots.clone(), torch.zeros(4, 2, 8)) for _ in range(2))
    wanted = [module()(*first) for _ in range(2)]
    function = compiled(module(), *(each.clone() for each in second))
    with torch.no_grad():
        found = [function(*second) for _ in range(2)]
    assert first[2].any()
    for ours, plain_torch in zip((*found, *second), (*wanted, *first), strict=True):
        assert torch.equal(ours, plain_torch)


@pytest.mark.parametrize("fast", [True, False])
def test_a_buffer_is_neither_folded_nor_written_while_compiling(fast):
    enable()
    module, ours, x = Buffers(), Buffers(), torch.ones(2)
    function = by_export(ours, x, fast=fast)
    assert not ours.cache.any()
    address = ours.cache.data_ptr()
    for _ in range(2):
        for found, wanted in zip(function(x), module(x), strict=True):
            assert torch.equal(found, wanted)
    assert torch.equal(ours.cache, module.cache)
    assert ours.cache.data_ptr() == address


def test_without_the_edges_a_write_would_overtake_a_read(monkeypatch):
    """The test above can fail: torch-tensorrt orders segments by their data only."""
    enable()
    monkeypatch.setattr(passes._Writes, "_made", lambda self, node: None)
    k, slots = rows()
    cache = torch.zeros(4, 2, 8)
    wanted = ReadsBefore()(k, slots, cache.clone())
    with torch.no_grad():
        found = by_export(ReadsBefore(), k, slots, cache)(k, slots, cache)
    assert not torch.equal(found, wanted)


def ops(function):
    """Return the calls in the segments of a compiled program, without those in engines."""
    engines, rest = [], []
    for child, segment in function.named_children():
        where = engines if "_run_on_acc" in child else rest
        where += [str(node.target) for node in segment.graph.nodes if node.op == "call_function"]
    return engines, rest


@pytest.mark.parametrize("module", [OnlyWrites, ReadsAfter, ReadsBefore, WritesTwice])
def test_a_whole_cache_is_written_without_a_copy(module):
    enable()
    k, slots = rows()
    engines, rest = ops(by_export(module(), k, slots, torch.zeros(4, 2, 8)))
    assert not [each for each in (*engines, *rest) if "copy" in each or "auto_func" in each]
    assert sum(each.startswith("dsv4_ops_tensorrt.insert_k_cache") for each in rest) == (
        2 if module is WritesTwice else 1
    )
    assert not [each for each in engines if "dsv4_ops" in each]


def test_a_saved_program_writes_too(tmp_path):
    enable()
    path, inputs = str(tmp_path / "step.ep"), (*rows(), torch.zeros(4, 2, 8))
    torch_tensorrt.save(by_export(ReadsAfter(), *inputs), path, inputs=inputs)
    ours, plain = torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)
    found = torch_tensorrt.load(path).module()(*rows(), ours)
    assert torch.equal(found, ReadsAfter()(*rows(), plain))
    assert torch.equal(ours, plain)
    assert ours.any()


def test_enable_twice_adds_its_passes_once():
    enable()
    enable()
    found = _compat.load("test")["passes"].passes
    assert found[0] is passes.keep_writes
    assert found.count(passes.keep_writes) == found.count(passes.remove_unread) == 1


@pytest.mark.parametrize("name", [name for name, spec in OPS.items() if spec.mutated])
def test_every_op_that_writes_has_a_form_for_segments(name):
    op, spec = writes.write_op(name), OPS[name]
    returned = [each.alias_info for each in op._schema.returns]
    assert len(returned) == len(spec.op._schema.returns) + len(spec.mutated)
    assert sum(info is not None and info.is_write for info in returned) == len(spec.mutated)
