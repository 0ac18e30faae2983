"""Cases and strategies of the KV compressor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.core.layout import FP8_MAX, IndexerLayout, MainLayout, QuantizedLayout, StateLayout
from dsv4_ops.testing.case import Case, Exact, OpTesting, i32, i64
from dsv4_ops.testing.strategies.batches import ADVERSARIAL_POSITIONS, BAD_REQUESTS, tables
from dsv4_ops.testing.strategies.caches import random_bytes, slots
from dsv4_ops.testing.strategies.draw import Draw

_TINY = {"compress_ratio": 2, "block_size": 1}
_PAGE = StateLayout(1, 4).page_bytes // 4


def _page(*row: float) -> list[float]:
    return [*row, *[7.0] * (_PAGE - 4)]


def _cases() -> list[Case]:
    kv_score = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    ape = torch.tensor([[0.5, -1.0], [10.0, 20.0]])
    states = torch.full((3, _PAGE), 7.0)
    inputs, sevens = (kv_score, ape, states), _page(7, 7, 7, 7)

    def case(name: str, slots: list[int], positions: list[int], *rows: list[float]) -> Case:
        return Case(name, (*inputs, i64(slots), i64(positions)), _TINY, (list(rows),))

    even, odd = _page(1, 2, 3.5, 3), _page(5, 6, 17, 28)
    return [
        case("an even and an odd position", [2, 0], [4, 9], odd, sevens, even),
        case("the first position", [1, -1], [0, 1], sevens, even, sevens),
        case("no slot", [-1, 3], [4, 5], *[sevens] * 3),
        case("no position", [0, 1], [-1, 7], sevens, odd, sevens),
        case("a late position", [0, -1], [2**63 - 2, 1], even, sevens, sevens),
        Case("no token", (kv_score[:0], ape, states, i64([]), i64([])), _TINY, (states.tolist(),)),
        Case("no page", (kv_score, ape, states[:0], i64([0, 1]), i64([0, 1])), _TINY, ([],)),
    ]


def _call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(0, 1, 2, 3, 5, 9, 17), min_size)
    num_blocks = max(draw.one_of(0, 1, 2, 3, 8), min_size)
    width = 512 if min_size else draw.one_of(512, 1, 24)
    seed, layout = draw.generator(), StateLayout(settings["block_size"], 2 * width)
    kv_score = torch.randn(num_tokens, 2 * width, generator=seed)
    kv_score *= torch.exp2(torch.randint(-40, 40, (num_tokens, 1), generator=seed).float())
    bits = kv_score.view(torch.int32)  # the op must copy kv bit for bit
    for token in draw.places(num_tokens, 4):
        pattern = draw.one_of(0x7FC00001, 0x7F800001, -(2**31), 0x7F800000, 1)
        bits[token, draw.integer(0, width - 1)] = pattern
    ape = torch.randn(settings["compress_ratio"], width, generator=seed)
    states = torch.randn(num_blocks, layout.page_bytes // 4, generator=seed)
    chosen = slots(draw, num_tokens=num_tokens, num_slots=num_blocks * layout.block_size)
    positions = torch.randint(0, 10**6, (num_tokens,), generator=seed)
    draw.spoil(positions, (-1, -128, -(2**63), 2**40, 2**63 - 1), 3)
    return Case("sampled", (kv_score, ape, states, chosen, positions), settings)


save_compressor_states = OpTesting(
    cases=_cases,
    settings=tuple(
        {"compress_ratio": ratio, "block_size": size} for ratio, size in ((4, 4), (128, 8), (1, 3))
    ),
    make=_call,
)


FP32_UNIT, FP8_UNIT = 2.0**-24, 2.0**-4
ROUNDINGS = 8
"""Number of float32 roundings from the states to a row, each relative to the row. The roundings are
in the exponential (two, because its argument is rounded too), the product, the sums, the quotient,
the root, the norm (two products) and the rotation."""


def _settings(ratio: int, overlap: bool, layout: str, *sizes: int) -> dict[str, Any]:
    state_block_size, block_size = sizes
    return {
        "compress_ratio": ratio,
        "overlap": overlap,
        "eps": 1e-6,
        "state_block_size": state_block_size,
        "block_size": block_size,
        "layout": layout,
    }


_SMALL = {**_settings(2, False, "plain", 2, 2), "eps": 1e-30}


class Windows(NamedTuple):
    """The tensors of a call of ``compress_and_insert``."""

    kv_score: Tensor
    ape: Tensor
    states: Tensor
    table: Tensor
    positions: Tensor
    req_indices: Tensor
    norm_weight: Tensor
    cos_sin_cache: Tensor
    k_cache: Tensor
    slot_mapping: Tensor


def written_slots(case: Case) -> list[tuple[int, int]]:
    """Return (token, slot) of every row that the op writes."""
    call = Windows._make(case.tensors)
    num_slots = call.k_cache.shape[0] * case.settings["block_size"]
    ratio, slots_of_tokens = case.settings["compress_ratio"], []
    columns = (each.tolist() for each in (call.positions, call.req_indices, call.slot_mapping))
    for token, (position, request, slot) in enumerate(zip(*columns, strict=True)):
        exists = 0 <= position < 2**31 - 1 and 0 <= request < call.table.shape[0]
        if exists and position % ratio == ratio - 1 and 0 <= slot < num_slots:
            slots_of_tokens.append((token, slot))
    return slots_of_tokens


def _state_rows(case: Case, token: int) -> tuple[Tensor, Tensor]:
    """Return kv and biased scores of a complete window, [rows, head_dim], without missing rows."""
    kv_score, ape, states, table, *tokens, norm_weight, _, _, _ = Windows._make(case.tensors)
    ratio, size = case.settings["compress_ratio"], case.settings["state_block_size"]
    width, dim = ape.shape[1], norm_weight.shape[0]
    positions, requests = (each.tolist() for each in tokens)
    position, request = positions[token], requests[token]
    kv, score = [], []
    num_rows = ratio * (2 if case.settings["overlap"] else 1)
    for row in range(num_rows):
        back = num_rows - 1 - row
        place, other, first = position - back, token - back, 0 if row < ratio else width - dim
        if place < 0:
            continue
        if other >= 0 and (positions[other], requests[other]) == (place, request):
            values = kv_score[other].clone()
            values[width:] += ape[place % ratio]  # rounded to float32, as stored
        else:
            column = place // size
            page = int(table[request, column]) if column < table.shape[1] else -1
            if not 0 <= page < states.shape[0]:
                continue
            values = StateLayout(size, 2 * width).rows(states)[page, place % size]
        kv.append(values[first : first + dim])
        score.append(values[width + first : width + first + dim])
    return torch.stack(kv).double(), torch.stack(score).double()


def _exact_row(case: Case, token: int) -> tuple[Tensor, Tensor]:
    """Compute a compressed key in float64, and the scale of its rounding errors."""
    call = Windows._make(case.tensors)
    kv, score = _state_rows(case, token)
    weight = (score - score.amax(0)).exp()
    weight = weight / weight.sum(0)
    row = (weight * kv).sum(0)
    scale = call.norm_weight.double() * (row.square().mean() + case.settings["eps"]).rsqrt()
    size = (weight * kv.abs()).sum(0) * scale.abs()
    row = row * scale
    ratio = case.settings["compress_ratio"]
    first = int(call.positions[token]) // ratio * ratio
    num_positions, rope = call.cos_sin_cache.shape
    if first < num_positions and rope:
        cos, sin = call.cos_sin_cache[first].double().chunk(2)
        even, odd = row[-rope::2].clone(), row[-rope + 1 :: 2].clone()
        row[-rope::2], row[-rope + 1 :: 2] = even * cos - odd * sin, odd * cos + even * sin
    return row, size.nan_to_num().amax().expand_as(row)


def _exact(value: Tensor, size: Tensor, unit: float) -> Exact:
    """Return ``value`` with an error scale. The scale counts the final rounding and the float32
    roundings before it, in units of the final rounding."""
    return Exact(value, value.abs() + ROUNDINGS * (FP32_UNIT / unit) * size)


def precise(*tensors: Tensor | None, **settings: Any) -> tuple[Exact | None, ...]:
    """Compute the float64 values of the results of ``decode``."""
    case, call = Case("precise", tensors, settings), Windows._make(tensors)
    pairs = [_exact_row(case, token) for token, _ in written_slots(case)]
    empty = call.norm_weight.new_empty((0, call.norm_weight.shape[0]), dtype=torch.float64)
    values, sizes = map(torch.stack, zip(*pairs, strict=True)) if pairs else (empty, empty)
    layout = _quantized(settings)
    if layout is None:
        return _exact(values, sizes, torch.finfo(call.k_cache.dtype).eps / 2), None
    codes, size = values[:, : layout.code_dim], sizes[:, : layout.code_dim]
    blocks = codes.unflatten(1, (-1, layout.quant_block))
    amax = blocks.nan_to_num(0.0).abs().amax(-1, keepdim=True).clamp(min=1e-4)
    step = torch.exp2(torch.ceil(torch.log2(amax / FP8_MAX))).expand_as(blocks).flatten(1)
    magnitude = codes.abs() + step * 2.0**-6 + ROUNDINGS * (FP32_UNIT / FP8_UNIT) * size
    coded = Exact(codes, magnitude, FP8_UNIT)
    rope, rope_size = values[:, layout.code_dim :], sizes[:, layout.code_dim :]
    return coded, _exact(rope, rope_size, 2.0**-8), None


def decode(case: Case, outcome: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the values of written rows, then the cache without the bytes that encode floats.

    For a quantised cache, return dequantised codes and RoPE values separately.
    """
    (cache,) = outcome
    rest = cache.clone(memory_format=torch.contiguous_format)
    slots = [slot for _, slot in written_slots(case)]
    layout = _quantized(case.settings)
    if layout is None:
        rows = rest.flatten(0, 1)
        values = rows[slots].clone()
        rows[slots] = 0
        return values, rest
    flat = rest.view(-1)
    data = torch.empty(len(slots), layout.data_bytes, dtype=torch.uint8, device=cache.device)
    scales = data.new_empty(len(slots), layout.scale_bytes)
    scale_bytes = layout.num_scales if isinstance(layout, MainLayout) else layout.scale_bytes
    for row, slot in enumerate(slots):
        for part, start in ((data, layout.data_offset(slot)), (scales, layout.scale_offset(slot))):
            part[row] = flat[start : start + part.shape[1]]
            flat[start : start + (part.shape[1] if part is data else scale_bytes)] = 0
    return *row_values(layout, data, scales), rest


