"""Cases and strategies of the fused inserts of a C4 layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import IndexerLayout, MainLayout, QuantizedLayout, StateLayout
from dsv4_ops.reference import c4_step as reference
from dsv4_ops.reference.compressor import save_and_compress
from dsv4_ops.testing.case import Case, Exact, OpTesting, i32, i64, tensor_names
from dsv4_ops.testing.cases import compressor
from dsv4_ops.testing.cases.compressor import filled_states
from dsv4_ops.testing.cases.rope import qnorm_rope_kv_insert
from dsv4_ops.testing.strategies.caches import heads, keys, random_bytes, slots
from dsv4_ops.testing.strategies.draw import Draw

NAMES = tensor_names(reference.insert_c4_step)
_QUERIES = ("q", "kv", "swa_cache", "swa_slot_mapping", "positions", "cos_sin_cache")
_INDEXER_QUERIES = ("indexer_q", "indexer_weights", "positions", "cos_sin_cache")
_COMPRESSOR = tensor_names(save_and_compress)
_OF_INDEXER = {
    **{name: f"indexer_{name}" for name in ("kv_score", "ape", "states", "norm_weight")},
    "k_cache": "indexer_cache",
}
MAIN, INDEXER = MainLayout.tag, IndexerLayout.tag


def parts(case: Case) -> dict[str, Case]:
    """Return the four op calls that make up ``case``, by name.

    The names are "queries", "compressor", "indexer_compressor" and "indexer_queries". The calls
    share the tensors of ``case``.
    """
    tensors, settings = dict(zip(NAMES, case.tensors, strict=True)), case.settings
    shared = {name: settings[name] for name in ("compress_ratio", "eps", "state_block_size")}
    shared |= {"overlap": True, "block_size": settings["block_size"]}
    shared["save_first"] = settings.get("save_first", False)
    window = {"eps": settings["eps"], "block_size": settings["swa_block_size"], "layout": MAIN}
    scale = {"softmax_scale": settings["softmax_scale"]}
    of_indexer = [_OF_INDEXER.get(name, name) for name in _COMPRESSOR]
    calls: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
        "queries": (_QUERIES, window),
        "compressor": (_COMPRESSOR, {**shared, "layout": MAIN}),
        "indexer_compressor": (of_indexer, {**shared, "layout": INDEXER}),
        "indexer_queries": (_INDEXER_QUERIES, scale),
    }
    return {
        part: Case(part, tuple(tensors[name] for name in names), chosen)
        for part, (names, chosen) in calls.items()
    }


def _precise(*tensors: Tensor | None, **settings: Any) -> tuple[Exact | None, ...]:
    """Compute the float64 values of the results of ``decode``: queries and compressed rows."""
    calls = parts(Case("precise", tensors, settings))
    queries, *compressors = (
        calls[part] for part in ("queries", "compressor", "indexer_compressor")
    )
    assert qnorm_rope_kv_insert.precise is not None
    q, _ = qnorm_rope_kv_insert.precise(*queries.tensors, **queries.settings)
    main, indexer = (
        compressor.precise_step(*call.tensors, **call.settings) for call in compressors
    )
    return q, None, None, None, *main, *indexer


def _decode(case: Case, outcome: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the results and the window cache unchanged, then the decoded compressor caches."""
    *exact, states, k_cache, indexer_states, indexer_cache = outcome
    calls = parts(case)
    main = compressor.decode_step_outcome(calls["compressor"], (states, k_cache))
    indexer = (indexer_states, indexer_cache)
    return *exact, *main, *compressor.decode_step_outcome(calls["indexer_compressor"], indexer)


def _determined(case: Case) -> bool:
    """Whether neither compressor overwrites a state that a window of the same call reads."""
    calls = parts(case)
    return all(compressor.determined(calls[part]) for part in ("compressor", "indexer_compressor"))


_CODE, _SCALE = 0x78, 119
"""Code and scale byte that store 1 as 256 * 2^-8. With a smaller scale, 1 has no code."""


