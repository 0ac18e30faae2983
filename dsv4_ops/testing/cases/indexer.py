"""Cases and strategies of the lightning indexer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import IndexerLayout, PlainLayout
from dsv4_ops.testing.case import Case, Exact, OpTesting, i32, i64
from dsv4_ops.testing.float64.indexer import Scores, paged_scores
from dsv4_ops.testing.float64.rope import positions, tables
from dsv4_ops.testing.strategies.caches import heads, insertions, random_bytes, requests
from dsv4_ops.testing.strategies.draw import Draw
from dsv4_ops.testing.strategies.indexer_batches import codes, paged_calls, query

_TAG = IndexerLayout.tag
_PAGES_OF_1 = {"block_size": 1, "layout": _TAG}


def worked_page() -> list[int]:
    """Return a block of one row: 3, -0.3, 0.01 and zeros, with the scale 2^-7."""
    return [0x7C, 0xE2, 0x3A] + [0] * 125 + [0, 0, 0x00, 0x3C] + [0] * 444


def _insert_cases() -> list[Case]:
    k = torch.zeros(1, 128, dtype=torch.bfloat16)
    k[0, :3] = torch.tensor([3.0, -0.3, 0.01])
    empty = torch.zeros(2, 576, dtype=torch.uint8)
    return [
        Case("worked row", (k, empty, i64([1])), _PAGES_OF_1, ([[0] * 576, worked_page()],)),
        Case("no slot", (k, empty + 7, i64([-3])), _PAGES_OF_1, ([[7] * 576] * 2,)),
        Case("no token", (k[:0], empty + 7, i64([])), _PAGES_OF_1, ([[7] * 576] * 2,)),
    ]


quantize_and_insert_indexer_k = OpTesting(
    cases=_insert_cases,
    settings=tuple({"block_size": size, "layout": _TAG} for size in (64, 1, 3)),
    make=insertions(IndexerLayout, IndexerLayout.code_dim),
)


def _gather_cases() -> list[Case]:
    cache = torch.tensor([[0xFF] * 576, worked_page()], dtype=torch.uint8)
    codes, nothing = worked_page()[:128], [0] * 128
    six, one = ({**_PAGES_OF_1, "num_rows": count} for count in (6, 1))
    two = (cache, i32([0, 1, 4]), i32([[1, 0, 0], [-1, 1, 2]]))
    gathered = [codes, nothing, codes, *[nothing] * 3], [2.0**-7, 0.0, 2.0**-7, *[0.0] * 3]
    none = (cache, i32([0]), i32([]).reshape(0, 3))
    return [
        Case("two requests, spare capacity", two, six, gathered),
        Case("no request", none, one, ([nothing], [0.0])),
        *(
            _many_requests(f"{count} requests of a key", cache, [1] * count)
            for count in (31, 32, 33)
        ),
        _many_requests("a key for two requests of three", cache, [0, 1, 1] * 30),
        _many_requests("few keys of many requests", cache, ([0] * 99 + [1, 0]) * 20),
        *(
            Case(name, (cache, i32(starts), i32(table)), {**_PAGES_OF_1, "num_rows": 4})
            for name, starts, table in (
                ("the first request starts later", [2, 4], [[1, 1]]),
                ("the first request started before", [-3, 2], [[1, 0, 1, 1, 1]]),
                ("all before, all behind", [-5, -2, 0, 5, 9], [[1] * 5] * 4),
                ("starts at the end of int32", [0, 2**31 - 1, 2**31 - 1], [[1, 1], [1, 1]]),
                ("positions beyond int32", [-(2**31), 2, 4], [[1, 1], [1, 1]]),
                ("pages past the end", [0, 4], [[2, 1, 2**31 - 1, -(2**31)]]),
                ("no column", [0, 2], [[]]),
            )
        ),
    ]


def _many_requests(name: str, cache: Tensor, lens: list[int]) -> Case:
    """Make a call with blocks of one row. Only requests with odd numbers have a block."""
    starts = [sum(lens[:place]) for place in range(len(lens) + 1)]
    table = [[place % 2 or -1] for place in range(len(lens))]
    flags = [place % 2 for place, length in enumerate(lens) if length] + [0, 0]
    codes = [worked_page()[:128] if flag else [0] * 128 for flag in flags]
    return Case(
        name,
        (cache, i32(starts), i32(table)),
        {**_PAGES_OF_1, "num_rows": len(flags)},
        (codes, [0.0078125 * flag for flag in flags]),
    )


def _gather_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_blocks = max(draw.one_of(0, 1, 2, 3, 8), min_size)
    page_bytes = IndexerLayout(settings["block_size"]).page_bytes
    cache = random_bytes(draw.generator(), num_blocks, page_bytes)
    _, lens, table = requests(draw, num_blocks=num_blocks, min_size=min_size)
    start = torch.tensor([draw.one_of(0, 0, 2)])
    cu_seq_lens = torch.cat([start, lens.clamp(0, 90)]).cumsum(0).to(torch.int32)
    num_rows = max(draw.one_of(0, 1, 7, 40, 150), min_size)
    return Case("sampled", (cache, cu_seq_lens, table), {**settings, "num_rows": num_rows})


gather_indexer_k = OpTesting(
    cases=_gather_cases,
    settings=tuple({"block_size": size, "layout": _TAG} for size in (64, 1, 3)),
    make=_gather_call,
)


_LENS = (0, 1, 255, 256, 257, 1000, 4096, 262144, 2**31 - 1, -1, -(2**31))


def _cases() -> list[Case]:
    def case(name: str, num_sms: int, lens: list[int], *starts: list[int]) -> Case:
        settings = {"block_size": 64, "num_sms": num_sms}
        return Case(name, (i32(lens),), settings, ([*starts],) if starts else None)

    return [
        # the lengths make 4, 2, 0 and 3 splits of 256 keys, so SMs get runs of 3, 2, 2 and 2
        case("worked example", 4, [1000, 300, 0, 600], [0, 0], [0, 3], [1, 1], [3, 1], [4, 0]),
        # the lengths make 0, 0, 1, 0, 1 and 0 splits, and no run begins at a length without keys
        case("fewer splits than SMs", 4, [0, -9, 1, 0, 256, 0], [2, 0], [4, 0], *[[6, 0]] * 3),
        case("no keys", 4, [0, 0, -1], *[[3, 0]] * 5),
        case("no request", 4, [], *[[0, 0]] * 5),
        case("one SM", 1, [257, 1], [0, 0], [2, 0]),
        # 3 * 2^23 splits: each SM gets 6291456, and each length makes 2^23 = 8388608
        case(
            "longest", 4, [2**31 - 1] * 3, [0, 0], [0, 6291456], [1, 4194304], [2, 2097152], [3, 0]
        ),
        case("beyond 32 bits", 132, [2**31 - 1] * 600),
    ]


def _call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    size = max(draw.one_of(3, 0, 1, 2, 7, 33, 150), min_size)
    lens = [draw.one_of(*_LENS) for _ in range(size)]
    return Case("sampled", (i32(lens),), settings)


paged_mqa_logits_metadata = OpTesting(
    cases=_cases,
    settings=(
        {"block_size": 64, "num_sms": 132},
        {"block_size": 64, "num_sms": 5},
        {"block_size": 32, "num_sms": 1},
    ),
    make=_call,
)


ONE = 0x38
"""The e4m3 code of 1."""

TAG, PLAIN = IndexerLayout.tag, PlainLayout.tag


def _quantize_cases() -> list[Case]:
    q = torch.full((2, 1, 128), 3.0, dtype=torch.bfloat16)
    q[:, :, 126], q[:, :, 127] = 1.0, 2.0
    quarter = torch.tensor([[0.0, 1.0]])  # rotates the last pair by a quarter turn
    weights = torch.tensor([[1.0], [-2.0]])
    # with the scale 2^-7, the code of 3 is 384, and the codes of (1, 2) are (128, 256), or (-256,
    # 128) after the rotation
    rows = [[[384.0] * 126 + pair] for pair in ([-256.0, 128.0], [128.0, 256.0])]
    case = partial(Case, settings={"softmax_scale": 0.5})
    nothing = torch.zeros(1, 2, 128, dtype=torch.bfloat16)
    ones = torch.ones(1, 2, dtype=torch.bfloat16)
    first = torch.full((1, 1, 128), 3.0, dtype=torch.bfloat16)
    first[..., 0], first[..., 1] = 1.0, 2.0
    # values 0 and 2 rotate by a quarter turn, 1 and 3 by half a turn
    turns, halves = torch.tensor([[0.0, -1.0, 1.0, 0.0]]), [-384.0, -256.0, 128.0, -384.0]
    return [
        Case(
            "the first values, as halves",
            (first, weights[:1], i64([0]), turns),
            {"softmax_scale": 0.5, "rope_first": True, "interleaved": False},
            ([[halves + [384.0] * 124]], [[0.00390625]]),
        ),
        case(
            "a quarter turn, and no such position",
            (q, weights, i64([0, 1]), quarter),
            expected=(rows, [[0.00390625], [-0.0078125]]),
        ),
        case(
            "zeros have the smallest scale",
            (nothing, ones, i64([-1]), quarter),
            expected=([[[0.0] * 128] * 2], [[2.0**-23] * 2]),
        ),
        case("no token", (q[:0], weights[:0], i64([]), quarter), expected=([], [])),
        case("no head", (q[:, :0], weights[:, :0], i64([0, 1]), quarter), expected=([[], []],) * 2),
        case("no pair", (q, weights, i64([0, 1]), quarter[:, :0])),
    ]


def _quantize_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5), min_size)
    num_heads = 4 if min_size else draw.one_of(1, 3, 4, 17)
    rope_dim = 64 if min_size else draw.one_of(64, 128, 2, 0)
    table = tables(draw, rope_dim=rope_dim, min_size=min_size)
    q = heads(draw, num_tokens, num_heads, 128)
    weights = torch.randn(num_tokens, num_heads, generator=draw.generator())
    if min_size or draw.flag():
        weights = weights.to(torch.bfloat16)
    places = positions(draw, num_tokens=num_tokens, num_positions=table.shape[0])
    return Case("sampled", (q, weights, places, table), settings)


indexer_quantize_q = OpTesting(
    cases=_quantize_cases,
    settings=(
        {"softmax_scale": 128**-0.5 / 4},
        {"softmax_scale": 128**-0.5 / 8, "rope_first": True, "interleaved": False},
        {"softmax_scale": 128**-0.5 / 8, "rope_first": True},
    ),
    make=_quantize_call,
)


def tiny_query(num_tokens: int) -> tuple[Tensor, Tensor]:
    """Make queries with a head of ones and a head of minus ones, and the head weights 0.5 and 2.

    A key of ones scores 64, and a key of minus ones scores 256.
    """
    q = torch.ones(num_tokens, 2, 128)
    q[:, 1] = -1
    return q.to(torch.float8_e4m3fn), torch.tensor([[0.5, 2.0]]).repeat(num_tokens, 1)


def tiny_cache() -> Tensor:
    """Make two blocks of two keys: ones and minus ones (scale 2); NaN and ones (scale 4)."""
    cache = torch.zeros(IndexerLayout(2).shape(2), dtype=torch.uint8)
    cache[0, :128], cache[0, 128:256] = ONE, ONE | 0x80
    cache[1, :128], cache[1, 128:256] = 0x7F, ONE
    for page, scales in enumerate(([1.0, 2.0], [1.0, 4.0])):
        cache[page, 256:264] = torch.tensor(scales).view(torch.uint8)
    return cache


def _tiny_case(
    settings: dict[str, Any],
    name: str,
    places: Tensor,
    requests: list[int],
    table: Tensor,
    *rows: list[Any],
    **changed: Any,
) -> Case:
    """Make a call over the tiny cache, with a query for each of ``places``, which are lengths or
    positions."""
    tensors = (*tiny_query(len(requests)), tiny_cache(), places, i32(requests), table)
    return Case(name, tensors, {**settings, **changed}, ([*rows],))


def beyond_int32() -> tuple[Tensor, ...]:
    """Make tensors for ``indexer_select``, with blocks of 64 rows at the limit of int32 slots.

    The table has the last block whose slots fit into int32, the next block, and the first block.
    """
    cache, last = IndexerLayout(64).allocate(1).expand(2**26, -1), 2**31 // 64 - 1
    table = i32([[last, last + 1, 0]])
    return (*tiny_query(2), cache, i64([191, 79]), i32([0, 0]), table)


def with_layouts(cases: list[Case]) -> list[Case]:
    """Return cases over the tiny cache, then over plain caches of the same keys."""
    plain_cases = [
        Case(c.name, c.tensors, {**c.settings, "layout": TAG}, c.expected) for c in cases
    ]
    for dtype in (torch.float32, torch.bfloat16):
        keys = torch.tensor([[1.0, -2.0], [torch.nan, 4.0]], dtype=dtype)
        cache = keys[:, :, None].repeat(1, 1, 128)
        for case in cases:
            q, weights, _, *rest = case.tensors
            assert q is not None
            tensors = (q.to(dtype), weights, cache, *rest)
            settings = {**case.settings, "layout": PLAIN}
            plain_cases.append(
                Case(f"plain {dtype}: {case.name}", tensors, settings, case.expected)
            )
    return plain_cases


def _logits_cases() -> list[Case]:
    case = partial(_tiny_case, {"block_size": 2, "num_rows": 3})
    table, row, absent = i32([[1, 0], [0, 9]]), [64.0, 512.0, -torch.inf], [-torch.inf] * 3
    lens, requests = i32([3, 4, 2, -5, 9]), [1, 1, 2, 0, -1]
    rows, unread = (row, row, *[absent] * 3), i32([[0, 1]])
    cases = [
        case("pages and requests that do not exist", lens, requests, table, *rows),
        case("behind an unread NaN", i32([2, 4]), [0, 0], unread, *[row[:2]] * 2, num_rows=2),
        case("no token", i32([]), [], table),
        case("no column", i32([2]), [0], table, [], num_rows=0),
        case("no page in the table", i32([2]), [0], i32([[]]), absent),
    ]
    return with_layouts(cases)


def _logits_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    paged = paged_calls(draw, settings=settings, min_size=min_size)
    lens = (paged.positions.clamp(-2, 2**20) + 1).to(torch.int32)
    draw.spoil(lens, (0, -1, -(2**31), 2**31 - 1), 2)
    num_rows = max(draw.one_of(0, 1, 5, 40, 130), min_size)
    tensors = (paged.q, paged.weights, paged.cache, lens, paged.req_indices, paged.table)
    return Case("sampled", tensors, {**settings, "num_rows": num_rows})


def _precise_logits(*tensors: Tensor, **settings: Any) -> tuple[Exact]:
    q, weights, k_cache, lens, requests, table = tensors
    rows = (q, weights, k_cache, lens.reshape(-1), requests, table)
    return (paged_scores(*rows, **settings).exact(),)


indexer_logits = OpTesting(
    cases=_logits_cases,
    settings=(
        *({"block_size": size, "layout": TAG} for size in (64, 2, 3)),
        *({"block_size": size, "layout": PLAIN} for size in (64, 3)),
    ),
    make=_logits_call,
    precise=_precise_logits,
)


def _ragged_cases() -> list[Case]:
    k = torch.stack([torch.full((128,), code, dtype=torch.uint8) for code in (ONE, 0xB8, 0x7F)])
    scales = torch.tensor([1.0, 2.0, torch.inf])
    inf = torch.inf
    starts, stops = i32([0, 1, -7, 2, 2**31 - 1]), i32([1, 2, 2, 1, 2**31 - 1])
    rows = [[64.0, -inf, -inf], [-inf, 512.0, -inf], [64.0, 512.0, -inf], *[[-inf] * 3] * 2]
    return [
        Case("spans", (*tiny_query(5), k, scales, starts, stops), {}, (rows,)),
        Case("no key", (*tiny_query(5), k[:0], scales[:0], starts, stops), {}, ([[]] * 5,)),
        Case("no token", (*tiny_query(0), k, scales, starts[:0], stops[:0]), {}, ([],)),
    ]


def _ragged_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    exact, seed = draw.flag(), draw.generator()
    num_tokens = max(draw.one_of(3, 0, 1, 2, 9, 18), min_size)
    num_k = max(draw.one_of(7, 0, 1, 2, 40, 130), min_size)
    q, weights = query(seed, num_tokens, 16 if min_size else draw.one_of(1, 3, 16), exact)
    scales = torch.exp2(torch.randint(-3, 3, (num_k,), generator=seed).float())
    bounds = torch.randint(-2, num_k + 3, (2, num_tokens), generator=seed, dtype=torch.int32)
    start, stop = bounds.sort(0).values if draw.flag() else bounds
    keys = codes(seed, (num_k, 128), exact)
    return Case("sampled", (q, weights, keys, scales, start.clone(), stop.clone()), settings)


def _precise_ragged(
    q: Tensor, weights: Tensor, k: Tensor, scales: Tensor, row_start: Tensor, row_stop: Tensor
) -> tuple[Exact]:
    row = torch.arange(k.shape[0], device=q.device)
    inside = (row >= row_start[:, None]) & (row < row_stop[:, None])
    keys = k.view(torch.float8_e4m3fn).to(torch.float64).expand(q.shape[0], -1, -1)
    return (Scores.of(q, weights, keys, scales.expand(q.shape[0], -1), inside).exact(),)


indexer_logits_ragged = OpTesting(
    cases=_ragged_cases, settings=({},), make=_ragged_call, precise=_precise_ragged
)


_SPECIAL = (torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38)


def _topk_cases() -> list[Case]:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [
            [1.0, 3.0, 2.0, 2.0, 2.0, 9.0],
            [-0.0, 0.0, -1.0, 0.0, nan, nan],
            [nan, -inf, -3e38, nan, inf, nan],
            [5.0] * 6,
            [5.0] * 6,
            [-1e-45, 1e-45, -1e-45, 0.0, -0.0, 7.0],
        ]
    )
    lens = i32([5, 6, 5, 2**31 - 1, -3, 6])
    rows = [[1, 2, 3], [0, 1, 3], [0, 2, 4], [0, 1, 2], [-1, -1, -1], [1, 3, 5]]
    three = {"topk": 3}
    return [
        Case("ties, NaN, zeros and infinities", (logits, lens), three, (rows,)),
        Case(
            "fewer candidates than topk",
            (logits[:3], i32([2, 1, 2])),
            three,
            ([[0, 1, -1], [0, -1, -1], [0, -1, -1]],),
        ),
        Case("no column", (logits[:2, :0], lens[:2]), three, ([[-1] * 3] * 2,)),
        Case("no row", (logits[:0], lens[:0]), three, ([],)),
    ]


def _topk_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    seed = draw.generator()
    num_tokens = max(draw.one_of(3, 0, 1, 2, 6), min_size)
    num_rows = max(draw.one_of(40, 0, 1, 2, 7, 130, 600), min_size)
    logits = torch.randn(num_tokens, num_rows, generator=seed)
    if draw.flag():
        logits = (logits * 2).round()
    draw.spoil(logits, _SPECIAL, 6)
    near = draw.st.sampled_from(
        (0, 1, settings["topk"], settings["topk"] + 1, num_rows, -1, 2**31 - 1)
    )
    lens = i32([draw(near) for _ in range(num_tokens)])
    return Case("sampled", (logits, lens), settings)


indexer_topk = OpTesting(
    cases=_topk_cases,
    settings=({"topk": 5}, {"topk": 1}, {"topk": 128}, {"topk": 512}),
    make=_topk_call,
)


def _select_cases() -> list[Case]:
    case = partial(_tiny_case, {"block_size": 2, "compress_ratio": 4, "topk": 2})
    absent, table = [-1, -1], i32([[0, 1], [1, 9], [0, 0]])
    positions = i64([2, 11, 15, 31, 15, 2**31 - 1, 15, 15, -1, -4])
    every = (positions, [0, 0, 0, 1, 2, 2, 3, -1, 0, 0], table)
    # scores of request 0: 64, 512, NaN, 256
    rows = (absent, [0, 1], [1, 3], [0, 1], [1, 3], *[absent] * 5)
    slots = (absent, [0, 1], [1, 3], [2, 3], [1, 1], *[absent] * 5)
    spare = (i64([11, 3]), [0, 0], i32([[-1, 1]]), [2, -1, -1], [-1] * 3)
    # scores of request 0: NaN, 256 in block 1, 64, 512 in block 0; of request 1: 64, 512
    around = (i64([31, 31, 3]), [0, 1, 0], i32([[1, -1, 2**31 - 1, 0], [-(2**31), 2, 0, -1]]))
    around_rows = ([3, 0, 1], [0, 1, -1], [2, -1, -1])
    headless = case("no head: all scores are equal", i64([15]), [0], table, [0, 1])
    q, weights, *rest = (each for each in headless.tensors if each is not None)
    cases = [
        case("what does not exist, NaN and ties", *every, *rows),
        case("NaN if there is nothing else", i64([7]), [0], i32([[1, 1]]), [0, 1]),
        case("a larger capacity than candidates", *spare, topk=3),
        case("no token", i64([]), [], table),
        case("no page in the table", i64([7]), [0], i32([[]]), absent),
        replace(headless, tensors=(q[:, :0], weights[:, :0], *rest)),
        case("slots of what does not exist, NaN and ties", *every, *slots, slots=True),
        case(
            "slots around blocks that do not exist, and no other row",
            *(*around, *around_rows),
            topk=3,
            slots=True,
        ),
    ]
    return with_layouts(cases)


def _select_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    return Case("sampled", tuple(paged_calls(draw, settings=settings, min_size=min_size)), settings)


def _scores(
    *tensors: Tensor, block_size: int, compress_ratio: int, layout: str, **settings: Any
) -> Scores:
    q, weights, k_cache, positions, req_indices, block_table = tensors
    positions = positions.reshape(-1)
    real = (positions >= 0) & (positions < 2**31 - 1)
    lens = torch.where(real, (positions.clamp(-1, 2**31) + 1) // compress_ratio, 0)
    num_rows = block_table.shape[1] * block_size
    return paged_scores(
        q, weights, k_cache, lens, req_indices, block_table, block_size, num_rows, layout
    )


def _ranked(scores: Tensor) -> Tensor:
    """Replace NaN with -inf, so that NaN ranks below every number."""
    return torch.where(scores.isnan(), -torch.inf, scores)


def _rows_of(
    slots: Tensor, candidate: Tensor, req_indices: Tensor, block_table: Tensor, block_size: int
) -> Tensor:
    """Return the row of each slot. Search the rows after the row of the previous slot, and return
    num_rows if no such row has the slot."""
    num_rows, rows = candidate.shape[1], []
    row = torch.arange(num_rows, device=slots.device)
    pages = block_table[req_indices.clamp(0, len(block_table) - 1)][:, row // block_size].long()
    slot_of_row = torch.where(candidate, pages * block_size + row % block_size, -1)
    for chosen, slots_of_token in zip(slots.tolist(), slot_of_row.tolist(), strict=True):
        remaining = iter(enumerate(slots_of_token))
        rows.append(
            [
                slot if slot < 0 else next((row for row, has in remaining if has == slot), num_rows)
                for slot in chosen
            ]
        )
    return slots.new_tensor(rows).view(slots.shape)


def _decode_selection(case: Case, outcome: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the indices if scores are exact.

    Otherwise return the selected scores in descending order, and whether each selected index is
    valid: rounding may swap the indices of two close scores.
    """
    tensors = [tensor for tensor in case.tensors if tensor is not None]
    oracle, indices = _scores(*tensors, **case.settings), outcome[0].long()
    if oracle.is_exact:
        return tuple(outcome)
    if case.settings.get("slots") and bool(oracle.candidate.any()):
        requests, table = tensors[4:]
        indices = _rows_of(indices, oracle.candidate, requests, table, case.settings["block_size"])
    exists = indices >= 0
    if oracle.value.shape[1] == 0:
        return torch.zeros(indices.shape, dtype=torch.float64, device=indices.device), outcome[0]
    place = indices.clamp(0, oracle.value.shape[1] - 1)
    chosen = torch.where(exists, _ranked(oracle.value).gather(1, place), -torch.inf)
    behind = torch.cat([exists.new_zeros(len(exists), 1), indices[:, 1:] <= indices[:, :-1]], 1)
    wrong = (behind | ~oracle.candidate.gather(1, place) | (place != indices)) & exists
    return chosen.sort(1, descending=True).values, exists.int() + 2 * wrong


