"""One index matrix for decodes and prefills: window slots, then slots of compressed rows."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from tests.helpers import (
    BAD_POSITIONS,
    BAD_REQUESTS,
    INT32_MAX,
    INT32_MIN,
    LAST_POSITION,
    Result,
    assert_exact,
    call,
    check_stream,
    i32,
    i64,
    maybe_strided,
    random_batch,
    random_page,
    rows32,
    strided,
    widened,
)
from tests.oracles import sparse as oracles_sparse

SEEDS = range(300)

SLOTS = [30, 31, 12, -1]
AWAY = [-1, -1, -1]
FAR = 2**30

# what only this kind takes, position, request and the slots of window and compressed rows
Token = tuple[Any, int, int, tuple[list[int], list[int]] | None]


def decode(
    entries: Any, slots: Any, given: Any = None, *, at: Any = (5, 0), swa=SLOTS, window=SLOTS
) -> Token:
    """As many compressed slots as its lengths counts; no slots for a token that does not exist."""
    return (swa, entries, given), *at, None if slots is None else (window, slots)


def prefill(local: list[int], position: int, request: int, *slots: list[int]) -> Token:
    return local, position, request, slots or None


def case(*tokens: Token, local: bool = False, **settings: Any) -> tuple[list[Token], Any]:
    usual = {"swa_block_size": 4, "compressed_block_size": 2, "window_size": 3}
    tables = {"swa_table": [[7, 3], [2, 5]], "compressed_table": [[10, 11], [12, 13]]}
    more = {"compress_ratio": 4, "topk": 2, "decode_compressed_indices_are_local": local}
    return [*tokens], {**usual, **more, **tables, **settings}


CASES = {
    "decodes and a prefill": case(
        decode([20, -1, 21], [20, -1], 2),
        decode([24, 25, -1], [24, 25, -1], 3, at=(6, 1), swa=[8, -1, 9, 1], window=[8, -1, 9, 1]),
        prefill([1, 0], 7, 1, [21, 22, 23], [25, 24]),
    ),
    "global without lens": case(
        decode([20, -1, 21], [20, -1, 21]),
        decode(AWAY, AWAY, at=(0, 1)),
        prefill([1, 0], 3, 0, [29, 30, 31], [21]),
    ),
    "local": case(
        decode([1, -1, 3], [21, -1, 23]),
        decode([2, 4, -1], [26], at=(0, 1)),
        decode(AWAY, []),
        decode([4, 5, INT32_MAX], []),
        prefill([1, 3], 7, 1, [21, 22, 23], [25, 27]),
        local=True,
    ),
    "local with lens": case(
        decode([1, -1, 3], [21], 1),
        decode([1, -1, 3], [21, -1], 2),
        decode([2, 4, -1], [26, -1, -1], 3, at=(0, 1)),
        decode([2, 1, 0], [], 0),
        decode([2, 1, 0], [], -1),
        decode([2, 1, 0], [22, 21, 20], INT32_MAX),
        local=True,
    ),
    "global with adversarial lens": case(
        decode([20, 21, -1], [20, 21, -1], 4),
        decode([20, 21, -1], [20, 21, -1], INT32_MAX),
        decode([20, 21, -1], [], -1),
        decode([20, 21, -1], [], INT32_MIN),
    ),
    "adversarial slots": case(
        decode([-2], [-1], swa=[INT32_MIN, INT32_MAX, 0, -7], window=[-1, INT32_MAX, 0, -1]),
        decode([INT32_MIN], [-1]),
        decode([INT32_MAX], [INT32_MAX]),
    ),
    "adversarial local rows": case(
        decode([INT32_MIN, 3, -2], [-1, 23]),
        decode([INT32_MAX, 4, 0], [-1, -1, 20]),
        prefill([-1, 3], 7, 0, [13, 14, 15], [-1, 23]),
        prefill([4, 0], 7, 0, [13, 14, 15], [-1, 20]),
        prefill([INT32_MAX, INT32_MIN], 7, 0, [13, 14, 15], [-1, -1]),
        local=True,
    ),
    "one table for both": case(
        decode([1, 3, -1], [15, 7]),
        prefill([1, 0], 7, 1, [21, 22, 23], [5, 4]),
        compressed_table=None,
        local=True,
    ),
    "prefills around window, page and table": case(
        prefill([1, 0], 0, 0, [28], []),
        prefill([1, 0], 2, 0, [28, 29, 30], []),
        prefill([1, 0], 3, 0, [29, 30, 31], [21]),
        prefill([1, 0], 4, 0, [30, 31, 12], [21]),
        prefill([1, 0], 7, 0, [13, 14, 15], [21, 20]),
        prefill([1, 0], 8, 0, [14, 15, -1], [21, 20]),
        prefill([1, 0], 100, 0, AWAY, [21, 20]),
    ),
    "more prefill columns than topk": case(
        prefill([1, 0, 3, 2], 11, 1, AWAY, [25, 24]), prefill([0] * 4, 1, 1, [8, 9], [])
    ),
    "topk wider than the decode columns": case(
        decode([20, 21, 22], [20, 21, 22]),
        prefill([0, 1, 2, 3, 4], 50, 0, AWAY, [20, 21, 22, 23, -1]),
        topk=5,
    ),
    "decode columns wider than topk": case(
        decode([9, 8, 7, 6, 5], [9, 8, 7, 6, 5]), prefill([3], 50, 0, AWAY, [23]), topk=1
    ),
    "no compressed decodes": case(decode(None, []), prefill([1, 0], 7, 1, [21, 22, 23], [25, 24])),
    "compressed decodes of no column": case(
        decode([], [], 3), prefill([1, 0], 7, 1, [21, 22, 23], [25, 24])
    ),
    **{
        f"windows only, {local=}, {entries=}": case(
            decode(entries, []), prefill([], 7, 1, [21, 22, 23], []), topk=0, local=local
        )
        for local in (False, True)
        for entries in (None, [])
    },
    "no topk": case(decode([6], [6]), prefill([1], 7, 1, [21, 22, 23], []), topk=0),
    "more window columns than window": case(
        decode([9], [9], swa=[1, 2, 3, 4, 5, 6, 7, 8], window=[1, 2, 3, 4, 5, 6, 7, 8]),
        prefill([1, 0], 7, 1, [21, 22, 23], [25, 24]),
    ),
    "as many window columns as window": case(
        decode([9], [9]), prefill([1, 0], 7, 1, [20, 21, 22, 23], [25, 24]), window_size=4
    ),
    "tables without columns": case(
        decode([0, 1], []),
        prefill([0, 1], 7, 1, AWAY, [-1, -1]),
        swa_table=[[], []],
        compressed_table=[[], []],
        local=True,
    ),
    "a column past the row is not the next row": case(
        decode([1, 2, 0], [21, -1, 20]),
        prefill([2, 0], 5, 0, [31, -1, -1], [-1]),
        prefill([2, 0], 7, 1, AWAY, [-1, 24]),
        swa_table=[[7], [2]],
        compressed_table=[[10], [12]],
        local=True,
    ),
    # 2^31 / 4 = 536870912 window blocks fit, and 2^31 / 2 = 1073741824 compressed ones
    "pages absent or beyond int32": case(
        decode([0, 3, 1], [-1, 1], at=(5, 1)),
        prefill([0, 2], 7, 0, AWAY, [-1, INT32_MAX - 1]),
        prefill([0, 3], 7, 1, [INT32_MAX - 2, INT32_MAX - 1, INT32_MAX], [-1, 1]),
        prefill([0, 3], 3, 1, AWAY, [-1]),
        swa_table=[[-1, INT32_MIN], [536_870_912, 536_870_911]],
        compressed_table=[[-1, 1_073_741_823], [1_073_741_824, 0]],
        local=True,
    ),
    "spans": case(
        decode([21, -1, 20], [51, -1, 50], swa=[130, 63, 64, -1], window=[148, 63, 73, -1]),
        prefill([1, 3], 65, 0, [574, 219, 220], [51, 56]),
        prefill([1, 3], 65, 1, [209, 365, 366], [61, 66]),
        swa_block_size=64,
        swa_block_span=73,
        compressed_block_span=5,
    ),
    "a span of local rows only": case(
        decode([1, -1, 3], [51, -1, 56]),
        prefill([1, 0], 7, 1, [21, 22, 23], [61, 60]),
        compressed_block_span=5,
        local=True,
    ),
    "the span of a page that fits only in part": case(
        decode([2], [INT32_MAX], swa=[4, 5, 3, -1], window=[INT32_MAX, -1, 3, -1]),
        swa_block_span=INT32_MAX,
        compressed_block_span=INT32_MAX,
    ),
    "spans beyond int32": case(
        decode([1, 2, 4], [1, FAR, -1], 3, swa=[3, 4, 8, 16], window=[3, FAR, -1, -1]),
        decode([8, 3, 3], [-1, FAR + 1], 2, swa=[7, INT32_MAX, 0, -1], window=[FAR + 3, -1, 0, -1]),
        prefill([1, 2], 8, 0, [FAR + 2, FAR + 3, -1], [FAR + 1, -1]),
        swa_table=[[0, 1, 2]],
        compressed_table=[[1, 2]],
        swa_block_span=FAR,
        compressed_block_span=FAR,
    ),
    # the rows exist: what a span makes of them changes no length
    "the span of the last local row beyond int32": case(
        decode([1, 2, -1], [FAR + 1, -1]),
        swa_table=[[0]],
        compressed_table=[[1, 2]],
        compressed_block_span=FAR,
        local=True,
    ),
    "the last position there is": case(
        decode([9], [9], at=(LAST_POSITION, 0)), prefill([1, 0], LAST_POSITION, 0, AWAY, [21, 20])
    ),
    "no such request": case(
        *[decode([1], None, 1, at=(5, request)) for request in (2, *BAD_REQUESTS)],
        *[prefill([1, 0], 5, request) for request in (2, *BAD_REQUESTS)],
        local=True,
    ),
    "no such position": case(
        *[decode([1], None, at=(position, 0)) for position in BAD_POSITIONS],
        *[prefill([1, 0], position, 0) for position in BAD_POSITIONS],
        swa_block_span=9,
    ),
    "no prefill": case(decode([6], [6]), decode([7], [7], at=(0, 1))),
    "no token": case(),
    "no request": case(
        decode([6], None), prefill([1], 7, 0), swa_table=[], compressed_table=[], topk=1
    ),
}

LAYOUTS = {
    "dense": lambda tensor: tensor,
    "strided": strided,
    "widened": lambda tensor: widened(tensor) if tensor.dim() == 2 else strided(tensor),
}


def matrix(rows: Sequence[list[int]] | None, columns: int) -> Tensor | None:
    return None if rows is None else rows32(rows, len(rows[0]) if rows else columns)


def run(tensors: list[Tensor | None], settings: dict[str, Any]) -> Any:
    """The op on tensors of which some may be None; it leaves the others alone."""

    def op(*given: Tensor, **settings: Any) -> Any:
        rest = iter(given)
        every = [None if tensor is None else next(rest) for tensor in tensors]
        return ops.mixed_sparse_indices(*every, **settings)

    return call(op, *(tensor for tensor in tensors if tensor is not None), **settings)


def oracle(tensors: list[Tensor | None], settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    lists = [None if tensor is None else tensor.tolist() for tensor in tensors]
    swa_width = tensors[0].shape[1]
    width = 0 if tensors[1] is None else tensors[1].shape[1]
    columns = -(-max(width, settings["topk"]) // 4) * 4
    indices, lens = oracles_sparse.mixed_sparse_indices(
        *lists, **settings, swa_width=swa_width, compressed_width=width
    )
    return rows32(indices, swa_width + columns), i32(lens)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_mixed_sparse_indices(case: tuple[Any, ...], layout: Any) -> None:
    tokens, settings = case
    settings = {**settings}
    tables = [matrix(settings.pop(name), 2) for name in ("swa_table", "compressed_table")]
    inputs = [token[0] for token in tokens]
    decodes = [given for given in inputs if isinstance(given, tuple)]
    swa, compressed, lens = ([given[i] for given in decodes] for i in range(3))
    tensors = [
        matrix(swa, 4),
        None if None in compressed else matrix(compressed, 3),
        None if None in lens else i32(lens),
        matrix(inputs[len(decodes) :], settings["topk"]),
        i64([token[1] for token in tokens]),
        i32([token[2] for token in tokens]),
        *tables,
    ]
    indices, lens = oracle(tensors, settings)
    width = tensors[0].shape[1]
    for token, row, length in zip(tokens, indices.tolist(), lens.tolist(), strict=True):
        window, slots = token[-1] or ([], [])
        assert length == (len(slots) + width if token[-1] else 0)
        window = window + [-1] * (width - len(window))
        assert row == window + slots + [-1] * (len(row) - width - len(slots))

    result = run([None if tensor is None else layout(tensor) for tensor in tensors], settings)
    assert isinstance(result, ops.TopkIndices)
    assert result.indices.is_contiguous()
    assert_exact(result, (indices, lens))


def random_rows(rng: Random, rows: int, width: int, odd: Sequence[int], end: int) -> Tensor:
    """Ids below ``end``, some of them odd, some rows with a tail of -1."""
    matrix = []
    for _ in range(rows):
        used = rng.choice((width, width, rng.randrange(width + 1)))
        ids = [rng.choice(odd) if rng.random() < 0.25 else rng.randrange(end) for _ in range(used)]
        matrix.append(ids + [-1] * (width - used))
    return rows32(matrix, width)


def random_call(seed: int) -> tuple[list[Tensor | None], dict[str, Any]]:
    batch, rng = random_batch(seed), Random(seed)
    num_decodes = rng.choice((0, batch.num_tokens, rng.randrange(batch.num_tokens + 1)))
    topk, size = rng.choice((0, 1, 2, 5, 16)), rng.choice((1, 2, 3, 8, 64))
    spans = [(None, n, n + 9, n + 2**20, INT32_MAX) for n in (batch.block_size, size)]
    settings = {
        "swa_block_size": batch.block_size,
        "compressed_block_size": size,
        "window_size": batch.window_size,
        "compress_ratio": batch.compress_ratio,
        "topk": topk,
        "decode_compressed_indices_are_local": rng.random() < 0.5,
        "swa_block_span": rng.choice(spans[0]),
        "compressed_block_span": rng.choice(spans[1]),
    }
    columns = rng.choice((0, 1, 2, 5))
    end = columns * size
    odd = (-1, -1, -2, end, end + 1, max(end - 1, 0), size, INT32_MAX, INT32_MIN, 2**30)
    width = rng.choice((0, 1, 3, 4, 6))
    swa_width = -(-batch.window_size // 4) * 4 + rng.choice((0, 0, 4))
    compressed = lens = table = None
    if rng.random() < 0.8:
        compressed = random_rows(rng, num_decodes, width, odd, end + 1)
        if rng.random() < 0.6:
            usual = (*range(width + 2), -1, INT32_MAX, INT32_MIN)
            lens = i32([rng.choice(usual) for _ in range(num_decodes)])
    if rng.random() < 0.7:
        pages = [[random_page(rng, size) for _ in range(columns)] for _ in batch.seq_lens]
        table = rows32(pages, columns)
    width = topk + rng.choice((0, 0, 1, 3))
    tensors = [
        random_rows(rng, num_decodes, swa_width, odd, 5000),
        compressed,
        lens,
        random_rows(rng, batch.num_tokens - num_decodes, width, odd, end + 1),
        batch.pos(rng),
        batch.req(rng),
        batch.table(rng),
        table,
    ]
    return [t if t is None else maybe_strided(rng, t) for t in tensors], settings


def random_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        tensors, settings = random_call(seed)
        yield run(tensors, settings), oracle(tensors, settings)


def test_random_batches() -> None:
    check_stream(random_pairs())


def test_keys_are_those_of_the_global_indices() -> None:
    """A token reads the same slots as a decode, of global or local rows, and as a prefill."""
    compared = 0
    for seed in SEEDS:
        batch, rng = random_batch(seed), Random(seed)
        positions, requests, table = places = batch.pos(rng), batch.req(rng), batch.table(rng)
        width, topk = rng.choice((4, 8)), rng.choice((1, 4, 5))
        size, end = batch.block_size, batch.columns * batch.block_size
        local = random_rows(rng, batch.num_tokens, topk, (-1, end, INT32_MAX), end + 1)
        window = ops.swa_indices_and_lens(*places, block_size=size, window_size=width)
        visible = (positions.clamp(-1, INT32_MAX) + 1) // batch.compress_ratio
        hidden = torch.arange(topk) >= visible[:, None]
        chosen = ops.global_topk_indices_and_lens(
            local.masked_fill(hidden, -1), requests, table, block_size=size
        )
        exists = window.lens > 0
        expected = torch.cat([window.indices, chosen.indices.where(exists[:, None], -1)], 1)
        lens = (~hidden).sum(1, dtype=torch.int32)
        split, is_local = rng.randrange(batch.num_tokens + 1), rng.random() < 0.5
        result = ops.mixed_sparse_indices(
            window.indices[:split],
            (local if is_local else chosen.indices)[:split],
            lens[:split],
            local[split:],
            *places,
            None,
            swa_block_size=size,
            compressed_block_size=size,
            window_size=width,
            compress_ratio=batch.compress_ratio,
            topk=topk,
            decode_compressed_indices_are_local=is_local,
        )
        assert_exact(result.indices[:, : width + topk], expected)
        assert (result.indices[:, width + topk :] == -1).all()
        assert_exact(result.lens, torch.where(exists, lens + width, 0))
        compared += int((expected >= 0).sum())
    assert compared > 1000
