"""Sparse MLA for prefill once more in plain Python, from the docstring, and batches for it whose
caches hold NaN in every row, block and padding byte that no token may read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from torch import Tensor

from dsv4_ops.testing.case import Case
from tests.helpers import BAD_POSITIONS, BAD_REQUESTS, INT32_MAX, INT32_MIN, i32, i64, rows32
from tests.oracles.kv import Rows
from tests.oracles.mla import (
    KINDS,
    Attended,
    Call,
    Pages,
    Values,
    as_list as listed,
    attended,
    cache_of,
    normal,
    random_sink as sink_of,
    read,
)

Place = tuple[int, int]


def paged(table: Rows, request: int, rows: Iterable[int], size: int, blocks: int) -> list[Place]:
    """Block and row of the rows of a request, but for those on no block."""
    found = []
    for row in rows:
        if 0 <= row < len(table[request]) * size:
            page = table[request][row // size]
            if 0 <= page < blocks:
                found.append((page, row % size))
    return found


def window_places(
    position: int, request: int, table: Rows, blocks: int, *, window_size: int, block_size: int
) -> list[Place]:
    """The token's own position and the window_size - 1 before it; none of padding."""
    if not (0 <= position < INT32_MAX and 0 <= request < len(table)):
        return []
    first = max(position - window_size + 1, 0)
    return paged(table, request, range(first, position + 1), block_size, blocks)


def compressed_places(
    position: int,
    request: int,
    table: Rows,
    blocks: int,
    chosen: Sequence[int] | None,
    *,
    compress_ratio: int,
    block_size: int,
) -> list[Place]:
    """Rows that exist and that the token may see: of those selected, or all."""
    if not (0 <= position < INT32_MAX and 0 <= request < len(table)):
        return []
    visible = (position + 1) // compress_ratio
    if chosen is None:
        rows: Sequence[int] = range(min(visible, len(table[request]) * block_size))
    else:
        rows = [row for row in chosen if 0 <= row < visible]
    return paged(table, request, rows, block_size, blocks)


def places(lists: dict[str, Any], blocks: dict[str, int], settings: dict[str, Any], token: int):
    """Places in the cache of the window, then in that of the compressed rows."""
    where = lists["positions"][token], lists["req_indices"][token]
    size, extra_size = settings["swa_block_size"], settings["extra_block_size"]
    window = window_places(
        *where,
        lists["swa_block_table"],
        blocks["swa"],
        window_size=settings["window_size"],
        block_size=size,
    )
    if lists["extra_block_table"] is None:
        return window, []
    chosen = None if lists["topk_indices"] is None else lists["topk_indices"][token]
    return window, compressed_places(
        *where,
        lists["extra_block_table"],
        blocks["extra"],
        chosen,
        compress_ratio=settings["compress_ratio"],
        block_size=extra_size,
    )


def sparse_mla_prefill(
    q: Sequence[Sequence[Values]],
    swa_cache: Pages,
    positions: Sequence[int],
    req_indices: Sequence[int],
    swa_block_table: Rows,
    extra_cache: Pages | None = None,
    extra_block_table: Rows | None = None,
    topk_indices: Rows | None = None,
    attn_sink: Values | None = None,
    **settings: Any,
) -> list[list[Attended]]:
    lists = {"positions": positions, "req_indices": req_indices, "topk_indices": topk_indices}
    lists |= {"swa_block_table": swa_block_table, "extra_block_table": extra_block_table}
    blocks = {"swa": len(swa_cache), "extra": len(extra_cache or [])}
    sizes, layout = (settings["swa_block_size"], settings["extra_block_size"]), settings["layout"]
    keys = []
    for token in range(len(q)):
        both = places(lists, blocks, settings, token)
        sources = zip((swa_cache, extra_cache), both, sizes, strict=True)
        keys.append(
            [
                read(cache, page, row, size, layout)
                for cache, found, size in sources
                for page, row in found
            ]
        )
    return attended(q, keys, attn_sink, settings["softmax_scale"])


@dataclass
class Prefill(Call):
    """A call of ``sparse_mla_prefill``."""

    op: str = "sparse_mla_prefill"

    def expected(self) -> list[list[Attended]]:
        lists = {name: listed(value) for name, value in self.tensors.items()}
        return sparse_mla_prefill(**lists, **self.settings)

    def case(self) -> Case:
        return Case("called", tuple(self.tensors.values()), self.settings)

    def tokens(self, chosen: slice | list[int]) -> "Prefill":
        """The same call for some of the tokens."""
        names = ("q", "positions", "req_indices", "topk_indices")
        given = {name: self.tensors[name] for name in names if self.tensors[name] is not None}
        found: Any = self.but(**{name: tensor[chosen] for name, tensor in given.items()})
        return found


