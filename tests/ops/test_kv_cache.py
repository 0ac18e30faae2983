"""Quantised rows of the caches, and rows read back: hand-computed numbers for the oracle, and every
value against the oracle. bf16 values are given by their bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core import layout
from tests.helpers import i32, i64
from tests.oracles import kv as oracles

CODES, BLOCK, WIDTH = 448, 64, 512
ONE, ONE_CODE, ONE_SCALE = 0x3F80, 0x78, 119  # 1.0 is 256 * 2^-8
# first bf16 values of a block (then zeros) -> scale byte, first codes (then zeros)
BLOCKS: dict[str, tuple[list[int], int, list[int]]] = {
    "worked example": ([0x4040, 0xBE9A, 0x3C24], 120, [0x7C, 0xE2, 0x3A]),
    "zeros": ([], 105, []),
    "minus zeros": ([0x8000] * 64, 105, [0x80] * 64),
    "minus zero under a large scale": ([0x43E0, 0x8000], 127, [0x7E, 0x80]),
    "448": ([0x43E0], 127, [0x7E]),
    "-448": ([0xC3E0], 127, [0xFE]),
    "446 rounds up to 448": ([0x43DF], 127, [0x7E]),
    "450, one step above 448": ([0x43E1], 128, [0x76]),
    "-450": ([0xC3E1], 128, [0xF6]),
    "largest value last": ([0] * 63 + [0x43E1], 128, [0] * 63 + [0x76]),
    "smallest subnormals": ([0x0001, 0x8001, 0x007F, 0x807F], 105, [0x00, 0x80, 0x00, 0x80]),
    # 448 * 2^-22, one step above, and the smallest scale: 2^-31 is the smallest code, 2^-32 a tie
    "the smallest scale, full": ([0x38E0], 105, [0x7E]),
    "just above the smallest scale": ([0x38E1], 106, [0x76]),
    "below the smallest scale": ([0x3000, 0x2F80, 0x2F81, 0xB000], 105, [0x01, 0, 0x01, 0x81]),
    "subnormal codes": ([0x43E0, 0x3B00, 0x3B80, 0x3BC0, 0x3C60, 0x3C80, 0xBB00], 127,
     [0x7E, 0x01, 0x02, 0x03, 0x07, 0x08, 0x81]),
    "ties of subnormal codes": ([0x43E0, 0x3A80, 0x3A81, 0x3B40, 0x3B3F, 0x3BA0, 0x3BA1, 0x3C70,
     0x3C6F, 0xBA80], 127, [0x7E, 0x00, 0x01, 0x02, 0x01, 0x02, 0x03, 0x08, 0x07, 0x80]),
    "ties of normal codes": ([0x43E0, 0x3F88, 0x3F89, 0x3F98, 0x3F97, 0xBF88, 0xBF98, 0x43D8,
     0x43C8, 0x43D7], 127, [0x7E, 0x38, 0x39, 0x3A, 0x39, 0xB8, 0xBA, 0x7E, 0x7C, 0x7D]),
    "rounding up into the next power of two": ([0x43E0, 0x3FFC, 0x3FF7], 127, [0x7E, 0x40, 0x3F]),
    "infinities": ([0x7F80, 0xFF80], 247, [0x7E, 0xFE]),
    "finite beside infinite": ([0x7F80, 0x7F7F, 0xFF7F, 0x7B80, ONE], 247,
     [0x7E, 0x78, 0xF8, 0x38, 0x00]),
    "the largest finite": ([0x7F7F], 247, [0x78]),
    "448 * 2^119": ([0x7F60, 0xFF60], 246, [0x7E, 0xFE]),
    "NaN of either sign": ([0x7FC0, 0xFFC0, 0x7F81, 0xFF81, 0x7FFF, 0xFFFF, ONE], ONE_SCALE,
     [0x7F] * 6 + [ONE_CODE]),
    "nothing but NaN": ([0xFFC0] * 64, 105, [0x7F] * 64),
    "NaN beside infinity": ([0xFFC0, 0xFF80], 247, [0x7F, 0xFE]),
}  # fmt: skip

ROPE = [0x7F81, 0xFF81, 0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x0001, 0x8000] + [0x1234] * 56

# scale byte -> code -> bf16
READS: dict[int, dict[int, int]] = {
    127: {0x38: 0x3F80, 0xB8: 0xBF80, 0x00: 0x0000, 0x80: 0x8000, 0x7E: 0x43E0, 0xFE: 0xC3E0}
    | {0x01: 0x3B00, 0x07: 0x3C60, 0x7F: oracles.NAN, 0xFF: oracles.NAN},
    120: {0x7C: 0x4040, 0xE2: 0xBEA0, 0x3A: 0x3C20},  # 3.0, -0.3125, 0.009765625
    105: {0x01: 0x3000},
    # 256 * 2^120 and more exceed bf16
    247: {0x7E: 0x7F80, 0xFE: 0xFF80, 0x78: 0x7F80, 0x77: 0x7F70, 0x7F: oracles.NAN},
    254: {0x38: 0x7F00, 0x40: 0x7F80},
    255: {0x38: 0x7F80, 0x81: 0xFF80, 0x00: oracles.NAN, 0x80: oracles.NAN},  # times infinity
    0: {0x7E: 0x0000, 0xB8: 0x8000, 0x7F: oracles.NAN},  # times zero
    # the smallest bf16 is 2^-133; codes 2 and 6 lie between two
    1: {0x38: 0x0080, 0x08: 0x0002, 0x04: 0x0001, 0x03: 0x0001, 0x02: 0x0000, 0x06: 0x0002}
    | {0x81: 0x8000},
    2: {0x01: 0x0000, 0x03: 0x0002},
}


def bf16(rows: Any, width: int = WIDTH) -> Tensor:
    flat = torch.tensor(rows, dtype=torch.int32).to(torch.int16)
    return flat.reshape(len(rows), width).view(torch.bfloat16)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16).to(torch.int32) & 0xFFFF


def test_the_oracle_gives_the_numbers_by_hand() -> None:
    for name, (block, scale, codes) in BLOCKS.items():
        padded = block + [0] * (BLOCK - len(block))
        assert oracles.quantize(padded) == (scale, codes + [0] * (BLOCK - len(codes))), name
    for scale, reads in READS.items():
        for code, value in reads.items():
            assert oracles.decode(code, scale) == value, (scale, code)


def test_every_magnitude_gets_the_scale_and_code_of_the_oracle() -> None:
    tops = list(range(1 << 16))
    tops += [0] * (-len(tops) % 7)
    rows = [
        [value for top in tops[at : at + 7] for value in [top] + [0] * 63] + [0] * 64
        for at in range(0, len(tops), 7)
    ]
    cache = torch.zeros(-(-len(rows) // 64), layout.MainLayout(64).page_bytes, dtype=torch.uint8)
    ops.quantize_and_insert_k_cache(bf16(rows), cache, torch.arange(len(rows)), block_size=64)
    scales = cache[:, 36864:37376].reshape(-1, 8)[: len(rows), :7].flatten()
    codes = cache[:, :36864].reshape(-1, 576)[: len(rows), :CODES:BLOCK].flatten()
    want = [oracles.quantize([top]) for top in tops]
    assert scales.tolist() == [scale for scale, _ in want]
    assert codes.tolist() == [code for _, [code] in want]


def test_every_third_magnitude_in_the_cache_of_the_indexer() -> None:
    """Values are at every place of a row of 128 values."""
    values = list(range(0, 1 << 16, 3))
    rows, places = torch.arange(len(values)), torch.arange(len(values)) % 128
    k = torch.zeros(len(values), 128, dtype=torch.int16)
    k[rows, places] = i32(values).to(torch.int16)
    cache = torch.zeros(len(values), 576, dtype=torch.uint8)
    ops.quantize_and_insert_indexer_k(k.view(torch.bfloat16), cache, rows, block_size=1)
    want = [oracles.quantize([value]) for value in values]
    scales = cache[:, 128:132].contiguous().view(torch.int32)[:, 0]
    assert scales.tolist() == [scale << 23 for scale, _ in want]
    assert cache[rows, places].tolist() == [code for _, [code] in want]


@pytest.mark.parametrize("scale", [105, 106, 127, 180, 246, 247])
def test_every_value_under_a_scale_gets_the_code_of_the_oracle(scale: int) -> None:
    top = min((scale + 8) << 7 | 0x60, 0x7F7F)
    values = [value for value in range(1 << 16) if not top < value & 0x7FFF < 0x7F80]
    values = [value for value in values if scale == 247 or value & 0x7FFF != 0x7F80]
    values += [0] * (-len(values) % (63 * 7))
    blocks = torch.tensor(values).reshape(-1, 7, 63)
    tops = torch.full((len(blocks), 7, 1), top)
    rope = torch.tensor([ROPE] * len(blocks))
    rows = torch.cat((torch.cat((tops, blocks), 2).flatten(1), rope), 1).tolist()
    cache = torch.zeros(len(rows), 1152, dtype=torch.uint8)
    ops.quantize_and_insert_k_cache(bf16(rows), cache, torch.arange(len(rows)), block_size=1)
    assert cache[:, 576:583].eq(scale).all()
    codes = oracles.encoder(scale)
    assert cache[:, :CODES].tolist() == [[codes[value] for value in row[:CODES]] for row in rows]


def test_every_code_under_every_scale_is_read_like_the_oracle() -> None:
    cache = torch.zeros(3, 37440, dtype=torch.uint8)
    blocks = torch.arange(3 * 64 * 7)  # four blocks have one scale
    data, scales = cache[:, :36864].view(3, 64, 576), cache[:, 36864:37376].view(3, 64, 8)
    codes = (blocks[:, None] % 4 * 64 + torch.arange(64)).to(torch.uint8)
    data[:, :, :CODES] = codes.view(3, 64, CODES)
    scales[:, :, :7] = (blocks // 4).to(torch.uint8).view(3, 64, 7)
    scales[:, :, 7] = 0xEE
    rope = torch.arange(3 * 64 * 64) * 5 + 0x7F00
    data[:, :, CODES:] = rope.to(torch.int16).view(torch.uint8).view(3, 64, 128)
    settings = {"block_size": 64, "num_rows": 192}
    rows = ops.gather_k_cache(cache, i32([192]), None, i32([[2, 0, 1]]), **settings)[0]
    expected = oracles.gather_k_cache(cache.tolist(), [192], None, [[2, 0, 1]], **settings)[0]
    got, want = bits(rows), i32(expected)
    got[:, :CODES][rows[:, :CODES].isnan()] = oracles.NAN
    assert torch.equal(got, want)


def test_a_cache_of_more_than_two_gigabytes() -> None:
    memory = torch.empty(9 * 2**28, dtype=torch.uint8)  # only block 8 is ever written
    cache = memory.as_strided((9, 1728), (2**28, 1))
    k = bf16([[0] * BLOCK + [ONE] * (CODES - BLOCK) + ROPE])
    ops.quantize_and_insert_k_cache(k, cache, i64([17]), block_size=2)
    back = ops.gather_k_cache(cache, i32([2]), None, i32([[8]]), block_size=2, num_rows=2)
    assert torch.equal(bits(back[0, 1]), bits(k[0]))
