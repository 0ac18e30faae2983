"""What the test files share: tensors from lists, exact comparison, layouts and random batches."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracles import batch as oracles

NIGHTLY = os.environ.get("DSV4_OPS_NIGHTLY") == "1"
"""Of `make test-all`: more draws, and tests marked nightly."""
SMOKE = os.environ.get("DSV4_OPS_SMOKE") == "1"
"""Of `make smoke`: few tests run, so that they show what others show in `make test`."""

INT32_MIN = -(2**31)
INT32_MAX = 2**31 - 1
HUGE_POSITION = 2**40
LAST_POSITION = INT32_MAX - 1  # seq_lens is int32: no request has a token behind this one
LATE_POSITIONS = (INT32_MAX, 2**31, 2**32 + 3, HUGE_POSITION, 2**63 - 1)
BAD_REQUESTS = (-1, -5, 10**9, INT32_MAX, INT32_MIN)
BAD_POSITIONS = (-1, -4, -128, -HUGE_POSITION, *LATE_POSITIONS)

Result = Tensor | Sequence[Tensor]


def i32(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def i64(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rows32(rows: Sequence[Sequence[int]], columns: int) -> Tensor:
    """An int32 matrix whose width is known even if it has no rows."""
    return i32(list(rows)).reshape(len(rows), columns)


def strided(tensor: Tensor) -> Tensor:
    """The same values in a view that is not contiguous, with junk between them."""
    if tensor.dim() == 1:
        base = torch.full((tensor.shape[0] + 1, 3), 77, dtype=tensor.dtype)
        base[1:, 1] = tensor
        return base[1:, 1]
    rows, columns = tensor.shape
    base = torch.full((columns + 1, rows + 2), 77, dtype=tensor.dtype)
    base[:columns, 1 : rows + 1] = tensor.t()
    return base[:columns, 1 : rows + 1].t()


def widened(table: Tensor) -> Tensor:
    """The same table as a column slice of a wider one: row stride larger than the width."""
    rows, columns = table.shape
    base = torch.full((rows, columns + 3), 77, dtype=table.dtype)
    base[:, 1 : columns + 1] = table
    return base[:, 1 : columns + 1]


def call(op: Callable[..., Any], *tensors: Tensor, **settings: int) -> Any:
    """Run an op and make sure that it left its inputs alone."""
    before = [tensor.clone() for tensor in tensors]
    result = op(*tensors, **settings)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor, copy), "the op modified an input"
    return result


def assert_exact(actual: Result, expected: Result, note: str = "") -> None:
    """Same number of tensors, same dtype, shape and values."""
    if isinstance(expected, Tensor):
        actual, expected = [actual], [expected]
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert isinstance(got, Tensor)
        text = f"{note}\n{got=}\n{want=}"
        assert (got.dtype, got.shape) == (want.dtype, want.shape), text
        assert torch.equal(got, want), text


def check_stream(pairs: Iterable[tuple[Result, Result]]) -> None:
    """Compare every pair, and the one before it again: two results never share memory."""
    previous: tuple[Result, Result] | None = None
    for number, (actual, expected) in enumerate(pairs):
        assert_exact(actual, expected, f"batch {number}")
        if previous is not None:
            assert_exact(*previous, f"batch {number - 1}, after batch {number}")
        previous = actual, expected
    assert previous is not None


@dataclass
class Batch:
    """One step: lists for the oracle; the token columns carry a few adversarial values."""

    query_start_loc: list[int]
    seq_lens: list[int]
    num_tokens: int
    req_indices: list[int]
    positions: list[int]
    slot_mapping: list[int]
    block_table: list[list[int]]
    columns: int
    block_size: int
    compress_ratio: int
    window_size: int

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)

    def qsl(self, layout: Random) -> Tensor:
        return maybe_strided(layout, i32(self.query_start_loc))

    def seq(self, layout: Random) -> Tensor:
        return maybe_strided(layout, i32(self.seq_lens))

    def req(self, layout: Random) -> Tensor:
        return maybe_strided(layout, i32(self.req_indices))

    def pos(self, layout: Random) -> Tensor:
        return maybe_strided(layout, i64(self.positions))

    def slots(self, layout: Random) -> Tensor:
        return maybe_strided(layout, i64(self.slot_mapping))

    def table(self, layout: Random) -> Tensor:
        table = rows32(self.block_table, self.columns)
        return maybe_strided(layout, widened(table) if layout.random() < 0.3 else table)


def maybe_strided(layout: Random, tensor: Tensor) -> Tensor:
    return strided(tensor) if layout.random() < 0.3 else tensor


def around(rng: Random, *marks: int) -> int:
    """A length at, just below or just above one of the marks, never negative."""
    return max(rng.choice(marks) + rng.choice((-1, 0, 0, 1)), 0)


def random_batch(seed: int) -> Batch:
    rng = Random(seed)
    block_size = rng.choice((1, 2, 3, 4, 8, 64))
    ratio = rng.choice((1, 1, 2, 3, 4, 4, 128))
    window = rng.choice((1, 2, 3, 5, 8, 17))
    columns = rng.choice((0, 1, 2, 3, 4, 6, 12, 40))
    marks = (0, 1, ratio, 2 * ratio, min(block_size * ratio, 300), window)
    num_reqs = rng.choice((0, 1, 1, 2, 3, 4, 6))
    starts = [rng.choice((0, 0, 0, 2))]
    seq_lens = []
    for _ in range(num_reqs):
        query = rng.choice((0, 0, 1, 1, 2, 3, 5, min(around(rng, *marks), 20)))
        starts.append(starts[-1] + query)
        seq_lens.append(random_seq_len(rng, query, marks))
    if rng.random() < 0.3:
        padding = rng.randrange(1, 3)
        starts += [starts[-1]] * padding
        seq_lens += [0] * padding
    num_tokens = max(starts[-1] + rng.choice((0, 0, 0, 1, 4, -1, -3)), 0)
    req_indices, positions = oracles.token_map(starts, seq_lens, num_tokens=num_tokens)
    for token in range(num_tokens):
        if rng.random() < 0.08:
            req_indices[token] = rng.choice((*BAD_REQUESTS, len(seq_lens)))
        if rng.random() < 0.08:
            positions[token] = rng.choice((*BAD_POSITIONS, LAST_POSITION, 127, 511))
    return Batch(
        query_start_loc=starts,
        seq_lens=seq_lens,
        num_tokens=num_tokens,
        req_indices=req_indices,
        positions=positions,
        slot_mapping=[
            rng.choice((-1, -9, 0, 1, 2, 3, 63, 64, 2**31, 2**40)) for _ in range(num_tokens)
        ],
        block_table=[[random_page(rng, block_size) for _ in range(columns)] for _ in seq_lens],
        columns=columns,
        block_size=block_size,
        compress_ratio=ratio,
        window_size=window,
    )


def random_seq_len(rng: Random, query: int, marks: Sequence[int]) -> int:
    kind = rng.random()
    if kind < 0.80:
        return query + around(rng, *marks) + rng.choice((0, 0, marks[2]))
    if kind < 0.90:
        return max(query - rng.choice((1, 2, query)), 0)
    return rng.choice((0, -1, -7, INT32_MIN, INT32_MAX, 70_000))


def random_page(rng: Random, block_size: int) -> int:
    if rng.random() < 0.8:
        return rng.choice((0, 1, *[rng.randrange(1000)] * 6))
    limit = 2**31 // block_size
    return rng.choice((-1, -6, INT32_MIN, INT32_MAX, 50_000_000, limit - 1, min(limit, INT32_MAX)))


class Called(TorchDispatchMode):
    """Names of our ops, in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "dsv4_ops":
            self.names.append(op._opname)
        return op(*args, **(kwargs or {}))
