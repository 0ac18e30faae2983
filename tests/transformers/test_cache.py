"""Rows, blocks and rings of a patched model's cache."""

import math
from random import Random

import pytest
import torch
from hypothesis import given, strategies as st

from dsv4_ops.integrations.transformers import OutOfBlocks, PagedCache
from dsv4_ops.integrations.transformers.cache.blocks import BlockPool
from dsv4_ops.integrations.transformers.generation.hooks import chunk_of
from dsv4_ops.testing.models import small_config


def cache(**sizes):
    sizes = {"max_batch_size": 3, "max_cache_len": 1000, "kv": "fp32", **sizes}
    return PagedCache(small_config(), **sizes)


def test_a_cache_beyond_memory_is_refused_by_its_number_of_blocks():
    """The cache would take about 550 GB per layer."""
    with pytest.raises(RuntimeError, match="num_blocks must leave memory on cpu, got 4194304 bl"):
        cache(num_blocks=2**22)


def test_pages_are_given_and_taken_back():
    paged = cache(num_blocks=5)
    assert (paged.add("a", 257), paged.add("b", 256)) == (0, 1)
    assert paged.num_free_blocks == 2
    table = paged.tensors.tables.compressed
    assert table.tolist() == [[0, 1, -1, -1], [2, -1, -1, -1], [-1, -1, -1, -1]]
    paged.reserve("b", 257)
    paged.reserve("b", 100)  # the request has these blocks already
    assert table[1].tolist() == [2, 3, -1, -1]
    paged.seq_lens.copy_(torch.tensor([257, 9, 0]))
    paged.free("a")
    assert table[0].tolist() == [-1] * 4
    assert paged.seq_lens.tolist() == [0, 9, 0]
    assert paged.requests == {"b": 1}
    assert paged.add("c", 1) == 0


def test_running_out_changes_nothing():
    paged = cache(num_blocks=2)
    paged.add("a", 300)
    before = [leaf.clone() for leaf in torch.utils._pytree.tree_leaves(paged.tensors)]
    for attempt in (lambda: paged.add("b", 1), lambda: paged.reserve("a", 513)):
        with pytest.raises(OutOfBlocks, match="the free blocks, 0 of 2, got tokens for 1 more"):
            attempt()
    assert paged.requests == {"a": 0}
    assert paged.num_free_blocks == 0
    for old, new in zip(before, torch.utils._pytree.tree_leaves(paged.tensors), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)


def test_rows_run_out_too():
    paged = cache()
    for request in range(3):
        paged.add(request, 1000)
    with pytest.raises(OutOfBlocks, match="one of at most 3 at a time"):
        paged.add(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.add("a"), "add: request must be a request that the cache does not have"),
        (lambda c: c.add("b", 1001),
         "add: num_tokens must be at most max_cache_len = 1000, got 1001"),
        (lambda c: c.reserve("b", 1), "reserve: request must be a request that was added"),
        (lambda c: c.reserve("a", 1001),
         "reserve: num_tokens must be at most max_cache_len = 1000"),
        (lambda c: c.free("b"), "free: request must be a request that was added"),
        (lambda c: c.reserve("a", -1), "reserve: num_tokens must be at least 0, got -1"),
    ],
)  # fmt: skip
def test_errors(call, message):
    paged = cache(num_blocks=4)
    paged.add("a")
    with pytest.raises(ValueError, match=message):
        call(paged)
    assert paged.num_free_blocks == 4


@pytest.mark.parametrize("request_", [["a"], {"a": 1}, ("a", ["b"])])
@pytest.mark.parametrize("name", ["add", "reserve", "lacking_blocks", "free"])
def test_requests_are_keys(name, request_):
    paged = cache(num_blocks=4)
    paged.add("a", 257)
    more = () if name == "free" else (1,)
    found = type(request_).__name__
    with pytest.raises(TypeError, match=f"^{name}: request must be hashable, got {found}. Pass a"):
        getattr(paged, name)(request_, *more)
    assert paged.requests == {"a": 0}
    assert (paged.num_free_blocks, paged.lacking_blocks("a", 600)) == (2, 1)
    assert paged.lacking_blocks("b", 600) == 3


