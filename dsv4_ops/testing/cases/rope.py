"""Cases and strategies of rotary embeddings and the fused query norm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import FP8_MAX, MainLayout, PlainLayout
from dsv4_ops.testing.case import Case, Exact, OpTesting, i64
from dsv4_ops.testing.float64.linear import block_values
from dsv4_ops.testing.float64.rope import (
    exact,
    exact_rotation,
    positions,
    rotated_row,
    tables,
    worked_row,
    worked_table,
)
from dsv4_ops.testing.strategies.caches import heads, keys, plain_cache, random_bytes, slots
from dsv4_ops.testing.strategies.draw import Draw

FP8_UNIT = 2.0**-4

QUARTERS = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
"""Table with the identity at position 0 and a quarter turn at position 1."""


def bf16(values: Any) -> Tensor:
    """Make a bf16 tensor from a list."""
    return torch.tensor(values, dtype=torch.bfloat16)


def _rope_cases() -> list[Case]:
    rows = torch.tensor([[5.0, 1.0, 2.0], [5.0, 1.0, 2.0]])
    forward, back = _rope(), _rope(inverse=True)
    four = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    turns = torch.tensor([[0.0, -1.0, 1.0, 0.0]])
    heads, table = bf16([[worked_row()] * 3] * 2), worked_table()
    rotated, back_again = ([[rotated_row(inverse=flag)] * 3] for flag in (False, True))
    unchanged = [[worked_row()] * 3]
    absent = i64([-1, 2, 2**40, 2**63 - 1])
    infinite = torch.tensor([[1.0, float("inf"), -0.0]] * 4)
    pairs = (rows[:, 1:], i64([0, 1]), QUARTERS)
    return [
        Case("a quarter turn", (rows, i64([0, 1]), QUARTERS), forward, ([[5, 1, 2], [5, -2, 1]],)),
        Case("back", (rows, i64([1, 0]), QUARTERS), back, ([[5, 2, -1], [5, 1, 2]],)),
        Case("heads", (heads, i64([0, 1]), table), forward, (unchanged + rotated,)),
        Case("heads back", (heads, i64([1, 0]), table), back, (back_again + unchanged,)),
        Case(
            "no such position", (rows.repeat(2, 1), absent, QUARTERS), forward, ([[5, 1, 2]] * 4,)
        ),
        Case("infinite, no position", (infinite, absent, QUARTERS), forward, (infinite.tolist(),)),
        Case("no table", (rows, i64([0, 1]), QUARTERS[:0]), forward, (rows.tolist(),)),
        Case("no pair", (rows, i64([0, 1]), QUARTERS[:, :0]), forward, (rows.tolist(),)),
        Case("nothing but pairs", pairs, forward, ([[1, 2], [-2, 1]],)),
        Case("no token", (rows[:0], i64([]), QUARTERS), forward, ([],)),
        Case(
            "the first pair",
            (rows, i64([0, 1]), QUARTERS),
            _rope(rope_first=True),
            ([[5, 1, 2], [-1, 5, 2]],),
        ),
        # (3, 5) rotate by the first angle (a quarter turn), and (4, 6) by the second angle (half a
        # turn)
        Case(
            "halves",
            (four, i64([0]), turns),
            _rope(interleaved=False),
            ([[1, 2, -5, -4, 3, -6]],),
        ),
        Case(
            "the first halves back",
            (four, i64([0]), turns),
            _rope(inverse=True, rope_first=True, interleaved=False),
            ([[3, -2, -1, -4, 5, 6]],),
        ),
    ]


def _rope(
    *, inverse: bool = False, rope_first: bool = False, interleaved: bool = True
) -> dict[str, Any]:
    return {"inverse": inverse, "rope_first": rope_first, "interleaved": interleaved}


def _rope_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    free = settings["inverse"]  # else calls share one compiled function: one ndim, dtype and width
    sizes = ((512, 64), (128, 64), (12, 4), (7, 6), (64, 64), (2, 2), (3, 0))
    dim, rope_dim = draw.one_of(*sizes) if free else (512, 64)
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5, 9, 17), min_size)
    num_heads = max(draw.one_of(4, 1, 2, 3, 8, 0), min_size)
    x = heads(draw, num_tokens, num_heads, dim)
    if free and draw.flag():
        x = x.to(torch.float32) * (1 + torch.arange(dim) * 2.0**-20)
    if free and num_heads and draw.flag():
        x = x[:, 0]
    table = tables(draw, rope_dim=rope_dim, min_size=min_size)
    where = positions(draw, num_tokens=num_tokens, num_positions=table.shape[0])
    return Case("sampled", (x, where, table), settings)


def _rope_precise(
    x: Tensor, positions: Tensor, cos_sin_cache: Tensor, **settings: bool
) -> tuple[Exact | None, ...]:
    rows = x.to(torch.float64).view(x.shape[0], -1 if x.numel() else 0, x.shape[-1])
    value, products = exact_rotation(rows, positions, cos_sin_cache, **settings)
    return (exact(value.view(x.shape), products.view(x.shape), x.dtype),)


apply_rope = OpTesting(
    cases=_rope_cases,
    settings=(
        _rope(),
        _rope(inverse=True),
        _rope(inverse=True, rope_first=True),
        _rope(inverse=True, rope_first=True, interleaved=False),
    ),
    make=_rope_call,
    precise=_rope_precise,
)


def _group_cases() -> list[Case]:
    row, back = worked_row(), rotated_row(inverse=True)
    plain, table = [0.5] * 512, worked_table()
    o, where = bf16([[row, plain, plain, row]] * 2), i64([1, 0])
    half = [*[0.5] * 448, 0.5, -0.5, 0.5, -1.5, *[0.5] * 60]  # inverse RoPE of pairs (1/2, 1/2)
    rotated, unchanged = [back + half, half + back], [row + plain, plain + row]
    one = [[rotated[0] + rotated[1]], [unchanged[0] + unchanged[1]]]
    return [
        Case("two groups", (o, where, table), {"num_groups": 2}, ([rotated, unchanged],)),
        Case("one group", (o, where, table), {"num_groups": 1}, (one,)),
        Case("no token", (o[:0], i64([]), table), {"num_groups": 2}, ([],)),
        Case("no head", (o[:, :0], where, table), {"num_groups": 2}, ([[[], []]] * 2,)),
    ]


def _grouped(
    sizes: tuple[tuple[int, int], ...], draw: Draw, settings: dict[str, Any], min_size: int
) -> Case:
    dim, rope_dim = sizes[0] if min_size else draw.one_of(*sizes)
    num_tokens = max(draw.one_of(3, 0, 1, 2, 4, 5, 9, 16), min_size)
    num_heads = max(draw.one_of(2, 1, 3), min_size) * settings["num_groups"]
    o = heads(draw, num_tokens, num_heads, dim)
    table = tables(draw, rope_dim=rope_dim, min_size=min_size)
    where = positions(draw, num_tokens=num_tokens, num_positions=table.shape[0])
    return Case("sampled", (o, where, table), settings)


def _group_precise(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, num_groups: int
) -> tuple[Exact | None, ...]:
    rotated = exact_rotation(o.to(torch.float64), positions, cos_sin_cache, inverse=True)
    shape = (o.shape[0], num_groups, o.shape[1] // num_groups * o.shape[2])
    value, products = (part.reshape(shape) for part in rotated)
    return (exact(value, products, o.dtype),)


inverse_rope_group = OpTesting(
    cases=_group_cases,
    settings=({"num_groups": 2}, {"num_groups": 1}, {"num_groups": 8}),
    make=partial(_grouped, ((512, 64), (12, 4), (7, 6))),
    precise=_group_precise,
)


def _quantize_case(scale_layout: str, scales: Any) -> Case:
    """Make two heads of one group at a position that is not rotated.

    The first block has 3 and -0.3, the sixth block has 900, and the last block has a value below
    the smallest scale.
    """
    o = torch.zeros(1, 2, 512, dtype=torch.bfloat16)
    o[0, 0, 0], o[0, 0, 1], o[0, 1, 128], o[0, 1, 511] = 3.0, -0.3, 900.0, 2.0**-43
    row = [0.0] * 1024
    row[0], row[1] = 384.0, -40.0  # 3 and -0.3 over 2^-7 are 384 and -38.5
    row[512 + 128], row[1023] = 224.0, 0.5  # 900 over 4 is 225; 2^-43 over 2^-42 is 0.5
    settings = {"num_groups": 1, "scale_layout": scale_layout}
    return Case(scale_layout, (o, i64([-1]), torch.zeros(1, 64)), settings, ([[row]], scales))


def _quantize_cases() -> list[Case]:
    floor = 2.0**-42
    scales = [2.0**-7, floor, floor, floor, floor, 4.0, floor, floor]
    packed = [120 + 85 * 0x10101 * 256, 85 + 129 * 256 + 85 * 0x10100 * 256]
    columns = [[[scale, 0.0, 0.0, 0.0] for scale in scales]]
    words = [[[word, 0, 0, 0] for word in packed]]
    o, where, table = _quantize_case("row", None).tensors
    assert o is not None
    none = {"num_groups": 2, "scale_layout": "column_padded"}
    return [
        _quantize_case("row", [[scales]]),
        _quantize_case("column_padded", columns),
        _quantize_case("ue8m0_packed", words),
        Case("no token", (o[:0], i64([]), table), none, ([[], []], [[[]] * 4] * 2)),
        Case("no head", (o[:, :0], where, table), none, ([[[]], [[]]], [[], []])),
    ]


def _quantize_precise(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, num_groups: int, scale_layout: str
) -> tuple[Exact | None, ...]:
    """Compute the decoded values in float64. An infinity decodes to 448 times the scale of the
    largest bf16 value."""
    (rows,) = _group_precise(o, positions, cos_sin_cache, num_groups=num_groups)
    assert rows is not None
    infinite = rows.value.to(torch.bfloat16).isinf()
    value = torch.where(infinite, FP8_MAX * 2.0**120 * rows.value.sign(), rows.value)
    value = value.transpose(0, 1)
    finite = value.abs().nan_to_num(0.0).clamp(max=torch.finfo(torch.bfloat16).max)
    blocks = finite.unflatten(-1, (value.shape[-1] // 128, 128))
    amax = blocks.amax(-1, keepdim=True) if value.numel() else blocks
    # an e4m3 value below 2^-6 has an error of 2^-10, times the scale of its block
    subnormal = (2 / FP8_MAX * amax).clamp(min=2.0**-42) * (2.0**-10 / FP8_UNIT)
    size = 1.1 * finite + subnormal.expand_as(blocks).flatten(-2)
    return Exact(value, size, FP8_UNIT), None


def _decode_quantized(case: Case, outcome: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the dequantised values in float64, and the padding of the scales."""
    values, scales = outcome
    num_tokens, padding = values.shape[1], scales.new_empty(0)
    layout = case.settings["scale_layout"]
    if layout != "row":
        scales, padding = scales[:, :, :num_tokens].transpose(1, 2), scales[:, :, num_tokens:]
    if layout == "ue8m0_packed":
        scales = scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return block_values(values, scales, 1, 128), padding


