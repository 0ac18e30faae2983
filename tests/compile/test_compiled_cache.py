"""Compiled graphs write caches in place, without a copy, in order, and to the right layer."""

import math
import re

import pytest
import torch
from torch import nn

import dsv4_ops as ops
from dsv4_ops.attention.caches import KVCacheBuffers, mark_static
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from dsv4_ops.lowering.inspect import compile_and_get_code
from tests.helpers import nightly

pytestmark = pytest.mark.slow
LAYOUT, INDEXER = MainLayout(64), IndexerLayout(64)
BLOCKS = 5


def keys(seed: int, tokens: int = 7, width: int = 512) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, width, generator=generator).to(torch.bfloat16)


def garbage(blocks: int = BLOCKS, layout=LAYOUT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(blocks)
    shape = layout.shape(blocks)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


SLOTS = torch.tensor([3, 70, -1, 100, 5, 319, 320])


def insert(k, cache, slots):
    ops.quantize_and_insert_k_cache(k, cache, slots, block_size=64)


def cache_sized_buffers(code: str, cache: torch.Tensor) -> list[str]:
    """Return the allocations in generated code (for fixed sizes) that are as large as the cache."""
    found = []
    for line in code.splitlines():
        shape = re.search(r"= empty_strided_\w+\(\(([\d, ]*)\),", line)
        sizes = map(int, filter(str.strip, shape[1].split(","))) if shape else ()
        if math.prod(sizes) >= cache.numel():
            found.append(line.strip())
    return found


class Caches(nn.Module):
    """Caches of every kind: one of two layers, one of an indexer, and one of plain rows."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = KVCacheBuffers(LAYOUT, num_layers=2, num_blocks=BLOCKS)
        for layer, cache in enumerate(self.layers):
            cache.copy_(garbage() + layer)
        self.how, argument = how, garbage()
        main = self.layers[1] if how == "buffer" else argument
        self.all = [main, garbage(layout=INDEXER), PlainLayout(4, width=32).allocate(100)]

    def forward(self, k, caches, slots):
        main, indexer, plain = caches
        insert(k, self.layers[1] if self.how == "buffer" else main, slots)
        ops.quantize_and_insert_indexer_k(k[:, :128], indexer, slots, block_size=64)
        ops.insert_k_cache(k[:, :32], plain, slots)


@pytest.mark.parametrize("how", [*nightly("a buffer", "argument", "marked argument"), "buffer"])
def test_inserts_write_the_caches_where_they_are(how):
    torch._dynamo.reset()
    model, eager = Caches(how), Caches(how)
    if how == "marked argument":
        mark_static(model.all[0])
    given = (keys(0), model.all if how != "buffer" else [None, *model.all[1:]], SLOTS)
    before, addresses = ([each.clone() for each in model.all], [c.data_ptr() for c in model.all])
    eager(keys(0), eager.all, SLOTS)
    _, code = compile_and_get_code(torch.compile(model, fullgraph=True, dynamic=False), *given)
    for cache, expected, old in zip(model.all, eager.all, before, strict=True):
        assert torch.equal(cache, expected)
        assert not torch.equal(cache, old)
        assert cache_sized_buffers(code, cache) == []
    assert [cache.data_ptr() for cache in model.all] == addresses
    assert ".copy_(" not in code
    assert torch.equal(model.layers[0], garbage()), "another layer was written to"


def test_the_check_for_copies_sees_one():
    """The check finds a copy that exists, so if it finds none, there is none."""
    torch._dynamo.reset()

    def functional(k, cache, slots):
        written = cache.clone()
        insert(k, written, slots)
        return written

    cache = garbage()
    compiled = torch.compile(functional, fullgraph=True, dynamic=False)
    _, code = compile_and_get_code(compiled, keys(0), cache, SLOTS)
    assert cache_sized_buffers(code, cache)


each_kind_of_size = pytest.mark.parametrize(
    "dynamic", [*nightly("sizes that are symbols are the harder", False), True]
)


@each_kind_of_size
@pytest.mark.parametrize(
    "layout",
    [
        *nightly("plain rows; test_contract.py reads in the graph what this insert wrote", LAYOUT),
        PlainLayout(64),
    ],
    ids=["fp8", "plain"],
)
def test_inserts_and_reads_keep_their_order(layout, dynamic):
    """Two inserts write the same slots, and each is followed by a read, which sees that insert."""
    torch._dynamo.reset()
    table = torch.tensor([[0, 1, 2, 3, 4]], dtype=torch.int32)
    lens = torch.tensor([320], dtype=torch.int32)

    def read(cache):
        sizes = {"block_size": 64, "num_rows": 320, "layout": layout.tag}
        return ops.gather_k_cache(cache, lens, None, table, **sizes)

    def write(k, cache, slots):
        if layout is LAYOUT:
            insert(k, cache, slots)
        else:
            ops.insert_k_cache(k, cache, slots)

    def step(first, second, cache, slots):
        before = read(cache)
        write(first, cache, slots)
        between = read(cache)
        write(second * 2, cache, slots)
        return before, between, read(cache)

    # small codes and scales, so that no value is NaN or infinite
    cache = garbage() & 0x3F if layout is LAYOUT else layout.allocate(BLOCKS).normal_()
    copy = cache.clone()
    expected = step(keys(1), keys(2), copy, SLOTS)
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    actual = compiled(keys(1), keys(2), cache, SLOTS)
    assert torch.equal(cache, copy)
    for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(left, right), f"read {index}"
    assert not torch.equal(expected[1], expected[2])


@each_kind_of_size
def test_a_layer_of_a_stacked_cache_is_the_one_that_is_written(dynamic):
    """Opaque ops have the miscompilation of tests/compile/test_upstream.py. Our ops do not, because
    their launches are traced into the graph."""
    torch._dynamo.reset()
    stacked = torch.stack([garbage() + layer for layer in range(3)])
    expected = stacked.clone()
    insert(keys(4), expected[1], SLOTS)
    compiled = torch.compile(
        lambda k, caches, slots: insert(k, caches[1], slots), fullgraph=True, dynamic=dynamic
    )
    compiled(keys(4), stacked, SLOTS)
    assert torch.equal(stacked, expected)


@pytest.mark.usefixtures("vectors")
def test_bits_of_nan_survive_compiled_copies():
    """RoPE values and plain rows are copied bit for bit, NaN payloads included, by fused code."""
    torch._dynamo.reset()
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    k = torch.zeros(1024, 512, dtype=torch.bfloat16)
    k[:, 448:] = bits.view(1024, 64).view(torch.bfloat16)
    rows = bits.view(1024, 64).view(torch.bfloat16)

    def copies(k, cache, rows, plain, slots, lens, table):
        insert(k, cache, slots)
        ops.insert_k_cache(rows, plain, slots)
        return (
            ops.gather_k_cache(cache, lens, None, table, block_size=64, num_rows=1024),
            ops.gather_k_cache(
                plain, lens, None, table, block_size=64, num_rows=1024, layout="plain"
            ),
        )

    cache, plain = LAYOUT.allocate(16), PlainLayout(64, width=64).allocate(16)
    lens = torch.tensor([1024], dtype=torch.int32)
    table = torch.arange(16, dtype=torch.int32)[None]
    compiled = torch.compile(copies, fullgraph=True)
    main, read = compiled(k, cache, rows, plain, torch.arange(1024), lens, table)
    assert torch.equal(main[0, :, 448:].contiguous().view(torch.int16), bits.view(1024, 64))
    assert torch.equal(read[0].view(torch.int16), bits.view(1024, 64))
    assert torch.equal(plain.view(1024, 64).view(torch.int16), bits.view(1024, 64))


def test_paged_kv_cache_is_one_tensor_per_layer():
    caches = KVCacheBuffers(LAYOUT, num_layers=3, num_blocks=2)
    assert len(list(caches)) == len(caches) == 3
    assert len({cache.data_ptr() for cache in caches}) == 3
    assert caches[-1] is caches[2]
    assert caches.state_dict() == {}
    assert "num_layers=3" in repr(caches)
    with pytest.raises(IndexError, match=r"^KVCacheBuffers: layer must be in -3\.\.2, got 3\."):
        caches[3]
    assert caches.to("meta")[0].is_meta
