"""The plain cache, and which rows are gathered from it and from the main cache.

bf16 and fp32 values are given by their bits.
"""

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout, StateLayout
from tests.helpers import INT32_MAX, INT32_MIN, i32, i64, rows32, strided, widened

DTYPES = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
KEPT, ZERO = "kept", "zero"

# seq_lens, gather_lens, block_table, num_rows, offset -> the slot that every row of out comes from,
# or what the row holds; four blocks of two rows
GATHERS: dict[str, tuple[list[int], Any, list[list[int]], int, int, list[list[Any]]]] = {
    "all rows": ([3], None, [[2, 0]], 4, 0, [[4, 5, 0, KEPT]]),
    "the last rows": ([3], [2], [[2, 0]], 4, 0, [[5, 0, KEPT, KEPT]]),
    "the last rows, later": ([3], [2], [[2, 0]], 4, 2, [[KEPT, KEPT, 5, 0]]),
    "every request its own rows": (
        [3, 0, 4, 1],
        [2, 0, 3, 1],
        [[2, 0], [1, 1], [3, 1], [0, 1]],
        3,
        0,
        [[5, 0, KEPT], [KEPT] * 3, [7, 2, 3], [0, KEPT, KEPT]],
    ),
    "nothing to gather": ([3, 3, 3], [0, -1, INT32_MIN], [[2, 0]] * 3, 2, 0, [[KEPT] * 2] * 3),
    "more than there is room for": ([4], [4], [[2, 0]], 3, 0, [[4, 5, 0]]),
    "more than there is room for, later": ([4], [3], [[2, 0]], 3, 1, [[KEPT, 5, 0]]),
    "no room": ([4], [4], [[2, 0]], 3, 3, [[KEPT] * 3]),
    "more than the sequence has": ([1], [3], [[2, 0]], 4, 0, [[ZERO, ZERO, 4, KEPT]]),
    "no sequence": ([0, -1], [2, 3], [[2]] * 2, 3, 0, [[ZERO, ZERO, KEPT], [ZERO] * 3]),
    "lengths below zero": ([-1, INT32_MIN], None, [[2, 0]] * 2, 2, 0, [[KEPT] * 2] * 2),
    "past the end of the table": ([5], [4], [[2, 0]], 4, 0, [[5, 0, 1, ZERO]]),
    "not the next table row": ([3, 1], None, [[2], [1]], 3, 0, [[4, 5, ZERO], [2, *[KEPT] * 2]]),
    "pages that do not exist": (
        [12],
        [11],
        [[-1, 3, 4, INT32_MAX, INT32_MIN, 0]],
        11,
        0,
        [[ZERO, 6, 7, *[ZERO] * 6, 0, 1]],
    ),
    "the same page for all": ([4, 2], None, [[1, 1]] * 2, 3, 0, [[2, 3, 2], [2, 3, KEPT]]),
    "the longest sequence": (
        [INT32_MAX] * 4,
        [INT32_MAX, INT32_MAX - 1, 2, INT32_MIN],
        [[2, 0]] * 4,
        3,
        0,
        [[4, 5, 0], [5, 0, 1], [ZERO, ZERO, KEPT], [KEPT] * 3],
    ),
    # in int32 the first request's would be positions 1 and 2
    "positions far below zero": (
        [INT32_MIN, INT32_MIN, 0],
        [INT32_MAX, 1, INT32_MAX],
        [[2, 0]] * 3,
        2,
        0,
        [[ZERO, ZERO], [ZERO, KEPT], [ZERO, ZERO]],
    ),
    "no column": ([2], None, [[]], 3, 0, [[ZERO, ZERO, KEPT]]),
    "no request": ([], [], [], 3, 0, []),
    "no row": ([2, 3], None, [[2, 0]] * 2, 0, 0, [[], []]),
}

# how ``out`` lies in memory: shape of the memory, and the view of it
VIEWS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "dense": (lambda n, m: (n, m, 512), lambda base, m: base),
    "rows cut out": (lambda n, m: (n, m + 3, 512), lambda base, m: base[:, 1 : m + 1]),
    "requests apart": (lambda n, m: (2 * n, m, 512), lambda base, m: base[::2]),
    "values apart": (lambda n, m: (n, m, 1024), lambda base, m: base[..., ::2]),
    "transposed": (lambda n, m: (512, m, n), lambda base, m: base.permute(2, 1, 0)),
    "all apart": (lambda n, m: (2 * n, 2 * m, 1536), lambda base, m: base[1::2, 1::2, 1::3]),
}


