"""Strategies of the cache ops: special key values, garbage caches, out-of-range slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import QuantizedLayout
from dsv4_ops.testing.case import Case, Make, i32
from dsv4_ops.testing.strategies.batches import ADVERSARIAL_BLOCKS, ragged_batch
from dsv4_ops.testing.strategies.draw import Draw

ADVERSARIAL_SLOTS = (-1, -2, -(2**63), 2**31, 2**40, 2**63 - 1)
SPECIAL_BITS = (
    0x7F80, 0xFF80,  # infinities
    0x7FC0, 0xFF81,  # NaN, quiet and signalling
    0x0001, 0x807F,  # subnormals
    0x8000,  # -0
    0x7F7F, 0xFF7F,  # largest finite
    0x43E0, 0x43E1,  # 448 and one step above
    0x38D1, 0x38D2,  # around 1e-4
)  # fmt: skip


def random_keys(seed: torch.Generator, num_rows: int, width: int) -> Tensor:
    """Sample bf16 rows over many orders of magnitude."""
    scale = torch.exp2(torch.randint(-40, 40, (num_rows, 1), generator=seed).float())
    return (torch.randn(num_rows, width, generator=seed) * scale).to(torch.bfloat16)


def keys(draw: Draw, *, num_rows: int, width: int, special: int) -> Tensor:
    """Sample bf16 keys with special values in some of the first ``special`` columns."""
    values = random_keys(draw.generator(), num_rows, width)
    if special:
        bits = values.view(torch.int16)
        for row in draw.places(num_rows, 4):
            pattern = draw.one_of(*SPECIAL_BITS)
            bits[row, draw.integer(0, special - 1)] = pattern - (pattern & 0x8000) * 2
    return values


def heads(draw: Draw, num_tokens: int, num_heads: int, width: int) -> Tensor:
    """Sample ``keys`` with special values in any column, [num_tokens, num_heads, width]."""
    rows = keys(draw, num_rows=num_tokens * num_heads, width=width, special=width)
    return rows.view(num_tokens, num_heads, width)


def plain_cache(seed: torch.Generator, num_blocks: int, block_size: int, width: int) -> Tensor:
    """Sample a plain cache of rows over many orders of magnitude."""
    rows = random_keys(seed, num_blocks * block_size, width)
    return rows.view(num_blocks, block_size, width)


def random_bytes(seed: torch.Generator, *shape: int) -> Tensor:
    """Sample a cache full of random bytes."""
    return torch.randint(0, 256, shape, generator=seed, dtype=torch.uint8)


def insertions(kind: type[QuantizedLayout], special: int) -> Make:
    """Return a sampler of calls that insert quantised rows into a cache of random bytes. Some calls
    have more rows than slots."""

    def call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
        num_tokens = max(draw.one_of(0, 1, 2, 3, 5, 9, 17), min_size)
        num_blocks = max(draw.one_of(0, 1, 2, 3, 8), min_size)
        num_rows = num_tokens + draw.one_of(0, 0, 1, 4)
        layout = kind(settings["block_size"])
        k = keys(draw, num_rows=num_rows, width=layout.head_dim, special=special)
        cache = random_bytes(draw.generator(), num_blocks, layout.page_bytes)
        order = slots(draw, num_tokens=num_tokens, num_slots=num_blocks * layout.block_size)
        return Case("sampled", (k, cache, order), settings)

    return call


def slots(draw: Draw, *, num_tokens: int, num_slots: int) -> Tensor:
    """Sample distinct slots. Some slots are invalid."""
    order = torch.randperm(max(num_slots, num_tokens), generator=draw.generator())[:num_tokens]
    draw.spoil(order, (*ADVERSARIAL_SLOTS, num_slots, num_slots + 7), 4)
    return order


def requests(draw: Draw, *, num_blocks: int, min_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sample seq_lens, gather_lens and block_table over a cache of ``num_blocks`` blocks."""
    batch = ragged_batch(draw, min_size=min_size, adversarial=False)
    table = batch.block_table % max(num_blocks, 1)
    seq_lens = batch.seq_lens.clone()
    gather_lens = i32([draw.one_of(0, 1, 2, 5, 9, int(length)) for length in seq_lens])
    draw.spoil(table, (*ADVERSARIAL_BLOCKS, num_blocks), 4)
    for lens in (seq_lens, gather_lens):
        draw.spoil(lens, (-1, -(2**31), 2**31 - 1, 7), 1)
    return seq_lens, gather_lens, table
