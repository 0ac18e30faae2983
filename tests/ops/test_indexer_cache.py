"""The indexer's cache: one scale to a row of 128, and keys gathered request behind request.

bf16 values are given by their bits.
"""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core import layout
from tests.helpers import (
    INT32_MAX,
    INT32_MIN,
    i32,
    i64,
    rows32,
    strided,
    widened,
)
from tests.oracles import kv as oracles

WIDTH = 128
# the first bf16 of a row, zeros behind -> scale, the first codes, zeros behind
ROWS: dict[str, tuple[list[int], float, list[int]]] = {
    "worked example": ([0x4040, 0xBE9A, 0x3C24], 2**-7, [0x7C, 0xE2, 0x3A]),
    "zeros": ([], 2**-22, []),
    "minus zeros": ([0x8000] * 128, 2**-22, [0x80] * 128),
    "one scale for both halves": ([0x3F80] * 64 + [0xC3E0] * 64, 1, [0x38] * 64 + [0xFE] * 64),
    "largest value last": ([0] * 127 + [0x43E0], 1, [0] * 127 + [0x7E]),
    "one step above 448": ([0] * 70 + [0x43E1], 2, [0] * 70 + [0x76]),
    "smallest subnormals": ([0x0001, 0x8001, 0x007F], 2**-22, [0x00, 0x80, 0x00]),
    "the smallest scale, full": ([0x38E0], 2**-22, [0x7E]),
    "just above the smallest scale": ([0x38E1], 2**-21, [0x76]),
    "ties": (
        [0x43E0, 0x3A80, 0x3A81, 0x3B40, 0x3C70, 0x3F88, 0x3F98, 0xC3D8, 0x43C8],
        1,
        [0x7E, 0x00, 0x01, 0x02, 0x08, 0x38, 0x3A, 0xFE, 0x7C],
    ),
    "infinities": ([0x7F80, 0xFF80, 0x7F7F, 0x7B80], 2**120, [0x7E, 0xFE, 0x78, 0x38]),
    "448 * 2^119": ([0x7F60], 2**119, [0x7E]),
    "NaN of either sign": ([0x7FC0, 0xFFC0, 0x7F81, 0xFFFF, 0x3F80], 2**-8, [0x7F] * 4 + [0x78]),
    "nothing but NaN": ([0xFFC0] * 128, 2**-22, [0x7F] * 128),
}

# cu_seq_lens, block_table, num_rows -> the slot of every row, None if it has none; two rows a block
GATHERS: dict[str, tuple[list[int], list[list[int]], int, list[int | None]]] = {
    "one request": ([0, 3], [[2, 0]], 3, [4, 5, 0]),
    "a row more than there are": ([0, 3], [[2, 0]], 4, [4, 5, 0, None]),
    "fewer rows than there are": ([0, 3], [[2, 0]], 2, [4, 5]),
    "two requests": ([0, 3, 5], [[2, 0], [1, 3]], 6, [4, 5, 0, 2, 3, None]),
    "requests without keys": (
        [0, 0, 2, 2, 2, 3, 3],
        [[3], [0], [3], [3], [1], [3]],
        4,
        [0, 1, 2, None],
    ),
    "nothing but requests without keys": ([0, 0, 0], [[1], [2]], 2, [None, None]),
    "the same page twice": ([0, 2, 4], [[1], [1]], 4, [2, 3, 2, 3]),
    "the first request starts later": ([2, 4], [[1]], 5, [None, None, 2, 3, None]),
    "the first request started before": ([-3, 2], [[2, 0, 1]], 3, [1, 2, None]),
    "all before": ([-5, -2, 0], [[1, 1, 1], [1, 1, 1]], 2, [None, None]),
    "all behind": ([3, 5], [[1]], 2, [None, None]),
    "past the end of the table": ([0, 3, 4], [[2], [1]], 4, [4, 5, None, 2]),
    "pages that do not exist": (
        [0, 10],
        [[-1, 3, 4, INT32_MAX, INT32_MIN]],
        10,
        [None, None, 6, 7, None, None, None, None, None, None],
    ),
    "cu_seq_lens at the end of int32": ([0, INT32_MAX], [[2, 0]], 5, [4, 5, 0, 1, None]),
    "everything behind int32": ([INT32_MAX, INT32_MAX], [[2, 0]], 2, [None, None]),
    "positions beyond int32": ([INT32_MIN, 2, 4], [[2, 0], [1, 1]], 4, [None, None, 2, 3]),
    "no column": ([0, 2], [[]], 2, [None, None]),
    "no request": ([0], [], 2, [None, None]),
    "no row": ([0, 2], [[1]], 0, []),
    "no request and no row": ([0], [], 0, []),
}


