"""Cases, strategies and float64 results of norm, rotation and insert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import MainLayout, PlainLayout
from dsv4_ops.testing.case import Case, Exact, OpTesting, i64
from dsv4_ops.testing.rotation import exact, exact_rotation, positions, tables, worked_table

_FP8 = {"eps": 1e-6, "block_size": 1, "layout": MainLayout.tag}
_PLAIN = {**_FP8, "layout": PlainLayout.tag}
ROUNDINGS = 8
"""Roundings of float32 that count before the last one: sum, mean and root of the norm, its product,
two of the rotation."""


def _worked() -> tuple[Tensor, ...]:
    """Two tokens with two heads and a key each, at positions 1 and 0, for slots 1 and none."""
    q = torch.full((2, 2, 512), 4.0, dtype=torch.bfloat16)
    q[:, 1] *= -1
    kv = torch.zeros(2, 512, dtype=torch.bfloat16)
    kv[:, :3] = torch.tensor([3.0, -0.3, 0.01])
    kv[:, 448:452] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return q, kv, i64([1, -1]), i64([1, 0]), worked_table()


def _normed() -> list[Any]:
    """All ones and all minus ones, rotated at position 1 and not at position 0."""
    rotated = [1.0] * 512
    rotated[448:452] = [-1.0, 1.0, -3.0, 1.0]
    return [[rotated, [-value for value in rotated]], [[1.0] * 512, [-1.0] * 512]]


def _worked_page() -> list[int]:
    """The key of position 1: (1, 2) becomes (-2, 1) and (3, 4) becomes (-11, 2)."""
    page = [0] * 1152
    page[:3] = [0x7C, 0xE2, 0x3A]
    page[448:456] = [0x00, 0xC0, 0x80, 0x3F, 0x30, 0xC1, 0x00, 0x40]
    page[576:584] = [120, 105, 105, 105, 105, 105, 105, 0]
    return page


def _cases() -> list[Case]:
    q, kv, slots, where, table = _worked()
    cache = torch.zeros(2, 1152, dtype=torch.uint8)
    plain = torch.full((2, 1, 512), 7.0, dtype=torch.bfloat16)
    row = kv[0].tolist()
    row[448:452] = [-2.0, 1.0, -11.0, 2.0]
    pages, sevens = [[0] * 1152, _worked_page()], [[7.0] * 512]
    far = i64([2**62, -(2**63)])
    ones = [[[1.0] * 512, [-1.0] * 512]] * 2
    return [
        Case("worked rows", (q, kv, cache, slots, where, table), _FP8, (_normed(), pages)),
        Case("plain", (q, kv, plain, slots, where, table), _PLAIN, (_normed(), [sevens, [row]])),
        Case("fewer slots", (q, kv, cache, slots[:1], where, table), _FP8, (_normed(), pages)),
        Case(
            "no slot", (q, kv, cache, slots[:0], where, table), _FP8, (_normed(), [[0] * 1152] * 2)
        ),
        Case("hostile", (q, kv, cache, far, far, table), _FP8, (ones, [[0] * 1152] * 2)),
        Case("no head", (q[:, :0], kv, cache, slots, where, table), _FP8, ([[], []], pages)),
        Case("no page", (q, kv, cache[:0], slots, where, table), _FP8, (_normed(), [])),
        Case(
            "no token",
            (q[:0], kv[:0], cache, slots[:0], where[:0], table),
            _FP8,
            ([], [[0] * 1152] * 2),
        ),
    ]


def _call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    from dsv4_ops.testing.caches import generator, keys, random_bytes, random_keys, slots

    num_tokens = max(draw(st.sampled_from((3, 0, 1, 2, 5, 9))), min_size)
    num_heads = max(draw(st.sampled_from((4, 0, 1, 2, 3, 8))), min_size)
    num_blocks = max(draw(st.sampled_from((3, 0, 1, 2, 8))), min_size)
    num_slots = max(num_tokens - draw(st.sampled_from((0, 0, 1, 4))), min_size)
    block_size = settings["block_size"]
    q = draw(keys(num_rows=num_tokens * num_heads, width=512, special=512))
    kv = draw(keys(num_rows=num_tokens, width=512, special=512))
    if settings["layout"] == PlainLayout.tag:
        cache = random_keys(generator(draw), num_blocks * block_size, 512)
        cache = cache.view(num_blocks, block_size, 512)
    else:
        page_bytes = MainLayout(block_size).page_bytes
        cache = random_bytes(generator(draw), num_blocks, page_bytes)
    slot_mapping = draw(slots(num_tokens=num_slots, num_slots=num_blocks * block_size))
    table = tables(draw, rope_dim=64, min_size=min_size)
    where = positions(draw, num_tokens=num_tokens, num_positions=table.shape[0])
    tensors = (q.view(num_tokens, num_heads, 512), kv, cache, slot_mapping, where, table)
    return Case("drawn", tensors, settings)


def _precise(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    eps: float,
    block_size: int,
    layout: str,
) -> tuple[Exact | None, ...]:
    """The cache is exact. A mean square beyond float32 is infinite, as there."""
    values = q.to(torch.float64)
    squares = values.square().sum(-1, keepdim=True).to(torch.float32).to(torch.float64)
    normed = values / (squares / q.shape[2] + eps).sqrt()
    value, products = exact_rotation(normed, positions, cos_sin_cache)
    return exact(value, products, q.dtype, ROUNDINGS), None


qnorm_rope_kv_insert = OpTesting(
    cases=_cases,
    settings=tuple(
        {"eps": eps, "block_size": size, "layout": layout}
        for eps, size, layout in (
            (1e-6, 64, MainLayout.tag),
            (0.25, 2, MainLayout.tag),
            (1e-6, 4, PlainLayout.tag),
        )
    ),
    make=_call,
    precise=_precise,
)
qnorm_rope_kv_insert_functional = qnorm_rope_kv_insert
