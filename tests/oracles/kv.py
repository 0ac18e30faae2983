"""Oracles of the KV cache ops in Python ints, written from the specification.

Tensors are nested lists of ints. Bytes, slots and lengths are values; a bf16 is its 16 bits, a fp32
its 32 bits, unsigned. A writing op returns the new contents of its argument. A NaN from a
dequantisation is ``NAN``, whatever its bits are in the op. No torch, and no floating point.

Absolute values are ints in units of the smallest positive bf16, 2^-133.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

Ints = Sequence[int]
Row = list[int]
Rows = Sequence[Ints]

NAN = 0x7FC0
INF = 0x7F80
MAX_FINITE = 0x7F7F
CODE_NAN = 0x7F
CODE_LARGEST = 0x7E  # 448
SMALLEST_SCALE = 105
MAIN_DATA, MAIN_SCALES, MAIN_CODES, MAIN_BLOCK = 576, 8, 448, 64
INDEXER_DATA, INDEXER_SCALES = 128, 4


def bf16_magnitude(bits: int) -> int:
    """Return the absolute value of a finite bf16, in units of 2^-133."""
    exponent, mantissa = (bits & 0x7FFF) >> 7, bits & 0x7F
    return (mantissa | 0x80) << (exponent - 1) if exponent else mantissa


def code_magnitude(code: int) -> int:
    """Return the absolute value of an e4m3 that is not NaN, in units of 2^-9."""
    exponent, mantissa = (code & 0x7F) >> 3, code & 7
    return (mantissa | 8) << (exponent - 1) if exponent else mantissa


CODES = [code_magnitude(code) for code in range(CODE_LARGEST + 1)]
MIDPOINTS = [low + high for low, high in pairwise(CODES)]  # in units of 2^-10


def largest_magnitude(values: Ints) -> int:
    """Return the bits of the amax: NaN counts as 0, infinity as the largest finite number."""
    magnitudes = [bits & 0x7FFF for bits in values]
    return min(max((bits for bits in magnitudes if bits <= INF), default=0), MAX_FINITE)


@cache
def scale_byte(amax: int) -> int:
    """Return the smallest byte from 105 on for which ``amax <= 448 * 2^(byte - 127)``."""
    byte = SMALLEST_SCALE
    while bf16_magnitude(amax) > 448 << (byte - 127 + 133):
        byte += 1
    return byte


class Encoder(dict[int, int]):
    """Maps bf16 bits to e4m3 codes for one scale byte; computes a code at its first use."""

    def __init__(self, byte: int) -> None:
        super().__init__()
        # compare x * 2^-133 * 2^(127 - byte) with m * 2^-10: x with m * 2^(byte - 4)
        self.midpoints = [midpoint << (byte - 4) for midpoint in MIDPOINTS]

    def __missing__(self, bits: int) -> int:
        self[bits] = self.encode(bits)
        return self[bits]

    def encode(self, bits: int) -> int:
        if bits & 0x7FFF > INF:
            return CODE_NAN
        sign = bits >> 15 << 7
        if bits & 0x7FFF == INF:
            return sign | CODE_LARGEST
        magnitude = bf16_magnitude(bits)
        code = bisect_left(self.midpoints, magnitude)
        if code < len(self.midpoints) and magnitude == self.midpoints[code] and code % 2 == 1:
            code += 1
        return sign | code


@cache
def encoder(byte: int) -> Encoder:
    return Encoder(byte)


def quantize(values: Ints) -> tuple[int, Row]:
    """Return the scale byte and the codes of one block."""
    byte = scale_byte(largest_magnitude(values))
    table = encoder(byte)
    return byte, [table[bits] for bits in values]


@cache
def decoder(byte: int) -> Row:
    """Return the bf16 bits of every code for a scale byte."""
    return [decode(code, byte) for code in range(256)]


def decode(code: int, byte: int) -> int:
    sign, magnitude = code >> 7 << 15, code_magnitude(code)
    if code & 0x7F == CODE_NAN or (byte == 255 and magnitude == 0):
        return NAN
    if byte == 0:
        return sign
    if byte == 255:
        return sign | INF
    # m * 2^-9 * 2^(byte - 127) is m * 2^(byte - 3) times 2^-133, here times 2^2
    return sign | bf16_bits(magnitude << (byte - 1))


def bf16_bits(quarters: int) -> int:
    """Round an absolute value, in quarters of 2^-133, to the nearest bf16, ties to even."""
    shift = max(quarters.bit_length() - 8, 2)
    bits, rest = quarters >> shift, quarters & ((1 << shift) - 1)
    half = 1 << (shift - 1)
    if rest > half or (rest == half and bits % 2 == 1):
        bits += 1
    return min(bits + ((shift - 2) << 7), INF)


def copied(pages: Rows) -> list[Row]:
    return [list(page) for page in pages]


def places(slot_mapping: Ints, num_blocks: int, block_size: int) -> list[tuple[int, int, int]]:
    """Return token, block and row of every token that an insert writes."""
    return [
        (token, slot // block_size, slot % block_size)
        for token, slot in enumerate(slot_mapping)
        if 0 <= slot < num_blocks * block_size
    ]


def quantize_and_insert_k_cache(
    k: Rows, k_cache: Rows, slot_mapping: Ints, *, block_size: int, layout: str = "v4_fp8"
) -> list[Row]:
    assert layout == "v4_fp8"
    pages = copied(k_cache)
    for token, page, row in places(slot_mapping, len(pages), block_size):
        codes, scales = [], []
        for start in range(0, MAIN_CODES, MAIN_BLOCK):
            byte, block = quantize(k[token][start : start + MAIN_BLOCK])
            scales.append(byte)
            codes += block
        rope = [byte for bits in k[token][MAIN_CODES:] for byte in (bits & 0xFF, bits >> 8)]
        data = row * MAIN_DATA
        pages[page][data : data + MAIN_DATA] = codes + rope
        first = block_size * MAIN_DATA + row * MAIN_SCALES
        pages[page][first : first + MAIN_SCALES] = [*scales, 0]
    return pages


def quantize_and_insert_indexer_k(
    k: Rows, k_cache: Rows, slot_mapping: Ints, *, block_size: int, layout: str = "v4_indexer_fp8"
) -> list[Row]:
    assert layout == "v4_indexer_fp8"
    pages = copied(k_cache)
    for token, page, row in places(slot_mapping, len(pages), block_size):
        byte, codes = quantize(k[token])
        data = row * INDEXER_DATA
        pages[page][data : data + INDEXER_DATA] = codes
        first = block_size * INDEXER_DATA + row * INDEXER_SCALES
        pages[page][first : first + INDEXER_SCALES] = (byte << 23).to_bytes(4, "little")
    return pages


def insert_k_cache(k: Rows, k_cache: Sequence[Rows], slot_mapping: Ints) -> list[list[Row]]:
    pages = [copied(page) for page in k_cache]
    block_size = len(pages[0]) if pages else 1
    for token, page, row in places(slot_mapping, len(pages), block_size):
        pages[page][row] = list(k[token])
    return pages


def find_row(
    position: int, table_row: Ints, num_blocks: int, block_size: int
) -> tuple[int, int] | None:
    """Return the block and row of a request's position, or None."""
    column = position // block_size
    if position < 0 or column >= len(table_row) or not 0 <= table_row[column] < num_blocks:
        return None
    return table_row[column], position % block_size