@given(st.integers(0, 2**32 - 1))
def test_no_block_has_two_owners(seed):
    rng = Random(seed)
    pool, wanted = BlockPool(3, 6, 4), {}
    for _ in range(40):
        request = rng.randrange(5)
        blocks = rng.randrange(6)
        state = (dict(pool.rows), {name: list(blocks) for name, blocks in pool.blocks.items()})
        try:
            if rng.random() < 0.3:
                pool.free(request)
                del wanted[request]
            elif rng.random() < 0.5:
                pool.add(request, blocks)
                wanted[request] = blocks
            else:
                pool.reserve(request, blocks)
                wanted[request] = max(blocks, wanted[request])
        except (ValueError, OutOfBlocks):
            assert state == (pool.rows, pool.blocks)
        used = [block for blocks in pool.blocks.values() for block in blocks]
        assert sorted(used + pool.free_blocks) == list(range(6))
        assert {name: len(blocks) for name, blocks in pool.blocks.items()} == wanted
        assert len(set(pool.rows.values())) == len(pool.rows)
        assert sorted([*pool.rows.values(), *pool.free_rows]) == [0, 1, 2]


@pytest.mark.parametrize("max_chunk", [1, 64, 65, 300, None])
def test_rings_hold_a_chunk_and_what_it_reads(max_chunk):
    """Wherever a chunk begins, it writes other blocks than those with its window's keys."""
    paged = cache(max_chunk=max_chunk)
    chunk = max_chunk or 1000
    tables = paged.tensors.tables
    spans = {"swa": (64, chunk + 127), "c4_states": (4, 8), "c128_states": (8, 128)}
    for name, (block, span) in spans.items():
        table = getattr(tables, name)
        assert table.shape == (3, math.ceil(1000 / block))
        for start in range(0, 1000, 7):
            blocks = range(start // block, min(start + span - 1, 999) // block + 1)
            rows = table[:, blocks.start : blocks.stop]
            assert len(rows.unique()) == rows.numel()
    layer = paged.tensors.layers[0]
    assert int(tables.swa.max()) == layer.swa.shape[0] - 1


def test_rings_are_no_longer_than_requests():
    assert cache(max_batch_size=1, max_cache_len=50).tensors.layers[0].swa.shape[0] == 1


def test_what_hugging_face_asks():
    paged = cache(num_blocks=2)
    paged.seq_lens.copy_(torch.tensor([3, 7, 0]))
    assert paged.is_compileable
    assert paged.get_seq_length().shape == ()
    assert int(paged.get_seq_length()) == 7
    assert len(paged) == 3
    assert paged.get_max_length() == 1000
    paged.reset()
    assert paged.seq_lens.tolist() == [0, 0, 0]
    with pytest.raises(NotImplementedError, match="beams must not reorder its rows"):
        paged.reorder_cache(torch.tensor([0]))
    assert repr(paged).startswith("PagedCache(3 layers, max_batch_size=3, max_cache_len=1000, num")
    assert repr(paged).endswith(
        "device='cpu'; 20.8 MiB: window 18.0 MiB, compressed 264.0 KiB, indexer 64.0 KiB, states "
        "2.0 MiB, tables 504.7 KiB)"
    )


def test_rings_are_bounded_by_default():
    """Without a bound, window keys of a long request would take most of the memory."""
    assert cache(max_cache_len=100_000, max_batch_size=1).max_chunk == 2048
    assert cache(max_cache_len=100_000, max_batch_size=1, max_chunk=4096).max_chunk == 4096
    assert cache(max_cache_len=100).max_chunk == 100
    assert [chunk_of(rows, 9999) for rows in (1, 8, 15, 64, 65)] == [2048, 2048, 1024, 256, 256]
    parts = cache().memory()
    held = torch.utils._pytree.tree_leaves(cache().tensors)
    assert sum(parts.values()) == sum(tensor.nbytes for tensor in held)


def test_an_unknown_device_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="PagedCache: device must be one that torch sees, got cud"):
        cache(device="cuda:0")
