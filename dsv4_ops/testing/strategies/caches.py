"""Strategies of the cache ops: special key values, garbage caches, out-of-range slots."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4_ops.testing.case import i32

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


def generator(draw: Any) -> torch.Generator:
    """Generator of bulk contents, with a sampled seed."""
    return torch.Generator().manual_seed(draw(st.integers(0, 2**16)))


def random_keys(seed: torch.Generator, num_rows: int, width: int) -> Tensor:
    """bf16 rows over many orders of magnitude."""
    scale = torch.exp2(torch.randint(-40, 40, (num_rows, 1), generator=seed).float())
    return (torch.randn(num_rows, width, generator=seed) * scale).to(torch.bfloat16)


@st.composite
def keys(draw: Any, *, num_rows: int, width: int, special: int) -> Tensor:
    """bf16 keys with special values in some of the first ``special`` columns."""
    values = random_keys(generator(draw), num_rows, width)
    if num_rows and special:
        bits = values.view(torch.int16)
        for row in draw(st.lists(st.integers(0, num_rows - 1), max_size=4)):
            pattern = draw(st.sampled_from(SPECIAL_BITS))
            bits[row, draw(st.integers(0, special - 1))] = pattern - (pattern & 0x8000) * 2
    return values


def random_bytes(seed: torch.Generator, *shape: int) -> Tensor:
    """A cache full of garbage."""
    return torch.randint(0, 256, shape, generator=seed, dtype=torch.uint8)


@st.composite
def slots(draw: Any, *, num_tokens: int, num_slots: int) -> Tensor:
    """Distinct slots, some of which do not exist."""
    order = torch.randperm(max(num_slots, num_tokens), generator=generator(draw))[:num_tokens]
    if num_tokens:
        for token in draw(st.lists(st.integers(0, num_tokens - 1), max_size=4)):
            order[token] = draw(st.sampled_from((*ADVERSARIAL_SLOTS, num_slots, num_slots + 7)))
    return order


@st.composite
def requests(draw: Any, *, num_blocks: int, min_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """seq_lens, gather_lens and block_table over a cache of ``num_blocks`` blocks."""
    from dsv4_ops.testing.strategies.batches import ADVERSARIAL_BLOCKS, batches

    batch = draw(batches(min_size=min_size, adversarial=False))
    table = batch.block_table % max(num_blocks, 1)
    seq_lens = batch.seq_lens.clone()
    num_reqs = seq_lens.shape[0]
    gather = [draw(st.sampled_from((0, 1, 2, 5, 9, int(length)))) for length in seq_lens]
    gather_lens = i32(gather).reshape(num_reqs)
    if table.numel():
        for entry in draw(st.lists(st.integers(0, table.numel() - 1), max_size=4)):
            table.view(-1)[entry] = draw(st.sampled_from((*ADVERSARIAL_BLOCKS, num_blocks)))
    if num_reqs:
        for lens in (seq_lens, gather_lens):
            for request in draw(st.lists(st.integers(0, num_reqs - 1), max_size=1)):
                lens[request] = draw(st.sampled_from((-1, -(2**31), 2**31 - 1, 7)))
    return seq_lens, gather_lens, table