inverse_rope_group_quantize = OpTesting(
    cases=_quantize_cases,
    settings=tuple(
        {"num_groups": num_groups, "scale_layout": layout}
        for num_groups, layout in ((2, "column_padded"), (1, "row"), (8, "ue8m0_packed"))
    ),
    make=partial(_grouped, ((512, 64), (512, 4), (512, 32))),
    precise=_quantize_precise,
    decode=_decode_quantized,
)


_FP8 = {"eps": 1e-6, "block_size": 1, "layout": MainLayout.tag}
_PLAIN = {**_FP8, "layout": PlainLayout.tag}
ROUNDINGS = 8
"""Allowed float32 roundings before the last rounding: in the sum, mean, root and product of the
norm, and in the rotation."""


def _worked() -> tuple[Tensor, ...]:
    """Make two tokens with two heads and a key each, at positions 1 and 0. Only the first token has
    a slot."""
    q = torch.full((2, 2, 512), 4.0, dtype=torch.bfloat16)
    q[:, 1] *= -1
    kv = torch.zeros(2, 512, dtype=torch.bfloat16)
    kv[:, :3] = torch.tensor([3.0, -0.3, 0.01])
    kv[:, 448:452] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return q, kv, i64([1, -1]), i64([1, 0]), worked_table()


