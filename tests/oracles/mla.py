"""Sparse attention once more, slowly, in Python floats: what the spec says and nothing clever.

A cache of the layout "v4_fp8" is the bytes of its blocks, a plain one the floats of its rows. The
keys that a token attends to are finite. The oracle itself uses no tensors; below it are random
calls for it to answer.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core.layout import MainLayout, PlainLayout
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import equal
from tests.helpers import BAD_REQUESTS, INT32_MAX, INT32_MIN, i32, i64
from tests.oracles.kv import Row, Rows
from tests.oracles.rope import value_of

BF16, F32 = torch.bfloat16, torch.float32
KINDS = {"fp8": ("v4_fp8", BF16, 512), "bf16": ("plain", BF16, 24), "fp32": ("plain", F32, 24)}
LENS = (-1, INT32_MIN, 0, 1, 2, 3, 5, 6, 7, 10**6, INT32_MAX)

Values = Sequence[float]
Pages = Rows | Sequence[Sequence[Values]]


class Attended(NamedTuple):
    """One head of one token.

    ``sizes`` are the sums of absolute weighted values, and ``terms`` is the largest sum of absolute
    terms of a logit: what the errors of the output and of the logits are measured in.
    """

    out: list[float]
    lse: float
    row_max: float
    sizes: list[float]
    terms: float


def code_value(code: int) -> float:
    """An e4m3fn number."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


CODES = [code_value(code) for code in range(256)]