def _page(layout: QuantizedLayout, *signs: int) -> list[int]:
    """Return a block with a row for each sign. A row contains only 1 or only -1; the row of a zero
    is empty."""
    page = torch.zeros(layout.page_bytes, dtype=torch.uint8)
    for row, sign in enumerate(signs):
        if sign == 0:
            continue
        data, scales = layout.data_offset(row), layout.scale_offset(row)
        rope = data + layout.code_dim
        page[data:rope] = _CODE if sign > 0 else _CODE | 0x80
        ones = torch.full(((layout.data_bytes - layout.code_dim) // 2,), float(sign)).bfloat16()
        page[rope : data + layout.data_bytes] = ones.view(torch.uint8)
        if isinstance(layout, MainLayout):
            page[scales : scales + layout.num_scales] = _SCALE
        else:
            page[scales : scales + 4] = torch.tensor([2.0**-8]).view(torch.uint8)
    return [int(byte) for byte in page]


def _state_page(head_dim: int, *kv: float | None) -> list[float]:
    """Return a block of two state rows. A row has equal kv values and biased scores of 0.5; the row
    of a None is empty."""
    layout = StateLayout(2, 4 * head_dim)
    page = torch.zeros(1, layout.page_bytes // 4)
    for row, value in enumerate(kv):
        if value is not None:
            layout.rows(page)[0, row, : 2 * head_dim] = value
            layout.rows(page)[0, row, 2 * head_dim :] = 0.5
    return [float(value) for value in page[0]]


def _left(states: Sequence[Sequence[float | None]], *rows: int) -> tuple[Any, ...]:
    """Return the blocks that each of the two compressors has written: state blocks with ``states``,
    and a cache block with ``rows``."""
    left: tuple[Any, ...] = ()
    for layout in (MainLayout(2), IndexerLayout(2)):
        pages = [_state_page(layout.head_dim, *page) for page in states]
        left = (*left, pages, [_page(layout, *rows)])
    return left


def _settings(eps: float, ratio: int, *sizes: int) -> dict[str, Any]:
    state_block_size, swa_block_size, block_size = sizes
    return {
        "eps": eps,
        "softmax_scale": 128**-0.5 / 4,
        "compress_ratio": ratio,
        "state_block_size": state_block_size,
        "swa_block_size": swa_block_size,
        "block_size": block_size,
    }


_SMALL = {**_settings(1e-6, 2, 2, 2, 2), "softmax_scale": 0.5}


def _tensors() -> dict[str, Tensor]:
    """Make the tensors of four tokens of one request, with equal channels and no rotation.

    The first window has kv 1 and 3, and the second window has kv 1, 3, -6 and -8. The keys are 1,
    -1, 1 and -1, the queries are 4 and -4, and the indexer's queries are 3.
    """
    signs = torch.tensor([1.0, -1.0])
    tensors = {
        "q": 4 * signs[None, :, None].repeat(4, 1, 512).bfloat16(),
        "kv": signs.repeat(2)[:, None].repeat(1, 512).bfloat16(),
        "indexer_q": torch.full((4, 1, 128), 3.0).bfloat16(),
        "indexer_weights": torch.tensor([[1.0], [-2.0], [1.0], [-2.0]]),
        "swa_cache": torch.zeros(MainLayout(2).shape(2), dtype=torch.uint8),
        "swa_slot_mapping": i64([3, 0, -1]),
        "k_cache": torch.zeros(MainLayout(2).shape(1), dtype=torch.uint8),
        "indexer_cache": torch.zeros(IndexerLayout(2).shape(1), dtype=torch.uint8),
        "state_block_table": i32([[0, 1]]),
        "state_slot_mapping": i64([1, -1, 2, 0]),
        "slot_mapping": i64([-1, 1, -1, 0]),
        "positions": i64([0, 1, 2, 3]),
        "req_indices": i32([0] * 4),
        "cos_sin_cache": torch.zeros(0, 64),
    }
    kv = torch.tensor([[1.0, 0.0], [3.0, 0.0], [-6.0, 0.0], [-8.0, 0.0]])
    for prefix, dim in (("", 512), ("indexer_", 128)):
        tensors |= {
            f"{prefix}kv_score": kv.repeat_interleave(2 * dim, 1),
            f"{prefix}ape": torch.full((2, 2 * dim), 0.5),
            f"{prefix}norm_weight": torch.ones(dim),
            f"{prefix}states": StateLayout(2, 4 * dim).allocate(2),
        }
    return tensors


_CACHES = ("swa_cache", "states", "k_cache", "indexer_states", "indexer_cache")
_OF_TOKENS = (
    *("q", "kv", "kv_score", "indexer_q", "indexer_weights", "indexer_kv_score"),
    *("swa_slot_mapping", "state_slot_mapping", "slot_mapping", "positions", "req_indices"),
)


def _worked(name: str, expected: Any = None, **changed: Any) -> Case:
    settings = {**_SMALL, "save_first": changed.pop("save_first", False)}
    tensors = {**_tensors(), **changed}
    return Case(name, tuple(tensors[each] for each in NAMES), settings, expected)


def _cases() -> list[Case]:
    # the RMSNorm of equal values is their sign
    normed, tensors = [[[1.0] * 512, [-1.0] * 512]] * 4, _tensors()
    # 3 is the code 384 times the scale 2^-7, and the weight absorbs the scale
    codes, scaled = [[[384.0] * 128]] * 4, [[0.00390625], [-0.0078125]] * 2
    queries = (normed, codes, scaled)
    window = [_page(MainLayout(2), -1), _page(MainLayout(2), 0, 1)]
    without = [_page(MainLayout(2))] * 2
    saved: tuple[tuple[float, ...], ...] = ((-8.0, 1.0), (-6.0,))
    whole, unchanged = (*queries, window, *_left(saved, -1, 1)), (*queries, window, *_left(saved))
    nothing = (without, *_left([[], []]))
    adversarial = i64([2**40, -(2**63), 2**63 - 1, 4])
    slots = ("swa_slot_mapping", "state_slot_mapping", "slot_mapping")
    no_token = {name: tensors[name][:0] for name in _OF_TOKENS}
    no_page = {name: tensors[name][:0] for name in _CACHES}
    no_head = {name: tensors[name][:, :0] for name in ("indexer_q", "indexer_weights")}
    last = {name: tensors[name][3:] for name in _OF_TOKENS}
    last |= {"swa_slot_mapping": i64([2]), "state_slot_mapping": i64([3])}
    old: list[list[float | None]] = [[1.0, 1.0], [1.0, None]]
    last |= {
        name: torch.tensor([_state_page(dim, *page) for page in old])
        for name, dim in (("states", 512), ("indexer_states", 128))
    }
    shared: dict[str, Any] = {"save_first": True, "req_indices": i32([0, 0, 0, 1])}
    shared |= {"state_block_table": i32([[0, 1]] * 2), "slot_mapping": i64([-1, -1, -1, 0])}
    shared["state_slot_mapping"] = i64([0, 1, 2, 3])
    for name, width in (("kv_score", 1024), ("indexer_kv_score", 256)):
        shared[name] = tensors[name].clone()
        shared[name][3, :width] = 1.0  # with the other request's 1, 3 and -6, the sum is negative
    return [
        _worked("two windows", whole),
        _worked("no slot for a row", unchanged, slot_mapping=i64([-1, 2, 0, -2])),
        _worked("no request", unchanged, req_indices=i32([-1, 1, 0, 2])),
        _worked("no table", unchanged, state_block_table=tensors["state_block_table"][:0]),
        _worked("adversarial slots", (*queries, *nothing), **dict.fromkeys(slots, adversarial)),
        _worked(
            "padding has no row, and a late token a state",
            (*queries, window, *_left([[None, 1.0], []])),
            positions=i64([2**31 - 1, 2**63 - 1, -1, -(2**63)]),
        ),
        _worked(
            "three rows of the last window from the states",
            (
                *(result[3:] for result in (normed, codes, scaled)),
                [_page(MainLayout(2)), _page(MainLayout(2), -1)],
                *_left([[1.0, 1.0], [1.0, -8.0]], -1),
            ),
            **last,
        ),
        _worked(
            "states of another request's tokens, which this call saves",
            (*queries, window, *_left([[1.0, 3.0], [-6.0, 1.0]], -1)),
            **shared,
        ),
        _worked("no token", ([], [], [], *nothing), **no_token),
        _worked("no page", (*queries, *[[]] * 5), **no_page),
        _worked("no head of the indexer", (normed, [[]] * 4, [[]] * 4, *whole[3:]), **no_head),
        _worked("weights of 16 bits", whole, indexer_weights=tensors["indexer_weights"].bfloat16()),
    ]


def _call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    """Sample a step of the compressor, and queries, window and indexer for its tokens."""
    of_step = {name: settings[name] for name in ("compress_ratio", "eps", "state_block_size")}
    of_step |= {"overlap": True, "block_size": settings["block_size"], "layout": MAIN}
    of_step["save_first"] = settings.get("save_first", False)
    step = compressor.save_and_compress.make(draw, of_step, min_size)
    tensors: dict[str, Any] = dict(zip(_COMPRESSOR, step.tensors, strict=True))
    num_tokens = tensors["positions"].shape[0]
    tensors |= _sampled_window(draw, settings, num_tokens, min_size)
    tensors |= _sampled_indexer(draw, settings, tensors, draw.generator(), min_size)
    return Case("sampled", tuple(tensors[name] for name in NAMES), settings)


def _sampled_window(
    draw: Draw, settings: dict[str, Any], num_tokens: int, min_size: int
) -> dict[str, Tensor]:
    """Sample queries and keys, the window cache, and slots of the first tokens."""
    num_heads = max(draw.one_of(3, 0, 1, 2, 5), min_size)
    num_blocks = max(draw.one_of(6, 0, 1, 2), min_size)
    num_slots = max(num_tokens - draw.one_of(0, 0, 1, 4), min(num_tokens, min_size))
    size = settings["swa_block_size"]
    return {
        "q": heads(draw, num_tokens, num_heads, 512),
        "kv": keys(draw, num_rows=num_tokens, width=512, special=512),
        "swa_cache": random_bytes(draw.generator(), num_blocks, MainLayout(size).page_bytes),
        "swa_slot_mapping": slots(draw, num_tokens=num_slots, num_slots=num_blocks * size),
    }


def _sampled_indexer(
    draw: Draw,
    settings: dict[str, Any],
    tensors: dict[str, Any],
    seed: torch.Generator,
    min_size: int,
) -> dict[str, Tensor]:
    """Sample the indexer's queries and compressor.

    The indexer's cache and states may have fewer blocks than the main caches, so that slots and
    tables are out of range for the indexer only.
    """
    num_tokens, (num_blocks, _) = tensors["positions"].shape[0], tensors["k_cache"].shape
    num_pages, ratio = tensors["states"].shape[0], settings["compress_ratio"]
    num_blocks, num_pages = (
        max(number - draw.one_of(0, 1), min(number, max(min_size, 1)))
        for number in (num_blocks, num_pages)
    )
    num_heads = 4 if min_size else draw.one_of(1, 3, 4, 17)
    q = heads(draw, num_tokens, num_heads, 128)
    weights = torch.randn(num_tokens, num_heads, generator=seed)
    if min_size or draw.flag():
        weights = weights.to(torch.bfloat16)
    table, size = tensors["state_block_table"], settings["state_block_size"]
    page_bytes = IndexerLayout(settings["block_size"]).page_bytes
    return {
        "indexer_q": q,
        "indexer_weights": weights,
        "indexer_kv_score": torch.randn(num_tokens, 512, generator=seed),
        "indexer_ape": torch.randn(ratio, 256, generator=seed),
        "indexer_norm_weight": torch.randn(128, generator=seed),
        "indexer_states": filled_states(size, table, num_pages, 512, seed),
        "indexer_cache": random_bytes(seed, num_blocks, page_bytes),
    }


insert_c4_step = OpTesting(
    cases=_cases,
    settings=(
        _settings(1e-6, 4, 4, 64, 64),
        _settings(1e-6, 4, 4, 256, 64),
        _settings(0.25, 4, 5, 2, 3),
        _settings(1e-6, 2, 1, 3, 64),
        {**_settings(1e-6, 4, 4, 64, 64), "save_first": True},
    ),
    make=_call,
    precise=_precise,
    decode=_decode,
    determined=_determined,
)