def main_row(page: Ints, row: int, block_size: int) -> Row:
    data = page[row * MAIN_DATA : (row + 1) * MAIN_DATA]
    scales = page[block_size * MAIN_DATA + row * MAIN_SCALES :]
    values = []
    for block in range(MAIN_CODES // MAIN_BLOCK):
        table = decoder(scales[block])
        values += [table[code] for code in data[block * MAIN_BLOCK : (block + 1) * MAIN_BLOCK]]
    rope = data[MAIN_CODES:]
    return values + [low | high << 8 for low, high in zip(rope[::2], rope[1::2], strict=True)]


def dequantize_and_gather_k_cache(
    out: Sequence[Rows],
    k_cache: Rows | Sequence[Rows],
    seq_lens: Ints,
    gather_lens: Ints | None,
    block_table: Rows,
    *,
    block_size: int,
    offset: int = 0,
    layout: str = "v4_fp8",
) -> list[list[Row]]:
    """Dequantise and gather rows, or copy rows of the plain layout, for ``gather_k_cache``."""
    assert layout in ("v4_fp8", "plain")
    result = [copied(rows) for rows in out]
    lengths = seq_lens if gather_lens is None else gather_lens
    for request, (seq_len, length) in enumerate(zip(seq_lens, lengths, strict=True)):
        rows = result[request]
        for i in range(max(min(length, len(rows) - offset), 0)):
            found = find_row(seq_len - length + i, block_table[request], len(k_cache), block_size)
            if found is None:
                rows[offset + i] = [0] * len(rows[offset + i])
            elif layout == "plain":
                rows[offset + i] = list(k_cache[found[0]][found[1]])
            else:
                rows[offset + i] = main_row(k_cache[found[0]], found[1], block_size)
    return result


def gather_k_cache(
    k_cache: Rows | Sequence[Rows],
    seq_lens: Ints,
    gather_lens: Ints | None,
    block_table: Rows,
    *,
    block_size: int,
    num_rows: int,
    offset: int = 0,
    layout: str = "v4_fp8",
    width: int = 512,
) -> list[list[Row]]:
    if layout == "plain" and len(k_cache):
        width = len(k_cache[0][0])
    out = [[[0] * width for _ in range(num_rows)] for _ in seq_lens]
    given = (k_cache, seq_lens, gather_lens, block_table)
    sizes = {"block_size": block_size, "offset": offset}
    return dequantize_and_gather_k_cache(out, *given, **sizes, layout=layout)


def gather_indexer_k(
    k_cache: Rows,
    cu_seq_lens: Ints,
    block_table: Rows,
    *,
    block_size: int,
    num_rows: int,
    layout: str = "v4_indexer_fp8",
) -> tuple[list[Row], Row]:
    assert layout == "v4_indexer_fp8"
    keys = [[0] * INDEXER_DATA for _ in range(num_rows)]
    scales = [0] * num_rows
    for request, table_row in enumerate(block_table):
        start, stop = cu_seq_lens[request], cu_seq_lens[request + 1]
        for n in range(max(start, 0), min(stop, num_rows)):
            found = find_row(n - start, table_row, len(k_cache), block_size)
            if found is not None:
                page, row = k_cache[found[0]], found[1]
                keys[n] = list(page[row * INDEXER_DATA : (row + 1) * INDEXER_DATA])
                first = block_size * INDEXER_DATA + row * INDEXER_SCALES
                scales[n] = int.from_bytes(bytes(page[first : first + 4]), "little")
    return keys, scales
