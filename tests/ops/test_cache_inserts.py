"""Inserts into every kind of cache: which bytes change, and to what (see test_kv_cache.py)."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from tests.helpers import i64
from tests.ops.test_contract import patterns
from tests.oracles import kv as oracles

BF16, F32 = torch.bfloat16, torch.float32
INTS = {torch.uint8: torch.uint8, BF16: torch.int16, F32: torch.int32}
MAIN = (MainLayout, "quantize_and_insert_k_cache", 512, BF16)
INDEXER = (IndexerLayout, "quantize_and_insert_indexer_k", 128, BF16)
PLAIN = tuple(
    (partial(PlainLayout, width=width, dtype=dtype), "insert_k_cache", width, dtype)
    for dtype in (BF16, F32)
    for width in (512, 3)
)
KINDS = {"main": MAIN, "indexer": INDEXER, **{f"plain {k[2]} {k[3]}": k for k in PLAIN}}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def noise(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator, limits = torch.Generator().manual_seed(seed), torch.iinfo(INTS[dtype])
    sampled = torch.randint(limits.min, limits.max, shape, dtype=INTS[dtype], generator=generator)
    return sampled.view(dtype)


def keys(kind: Any, seed: int, count: int) -> Tensor:
    return noise(seed, (count, kind[2]), kind[3])


def cache_of(kind: Any, seed: int, pages: int, size: int, gap: int = 0) -> tuple[Tensor, Tensor]:
    """Make a cache of random bits with gaps between its blocks; return it and all of its memory."""
    one = kind[0](size).allocate(1)
    base = noise(seed, (pages + 2, one.numel() + gap), one.dtype)
    return base[1 : pages + 1, : one.numel()].unflatten(1, one.shape[1:]), base


def insert(kind: Any, k: Tensor, cache: Tensor, slots: Tensor, size: int) -> None:
    settings = {} if kind[1] == "insert_k_cache" else {"block_size": size}
    assert getattr(ops, kind[1])(k, cache, slots, **settings) is None


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def check_insert(
    kind: Any, k: Tensor, cache: Tensor, base: Tensor, slots: Tensor, size: int
) -> None:
    """Compare the op with the oracle: all bits in and around the cache."""
    settings = {} if kind[1] == "insert_k_cache" else {"block_size": size}
    oracle = getattr(oracles, kind[1])
    rows = oracle(patterns(k), patterns(cache), slots.tolist(), **settings)
    want = torch.tensor(rows, dtype=torch.int64).to(INTS[cache.dtype]).view(cache.dtype)
    before, inputs = base.clone(), (raw(k), slots.clone())
    insert(kind, k, cache, slots, size)
    written = before.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    written.copy_(want.reshape(cache.shape))
    assert torch.equal(raw(base), raw(before))
    assert torch.equal(raw(k), inputs[0])
    assert torch.equal(slots, inputs[1])


@each_kind
@pytest.mark.parametrize(("size", "gap"), [(64, 0), (2, 16), (1, 4096), (3, 16)])
def test_rows_at_the_ends_of_pages(kind: Any, size: int, gap: int) -> None:
    end = 3 * size
    slots = (end - 1, -1, size, 0, end, end + 1, 2 * size - 1, 2 * size, 2**63 - 1)
    slots = [*dict.fromkeys(slots)]
    cache, base = cache_of(kind, size, 3, size, gap)
    check_insert(kind, keys(kind, 1, len(slots) + 2), cache, base, i64(slots), size)


@each_kind
def test_of_two_tokens_with_one_slot_other_rows_know_nothing(kind: Any) -> None:
    k, (cache, _) = keys(kind, 6, 4), cache_of(kind, 6, 2, 2)
    twice, once = cache.clone(), cache.clone()
    insert(kind, k, twice, i64([1, 3, 1, 0]), 2)
    insert(kind, k, once, i64([-1, 3, 1, 0]), 2)
    for memory in (twice, once):
        insert(kind, k[:1], memory, i64([1]), 2)
    assert torch.equal(raw(twice), raw(once))


@pytest.mark.parametrize(
    ("pages", "tag", "row_bytes", "sizes"),
    [
        (MainLayout, "v4_fp8", 584, {64: 37440, 2: 1728, 256: 149760, 1: 1152, 72: 42048}),
        (IndexerLayout, "v4_indexer_fp8", 132, {64: 8640, 2: 576, 256: 33984, 1: 576, 48: 6336}),
    ],
)
def test_layout(pages: Any, tag: str, row_bytes: int, sizes: dict[int, int]) -> None:
    """A block has the data of all its rows, then their scales."""
    data = {"v4_fp8": 576, "v4_indexer_fp8": 128}[tag]
    for size, page_bytes in sizes.items():
        layout = pages(size)
        assert layout == pages(size)
        assert (layout.tag, layout.row_bytes, layout.page_bytes) == (tag, row_bytes, page_bytes)
        last = 3 * size - 1
        assert (layout.data_offset(0), layout.data_offset(size)) == (0, page_bytes)
        assert layout.data_offset(last) == 2 * page_bytes + data * (size - 1)
        assert layout.scale_offset(0) == data * size
        assert layout.scale_offset(last) == 2 * page_bytes + row_bytes * size - (row_bytes - data)
        cache = layout.allocate(3)
        assert (cache.dtype, cache.shape) == (torch.uint8, (3, page_bytes))
        assert cache.is_contiguous()
        assert not cache.any()