def row_values(layout: QuantizedLayout, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Decode the bytes of rows: codes times their scales, float32, then the bfloat16 values."""
    factor = scales.view(torch.float32)
    if isinstance(layout, MainLayout):
        factor = torch.exp2(scales[:, : layout.num_scales].float() - 127)
    codes = data[:, : layout.code_dim].contiguous().view(torch.float8_e4m3fn).float()
    values = codes.unflatten(1, (-1, layout.quant_block)) * factor.unsqueeze(-1)
    return values.flatten(1), data[:, layout.code_dim :].contiguous().view(torch.bfloat16)


def _quantized(settings: dict[str, Any]) -> QuantizedLayout | None:
    if settings["layout"] == "plain":
        return None
    kind = MainLayout if settings["layout"] == MainLayout.tag else IndexerLayout
    return kind(settings["block_size"])


def worked(name: str, expected: Any = None, **changed: Any) -> Case:
    """Make a call for four tokens of one request, with equal scores and no rotation.

    Windows have two tokens. The first window has kv (1, 3) and (3, 5), and the second window has kv
    (0, 0) and (6, -8).
    """
    tensors = {
        "kv_score": torch.tensor([[1.0, 3, 0, 0], [3, 5, 0, 0], [0, 0, 0, 0], [6, -8, 0, 0]]),
        "ape": torch.zeros(2, 2),
        "states": StateLayout(2, 4).allocate(2),
        "state_block_table": i32([[0, 1]]),
        "positions": i64([0, 1, 2, 3]),
        "req_indices": i32([0] * 4),
        "norm_weight": torch.tensor([1.0, 2.0]),
        "cos_sin_cache": torch.zeros(0, 2),
        "k_cache": torch.full((1, 2, 2), 7.0),
        "slot_mapping": i64([-1, 0, -1, 1]),
    }
    settings = {key: changed.pop(key) for key in [*changed] if key in (*_SMALL, "save_first")}
    tensors.update(changed)
    return Case(name, tuple(tensors.values()), {**_SMALL, **settings}, expected)


def _last_token(*kv_score: float) -> dict[str, Tensor]:
    """Return the tensors of a call for only the last token of the second window."""
    places = {"positions": i64([3]), "req_indices": i32([0]), "slot_mapping": i64([1])}
    return {"kv_score": torch.tensor([kv_score]), **places}


def _compressor_cases() -> list[Case]:
    # the RMSNorm of one channel is the sign of the channel times the weight
    states = StateLayout(2, 4).allocate(2)
    StateLayout(2, 4).rows(states)[1, 0] = torch.tensor([-4.0, 5.0, 0.0, 100.0])
    one = {"norm_weight": torch.tensor([0.5]), "ape": torch.zeros(2, 1)}
    one |= {"cos_sin_cache": torch.zeros(0, 0), "k_cache": torch.full((1, 2, 1), 7.0)}
    one |= {"kv_score": torch.tensor([[1.0, 0], [3, 0], [0, 0], [-6, 0]])}
    one |= {"states": StateLayout(2, 2).allocate(2)}
    rotated = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # a quarter turn for window 1
    level = torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0], [3, 4, 0, 0], [3, 2, 0, 0]])
    last, unchanged = _last_token(2.0, 1.0, 0.0, 100.0), ([[[7.0] * 2] * 2],)
    return [
        worked("one channel", ([[[0.5], [-0.5]]],), **one),
        worked("no slot", unchanged, slot_mapping=i64([-1, 2, 0, -2])),
        worked("no request", unchanged, req_indices=i32([-1, 1, 0, 2])),
        worked(
            "a quarter turn at the first position of the window",
            ([[[1.0, 1.0], [-1.0, 1.0]]],),
            kv_score=level,
            norm_weight=torch.ones(2),
            cos_sin_cache=rotated,
        ),
        worked("two channels"),
        worked("the last token of a window from the states", states=states, **last),
        worked("no token", unchanged, **{name: each[:0] for name, each in last.items()}),
        worked("no page", ([],), k_cache=torch.zeros(0, 2, 2)),
        worked("bfloat16", k_cache=torch.full((1, 2, 2), 7.0, dtype=torch.bfloat16)),
        worked("a row of NaN", kv_score=_spoiled(0, torch.nan)),
        worked("a score of -inf", kv_score=_spoiled(2, -torch.inf)),
        worked("a score of inf", kv_score=_spoiled(2, torch.inf)),
        worked(
            "the last positions of all, and later ones",
            ([[[7.0], [0.5]]],),
            **{**one, "ape": torch.zeros(1, 1), "compress_ratio": 1},
            positions=i64([2**31 - 1, 2**31 - 2, 2**40 + 1, 2**63 - 1]),
            slot_mapping=i64([0, 1, 0, 0]),
        ),
    ]


def _spoiled(place: int, value: float) -> Tensor:
    kv_score = torch.tensor([[1.0, 3, 0, 0], [3, 5, 0, 0], [0, 0, 0, 0], [6, -8, 0, 0]])
    kv_score[0, place] = value
    return kv_score


def _tokens(draw: Draw, ratio: int, min_size: int) -> tuple[int, Tensor, Tensor]:
    """Sample requests and their tokens. Most requests end at or next to the end of a window.

    Some requests are empty, and some tokens are padding or adversarial.
    """
    positions: list[int] = []
    requests: list[int] = []
    few = max(draw.one_of(3, 3, 0), min_size)
    counts = draw(draw.st.lists(draw.st.sampled_from((1, 2, 3, 5, 9, 0)), min_size=few, max_size=6))
    for request, count in enumerate(counts):
        windows = draw.one_of(1, 2, 3, 7)
        stop = windows * ratio + draw.one_of(0, 0, 1, -1, 3)
        start = max(stop - count, 0)
        positions += range(start, start + count)
        requests += [request] * count
    padding = max(draw.one_of(0, 0, 1, 3), min_size - len(positions))
    positions += [-1] * padding
    requests += [-1] * padding
    draw.spoil(positions, (*ADVERSARIAL_POSITIONS, 2 * ratio - 1), 2)
    draw.spoil(requests, (*BAD_REQUESTS, len(counts), 0), 2)
    return len(counts), i64(positions), i32(requests)


def _compressor_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_reqs, positions, req_indices = _tokens(draw, settings["compress_ratio"], min_size)
    num_tokens = positions.shape[0]
    layout, seed = _quantized(settings), draw.generator()
    dim = layout.head_dim if layout else 24
    width = dim * (2 if settings["overlap"] else 1)
    enough = num_tokens // settings["block_size"] + 2
    num_blocks = max(draw.one_of(enough, enough, enough, enough, 1, 0), min_size)
    num_pages = max(draw.one_of(9, 40, 0, 1), min_size)
    num_positions = max(draw.one_of(700, 40, 0), min_size)
    kv_score = torch.randn(num_tokens, 2 * width, generator=seed)
    kv_score[:, width:] *= draw.one_of(1.0, 10.0)
    table = tables(draw, num_reqs=num_reqs, min_size=min_size)
    table = torch.where((table >= 0) & (table < 5000), table % max(num_pages, 1), table)
    states = filled_states(settings["state_block_size"], table, num_pages, 2 * width, seed)
    angle = torch.rand(num_positions, 32 if layout else 4, generator=seed) * 6.3
    if layout is None:
        k_cache = torch.randn(num_blocks, settings["block_size"], dim, generator=seed)
        k_cache = k_cache if draw.flag() or min_size else k_cache.bfloat16()
    else:
        k_cache = random_bytes(seed, *layout.shape(num_blocks))
    tensors = (
        kv_score,
        torch.randn(settings["compress_ratio"], width, generator=seed),
        states,
        table,
        positions,
        req_indices,
        torch.randn(dim, generator=seed),
        torch.cat([angle.cos(), angle.sin()], 1),
        k_cache,
        slots(draw, num_tokens=num_tokens, num_slots=num_blocks * settings["block_size"]),
    )
    return Case("sampled", tensors, settings)


def filled_states(
    block_size: int, table: Tensor, num_pages: int, width: int, seed: torch.Generator
) -> Tensor:
    """Sample state blocks; padding and blocks outside ``table`` are NaN."""
    layout = StateLayout(block_size, width)
    states = torch.full(layout.shape(num_pages), float("nan"))
    layout.rows(states).copy_(torch.randn(num_pages, block_size, width, generator=seed))
    used = table[(table >= 0) & (table < num_pages)].long()
    unused = torch.ones(num_pages, dtype=torch.bool)
    unused[used] = False
    states[unused] = float("nan")
    return states


compress_and_insert = OpTesting(
    cases=_compressor_cases,
    settings=(
        _settings(4, True, "v4_fp8", 4, 64),
        _settings(4, True, "v4_indexer_fp8", 4, 64),
        _settings(4, True, "plain", 4, 3),
        _settings(128, False, "plain", 8, 40),
        _settings(2, False, "plain", 1, 64),
        _settings(128, False, "v4_fp8", 8, 2),
        _settings(3, True, "plain", 5, 64),
    ),
    make=_compressor_call,
    precise=precise,
    decode=decode,
)


_SLOTS = 4
"""Index of the argument with the slots of the states."""


def _windows_of(case: Case) -> Case:
    """Return the call of ``compress_and_insert`` that is part of a step."""
    tensors = (*case.tensors[:_SLOTS], *case.tensors[_SLOTS + 1 :])
    return Case(case.name, tensors, case.settings)


def precise_step(*tensors: Tensor | None, **settings: Any) -> tuple[Exact | None, ...]:
    """Compute the float64 values of the results of ``decode_step_outcome``; states are exact."""
    windows = _windows_of(Case("precise", tensors, settings))
    if settings.get("save_first"):
        windows = _with_states_saved(windows, tensors[_SLOTS])
    return None, *precise(*windows.tensors, **settings)


def _with_states_saved(windows: Case, slots: Any) -> Case:
    """Return ``windows`` with the states of the call's own tokens already saved."""
    call, size = Windows._make(windows.tensors), windows.settings["state_block_size"]
    states, (ratio, width) = call.states.clone(), call.ape.shape
    rows = StateLayout(size, 2 * width).rows(states)
    tokens = zip(call.kv_score, slots.tolist(), call.positions.tolist(), strict=True)
    for kv_score, slot, position in tokens:
        if position >= 0 and 0 <= slot < states.shape[0] * size:
            row = rows[slot // size, slot % size]
            row.copy_(kv_score)
            row[width:] += call.ape[position % ratio]
    return Case(windows.name, tuple(call._replace(states=states)), windows.settings)


def decode_step_outcome(case: Case, outcome: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the states, then the decoded cache."""
    states, cache = outcome
    return states, *decode(_windows_of(case), [cache])


def read_slots(case: Case) -> set[int]:
    """Return the state slots that a ``compress_and_insert`` call reads."""
    _, _, states, table, positions, req_indices, *_ = Windows._make(case.tensors)
    ratio, size = case.settings["compress_ratio"], case.settings["state_block_size"]
    tokens = list(zip(req_indices.tolist(), positions.tolist(), strict=True))
    slots_read = set()
    for token, _ in written_slots(case):
        request, position = tokens[token]
        for back in range(ratio * (2 if case.settings["overlap"] else 1)):
            place, other = position - back, token - back
            column = place // size
            if place < 0 or column >= table.shape[1]:
                continue
            if other < 0 or tokens[other] != (request, place):
                slots_read.add(int(table[request, column]) * size + place % size)
    return {slot for slot in slots_read if 0 <= slot < states.shape[0] * size}


def determined(case: Case) -> bool:
    """Whether the call saves all states first, or no token overwrites a state that a window of the
    same call reads."""
    if case.settings.get("save_first"):
        return True
    slots: Any = case.tensors[_SLOTS]
    return not read_slots(_windows_of(case)) & {int(slot) for slot in slots}


def _compressor_step_page(*rows: Sequence[float]) -> list[float]:
    """Return a block that has rows of two values, and padding."""
    values = [value for row in rows for value in row]
    return values + [0.0] * (StateLayout(2, 2).page_bytes // 4 - len(values))


def _worked(name: str, slots: Sequence[int], expected: Any = None, **changed: Any) -> Case:
    """Make a call for four tokens of one request, with one channel.

    Windows have two tokens. The first window has kv 1 and 3, and the second window has kv 0 and -6.
    All scores are 0, with a bias of 0.5.
    """
    one = {
        "kv_score": torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 0.0], [-6.0, 0.0]]),
        "ape": torch.full((2, 1), 0.5),
        "states": StateLayout(2, 2).allocate(2),
        "norm_weight": torch.tensor([0.5]),
        "cos_sin_cache": torch.zeros(0, 0),
        "k_cache": torch.full((1, 2, 1), 7.0),
    }
    windows = worked(name, **{**one, **changed})
    tensors = (*windows.tensors[:_SLOTS], i64([*slots]), *windows.tensors[_SLOTS:])
    return Case(name, tensors, windows.settings, expected)


def _compressor_step_cases() -> list[Case]:
    # the RMSNorm of one channel is the sign of the channel times the weight
    rows, unchanged, zero = [[[0.5], [-0.5]]], [[[7.0], [7.0]]], _compressor_step_page()
    old = StateLayout(2, 2).allocate(2)
    StateLayout(2, 2).rows(old)[1, 0] = torch.tensor([-9.0, 0.5])
    last = _last_token(3.0, 0.0)
    shared = {"kv_score": torch.tensor([[3.0, 0.0], [1.0, 0.0]]), "states": old.flip(0)}
    shared |= {"positions": i64([0, 1]), "req_indices": i32([0, 1]), "slot_mapping": i64([-1, 0])}
    shared["state_block_table"] = i32([[0], [0]])
    both = [_compressor_step_page([3.0, 0.5], [1.0, 0.5]), zero]
    none = {name: tensor[:0] for name, tensor in last.items()}
    saved = [_compressor_step_page([-6.0, 0.5], [1.0, 0.5]), _compressor_step_page([0.0, 0.5])]
    return [
        _worked("two windows", [1, -1, 2, 0], (saved, rows)),
        _worked("no slot for a state", [-1, 4, 2**40, -(2**63)], ([zero, zero], rows)),
        _worked(
            "no slot for a row", [1, -1, 2, 0], (saved, unchanged), slot_mapping=i64([-1, 2, 0, -2])
        ),
        _worked("no request", [1, -1, 2, 0], (saved, unchanged), req_indices=i32([-1, 1, 0, 2])),
        _worked(
            "padding has neither, and a late token a state",
            [0, 1, 2, 3],
            ([zero, _compressor_step_page([0.0, 0.5], [-6.0, 0.5])], unchanged),
            positions=i64([-1, -(2**63), 2**31 - 1, 2**63 - 1]),
        ),
        _worked(
            "its own state beside that of the token before",
            [3],
            ([zero, _compressor_step_page([-9.0, 0.5], [3.0, 0.5])], [[[7.0], [-0.5]]]),
            states=old,
            **last,
        ),
        _worked(
            "the state of another request's token, which this call saves",
            [0, 1],
            (both, [[[0.5], [7.0]]]),
            **shared,
            save_first=True,
        ),
        _worked("no token", [], ([zero, zero], unchanged), **none),
        _worked("no page", [1, -1, 2, 0], (saved, []), k_cache=torch.zeros(0, 2, 1)),
        _worked("no page of states", [1, -1, 2, 0], ([], rows), states=old[:0]),
        _worked("no table", [1, -1, 2, 0], (saved, unchanged), state_block_table=i32([[0, 1]])[:0]),
        _worked("bfloat16", [1, -1, 2, 0], k_cache=torch.full((1, 2, 1), 7.0).bfloat16()),
    ]


def _compressor_step_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    """Sample a step. Only a step that saves states first may save to slots that its windows
    read."""
    windows = compress_and_insert.make(draw, settings, min_size)
    call = Windows._make(windows.tensors)
    num_tokens = call.positions.shape[0]
    num_slots = call.states.shape[0] * settings["state_block_size"]
    read = read_slots(windows)
    free = sorted(set(range(num_slots)) - (set() if settings.get("save_first") else read))
    if draw.flag():  # use only free slots near those that windows read
        free = sorted(free, key=lambda slot: _distance(slot, read))[: num_tokens + 2]
    places = slots(draw, num_tokens=num_tokens, num_slots=len(free))
    in_range = (places >= 0) & (places < len(free))
    chosen = torch.where(in_range, i64([*free, -1])[torch.where(in_range, places, -1)], places)
    outside = (places >= len(free)) & (places < num_slots)
    tensors = (*windows.tensors[:_SLOTS], torch.where(outside, -1, chosen))
    return Case("sampled", (*tensors, *windows.tensors[_SLOTS:]), settings)


def _distance(slot: int, read: set[int]) -> int:
    return min((abs(slot - other) for other in read), default=0)


save_and_compress = OpTesting(
    cases=_compressor_step_cases,
    settings=(
        *compress_and_insert.settings,
        {**_settings(4, True, "v4_indexer_fp8", 4, 64), "save_first": True},
        {**_settings(128, False, "plain", 8, 40), "save_first": True},
    ),
    make=_compressor_step_call,
    precise=precise_step,
    decode=decode_step_outcome,
    determined=determined,
)