def main_row(page: Row, row: int, block_size: int) -> list[float]:
    """448 codes, 64 bf16; 7 scales behind the data of all rows."""
    data = page[576 * row : 576 * (row + 1)]
    first = 576 * block_size + 8 * row
    scales = [2.0 ** (byte - 127) for byte in page[first : first + 7]]
    codes = [CODES[code] * scales[dim // 64] for dim, code in enumerate(data[:448])]
    words = [data[place] | data[place + 1] << 8 for place in range(448, 576, 2)]
    return codes + [value_of(word) for word in words]


def read(cache: Pages, page: int, row: int, block_size: int, layout: str) -> Values:
    assert 0 <= page < len(cache)
    if layout == "plain":
        assert len(cache[page]) == block_size
        return cache[page][row]
    return main_row(list(cache[page]), row, block_size)


def listed(
    cache: Pages, indices: Sequence[int], length: int, block_size: int, layout: str
) -> Iterator[Values]:
    """The rows of the first ``length`` slots, but for slots that do not exist."""
    for slot in list(indices)[: max(length, 0)]:
        if 0 <= slot < len(cache) * block_size:
            yield read(cache, slot // block_size, slot % block_size, block_size, layout)


def walked(
    cache: Pages, table: Rows, request: int, length: int, block_size: int, layout: str
) -> Iterator[Values]:
    """The first ``length`` rows of a request, but for those on no block."""
    if not 0 <= request < len(table):
        return
    for place in range(min(length, len(table[request]) * block_size)):
        page = table[request][place // block_size]
        if 0 <= page < len(cache):
            yield read(cache, page, place % block_size, block_size, layout)


def attend(q: Values, keys: Sequence[Values], sink: float | None, scale: float) -> Attended:
    if not keys:
        nothing = [0.0] * len(q)
        return Attended(nothing, -math.inf, -math.inf, nothing, 0.0)
    products = [[a * b for a, b in zip(q, key, strict=True)] for key in keys]
    logits = [scale * math.fsum(terms) for terms in products]
    terms = abs(scale) * max(math.fsum(map(abs, each)) for each in products)
    row_max = max(logits)
    total = math.fsum(math.exp(logit - row_max) for logit in logits)
    lse = row_max + math.log(total)
    if sink == math.inf:
        factor = 0.0
    elif sink is None or sink == -math.inf:
        factor = 1 / total
    else:
        highest = max(row_max, sink)
        rescaled = math.exp(row_max - highest)
        factor = rescaled / (total * rescaled + math.exp(sink - highest))
    weights = [math.exp(logit - row_max) * factor for logit in logits]
    parts = [
        [w * value for w, value in zip(weights, dim, strict=True)]
        for dim in zip(*keys, strict=True)
    ]
    return Attended(
        [math.fsum(part) for part in parts],
        lse,
        row_max,
        [math.fsum(map(abs, part)) for part in parts],
        terms,
    )


def attended(
    q: Sequence[Sequence[Values]],
    keys: Sequence[Sequence[Values]],
    attn_sink: Values | None,
    scale: float,
) -> list[list[Attended]]:
    """Every head of every token over the token's keys."""
    return [
        [
            attend(head, rows, None if attn_sink is None else attn_sink[place], scale)
            for place, head in enumerate(heads)
        ]
        for heads, rows in zip(q, keys, strict=True)
    ]


def sparse_mla_decode(
    q: Sequence[Sequence[Values]],
    swa_cache: Pages,
    swa_indices: Rows,
    swa_lens: Sequence[int],
    extra_cache: Pages | None = None,
    extra_indices: Rows | None = None,
    extra_lens: Sequence[int] | None = None,
    attn_sink: Values | None = None,
    *,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int = 1,
    layout: str = "v4_fp8",
) -> list[list[Attended]]:
    keys = []
    for token, indices in enumerate(swa_indices):
        rows = list(listed(swa_cache, indices, swa_lens[token], swa_block_size, layout))
        if extra_cache is not None and extra_indices is not None and extra_lens is not None:
            more = extra_indices[token], extra_lens[token]
            rows += listed(extra_cache, *more, extra_block_size, layout)
        keys.append(rows)
    return attended(q, keys, attn_sink, softmax_scale)


def sparse_mla_decode_paged(
    q: Sequence[Sequence[Values]],
    swa_cache: Pages,
    swa_indices: Rows,
    swa_lens: Sequence[int],
    extra_cache: Pages,
    extra_lens: Sequence[int],
    req_indices: Sequence[int],
    extra_block_table: Rows,
    attn_sink: Values | None = None,
    *,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int,
    layout: str = "v4_fp8",
) -> list[list[Attended]]:
    keys = []
    for token, indices in enumerate(swa_indices):
        rows = list(listed(swa_cache, indices, swa_lens[token], swa_block_size, layout))
        where = req_indices[token], extra_lens[token]
        rows += walked(extra_cache, extra_block_table, *where, extra_block_size, layout)
        keys.append(rows)
    return attended(q, keys, attn_sink, softmax_scale)


def sparse_mla_gathered(
    q: Sequence[Sequence[Values]],
    kv: Sequence[Values],
    indices: Rows,
    lens: Sequence[int],
    attn_sink: Values | None = None,
    *,
    softmax_scale: float,
) -> list[list[Attended]]:
    pages = [[row] for row in kv]
    keys = [
        list(listed(pages, rows, length, 1, "plain"))
        for rows, length in zip(indices, lens, strict=True)
    ]
    return attended(q, keys, attn_sink, softmax_scale)


def used_bytes(cache: Tensor, slots: list[int], block_size: int) -> Tensor:
    """Which bytes hold a value of a row: its data and 7 of its 8 scale bytes."""
    used = torch.zeros(cache.shape, dtype=torch.bool)
    for slot in slots:
        page, row = divmod(slot, block_size)
        used[page, 576 * row : 576 * (row + 1)] = True
        first = 576 * block_size + 8 * row
        used[page, first : first + 7] = True
    return used


def cache_of(rows: Tensor, slots: list[int], blocks: int, size: int, layout: str, fill: int = 0xFF):
    """Rows in their slots; every other byte is ``fill``, which is NaN."""
    if layout == "plain":
        cache = PlainLayout(size, rows.shape[1], rows.dtype).allocate(blocks)
        cache.fill_(math.nan if fill else 0)
        cache.flatten(0, 1)[slots] = rows
        return cache
    cache = MainLayout(size).allocate(blocks)
    ops.quantize_and_insert_k_cache(rows, cache, i64(slots), block_size=size)
    return torch.where(used_bytes(cache, slots, size), cache, fill).to(torch.uint8)


@dataclass
class Call:
    """Arguments of an op by name, and the rows of the window's cache that are not NaN."""

    tensors: dict[str, Tensor | None]
    settings: dict[str, Any]
    slots: list[int]
    op: str = "sparse_mla_decode"
    zeros: dict[str, Tensor] = field(default_factory=dict)  # the caches with 0 where they have NaN

    def but(self, **changed: Any) -> "Call":
        tensors, settings = dict(self.tensors), dict(self.settings)
        for name, value in changed.items():
            (tensors if name in tensors else settings)[name] = value
        return replace(self, tensors=tensors, settings=settings)

    def without_extra(self) -> "Call":
        return self.but(extra_cache=None, extra_indices=None, extra_lens=None)

    def run(self) -> Any:
        before = {name: t.clone() for name, t in self.tensors.items() if t is not None}
        result = getattr(ops, self.op)(**self.tensors, **self.settings)
        for name, copy in before.items():
            assert equal(self.tensors[name], copy), f"{name} was written to"
        return result

    def expected(self) -> list[list[Attended]]:
        oracle = {
            "sparse_mla_decode": sparse_mla_decode,
            "sparse_mla_gathered": sparse_mla_gathered,
        }
        oracle["sparse_mla_decode_paged"] = sparse_mla_decode_paged
        lists = {name: as_list(value) for name, value in self.tensors.items()}
        return oracle[self.op](**lists, **self.settings)

    def case(self) -> Case:
        """What the contract takes: tensors in order, every setting."""
        order = inspect.signature(getattr(ops, self.op)).parameters
        tensors = tuple(self.tensors[name] for name in order if name in self.tensors)
        splits = {} if self.op == "sparse_mla_gathered" else {"num_splits": 0}
        splits |= {"batch_invariant": False} if splits else {}
        return Case("called", tensors, {**splits, **self.settings})


def as_list(value: Tensor | None) -> list[Any] | None:
    return None if value is None else value.tolist()


def normal(seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def adversarial_slots(rng: Random, slots: list[int], limit: int, tokens: int, width: int) -> Tensor:
    """Mostly rows that exist, some of them twice."""
    bad = (-1, -2, INT32_MIN, limit, limit + 1, INT32_MAX)
    pick = [rng.choice((rng.choice(bad), *[rng.choice(slots)] * 4)) for _ in range(tokens * width)]
    return i32(pick).reshape(tokens, width)


def random_call(seed: int, kind: str, heads: int | None = None, tokens: int | None = None) -> Call:
    """A small batch with adversarial slots and lengths, over caches full of NaN; half of them have
    an extra cache."""
    rng, (layout, dtype, width) = Random(seed), KINDS[kind]
    tokens, heads = tokens or rng.randrange(1, 4), heads or rng.choice((1, 2, 3))
    tensors: dict[str, Tensor | None] = {"q": normal(seed, tokens, heads, width, dtype=dtype)}
    settings = {"softmax_scale": width**-0.5, "layout": layout}
    filled, zeros = [], {}
    for name, size, blocks in (
        ("swa", rng.choice((1, 2, 3)), 3),
        ("extra", rng.choice((1, 2, 64)), 4),
    ):
        limit, columns = size * blocks, rng.choice((1, 2, 5, 6))
        slots = rng.sample(range(limit), min(limit // 2 + 1, 6))
        rows = normal(seed + blocks, len(slots), width, dtype=dtype) * 2.0 ** rng.randrange(-3, 2)
        zeros[f"{name}_cache"] = cache_of(rows, slots, blocks, size, layout, fill=0)
        tensors[f"{name}_cache"] = cache_of(rows, slots, blocks, size, layout)
        tensors[f"{name}_indices"] = adversarial_slots(rng, slots, limit, tokens, columns)
        tensors[f"{name}_lens"] = i32([rng.choice(LENS) for _ in range(tokens)])
        settings[f"{name}_block_size"] = size
        filled.append(slots)
    tensors["attn_sink"] = random_sink(rng, heads)
    call = Call(tensors, settings, filled[0], zeros=zeros)
    return call.without_extra() if rng.random() < 0.5 else call


def random_sink(rng: Random, heads: int) -> Tensor | None:
    special = (math.inf, -math.inf, 0.0, 1e30, -1e30)
    sinks = [rng.choice((*special, rng.gauss(0, 3))) for _ in range(heads)]
    return torch.tensor(sinks) if rng.random() < 0.7 else None


def random_paged(seed: int, kind: str) -> Call:
    """Two requests on blocks of rows that exist, or on blocks that do not, and one on NaN, which no
    token sees."""
    rng, window = Random(seed), random_call(seed, kind)
    layout, dtype, width = KINDS[kind]
    size, blocks, columns = rng.choice((1, 2, 3)), 5, rng.choice((1, 2, 4))
    slots = [page * size + row for page in (1, 3) for row in range(size)]
    rows = normal(seed + 9, len(slots), width, dtype=dtype)
    pages = (1, 3, 1, 3, -1, blocks, INT32_MIN, INT32_MAX)
    table = [[rng.choice(pages) for _ in range(columns)] for _ in range(2)] + [[0] * columns]
    requests = [rng.choice((0, 1, 0, 1, 2, rng.choice(BAD_REQUESTS))) for _ in window.tensors["q"]]
    tensors = dict(window.tensors)
    del tensors["extra_indices"]
    tensors["extra_cache"] = cache_of(rows, slots, blocks, size, layout)
    lens = [0 if request == 2 else rng.choice((*LENS, *range(1, 9))) for request in requests]
    tensors |= {"extra_lens": i32(lens), "req_indices": i32(requests)}
    tensors["extra_block_table"] = i32(table)
    settings = {**window.settings, "extra_block_size": size}
    return Call(tensors, settings, window.slots, "sparse_mla_decode_paged")


def random_gathered(seed: int, dtype: torch.dtype) -> Call:
    """Rows of an unpaged tensor, of which every other one is NaN."""
    rng = Random(seed)
    tokens, heads, width = rng.randrange(1, 4), rng.choice((1, 2, 5)), rng.choice((1, 24, 40))
    kv, slots = normal(seed, 9, width, dtype=dtype), list(range(0, 9, 2))
    kv[1::2] = math.nan
    columns = rng.choice((1, 2, 6))
    tensors = {
        "q": normal(seed + 1, tokens, heads, width, dtype=dtype),
        "kv": kv,
        "indices": adversarial_slots(rng, slots, 9, tokens, columns),
        "lens": i32([rng.choice(LENS) for _ in range(tokens)]),
        "attn_sink": random_sink(rng, heads),
    }
    settings = {"softmax_scale": rng.choice((1.0, 0.25))}
    return Call(tensors, settings, slots, "sparse_mla_gathered")


def column(expected: list[list[Attended]], name: str) -> Tensor:
    return torch.tensor(
        [[getattr(head, name) for head in heads] for heads in expected], dtype=torch.float64
    )


def assert_attended(result: Any, expected: list[list[Attended]], dtype: torch.dtype) -> None:
    """Three roundings of the weighted values, and logits that are float32 sums."""
    out, lse = result[0], result[-1]
    value, logs = column(expected, "out"), column(expected, "lse")
    assert (out.dtype, lse.dtype) == (dtype, F32)
    assert (out.shape, lse.shape) == (value.shape, logs.shape)
    logit_error = (column(expected, "terms") + 1) * 2.0**-20
    budget = column(expected, "sizes") * (
        3 * torch.finfo(dtype).eps / 2 + logit_error[..., None] * 2
    )
    assert bool(((out.double() - value).abs() <= budget + 1e-37).all()), (out, value)
    columns = [(lse, logs)]
    if len(result) == 3:
        columns.append((result[1], column(expected, "row_max")))
    for actual, exact in columns:
        none = exact == -math.inf
        assert torch.equal(actual == -math.inf, none)
        near = (actual.double() - exact).abs() <= logit_error + exact.abs() * 2.0**-22
        assert bool((near | none).all()), (actual, exact)