def bf16(rows: Any) -> Tensor:
    flat = torch.tensor(rows, dtype=torch.int32).to(torch.int16)
    return flat.reshape(len(rows), WIDTH).view(torch.bfloat16)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16).to(torch.int32) & 0xFFFF


def random_cache(seed: int, pages: int, block_size: int, gap: int = 0) -> tuple[Tensor, Tensor]:
    """A cache full of random bytes, ``gap`` bytes between its blocks, and all the memory of it."""
    size = layout.IndexerLayout(block_size).page_bytes
    memory = bytearray(Random(seed).randbytes((pages + 2) * (size + gap)))
    base = torch.frombuffer(memory, dtype=torch.uint8).reshape(pages + 2, size + gap)
    return base[1 : pages + 1, :size], base


def check_gather(cache: Tensor, cu: Tensor, table: Tensor, block_size: int, num_rows: int) -> None:
    settings = {"block_size": block_size, "num_rows": num_rows}
    before = cache.clone()
    k, scales = oracles.gather_indexer_k(cache.tolist(), cu.tolist(), table.tolist(), **settings)
    result = ops.gather_indexer_k(cache, cu, table, **settings)
    assert (result.k.dtype, result.k.shape) == (torch.uint8, (num_rows, WIDTH))
    assert (result.scales.dtype, result.scales.shape) == (torch.float32, (num_rows,))
    assert result.k.tolist() == k
    assert (result.scales.view(torch.int32).long() & 0xFFFFFFFF).tolist() == scales
    assert torch.equal(cache, before)


@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_a_row_becomes(case: tuple[list[int], float, list[int]]) -> None:
    values, scale, codes = case
    values = values + [0] * (WIDTH - len(values))
    codes = codes + [0] * (WIDTH - len(codes))
    cache = torch.full((3, 8640), 0xA5, dtype=torch.uint8)
    ops.quantize_and_insert_indexer_k(bf16([values]), cache, i64([130]), block_size=64)
    flat = cache.flatten()
    # block 2, row 2
    assert flat[17280 + 256 : 17280 + 384].tolist() == codes
    place = 17280 + 8192 + 8
    assert flat[place : place + 4].view(torch.float32).item() == scale
    flat[17280 + 256 : 17280 + 384] = flat[place : place + 4] = 0xA5
    assert flat.eq(0xA5).all()


def test_a_scale_is_a_little_endian_float() -> None:
    cache = torch.zeros(1, 8640, dtype=torch.uint8)
    k = bf16([[0x43E0] * WIDTH, [0x43E1] * WIDTH, [0] * WIDTH, [0x7F80] * WIDTH])
    ops.quantize_and_insert_indexer_k(k, cache, torch.arange(4), block_size=64)
    ones, twos, smallest, huge = cache[0, 8192:8208].view(4, 4).tolist()
    assert ones == [0x00, 0x00, 0x80, 0x3F]
    assert twos == [0x00, 0x00, 0x00, 0x40]
    assert smallest == [0x00, 0x00, 0x80, 0x34]
    assert huge == [0x00, 0x00, 0x80, 0x7B]


def test_every_magnitude_gets_the_scale_and_code_of_the_oracle() -> None:
    values = list(range(0, 1 << 16, 3))
    k = torch.zeros(len(values), WIDTH, dtype=torch.int16)
    places = torch.arange(len(values)) % WIDTH
    k[torch.arange(len(values)), places] = i32(values).to(torch.int16)
    cache = torch.zeros(len(values), 576, dtype=torch.uint8)
    ops.quantize_and_insert_indexer_k(
        k.view(torch.bfloat16), cache, torch.arange(len(values)), block_size=1
    )
    want = [oracles.quantize([value]) for value in values]
    scales = cache[:, 128:132].contiguous().view(torch.int32)[:, 0]
    assert scales.tolist() == [scale << 23 for scale, _ in want]
    codes = cache[torch.arange(len(values)), places]
    assert codes.tolist() == [code for _, [code] in want]


