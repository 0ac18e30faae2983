"""FlashMLA's tile scheduler metadata. Numbers by hand, a walk over the parts, fakes, graphs and
exports: tests/ops/test_contract.py; against FlashMLA's own: tests/gpu/test_providers.py."""

import pytest
import torch

import dsv4_ops as ops


@pytest.mark.parametrize("num_tokens", [1, 150, 2000])
def test_blocks_are_shared_without_gaps(num_tokens):
    """Every block of every token is in exactly one part, and splits are as many as parts that have
    some of a token's."""
    sampled = torch.Generator().manual_seed(num_tokens)
    lens = torch.randint(0, 8193, (num_tokens,), generator=sampled).int()
    made = ops.flash_mla_metadata(lens, swa_width=8192, num_sm_parts=132)
    counts = ((lens + 63) // 64).clamp(min=1).tolist()
    splits = made[132:].flatten()[: num_tokens + 1].diff().tolist()
    seen: list[list[tuple[int, int]]] = [[] for _ in counts]
    for first, last, begin, end, before, *_ in made[:132].tolist():
        for token in range(first, last + 1):
            stop = end if token == last else counts[token]
            assert len(seen[token]) == (before if token == first else 0)
            seen[token].append((begin if token == first else 0, stop))
    for ranges, count, split in zip(seen, counts, splits, strict=True):
        assert [stop for _, stop in ranges][-1] == count
        assert [begin for begin, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert len(ranges) == split