def batch(
    rng: Random,
    kind: str,
    requests: Sequence[tuple[int, int]],
    *,
    window: int,
    ratio: int,
    sizes: tuple[int, int],
    rows: str = "selected",
    topk: int = 4,
    padding: int = 1,
    adversarial: float = 0.15,
    heads: int = 2,
) -> Prefill:
    """Requests of (tokens before, tokens of this batch), and behind them padding. Of
    ``adversarial`` of all entries nothing must be read. ``rows``: "selected", "all", or "none"."""
    layout, dtype, width = KINDS[kind]
    positions = [start + token for start, count in requests for token in range(count)]
    owners = [number for number, (_, count) in enumerate(requests) for _ in range(count)]
    for token in range(len(positions)):
        if rng.random() < adversarial / 2:
            positions[token] = rng.choice(BAD_POSITIONS)
        if rng.random() < adversarial / 2:
            owners[token] = rng.choice((*BAD_REQUESTS, len(requests)))
    padding = padding if positions else 1  # a batch of nothing else
    positions, owners = positions + [-1] * padding, owners + [-1] * padding
    longest = max([start + count for start, count in requests], default=0)
    lists: dict[str, Any] = {"positions": positions, "req_indices": owners, "topk_indices": None}
    blocks, columns = {}, {}
    for name, length, size in (
        ("swa", longest, sizes[0]),
        ("extra", longest // ratio, sizes[1]),
    ):
        columns[name] = max(-(-length // size) - (rng.random() < adversarial), 0)
        lists[f"{name}_block_table"], blocks[name] = table_of(
            rng, len(requests), columns[name], adversarial
        )
    if rows == "none":
        lists["extra_block_table"] = None
    elif rows == "selected":
        lists["topk_indices"] = [
            selected(rng, longest // ratio, topk, adversarial) for _ in positions
        ]
    settings = {"softmax_scale": width**-0.5, "window_size": window, "compress_ratio": ratio}
    settings |= {"swa_block_size": sizes[0], "extra_block_size": sizes[1], "layout": layout}
    used: list[set[int]] = [set(), set()]
    for token in range(len(positions)):
        for slots, found, size in zip(
            used, places(lists, blocks, settings, token), sizes, strict=True
        ):
            slots |= {page * size + row for page, row in found}
    tensors: dict[str, Tensor | None] = dict.fromkeys(ORDER)
    tensors["q"] = normal(rng.randrange(2**31), len(positions), heads, width, dtype=dtype)
    zeros = {}
    for name, slots, size in zip(("swa", "extra"), used, sizes, strict=True):
        tables = lists[f"{name}_block_table"]
        if tables is None:
            continue
        keys = normal(rng.randrange(2**31), len(slots), width, dtype=dtype)
        stored = (keys, sorted(slots), blocks[name], size, layout)
        tensors[f"{name}_cache"] = cache_of(*stored)
        zeros[f"{name}_cache"] = cache_of(*stored, fill=0)
        tensors[f"{name}_block_table"] = rows32(tables, columns[name])
    tensors |= {"positions": i64(positions), "req_indices": i32(owners)}
    if lists["topk_indices"] is not None:
        tensors["topk_indices"] = rows32(lists["topk_indices"], topk)
    tensors["attn_sink"] = sink_of(rng, heads)
    return Prefill(tensors, settings, sorted(used[0]), zeros=zeros)


ORDER = (
    "q",
    "swa_cache",
    "positions",
    "req_indices",
    "swa_block_table",
    "extra_cache",
    "extra_block_table",
    "topk_indices",
    "attn_sink",
)


def table_of(
    rng: Random, reqs: int, columns: int, adversarial: float
) -> tuple[list[list[int]], int]:
    """Blocks in random order, some of them none, and how many blocks the cache has."""
    blocks = reqs * columns + 2
    pages = rng.sample(range(blocks), blocks)
    bad = (-1, -2, INT32_MIN, blocks, blocks + 1, INT32_MAX)
    table = [
        [rng.choice(bad) if rng.random() < adversarial else pages.pop() for _ in range(columns)]
        for _ in range(reqs)
    ]
    return table, blocks


def selected(rng: Random, num_rows: int, topk: int, adversarial: float) -> list[int]:
    """Rows that a request has, some twice, in no order; gaps, and rows that it has not."""
    bad = (-1, -1, -7, INT32_MIN, INT32_MAX, num_rows, num_rows + 1)
    return [
        rng.choice(bad) if rng.random() < adversarial or not num_rows else rng.randrange(num_rows)
        for _ in range(topk)
    ]


def random_prefill(seed: int, kind: str, **fixed: Any) -> Prefill:
    """Requests with and without tokens before, some of them without any of this batch."""
    rng = Random(seed)
    sampled: dict[str, Any] = {
        "window": rng.choice((1, 2, 3, 5, 8)),
        "ratio": rng.choice((1, 2, 4, 128)),
        "sizes": (rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3))),
        "rows": rng.choice(("selected", "selected", "all", "none")),
        "topk": rng.choice((1, 3, 6)),
        "padding": rng.choice((0, 1, 2)),
        "adversarial": rng.choice((0.0, 0.15, 0.4)),
    }
    sampled |= fixed
    starts = (0, 0, 1, 3, 7, 8, sampled["window"], 126 if sampled["ratio"] == 128 else 9)
    count = rng.choice((0, 1, 2, 2, 3))
    requests = [(rng.choice(starts), rng.choice((0, 1, 1, 2, 4))) for _ in range(count)]
    return batch(rng, kind, requests, **sampled)
