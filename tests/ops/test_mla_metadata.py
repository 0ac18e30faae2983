"""FlashMLA's tile scheduler metadata against a walk over the parts. Numbers by hand, fakes, graphs
and exports: tests/ops/test_contract.py; against FlashMLA's own: tests/gpu/test_providers.py."""

import pytest
import torch
from hypothesis import given, strategies as st

import dsv4_ops as ops
from tests.helpers import INT32_MAX, INT32_MIN, call, i32
from tests.oracles import plan as oracle

LENS = (0, 1, 63, 64, 65, 127, 128, 129, 512, 640, 8192, INT32_MAX, -1, INT32_MIN)


@given(
    st.lists(st.tuples(st.sampled_from(LENS), st.sampled_from(LENS)), max_size=70),
    st.sampled_from((1, 64, 100, 128)),
    st.sampled_from((0, 37, 512, 8192)),
    st.sampled_from((1, 2, 3, 7, 66, 132)),
)
def test_every_part_takes_what_it_has_time_for(lens, swa_width, extra_width, num_sm_parts):
    swa = [window for window, _ in lens]
    extra = [rows for _, rows in lens] if extra_width else None
    sizes = {"swa_width": swa_width, "extra_width": extra_width, "num_sm_parts": num_sm_parts}
    tensors = [i32(swa)] if extra is None else [i32(swa), i32(extra)]
    made = call(ops.flash_mla_metadata, *tensors, **sizes)
    assert made.tolist() == oracle.flash_mla_metadata(swa, extra, **sizes)


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
