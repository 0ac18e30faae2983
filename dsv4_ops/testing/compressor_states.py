"""Cases and strategies of the compressor's states."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_ops.core.layout import StateLayout
from dsv4_ops.testing.case import Case, OpTesting, i64

_TINY = {"compress_ratio": 2, "block_size": 1}
_PAGE = StateLayout(1, 4).page_bytes // 4


def _page(*row: float) -> list[float]:
    return [*row, *[7.0] * (_PAGE - 4)]


def _cases() -> list[Case]:
    kv_score = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    ape = torch.tensor([[0.5, -1.0], [10.0, 20.0]])
    states = torch.full((3, _PAGE), 7.0)
    kept, sevens = (kv_score, ape, states), _page(7, 7, 7, 7)

    def case(name: str, slots: list[int], positions: list[int], *rows: list[float]) -> Case:
        return Case(name, (*kept, i64(slots), i64(positions)), _TINY, (list(rows),))

    even, odd = _page(1, 2, 3.5, 3), _page(5, 6, 17, 28)
    return [
        case("an even and an odd position", [2, 0], [4, 9], odd, sevens, even),
        case("no slot", [-1, 3], [4, 5], *[sevens] * 3),
        case("no position", [0, 1], [-1, 7], sevens, odd, sevens),
        case("a late position", [0, -1], [2**63 - 2, 1], even, sevens, sevens),
        Case("no token", (kv_score[:0], ape, states, i64([]), i64([])), _TINY, (states.tolist(),)),
        Case("no page", (kv_score, ape, states[:0], i64([0, 1]), i64([0, 1])), _TINY, ([],)),
    ]


def _call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    from dsv4_ops.testing.caches import generator, slots

    num_tokens = max(draw(st.sampled_from((0, 1, 2, 3, 5, 9, 17))), min_size)
    num_blocks = max(draw(st.sampled_from((0, 1, 2, 3, 8))), min_size)
    width = 512 if min_size else draw(st.sampled_from((512, 1, 24)))
    seed, layout = generator(draw), StateLayout(settings["block_size"], 2 * width)
    kv_score = torch.randn(num_tokens, 2 * width, generator=seed)
    kv_score *= torch.exp2(torch.randint(-40, 40, (num_tokens, 1), generator=seed).float())
    if num_tokens:  # kv is copied bit for bit
        bits = kv_score.view(torch.int32)
        for token in draw(st.lists(st.integers(0, num_tokens - 1), max_size=4)):
            pattern = draw(st.sampled_from((0x7FC00001, 0x7F800001, -(2**31), 0x7F800000, 1)))
            bits[token, draw(st.integers(0, width - 1))] = pattern
    ape = torch.randn(settings["compress_ratio"], width, generator=seed)
    states = torch.randn(num_blocks, layout.page_bytes // 4, generator=seed)
    chosen = draw(slots(num_tokens=num_tokens, num_slots=num_blocks * layout.block_size))
    positions = torch.randint(0, 10**6, (num_tokens,), generator=seed)
    if num_tokens:
        for token in draw(st.lists(st.integers(0, num_tokens - 1), max_size=3)):
            positions[token] = draw(st.sampled_from((-1, -128, -(2**63), 2**40, 2**63 - 1)))
    return Case("drawn", (kv_score, ape, states, chosen, positions), settings)


save_compressor_states = OpTesting(
    cases=_cases,
    settings=tuple(
        {"compress_ratio": ratio, "block_size": size} for ratio, size in ((4, 4), (128, 8), (1, 3))
    ),
    make=_call,
)
save_compressor_states_functional = save_compressor_states