def _normed() -> list[Any]:
    """Return queries of ones and of minus ones, rotated at position 1 and not at position 0."""
    rotated = [1.0] * 512
    rotated[448:452] = [-1.0, 1.0, -3.0, 1.0]
    return [[rotated, [-value for value in rotated]], [[1.0] * 512, [-1.0] * 512]]


def _worked_page() -> list[int]:
    """Return a block with the key of position 1: RoPE turns (1, 2) into (-2, 1) and (3, 4) into
    (-11, 2)."""
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
    far, empty = i64([2**62, -(2**63)]), [[0] * 1152] * 2
    none = (q[:0], kv[:0], cache, slots[:0], where[:0], table)
    ones = [[[1.0] * 512, [-1.0] * 512]] * 2
    return [
        Case("worked rows", (q, kv, cache, slots, where, table), _FP8, (_normed(), pages)),
        Case("plain", (q, kv, plain, slots, where, table), _PLAIN, (_normed(), [sevens, [row]])),
        Case("fewer slots", (q, kv, cache, slots[:1], where, table), _FP8, (_normed(), pages)),
        Case("no slot", (q, kv, cache, slots[:0], where, table), _FP8, (_normed(), empty)),
        Case("adversarial", (q, kv, cache, far, far, table), _FP8, (ones, empty)),
        Case("no head", (q[:, :0], kv, cache, slots, where, table), _FP8, ([[], []], pages)),
        Case("no page", (q, kv, cache[:0], slots, where, table), _FP8, (_normed(), [])),
        Case("no token", none, _FP8, ([], empty)),
    ]


