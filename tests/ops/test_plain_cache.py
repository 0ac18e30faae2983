"""Layouts of plain caches and states, rows that are copied bit for bit, and their places. bf16 and
fp32 values are given by their bits."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout, StateLayout
from tests.helpers import i32, i64

DTYPES = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def tensor(values: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(DTYPES[dtype]).reshape(shape).view(dtype)


def bits(values: Tensor) -> Tensor:
    mask = (1 << 8 * values.element_size()) - 1
    return values.view(DTYPES[values.dtype]).to(torch.int64) & mask


@pytest.mark.parametrize(
    ("pages", "row_bytes", "page_bytes"),
    [
        (PlainLayout(64), 1024, 65536),
        (PlainLayout(2, dtype=torch.float32), 2048, 4096),
        (PlainLayout(8, 128), 256, 2048),
        (PlainLayout(1, width=5), 10, 10),
    ],
    ids=str,
)
def test_plain_layout(pages: PlainLayout, row_bytes: int, page_bytes: int) -> None:
    assert (pages.tag, pages.row_bytes, pages.page_bytes) == ("plain", row_bytes, page_bytes)
    assert pages.data_offset(3 * pages.block_size) == 3 * page_bytes
    assert pages.data_offset(2 * pages.block_size - 1) == 2 * page_bytes - row_bytes
    cache = pages.allocate(3)
    assert cache.shape == (3, pages.block_size, pages.width)
    assert cache.dtype == pages.dtype
    assert cache.is_contiguous()
    assert not cache.any()


@pytest.mark.parametrize(
    ("block_size", "width", "page_bytes"), [(4, 2048, 32832), (8, 1024, 32832), (4, 512, 8640)]
)
def test_state_layout(block_size: int, width: int, page_bytes: int) -> None:
    pages = StateLayout(block_size, width)
    assert (pages.tag, pages.row_bytes, pages.page_bytes) == ("v4_state", 4 * width, page_bytes)
    assert pages.data_offset(block_size + 1) == page_bytes + 4 * width
    cache = pages.allocate(3)
    assert (cache.dtype, len(cache)) == (torch.float32, 3)
    assert 4 * cache.stride(0) == page_bytes
    assert not cache.any()


@pytest.mark.parametrize(
    "pages", [MainLayout(64), IndexerLayout(64), PlainLayout(64), StateLayout(4, 2048)], ids=str
)
def test_layouts_are_frozen(pages: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        pages.block_size = 2


OUTS = {
    "rows cut out": (lambda base: base[:4, 1:4, :512]),
    "requests apart": (lambda base: base[::2, :3, :512]),
    "values apart": (lambda base: base[:4, :3, ::3]),
    "all apart": (lambda base: base[1::2, 1::2, 1::3]),
}


@pytest.mark.parametrize("view", OUTS.values(), ids=OUTS)
def test_rows_are_gathered_into_any_view(view: Any) -> None:
    """In the view's memory only the rows change; they equal those of a dense result."""
    seed = torch.Generator().manual_seed(13)
    cache = torch.randint(0, 255, (4, 1728), generator=seed, dtype=torch.uint8)
    lens = i32([3, 0, 4, 1]), i32([2, 0, 3, 1]), i32([[2, 0], [1, 1], [3, 1], [0, 1]])
    base = torch.randint(0, 99, (8, 6, 1536), generator=seed).to(torch.bfloat16)
    before, out = base.clone(), view(base)
    dense = out.clone(memory_format=torch.contiguous_format)
    for each in (out, dense):
        ops.dequantize_and_gather_k_cache(each, cache, *lens, block_size=2)
    assert torch.equal(bits(out), bits(dense))
    view(before).copy_(out)
    assert torch.equal(bits(base), bits(before)), "memory outside of out changed"


@pytest.mark.parametrize(("dtype", "quiet"), [(torch.bfloat16, 1 << 6), (torch.float32, 1 << 22)])
def test_a_signalling_nan_stays_one(dtype: torch.dtype, quiet: int) -> None:
    infinity = 0x7F80 if dtype == torch.bfloat16 else 0x7F800000
    sign = infinity + (infinity & -infinity)
    values = [infinity | 1, infinity | sign | 1, infinity | quiet | 3, sign, 1, infinity]
    k = tensor([values], dtype, (1, 6))
    cache = torch.zeros(2, 2, 6, dtype=dtype)
    ops.insert_k_cache(k, cache, i64([3]))
    assert bits(cache[1, 1]).tolist() == values
    settings = {"block_size": 2, "num_rows": 1, "layout": "plain"}
    back = ops.gather_k_cache(cache, i32([4]), i32([1]), i32([[0, 1]]), **settings)
    assert bits(back).tolist() == [[values]]


@pytest.mark.parametrize("stride", [(3, 12, 1), (16, 5, 1), (6, 3, 1)])
def test_rows_may_be_in_any_order_in_memory(stride):
    """Strides are larger between rows than between blocks, have gaps, or are dense."""
    cache = torch.full((64,), 9.0).as_strided((4, 2, 3), stride)
    ops.insert_k_cache(torch.arange(6.0).view(2, 3), cache, i64([5, 2]))
    assert cache[2, 1].tolist() == [0, 1, 2]
    assert cache[1, 0].tolist() == [3, 4, 5]
    assert int((cache == 9).sum()) == 18
