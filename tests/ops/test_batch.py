"""The batch ops: defaults, and starts that decrease. testing/cases/batch.py has hand numbers."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from tests.helpers import INT32_MAX, INT32_MIN, NIGHTLY, call, i32, maybe_strided

SEEDS = range(300)

# query_start_loc decreases: the request of a token is undefined, but must be in range
UNORDERED = {
    "falling": [5, 3, 1], "falling to zero": [9, 6, 3, 0], "one step back": [0, 4, 2, 6],
    "zigzag": [0, 9, 1, 8, 2, 7, 3], "end before start": [6, 6, 6, 0],
    "back to zero": [0, 3, 0], "below zero": [3, -2, 8, -9], "starts below zero": [-5, -7, 4],
    "only negative": [-3, -1, -2], "greatest first": [INT32_MAX, INT32_MIN, 0],
    "extremes in turn": [INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN],
    "one request that ends before it starts": [4, 0],
    "one request at the extremes": [INT32_MAX, INT32_MIN],
}  # fmt: skip


def test_split_is_not_uniform_by_default() -> None:
    result = ops.split_decodes_and_prefills(i32([0, 1, 3]), decode_threshold=2)
    assert result.tolist() == [2, 0, 3, 0]


def test_compress_ratio_is_one_by_default() -> None:
    starts, seq_lens = i32([0, 2]), i32([9])
    assert ops.flatten_decode(starts, seq_lens, num_tokens=2).seq_lens.tolist() == [8, 9]
    assert ops.mtp_seq_lens(starts, seq_lens, next_n=2).tolist() == [[8, 9]]


def check_unordered(
    map_tokens: Callable[..., Any], flatten: Callable[..., Any], starts: Tensor, seq_lens: Tensor
) -> None:
    num_reqs, num_tokens = seq_lens.shape[0], 12
    mapped = call(map_tokens, starts, seq_lens, num_tokens=num_tokens)
    flat = call(flatten, starts, seq_lens, num_tokens=num_tokens, compress_ratio=4)
    for requests in (mapped.req_indices, flat.req_indices):
        assert (requests.dtype, requests.shape) == (torch.int32, (num_tokens,))
        assert all(-1 <= request < num_reqs for request in requests.tolist()), requests
    assert (mapped.positions.dtype, mapped.positions.shape) == (torch.int64, (num_tokens,))
    assert all(position >= -1 for position in mapped.positions.tolist()), mapped
    assert torch.equal(mapped.req_indices == -1, mapped.positions == -1), mapped
    assert (flat.seq_lens.dtype, flat.seq_lens.shape) == (torch.int32, (num_tokens,))
    assert all(0 <= length <= 2**29 - 1 for length in flat.seq_lens.tolist()), flat
    assert flat.seq_lens[flat.req_indices == -1].tolist() == [0] * flat.req_indices.eq(-1).sum()


def unordered_batches() -> Iterator[tuple[Tensor, Tensor]]:
    lengths = (INT32_MIN, -1, 0, 1, 7, 10**6, INT32_MAX)
    for starts in UNORDERED.values():
        for length in lengths:
            yield i32(starts), i32([length] * (len(starts) - 1))
    for seed in SEEDS:
        rng = Random(seed)
        entries = (INT32_MIN, INT32_MAX, 12, 13, *range(-3, 12))
        starts = [rng.choice(entries) for _ in range(rng.randrange(2, 20))]
        seq_lens = i32([rng.choice(lengths) for _ in starts[1:]])
        yield maybe_strided(rng, i32(starts)), maybe_strided(rng, seq_lens)


def test_unordered_starts_stay_in_range() -> None:
    for starts, seq_lens in unordered_batches():
        check_unordered(ops.token_map, ops.flatten_decode, starts, seq_lens)


@pytest.mark.slow
def test_unordered_starts_stay_in_range_when_compiled() -> None:
    """Compiled code does not check bounds, so here a wrong index would read unrelated memory."""
    map_tokens = torch.compile(ops.token_map, fullgraph=True, dynamic=True)
    flatten = torch.compile(ops.flatten_decode, fullgraph=True, dynamic=True)
    for starts, seq_lens in unordered_batches():
        if NIGHTLY or len(seq_lens) > 1:  # a batch of one request has a graph of its own
            check_unordered(map_tokens, flatten, starts.contiguous(), seq_lens.contiguous())