def _precise_selection(*tensors: Tensor, **settings: Any) -> tuple[Exact | None, ...]:
    oracle = _scores(*tensors, **settings)
    if oracle.is_exact:
        return (None,)
    num_tokens, num_rows = oracle.value.shape
    topk = settings["topk"]
    if num_rows == 0:
        nothing = oracle.value.new_zeros((num_tokens, topk))
        return Exact(nothing, nothing), None
    padding = oracle.value.new_full((num_tokens, topk), -torch.inf)
    value = torch.cat([_ranked(oracle.value), padding], 1).sort(1, descending=True).values[:, :topk]
    exact = oracle.exact()
    magnitude = exact.magnitude.amax(1, keepdim=True)
    return Exact(value, magnitude, exact.unit), None


indexer_select = OpTesting(
    cases=_select_cases,
    settings=tuple(
        {
            "block_size": size,
            "compress_ratio": ratio,
            "topk": topk,
            "layout": layout,
            "slots": slots,
        }
        for layout, size, ratio, topk, slots in (
            (TAG, 64, 4, 16, False),
            (TAG, 64, 4, 16, True),
            (TAG, 2, 4, 3, False),
            (TAG, 3, 1, 20, True),
            (TAG, 64, 1, 128, True),
            (TAG, 64, 128, 512, False),
            (PLAIN, 64, 4, 16, True),
            (PLAIN, 3, 1, 20, False),
        )
    ),
    make=_select_call,
    precise=_precise_selection,
    decode=_decode_selection,
)
