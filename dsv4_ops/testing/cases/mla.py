"""Cases and strategies of dense MLA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import MlaDsFp8Layout, MlaFp8Layout, PlainLayout, mla_layout
from dsv4_ops.reference import mla as reference
from dsv4_ops.reference.sparse_mla import sparse_mla_plan
from dsv4_ops.testing.case import Case, OpTesting, i32, i64
from dsv4_ops.testing.float64.mla import (
    decode_keys,
    exact_absorbed,
    exact_expanded,
    exact_mla_decode,
    exact_mla_sparse,
    exact_v_up,
)
from dsv4_ops.testing.strategies.caches import (
    ADVERSARIAL_SLOTS,
    keys,
    plain_cache,
    random_bytes,
    random_keys,
    slots,
)
from dsv4_ops.testing.strategies.draw import Draw

PLAIN, FP8, DS_FP8 = PlainLayout.tag, MlaFp8Layout.tag, MlaDsFp8Layout.tag
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_SCALES = (0.5, 1.0, 0.0371, 1e-30, 448.0)


def _rows(size: int, layout: str, scale_format: str = "float32") -> dict[str, Any]:
    return {"block_size": size, "layout": layout, "scale_format": scale_format}


def scale_of(value: float) -> Tensor:
    """Make a per-tensor scale."""
    return torch.tensor([value], dtype=torch.float32)


def worked_codes() -> tuple[list[float], list[int]]:
    """Return values, and their codes with a scale of 0.5."""
    values = [1.0, -3.3, 1000.0, 1e-4, 0.01, math.nan, -math.inf, 0.0]
    return values, [0x40, 0xCD, 0x7E, 0x00, 0x0A, 0x7F, 0xFE, 0x00]


def worked_tile(scale_format: str) -> list[int]:
    """Return the 656-byte row of latents 3, -0.3, 0.01 and zeros, and of RoPE values 1 and -2."""
    power = scale_format == "ue8m0"
    codes = [0x7C, 0xE2, 0x3A] if power else [0x7E, 0xE3, 0x3C]
    first = [0x00, 0x00, 0x00, 0x3C] if power else [0xB7, 0x6D, 0xDB, 0x3B]  # 2^-7, 3 / 448
    least = [0x00, 0x00, 0x00, 0x39] if power else [0x00, 0x00, 0x80, 0x00]  # 2^-13, 2^-126
    rope = [0x80, 0x3F] + [0] * 124 + [0x00, 0xC0]
    return codes + [0] * 509 + first + least * 3 + rope


def _worked_latent() -> tuple[Tensor, Tensor]:
    kv_c, k_pe = torch.zeros(1, 512), torch.zeros(1, 64)
    kv_c[0, :3] = torch.tensor([3.0, -0.3, 0.01])
    k_pe[0, 0], k_pe[0, 63] = 1.0, -2.0
    return kv_c, k_pe


def _insert_cases() -> list[Case]:
    kv_c, k_pe = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0], [6.0]])
    cache = torch.full((2, 2, 3), 9.0)
    nines, plain = [9.0] * 3, _rows(2, PLAIN)
    written = ([[nines, nines], [nines, [1.0, 2.0, 5.0]]],)
    values, codes = worked_codes()
    eight = torch.tensor([values])
    bytes_of = torch.full((1, 2, 16), 7, dtype=torch.uint8)
    tiled = torch.zeros(2, 1, 656, dtype=torch.uint8)
    tile = _worked_latent()
    none = torch.zeros(1, 512, dtype=torch.float16), torch.zeros(1, 64, dtype=torch.float16)
    return [
        Case("plain fp32", (kv_c, k_pe, cache, i64([3, -1])), plain, written),
        Case(
            "plain fp16, more rows than slots",
            (kv_c.half(), k_pe.half(), cache.half(), i64([3])),
            plain,
            written,
        ),
        Case("plain, no such slot", (kv_c, k_pe, cache, i64([4, -1])), plain, (cache.tolist(),)),
        Case("plain, no block", (kv_c, k_pe, cache[:0], i64([0, 1])), plain, ([],)),
        Case(
            "codes over one scale",
            (eight, eight, bytes_of, i64([1]), scale_of(0.5)),
            _rows(2, FP8),
            ([[[7] * 16, codes * 2]],),
        ),
        Case(
            "codes without a scale",
            (torch.tensor([[448.0, -1.0]]).repeat(1, 4), eight[:, :8] * 0 + 2, bytes_of, i64([0])),
            _rows(2, FP8),
            ([[[0x7E, 0xB8] * 4 + [0x40] * 5 + [0x7F, 0x7F, 0x40], [7] * 16]],),
        ),
        *(
            Case(
                f"tiles, scales {form}",
                (*tile, tiled, i64([1])),
                _rows(1, DS_FP8, form),
                ([[[0] * 656], [worked_tile(form)]],),
            )
            for form in ("float32", "ue8m0")
        ),
        Case(
            "tiles of zeros in fp16",
            (*none, tiled, i64([0])),
            _rows(1, DS_FP8),
            ([[[0] * 512 + [0, 0, 0x80, 0] * 4 + [0] * 128], [[0] * 656]],),
        ),
        Case(
            "no token",
            (*(each[:0] for each in tile), tiled, i64([])),
            _rows(1, DS_FP8),
            (tiled.tolist(),),
        ),
    ]


def _parts(layout: str) -> tuple[int, int]:
    return (512, 64) if layout == DS_FP8 else (24, 8)


def _cache(
    seed: torch.Generator, num_blocks: int, size: int, layout: str, dtype: torch.dtype
) -> Tensor:
    """Sample a cache with random values or bytes in all rows."""
    width = sum(_parts(layout))
    if layout == PLAIN:
        return plain_cache(seed, num_blocks, size, width).to(dtype)
    return random_bytes(seed, num_blocks, size, mla_layout(layout, size, width).row_bytes)


def _insert_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5, 9), min_size)
    num_blocks = max(draw.one_of(3, 0, 1, 2, 8), min_size)
    num_rows = num_tokens + draw.one_of(0, 0, 1, 4)
    layout, size = settings["layout"], settings["block_size"]
    rank, rope = _parts(layout)
    dtype = _DTYPES[0] if min_size else draw.one_of(*_DTYPES)
    kv_c = keys(draw, num_rows=num_rows, width=rank, special=rank).to(dtype)
    k_pe = keys(draw, num_rows=num_rows, width=rope, special=rope).to(dtype)
    cache = _cache(draw.generator(), num_blocks, size, layout, dtype)
    order = slots(draw, num_tokens=num_tokens, num_slots=num_blocks * size)
    scale = scale_of(draw.one_of(*_SCALES)) if layout == FP8 else None
    return Case("sampled", (kv_c, k_pe, cache, order, scale), settings)


mla_insert_kv = OpTesting(
    cases=_insert_cases,
    settings=(_rows(64, DS_FP8), _rows(2, DS_FP8, "ue8m0"), _rows(64, FP8), _rows(3, PLAIN)),
    make=_insert_call,
)


def _read(size: int, layout: str) -> dict[str, Any]:
    return {"block_size": size, "layout": layout}


def _tiles() -> Tensor:
    row = torch.tensor(worked_tile("float32"), dtype=torch.uint8)
    return torch.stack([torch.full_like(row, 0xFF), row]).view(2, 1, 656)


def _tile_values() -> list[float]:
    latent = [3.0, -0.294921875, 0.01007080078125] + [0.0] * 509
    return latent + [1.0] + [0.0] * 62 + [-2.0]


def _gather_cases() -> list[Case]:
    rows = torch.arange(12.0).view(2, 2, 3)
    plain, zeros = _read(2, PLAIN), [0.0] * 3
    gathered = ([[6.0, 7.0, 8.0], zeros, [0.0, 1.0, 2.0], zeros],)
    codes = torch.tensor([[[0x40, 0xCD, 0x7E, 0x0A] * 4]], dtype=torch.uint8)
    slots = i64([2, -1, 0, 4])
    one = _read(1, FP8)
    return [
        Case("plain fp32", (rows, slots), plain, gathered),
        Case("plain fp16", (rows.half(), slots), plain, gathered),
        Case("plain, no block", (rows[:0], slots), plain, ([zeros] * 4,)),
        Case(
            "codes",
            (codes, i64([0, 1]), scale_of(0.5)),
            one,
            ([[1.0, -3.25, 224.0, 0.009765625] * 4, [0.0] * 16],),
        ),
        Case(
            "codes without a scale", (codes, i64([0])), one, ([[2.0, -6.5, 448.0, 0.01953125] * 4],)
        ),
        Case(
            "absent rows of no finite scale",
            (codes, i64([-1]), scale_of(math.inf)),
            one,
            ([[0.0] * 16],),
        ),
        Case("tiles", (_tiles(), i64([1, 2])), _read(1, DS_FP8), ([_tile_values(), [0.0] * 576],)),
        Case("no row", (_tiles(), i64([])), _read(1, DS_FP8), ([],)),
    ]


def _slots(draw: Draw, min_size: int, count: int) -> Tensor:
    """Sample slots in any order. Some slots are repeated, and some are invalid."""
    num_rows = max(draw.one_of(5, 0, 1, 2, 17), min_size)
    slots = torch.randint(0, max(count, 1), (num_rows,), generator=draw.generator())
    draw.spoil(slots, (*ADVERSARIAL_SLOTS, count, count + 7), 4)
    return slots


def _gather_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_blocks = max(draw.one_of(3, 0, 1, 2, 8), min_size)
    layout, size = settings["layout"], settings["block_size"]
    dtype = _DTYPES[0] if min_size else draw.one_of(*_DTYPES)
    cache = _cache(draw.generator(), num_blocks, size, layout, dtype)
    scale = scale_of(draw.one_of(*_SCALES)) if layout == FP8 else None
    return Case("sampled", (cache, _slots(draw, min_size, num_blocks * size), scale), settings)


mla_gather_kv = OpTesting(
    cases=_gather_cases,
    settings=(_read(64, DS_FP8), _read(2, FP8), _read(64, PLAIN), _read(3, PLAIN)),
    make=_gather_call,
)


def _codes_cases() -> list[Case]:
    tiles = _tiles()
    return [
        Case(
            "tiles",
            (tiles, i64([1, 2, -1, 0])),
            _read(1, DS_FP8),
            ([worked_tile("float32"), [0] * 656, [0] * 656, [0xFF] * 656],),
        ),
        Case("no block", (tiles[:0], i64([0])), _read(1, DS_FP8), ([[0] * 656],)),
    ]


def _codes_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    case = _gather_call(draw, settings, min_size)
    return Case("sampled", case.tensors[:2], settings)


mla_gather_codes = OpTesting(
    cases=_codes_cases, settings=(_read(64, FP8), _read(2, DS_FP8)), make=_codes_call
)


def _dequantize_cases() -> list[Case]:
    codes = torch.tensor([[0x40, 0xCD, 0x7E, 0x0A]], dtype=torch.uint8)
    tiles = _tiles().view(2, 656)
    return [
        Case(
            "codes", (codes, scale_of(0.5)), {"layout": FP8}, ([[1.0, -3.25, 224.0, 0.009765625]],)
        ),
        Case(
            "codes without a scale", (codes,), {"layout": FP8}, ([[2.0, -6.5, 448.0, 0.01953125]],)
        ),
        Case("tiles", (tiles[1:],), {"layout": DS_FP8}, ([_tile_values()],)),
        Case("bytes of an absent row", (tiles[1:] * 0,), {"layout": DS_FP8}, ([[0.0] * 576],)),
        Case("no row", (tiles[:0],), {"layout": DS_FP8}, ([],)),
    ]


def _dequantize_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_rows = max(draw.one_of(5, 0, 1, 2, 17), min_size)
    codes = _cache(draw.generator(), num_rows, 1, settings["layout"], torch.uint8).flatten(1)
    scale = scale_of(draw.one_of(*_SCALES)) if settings["layout"] == FP8 else None
    return Case("sampled", (codes, scale), settings)


mla_dequantize_rows = OpTesting(
    cases=_dequantize_cases, settings=({"layout": DS_FP8}, {"layout": FP8}), make=_dequantize_call
)


def _absorb_cases() -> list[Case]:
    q_nope, q_pe = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0]]])
    w_uk_t = torch.tensor([[[2.0, 0.0], [1.0, -1.0]]])
    half = tuple(each.half() for each in (q_nope, q_pe, w_uk_t))
    eye = torch.eye(2)[None]
    shown = torch.tensor([[[0.75, -3.0]]]), torch.tensor([[[100.0, 0.11]]])
    return [
        Case("worked", (q_nope, q_pe, w_uk_t), {}, ([[[4.0, -2.0, 3.0]]],)),
        Case("worked in fp16", half, {}, ([[[4.0, -2.0, 3.0]]],)),
        Case("codes", (*shown, eye, scale_of(0.1)), {}, ([[[7.5, -30.0, 448.0, 1.125]]],)),
        Case("no token", (q_nope[:0], q_pe[:0], w_uk_t), {}, ([],)),
        Case("no token, codes", (q_nope[:0], q_pe[:0], w_uk_t, scale_of(1.0)), {}),
    ]


def _sizes(draw: Draw, min_size: int) -> tuple[torch.Generator, torch.dtype, int, int]:
    """Sample the seed, the dtype, and the numbers of tokens and heads of a product."""
    num_tokens = max(draw.one_of(3, 0, 1, 2, 7), min_size)
    num_heads = 5 if min_size else draw.one_of(1, 2, 5, 16)
    dtype = _DTYPES[0] if min_size else draw.one_of(*_DTYPES)
    return draw.generator(), dtype, num_tokens, num_heads


def _normal(seed: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=seed).to(dtype)


def _absorb_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    seed, dtype, num_tokens, num_heads = _sizes(draw, min_size)
    nope, rope, rank = (16, 8, 32) if min_size else draw.one_of((16, 8, 32), (3, 2, 5))
    q = _normal(seed, dtype, num_tokens, num_heads, nope + rope)
    w_uk_t = _normal(seed, dtype, num_heads, nope, rank)
    is_coded = min_size or draw.flag()
    scale = scale_of(draw.one_of(0.1, 1.0, 0.0037)) if is_coded else None
    q_nope, q_pe = (each.contiguous() for each in q.split([nope, rope], -1))
    return Case("sampled", (q_nope, q_pe, w_uk_t, scale), settings)


def _decode_absorbed(case: Case, outcome: Sequence[Tensor]) -> Sequence[Tensor]:
    (q,) = outcome
    return [q.to(torch.float64)] if q.dtype == torch.float8_e4m3fn else [q]


mla_absorb_q = OpTesting(
    cases=_absorb_cases,
    settings=({},),
    make=_absorb_call,
    precise=exact_absorbed,
    decode=_decode_absorbed,
)


def _expand_cases() -> list[Case]:
    """Make calls over two rows, and an unused row of NaN."""
    kv_c = torch.tensor([[1.0, 2.0], [4.0, 0.0], [math.nan, math.nan]])
    w_kv_b = torch.tensor([[[2.0, 0.0], [1.0, -1.0]], [[3.0, 1.0], [0.0, 1.0]]])
    rows = [[[2.0, -1.0], [5.0, 2.0]], [[8.0, 4.0], [12.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]
    none, few = i32([-(2**31)]), i32([2**31 - 1])
    return [
        Case("worked", (kv_c, w_kv_b, i32([2])), {}, (rows,)),
        Case("no row is used", (kv_c, w_kv_b, none), {}, ([rows[2]] * 3,)),
        Case("more than there are", (kv_c[:2], w_kv_b, few), {}, (rows[:2],)),
        Case(
            "in bf16",
            (kv_c.bfloat16(), w_kv_b.bfloat16(), i32([1])),
            {},
            ([rows[0], *[rows[2]] * 2],),
        ),
        Case("no row", (kv_c[:0], w_kv_b, few), {}, ([],)),
    ]


def _expand_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    seed, dtype, num_rows, num_heads = _sizes(draw, min_size)
    rank, width = (32, 16) if min_size else draw.one_of((32, 16), (5, 3), (80, 40))
    kv_c = _normal(seed, dtype, num_rows, rank)
    num_valid: int = draw.integer(-1, num_rows + 1)
    kv_c[max(num_valid, 0) :] = math.nan
    return Case(
        "sampled", (kv_c, _normal(seed, dtype, num_heads, width, rank), i32([num_valid])), settings
    )


mla_expand_kv = OpTesting(
    cases=_expand_cases, settings=({},), make=_expand_call, precise=exact_expanded
)


def _v_up_cases() -> list[Case]:
    x, w_uv = torch.tensor([[[3.25, 0.5]]]), torch.tensor([[[3.0], [1.0]]])
    two = torch.cat([x, x * 2], 1), torch.cat([w_uv, w_uv * 2])
    return [
        Case("worked", (x, w_uv), {}, ([[10.25]],)),
        Case("two heads in bf16", tuple(each.bfloat16() for each in two), {}, ([[10.25, 41.0]],)),
        Case("no token", (x[:0], w_uv), {}, ([],)),
    ]


def _v_up_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    seed, dtype, num_tokens, num_heads = _sizes(draw, min_size)
    rank, width = (32, 16) if min_size else draw.one_of((32, 16), (5, 3))
    x = _normal(seed, dtype, num_tokens, num_heads, rank)
    return Case("sampled", (x, _normal(seed, dtype, num_heads, rank, width)), settings)


mla_v_up = OpTesting(cases=_v_up_cases, settings=({},), make=_v_up_call, precise=exact_v_up)


def _per_tensor_cases() -> list[Case]:
    least = 1.0 / 4.48e12
    return [
        Case(
            "worked",
            (torch.tensor([-2.0, 1.0]),),
            {},
            ([-448.0, 224.0], [float(torch.tensor(1 / 224.0))]),
        ),
        Case("zeros", (torch.zeros(2, 1).half(),), {}, ([[0.0], [0.0]], [float(scale_of(least))])),
        Case("no token", (torch.zeros(0, 3),), {}, ([], [float(scale_of(least))])),
        Case("a row of padding", (torch.tensor([[1.0], [math.nan]]),), {}),
    ]


def _per_tensor_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_rows = max(draw.one_of(5, 0, 1, 2, 17), min_size)
    width = 24 if min_size else draw.one_of(24, 1)
    dtype = _DTYPES[0] if min_size else draw.one_of(*_DTYPES[:2])
    return Case("sampled", (random_keys(draw.generator(), num_rows, width).to(dtype),), settings)


quantize_per_tensor = OpTesting(cases=_per_tensor_cases, settings=({},), make=_per_tensor_call)


def _decode(
    size: int,
    layout: str,
    rank: int = 512,
    scale: float = 0.1352338,
    num_splits: int = 0,
    invariant: bool = False,
) -> dict[str, Any]:
    return {
        "softmax_scale": scale,
        "block_size": size,
        "kv_lora_rank": rank,
        "layout": layout,
        "num_splits": num_splits,
        "batch_invariant": invariant,
    }


def worked_decode() -> tuple[Tensor, ...]:
    """Make a cache with positions 0 to 2 of request 0 in blocks 1 and 3, and queries and tables.

    All other rows are NaN, and request 1 is padding.
    """
    cache = torch.full((4, 2, 2), torch.nan)
    cache[1] = torch.tensor([[1.0, 0.0], [5.0, 1.0]])
    cache[3, 0] = torch.tensor([2.0, 0.0])
    q = torch.tensor([0.0, math.log(3)]).expand(3, 1, 2).contiguous()
    table = i32([[1, 3], [2147480000, -1]])
    return q, cache, i32([2, 3, 0]), i32([0, 0, -1]), table, i32([0, 2, 2])


def _decode_cases() -> list[Case]:
    q, cache, lens, requests, table, starts = worked_decode()
    small = _decode(2, PLAIN, rank=1, scale=1.0)
    zeros = q * 0
    none = ([[[0.0]]], [[-math.inf]])
    one = (zeros[:1], cache)
    codes = torch.full((1, 1, 16), 0x40, dtype=torch.uint8)  # 2
    eight = torch.zeros(1, 1, 16)
    first = (i32([1]), i32([0]), i32([[0]]))
    tiles = torch.tensor(worked_tile("float32"), dtype=torch.uint8).view(1, 1, 656)
    q8 = torch.full((1, 1, 16), 0x30, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 0.5
    latent = _tile_values()[:512]
    return [
        Case("worked", (q, cache, lens, requests, table, starts), small),
        Case(
            "two equal keys: their mean",
            (zeros[:2], cache, i32([2, 1]), i32([0, 0]), table),
            small,
            ([[[3.0]], [[1.0]]], [[float(torch.tensor(2.0).log())], [0.0]]),
        ),
        Case("no row", (*one, i32([0]), i32([0]), table), small, none),
        Case("fewer than no rows", (*one, i32([-(2**31)]), i32([0]), table), small, none),
        Case("no request", (*one, i32([3]), i32([-1]), table), small, none),
        Case("no such request", (*one, i32([3]), i32([2]), table), small, none),
        Case("no such page", (*one, i32([2**31 - 1]), i32([1]), table), small, none),
        Case(
            "past the table",
            (*one, i32([2**31 - 1]), i32([0]), table[:, :1]),
            small,
            ([[[3.0]]], [[float(torch.tensor(2.0).log())]]),
        ),
        Case("no column", (*one, i32([2]), i32([0]), table[:, :0]), small, none),
        Case("no token", (zeros[:0], cache, i32([]), i32([]), table), small, ([], [])),
        Case(
            "codes of 2 with a scale",
            (eight.bfloat16(), codes, *first, None, None, None, scale_of(0.5)),
            _decode(1, FP8, rank=8),
            ([[[1.0] * 8]], [[0.0]]),
        ),
        Case(
            # the logit has 16 products of q = 0.5 * 0.25 and k = 2 * 0.5
            "coded queries",
            (q8, codes, *first, None, None, scale_of(0.25), scale_of(0.5)),
            _decode(1, FP8, rank=8, scale=1.0),
            ([[[1.0] * 8]], [[2.0]]),
        ),
        Case(
            "tiles",
            (torch.zeros(1, 1, 576), tiles, *first),
            _decode(1, DS_FP8),
            ([[latent]], [[0.0]]),
        ),
    ]


HEADS = 4
_TABLE_GARBAGE = (2147480000, -1, 2**31 - 1, -(2**31))


def _requests(draw: Draw, size: int) -> list[tuple[int, int]]:
    """Sample the number of query tokens and the length of every request. Contexts end near the ends
    of blocks, and some requests are padding."""
    requests = []
    for _ in range(draw.integer(0, 3)):
        query = draw.one_of(1, 1, 2, 3, 0)
        context = size * draw.integer(0, 2) + draw.one_of(0, -1, 1)
        is_padding = draw.one_of(False, False, False, True)
        requests.append((0, 0) if is_padding else (query, max(context, 0) + query))
    return requests


def _decode_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    layout, size, rank = (settings[name] for name in ("layout", "block_size", "kv_lora_rank"))
    seed, reqs = draw.generator(), _requests(draw, size)
    reqs += [(1, size + 1)] * (min_size - len(reqs))
    columns = max(3 + draw.one_of(0, 1, -1, -3), min_size)
    width = 576 if rank == 512 else rank + 16
    dtype = _DTYPES[0] if min_size or rank == 512 else draw.one_of(*_DTYPES)
    order = torch.randperm(len(reqs) * columns + 1, generator=seed)
    table = i32(_TABLE_GARBAGE)[torch.randint(0, 4, (len(reqs), columns), generator=seed)]
    slots = []
    for request, (_, length) in enumerate(reqs):
        for block in range(min(-(-length // size), columns)):
            page = int(order[request * columns + block])
            if draw.integer(0, 9):
                table[request, block] = page
            slots += [page * size + row for row in range(size) if block * size + row < length]
    rows = torch.randn(len(slots), width, generator=seed).to(dtype)
    cache = _filled(rows, slots, len(order), settings)
    lens, requests, starts = _tokens(draw, reqs, min_size)
    num_tokens = len(lens)
    q: Tensor = torch.randn(num_tokens, HEADS, width, generator=seed).to(dtype)
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if layout == FP8:
        scales = (None, scale_of(draw.one_of(1.0, 0.5, 0.03)) if draw.flag() else None)
        if draw.flag():
            q, scales = q.to(torch.float8_e4m3fn), (scale_of(0.7), scales[1])
    hint = starts if min_size or draw.flag() else None
    free = settings["num_splits"] == 0 and not settings["batch_invariant"]
    plan = None
    if free and (min_size or draw.flag()):
        programs = draw.one_of(132, 1, 3)
        plan = sparse_mla_plan(i32(lens).flip(0), None, num_heads=HEADS, num_programs=programs)
    token = (i32(lens), i32(requests))
    return Case("sampled", (q, cache, *token, table, hint, plan, *scales), settings)


def _tokens(
    draw: Draw, reqs: list[tuple[int, int]], min_size: int
) -> tuple[list[int], list[int], Tensor]:
    """Sample the length and the request of each token, and the start of each request. Some tokens
    are padding, or have invalid requests or lengths."""
    lens, requests, starts = [], [], [0]
    for request, (query, length) in enumerate(reqs):
        lens += [length - query + token + 1 for token in range(query)]
        requests += [request] * query
        starts.append(len(lens))
    padding = max(draw.one_of(0, 0, 1, 3), min_size - len(lens))
    lens, requests = lens + [0] * padding, requests + [-1] * padding
    for token in draw.places(len(lens), 2):
        if draw.flag():
            lens[token] = draw.one_of(0, -1, -(2**31))
        else:
            requests[token] = draw.one_of(-1, len(reqs), 2**31 - 1, -(2**31))
    return lens, requests, i32(starts)


def _filled(rows: Tensor, slots: list[int], num_blocks: int, settings: dict[str, Any]) -> Tensor:
    """Make a cache with ``rows`` in ``slots`` and NaN everywhere else."""
    size, layout, width = settings["block_size"], settings["layout"], rows.shape[1]
    if layout == PLAIN:
        cache = torch.full((num_blocks, size, width), torch.nan, dtype=rows.dtype)
    else:
        shape = mla_layout(layout, size, width).shape(num_blocks)
        cache = torch.full(shape, 0xFF, dtype=torch.uint8)
    kv_c, k_pe = rows.tensor_split([settings["kv_lora_rank"]], 1)
    reference.mla_insert_kv(kv_c, k_pe, cache, i64(slots), **_rows(size, layout))
    return cache


def _is_determined(case: Case) -> bool:
    """Whether no token sees NaN; otherwise results are undefined."""
    _, cache, *table = (each for each in case.tensors[:5] if each is not None)
    settings = {name: case.settings[name] for name in ("block_size", "layout")}
    keys, exists = decode_keys(cache, *table, **settings)
    return not bool(keys.isnan()[exists].any())


mla_decode = OpTesting(
    cases=_decode_cases,
    settings=(
        _decode(64, PLAIN),
        _decode(64, DS_FP8),
        _decode(64, FP8),
        _decode(2, PLAIN, rank=24),
        _decode(3, FP8, rank=32, num_splits=3),
        _decode(64, PLAIN, rank=32, invariant=True),
    ),
    make=_decode_call,
    precise=exact_mla_decode,
    determined=_is_determined,
)


def _sparse_cases() -> list[Case]:
    """Make calls over the cache of ``worked_decode``, with rows 1, 5 and 2 in slots 2, 3 and 6."""
    cache = worked_decode()[1]
    small, log_2 = _decode(2, PLAIN, rank=1, scale=1.0), float(torch.tensor(2.0).log())
    q = torch.zeros(5, 2, 2)
    lists = i32([[2, 3, 6], [6, -1, 2], [3, 3, 0], [3, 0, 0], [-1, 8, 2**31 - 1]])
    lens = i32([2, 2**31 - 1, 2, 1, 3])
    means = ([[[x]] * 2 for x in (3.0, 1.5, 5.0, 5.0, 0.0)],)
    logs = ([[x] * 2 for x in (log_2, log_2, log_2, 0.0, -math.inf)],)
    none = ([[[0.0]] * 2], [[-math.inf] * 2])
    one = (q[:1], cache)
    tiles = torch.tensor(worked_tile("float32"), dtype=torch.uint8).view(1, 1, 656)
    return [
        Case("equal keys: their mean", (q, cache, lists, lens), small, means + logs),
        Case("no row", (*one, lists[:1], i32([0])), small, none),
        Case("fewer than no rows", (*one, lists[:1], i32([-(2**31)])), small, none),
        Case("no block", (q[:1], cache[:0], lists[:1], i32([3])), small, none),
        Case("no token", (q[:0], cache, lists[:0], lens[:0]), small, ([], [])),
        Case(
            "tiles",
            (torch.zeros(1, 1, 576), tiles, i32([[1, 0]]), i32([2])),
            _decode(1, DS_FP8),
            ([[_tile_values()[:512]]], [[0.0]]),
        ),
    ]


def _sparse_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    """Sample lists of rows in any order, with gaps. Slots that no list names hold NaN."""
    size, rank = settings["block_size"], settings["kv_lora_rank"]
    seed = draw.generator()
    num_tokens = max(draw.one_of(3, 0, 1, 2, 7), min_size)
    num_blocks = max(draw.one_of(3, 0, 1, 2), min_size)
    topk = max(draw.one_of(70, 1, 3, 64, 130), min_size)
    num_heads = draw.one_of(HEADS, 1, 16) if not min_size else HEADS
    width = 576 if rank == 512 else rank + 16
    dtype = _DTYPES[0] if min_size or rank == 512 else draw.one_of(*_DTYPES)
    count = num_blocks * size
    used = torch.randperm(count, generator=seed)[: max(count // 2, min(count, 1))]
    lists = torch.full((num_tokens, topk), -1, dtype=torch.int32)
    if len(used):
        picks = torch.randint(0, len(used), (num_tokens, topk), generator=seed)
        lists = used[picks].to(torch.int32)
    draw.spoil(lists.view(-1), (-1, -(2**31), count, 2**31 - 1), 4)
    lens = torch.randint(0, topk + 1, (num_tokens,), generator=seed, dtype=torch.int32)
    draw.spoil(lens, (topk, topk + 1, 2**31 - 1, -1, -(2**31)), 2)
    ends = torch.arange(topk) >= lens[:, None]
    lists = torch.where(ends, torch.randint(-2, count + 2, lists.shape, generator=seed), lists)
    rows = torch.randn(len(used), width, generator=seed).to(dtype)
    cache = _filled(rows, used.tolist(), num_blocks, settings)
    q: Tensor = torch.randn(num_tokens, num_heads, width, generator=seed).to(dtype)
    return Case("sampled", (q, cache, lists.to(torch.int32), lens), settings)


mla_sparse = OpTesting(
    cases=_sparse_cases,
    settings=(
        _decode(64, PLAIN),
        _decode(64, DS_FP8),
        _decode(2, PLAIN, rank=24),
        _decode(3, DS_FP8, num_splits=3),
        _decode(64, PLAIN, rank=32, invariant=True),
    ),
    make=_sparse_call,
    precise=exact_mla_sparse,
)