def _call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5, 9), min_size)
    num_heads = max(draw.one_of(4, 0, 1, 2, 3, 8), min_size)
    num_blocks = max(draw.one_of(3, 0, 1, 2, 8), min_size)
    num_slots = max(num_tokens - draw.one_of(0, 0, 1, 4), min_size)
    block_size = settings["block_size"]
    q = heads(draw, num_tokens, num_heads, 512)
    kv = keys(draw, num_rows=num_tokens, width=512, special=512)
    if settings["layout"] == PlainLayout.tag:
        cache = plain_cache(draw.generator(), num_blocks, block_size, 512)
    else:
        cache = random_bytes(draw.generator(), *MainLayout(block_size).shape(num_blocks))
    slot_mapping = slots(draw, num_tokens=num_slots, num_slots=num_blocks * block_size)
    table = tables(draw, rope_dim=64, min_size=min_size)
    where = positions(draw, num_tokens=num_tokens, num_positions=table.shape[0])
    return Case("sampled", (q, kv, cache, slot_mapping, where, table), settings)


def _precise(*tensors: Tensor, eps: float, **settings: Any) -> tuple[Exact | None, ...]:
    """Compute float64 results; the cache is exact. A mean square beyond float32 becomes
    infinite."""
    q, _, _, _, positions, cos_sin_cache = tensors
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