def tensor(values: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(DTYPES[dtype]).reshape(shape).view(dtype)


def bits(values: Tensor) -> Tensor:
    mask = (1 << 8 * values.element_size()) - 1
    return values.view(DTYPES[values.dtype]).to(torch.int64) & mask


def noise(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator, kind = torch.Generator().manual_seed(seed), DTYPES[dtype]
    limits = torch.iinfo(kind)
    sampled = torch.randint(limits.min, limits.max, shape, dtype=kind, generator=generator)
    return sampled.view(dtype)


def plain_cache(
    seed: int, pages: int, block_size: int, width: int, dtype: torch.dtype, gap: int = 0
) -> tuple[Tensor, Tensor]:
    """A cache of random bits, ``gap`` values between its blocks, and all the memory of it."""
    base = noise(seed, (pages + 2, block_size * width + gap), dtype)
    cut = base[1 : pages + 1, : block_size * width]
    return cut.unflatten(1, (block_size, width)), base


def main_cache(seed: int, pages: int, block_size: int, gap: int = 0) -> Tensor:
    size = MainLayout(block_size).page_bytes
    memory = bytearray(Random(seed).randbytes((pages + 1) * (size + gap)))
    return torch.frombuffer(memory, dtype=torch.uint8).reshape(pages + 1, -1)[1:, :size]


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


def marked_cache() -> tuple[Tensor, list[list[int]]]:
    """The main cache with a different row in each of eight slots, and the rows."""
    cache = main_cache(12, 4, 2)
    rows = []
    for slot in range(8):
        page, row = cache[slot // 2], slot % 2
        page[576 * row : 576 * row + 448] = 0x38 + slot
        page[576 * row + 448 : 576 * row + 576 : 2] = 0x81 + slot
        page[576 * row + 449 : 576 * row + 576 : 2] = 0x7F
        page[1152 + 8 * row : 1159 + 8 * row] = 128
        rows.append([0x4000 + 16 * slot] * 448 + [0x7F81 + slot] * 64)
    return cache, rows


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("case", GATHERS.values(), ids=GATHERS)
def test_dequantized_rows_go_where_they_belong(case: tuple[Any, ...], view: Any) -> None:
    seq_lens, gather_lens, table, num_rows, offset, slots = case
    cache, rows = marked_cache()
    shape_of, view_of = view
    base = noise(13, shape_of(len(seq_lens), num_rows))
    out, before = view_of(base, num_rows), base.clone()
    want = bits(out)
    for request, row in ((b, i) for b in range(len(slots)) for i in range(num_rows)):
        source = slots[request][row]
        if source != KEPT:
            want[request, row] = 0 if source == ZERO else i64(rows[source])
    lens = None if gather_lens is None else i32(gather_lens)
    columns = rows32(table, len(table[0]) if table else 2)
    settings = {"block_size": 2, "offset": offset}
    ops.dequantize_and_gather_k_cache(out, cache, i32(seq_lens), lens, columns, **settings)
    assert torch.equal(bits(out), want)
    view_of(before, num_rows).copy_(out)
    assert torch.equal(bits(base), bits(before)), "memory outside of out changed"


@pytest.mark.parametrize("table_view", [lambda table: table, strided, widened])
@pytest.mark.parametrize("kind", ["v4_fp8", *DTYPES], ids=str)
@pytest.mark.parametrize("case", GATHERS.values(), ids=GATHERS)
def test_gathered_rows_are_behind_one_another(
    case: tuple[Any, ...], kind: Any, table_view: Any
) -> None:
    seq_lens, gather_lens, table, num_rows, offset, slots = case
    cache, rows = marked_cache()
    settings = {"block_size": 2, "num_rows": num_rows, "offset": offset}
    if kind != "v4_fp8":
        settings["layout"] = "plain"
        cache, _ = plain_cache(14, 4, 2, 5, kind, 16)
        rows = bits(cache).flatten(0, 1).tolist()
    width = len(rows[0])
    zeros = [0] * width
    want = [[zeros if s in (KEPT, ZERO) else rows[s] for s in line] for line in slots]
    lens = None if gather_lens is None else strided(i32(gather_lens))
    columns = table_view(rows32(table, len(table[0]) if table else 2))
    result = ops.gather_k_cache(cache, strided(i32(seq_lens)), lens, columns, **settings)
    assert result.dtype == (torch.bfloat16 if kind == "v4_fp8" else kind)
    assert result.shape == (len(seq_lens), num_rows, width)
    assert bits(result).tolist() == want


@pytest.mark.parametrize("kind", ["v4_fp8", "plain"])
def test_a_cache_without_pages_has_no_rows(kind: str) -> None:
    empty = {"v4_fp8": marked_cache()[0][:0], "plain": torch.empty(0, 2, 5)}[kind]
    settings = {"block_size": 2, "num_rows": 3, "layout": kind}
    rows = ops.gather_k_cache(empty, i32([3, 1]), None, i32([[0, 1], [-1, 4]]), **settings)
    assert rows.shape == (2, 3, 512 if kind == "v4_fp8" else 5)
    assert not rows.any()


def test_what_is_not_asked_for_changes_nothing() -> None:
    first, second = main_cache(15, 4, 2), main_cache(16, 4, 2, gap=32)
    second[2, :1152] = first[2, :1152]
    second[2, 1152:1159], second[2, 1160:1167] = first[2, 1152:1159], first[2, 1160:1167]
    second[1, :576], second[1, 1152:1159] = first[1, :576], first[1, 1152:1159]
    lens, settings = i32([2, 1]), {"block_size": 2, "num_rows": 3}
    one = ops.gather_k_cache(first, lens, None, i32([[2, 0], [1, 3]]), **settings)
    two = ops.gather_k_cache(second, lens, None, i32([[2, 9], [1, INT32_MIN]]), **settings)
    assert torch.equal(bits(one), bits(two))


LAYERS, OF_LAYER = 3, 4
LAYER_1 = {
    "select": lambda c: c[1],
    "select of a select": lambda c: c[None][0][1],
    "unbind": lambda c: c.unbind()[1],
    "iteration": lambda c: list(c)[1],
    "narrow": lambda c: c.narrow(0, 1, 1)[0],
    "slice": lambda c: c[1:2].squeeze(0),
    "slice behind a select": lambda c: c[1][1:],
    "split": lambda c: c.split(1)[1][0],
    "chunk": lambda c: c.chunk(3)[1][0],
    "flatten": lambda c: c.flatten(0, 1)[OF_LAYER : 2 * OF_LAYER],
    "view behind a select": lambda c: c[1].view(-1, 2, 3),
    "as_strided": lambda c: c.as_strided(c.shape[1:], c.stride()[1:], c.stride(0)),
    "transpose": lambda c: c.transpose(0, 1)[:, 1],
}


@pytest.mark.nightly("test_compiled_cache.py writes one of a stacked cache, by another op")
def test_views_of_one_tensor_for_all_layers():
    """A graph writes where eager does, in any form of "the blocks of layer 1" (torch rebuilds such
    views of graph inputs at offset 0 for an op that stays in the graph:
    tests/compile/test_upstream.py)."""

    def write(caches, k, slots):
        for cache, view in zip(caches, LAYER_1.values(), strict=True):
            ops.insert_k_cache(k, view(cache), slots)

    k, slots = torch.arange(1.0, 7).view(2, 3), i64([5, 2])
    eager, compiled = ([torch.zeros(LAYERS, OF_LAYER, 2, 3) for _ in LAYER_1] for _ in range(2))
    write(eager, k, slots)
    torch._dynamo.reset()
    torch.compile(write, fullgraph=True, dynamic=True)(compiled, k, slots)
    for name, want, got in zip(LAYER_1, eager, compiled, strict=True):
        assert want[1].any()
        assert not want[[0, 2]].any()
        assert torch.equal(got, want), name


@pytest.mark.parametrize("stride", [(3, 12, 1), (16, 5, 1), (6, 3, 1)])
def test_rows_may_be_in_any_order_in_memory(stride):
    """Row by row of all blocks, with gaps behind rows and blocks, or dense."""
    cache = torch.full((64,), 9.0).as_strided((4, 2, 3), stride)
    ops.insert_k_cache(torch.arange(6.0).view(2, 3), cache, i64([5, 2]))
    assert cache[2, 1].tolist() == [0, 1, 2]
    assert cache[1, 0].tolist() == [3, 4, 5]
    assert int((cache == 9).sum()) == 18