def test_keys_are_read_back_within_half_a_step() -> None:
    rng = Random(0)
    ranges = [(0, 0x7F00), (0x3D00, 0x4300), (0x38E0 - 900, 0x38E0), (0, 0x80)] * 32
    rows = [
        [rng.choice((0, 1)) << 15 | rng.randrange(low, high) for _ in range(WIDTH)]
        for low, high in ranges
    ]
    cache = layout.IndexerLayout(64).allocate(2)
    ops.quantize_and_insert_indexer_k(bf16(rows), cache, torch.arange(128), block_size=64)
    keys = ops.gather_indexer_k(
        cache, i32([0, 64, 128]), i32([[0], [1]]), block_size=64, num_rows=128
    )
    before, scales = bf16(rows).double(), keys.scales.double()[:, None]
    after = keys.k.view(torch.float8_e4m3fn).double() * scales
    # three bits of mantissa: 2^-4 of a normal code's value, half of 2^-9 below
    assert ((after - before).abs() <= torch.maximum(before.abs() / 16, scales / 1024)).all()
    assert (before.abs() <= 448 * scales).all()


@pytest.mark.parametrize("gap", [0, 16, 4096])
@pytest.mark.parametrize("block_size", [64, 2, 256, 1])
def test_rows_at_the_ends_of_pages(block_size: int, gap: int) -> None:
    cache, _ = random_cache(block_size, 3, block_size, gap)
    cu = i32([1, block_size + 2, block_size + 3, 3 * block_size + 4])
    table = i32([[1, 0, 3], [0, 0, 0], [2, 1, 0]])
    check_gather(cache, cu, table, block_size, 3 * block_size + 6)


def marked_cache() -> Tensor:
    """Four blocks of two rows: slot s has codes s + 1 and a scale that is a signalling NaN."""
    cache = torch.full((4, 576), 0xA5, dtype=torch.uint8)
    for slot in range(8):
        page, row = divmod(slot, 2)
        cache[page, 128 * row : 128 * row + 128] = slot + 1
        scale = torch.tensor(list((0x7F800001 + slot).to_bytes(4, "little")))
        cache[page, 256 + 4 * row : 260 + 4 * row] = scale
    return cache


@pytest.mark.parametrize("view", [lambda table: table, strided, widened])
@pytest.mark.parametrize("case", GATHERS.values(), ids=GATHERS)
def test_a_gathered_row_is_that_of_its_request(case: tuple[Any, ...], view: Any) -> None:
    cu, table, num_rows, slots = case
    table = view(rows32(table, len(table[0]) if table else 2))
    check_gather(marked_cache(), i32(cu), table, 2, num_rows)
    keys = ops.gather_indexer_k(marked_cache(), i32(cu), table, block_size=2, num_rows=num_rows)
    assert keys.k.tolist() == [[0 if slot is None else slot + 1] * WIDTH for slot in slots]
    scales = [0 if slot is None else 0x7F800001 + slot for slot in slots]
    assert keys.scales.view(torch.int32).tolist() == scales


def test_a_cache_without_pages_has_no_rows() -> None:
    check_gather(marked_cache()[:0], i32([0, 2, 3]), i32([[0, 1], [-1, 5]]), 2, 4)


def test_what_is_not_asked_for_changes_nothing() -> None:
    first = marked_cache()
    second, _ = random_cache(1, 4, 2)
    for place in (slice(0, 128), slice(256, 260)):
        second[1, place] = first[1, place]
    second[2, :264] = first[2, :264]
    cu, unused = i32([0, 2, 3]), i32([[2, 7], [1, INT32_MIN]])
    settings = {"block_size": 2, "num_rows": 5}
    one = ops.gather_indexer_k(first, cu, i32([[2, 0], [1, 3]]), **settings)
    two = ops.gather_indexer_k(second, cu, unused, **settings)
    assert torch.equal(one.k, two.k)
    assert torch.equal(one.scales.view(torch.int32), two.scales.view(torch.int32))
