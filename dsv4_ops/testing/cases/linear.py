"""Cases and strategies of the block-scaled FP8 linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import FP8_MAX
from dsv4_ops.reference.linear import quantized
from dsv4_ops.testing.case import Case, Exact, OpTesting
from dsv4_ops.testing.float64.linear import activations, block_values, exact_product, fp8_weight
from dsv4_ops.testing.strategies.caches import keys
from dsv4_ops.testing.strategies.draw import Draw

FP8_UNIT = 2.0**-4
FLOOR_SCALE = 2.0**-22
"""Scale for an amax of 1e-4: 2^-22 * 448 is just above 1e-4, and 2^-23 * 448 is below."""

_OFFICIAL = {"block": 128, "scale": "pow2", "min_amax": 1e-4, "scale_layout": "row"}
_HUGGING_FACE = {"block": 32, "scale": "float32", "min_amax": 1e-12, "scale_layout": "row"}


def _rows_case(name: str, settings: dict[str, Any], codes: Any, scales: Any) -> Case:
    """Make a row of three blocks of 128 values. The first block has 3 and -0.3, the second block
    has only values below ``min_amax``, and the third block has 900."""
    x = torch.zeros(1, 384, dtype=torch.bfloat16)
    x[0, 0], x[0, 1], x[0, 128], x[0, 256] = 3.0, -0.3, 2.0**-43, 900.0
    row = [0.0] * 384
    row[0], row[1], row[256] = codes
    return Case(name, (x,), settings, ([row], scales))


def _rows_cases() -> list[Case]:
    # 3 and -0.3 over 2^-7 are 384 and -38.5; 900 over 4 is 225
    powers, scales = (384.0, -40.0, 224.0), [2.0**-7, FLOOR_SCALE, 4.0]
    # 3 and -0.3 over 3 / 448 are 448 and -44.9; 900 over 900 / 448 is 448
    exactly = (448.0, -44.0, 448.0)
    real = [torch.tensor(amax).div(FP8_MAX).item() for amax in (3.0, 1e-4, 900.0)]
    special = torch.tensor([[448.0, 450.0, torch.inf, 2.0, 0.0, 0.0]]).bfloat16()
    # 450 needs the scale 2; the largest bf16 value, 0x7F7F, needs 2^120
    large = [[224.0, 224.0, 448.0, 0.0, 0.0, 0.0]], [[2.0, 2.0**120, FLOOR_SCALE]]
    pairs = {**_OFFICIAL, "block": 2}
    none = {**_OFFICIAL, "scale_layout": "column_padded"}
    return [
        _rows_case("powers of two", _OFFICIAL, powers, [scales]),
        _rows_case("padded columns", none, powers, [[each, 0.0, 0.0, 0.0] for each in scales]),
        _rows_case("float32", {**_OFFICIAL, "scale": "float32"}, exactly, [real]),
        Case("large values", (special,), pairs, large),
        Case(
            "no token", (special[:0],), {**pairs, "scale_layout": "column_padded"}, ([], [[]] * 3)
        ),
        Case("no value", (special[:, :0],), pairs, ([[]], [[]])),
    ]


def _rows_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 4, 5, 9), min_size)
    width = 384 if min_size else draw.one_of(384, 128, 256)
    x = keys(draw, num_rows=num_tokens, width=width, special=width)
    return Case("sampled", (x,), settings)


def _rows_precise(
    x: Tensor, *, block: int, scale: str, min_amax: float, scale_layout: str
) -> tuple[Exact | None, ...]:
    """Compute decoded values in float64. With power-of-two scales, every implementation must match
    the reference bit for bit, so return None."""
    if scale == "pow2":
        return None, None
    value = x.to(torch.float64)
    most = torch.finfo(torch.bfloat16).max
    finite = value.abs().nan_to_num(0.0).clamp(max=most)
    blocks = finite.unflatten(-1, (value.shape[1] // block, block))
    amax = blocks.amax(-1, keepdim=True) if value.numel() else blocks[..., :1]
    amax = amax.clamp(min=min_amax)
    value = torch.where(value.isinf(), value.sign() * most, value)
    subnormal = amax / FP8_MAX * (2.0**-10 / FP8_UNIT)
    size = 1.1 * finite + subnormal.expand_as(blocks).flatten(-2)
    unit = 4 * 2.0**-24  # two divisions and the lower bound round
    scales = (amax / FP8_MAX).squeeze(-1)
    return Exact(value, size, FP8_UNIT), Exact(scales, scales, unit)


def _decode_rows(case: Case, outcome: Sequence[Tensor]) -> Sequence[Tensor]:
    values, scales = outcome
    if case.settings["scale"] == "pow2":
        return outcome
    return block_values(values, scales, 1, case.settings["block"]), scales


quantize_rows = OpTesting(
    cases=_rows_cases,
    settings=(
        _OFFICIAL,
        {**_OFFICIAL, "scale_layout": "column_padded", "block": 64},
        _HUGGING_FACE,
        {**_OFFICIAL, "min_amax": 1e-10, "block": 32},
    ),
    make=_rows_call,
    precise=_rows_precise,
    decode=_decode_rows,
)

W8A16 = {"activations": "bf16", "out_dtype": torch.bfloat16, "impl": "auto"}
W8A8 = {**W8A16, "activations": "fp8"}
_WEIGHT_SETTINGS = (W8A16, W8A8, {**W8A16, "out_dtype": torch.float32})


def _worked_weight() -> tuple[Tensor, Tensor]:
    """Make 2 x 2 blocks of 128 x 128 values, with codes [[2, -0.5], [1, 0]] and scales [[2, 1/2],
    [1, 2^-127]]."""
    weight = torch.zeros(256, 256)
    weight[:128, :128], weight[:128, 128:], weight[128:, :128] = 2.0, -0.5, 1.0
    scale = torch.tensor([[128, 126], [127, 0]], dtype=torch.uint8)
    return weight.to(torch.float8_e4m3fn), scale


def _linear_cases() -> list[Case]:
    weight, scale = _worked_weight()
    real = torch.tensor([[2.0, 0.5], [1.0, 3.0]])
    ones = torch.ones(2, 256, dtype=torch.bfloat16)
    ones[1] = 0.3
    # the row of ones gives 128 * 2 * 2 - 128 * 0.5 * 0.5 = 480 and 128; 0.3 is 0.30078125 in bf16
    whole = [[480.0] * 128 + [128.0] * 128, [144.375] * 128 + [38.5] * 128]
    # 1 / 2^-8 is 256; 0.30078125 / 2^-10 is 308, which rounds to 320 and reads as 0.3125
    rounded = [whole[0], [150.0] * 128 + [40.0] * 128]
    codes = torch.full((2, 256), 320.0).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 0.25], [2.0**-10, 2.0**-10]])
    # the first row is 320 * 128 * 4 - 80 * 128 / 4 = 161280 and 320 * 128 = 40960
    scaled = [[161280.0] * 128 + [40960.0] * 128, rounded[1]]
    nan = torch.where(scale == 0, 255, scale)
    missing = torch.ones(1, 256, dtype=torch.bfloat16)
    out32 = {**W8A16, "out_dtype": torch.float32}
    return [
        Case("bytes", (ones, weight, scale), out32, (whole,)),
        Case("float32 scales", (ones, weight, real), out32, (whole,)),
        Case("bf16", (ones[:1], weight, scale), W8A16, (whole[:1],)),
        Case("quantised", (ones, weight, scale), {**W8A8, "out_dtype": torch.float32}, (rounded,)),
        Case("codes", (codes, weight, scale, scales), {**out32, "activations": "fp8"}, (scaled,)),
        Case(
            "many codes",
            (codes[:1].expand(33, -1), weight, scale, scales[1:].expand(33, -1)),
            W8A16,
            (rounded[1:] * 33,),
        ),
        Case("a byte of 255", (missing, weight, nan), W8A16),
        Case("no token", (ones[:0], weight, scale), W8A16, ([],)),
        Case("no output", (ones, weight[:0], scale[:0]), W8A16, ([[], []],)),
    ]


def _linear_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5, 17, 40), min_size)
    sizes = ((256, 384), (128, 128), (384, 256))
    rows, columns = sizes[0] if min_size else draw.one_of(*sizes)
    return _sampled(draw, settings, min_size, rows, (num_tokens, columns))


def _sampled(
    draw: Draw, settings: dict[str, Any], min_size: int, rows: int, shape: tuple[int, ...]
) -> Case:
    """Sample activations of ``shape``, or the activations' codes for each group, and a weight."""
    ue8m0 = bool(min_size) or draw.flag()
    weight = fp8_weight(draw.generator(), rows, shape[-1], ue8m0=ue8m0)
    # a quantised infinity decodes to a value above the largest float32
    x = activations(draw, *shape, infinite=settings["activations"] == "bf16")
    if settings["activations"] == "fp8" and draw.flag():
        codes, scales = quantized(x.transpose(0, -2))
        return Case("sampled", (codes, *weight, scales * 1.5), settings)
    return Case("sampled", (x, *weight), settings)


def activation_values(x: Tensor, x_scale: Tensor | None, quantise: str) -> Tensor:
    """Return the float64 values of activations."""
    if x_scale is None and quantise == "fp8":
        x, x_scale = quantized(x)
    if x_scale is None:
        return x.to(torch.float64)
    return block_values(x, x_scale, 1, 128)


def _linear_precise(
    x: Tensor, weight: Tensor, scale: Tensor, x_scale: Tensor | None = None, **settings: Any
) -> tuple[Exact | None, ...]:
    rows = activation_values(x, x_scale, settings["activations"])
    return (exact_product(rows, block_values(weight, scale, 128, 128), settings["out_dtype"]),)


fp8_linear = OpTesting(
    cases=_linear_cases, settings=_WEIGHT_SETTINGS, make=_linear_call, precise=_linear_precise
)


def _norms_cases() -> list[Case]:
    weight = torch.full((256, 128), 3.0)
    weight[1:192:2] = 4.0
    norms = torch.full((192,), 2.0), torch.ones(64)
    norms[1][3] = 0.5
    tensors = torch.ones(2, 128).bfloat16(), weight.to(torch.float8_e4m3fn), torch.ones(2, 1)
    settings = {"eps": 1e-6, "activations": "bf16"}
    # 3 and 4 over the root of 12.5 are 0.8485 and 1.1314
    rows = [[1.6953125, 2.265625] * 96] * 2, [[1.0] * 3 + [0.5] + [1.0] * 60] * 2
    return [
        Case("two", (*tensors, *norms), settings, rows),
        Case("no token", (tensors[0][:0], *tensors[1:], *norms), settings, ([], [])),
    ]


def _norms_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5, 17, 40), min_size)
    sizes = ((256, 384), (128, 128), (384, 256))
    rows, columns = sizes[0] if min_size else draw.one_of(*sizes)
    first = 96 if min_size else draw.one_of(96, 1, rows - 1, rows // 2)
    seed = draw.generator()
    weight = fp8_weight(seed, rows, columns, ue8m0=bool(min_size) or draw.flag())
    norm = torch.rand(rows, generator=seed) + 0.5
    x = activations(draw, num_tokens, columns, infinite=False)
    return Case("sampled", (x, *weight, norm[:first].clone(), norm[first:].clone()), settings)


def _norms_precise(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    first_norm: Tensor,
    second_norm: Tensor,
    *,
    eps: float,
    **settings: Any,
) -> tuple[Exact | None, ...]:
    rows = activation_values(x, None, settings["activations"])
    product = exact_product(rows, block_values(weight, scale, 128, 128), torch.bfloat16)
    sizes, found = [first_norm.shape[0], second_norm.shape[0]], list[Exact | None]()
    parts = zip(*(each.split(sizes, 1) for each in product[:2]), strict=True)
    for (value, error), norm in zip(parts, (first_norm, second_norm), strict=True):
        scaled = torch.rsqrt(value.square().mean(1, keepdim=True) + eps) * norm
        # products round before the norm, and the error of the largest product changes the mean
        # square
        most = (error * scaled.abs()).amax(1, keepdim=True)
        normed = value * scaled
        found.append(Exact(normed, normed.abs() * (1 + most) + 2 * error * scaled.abs()))
    return tuple(found)


fp8_linear_norms = OpTesting(
    cases=_norms_cases,
    settings=(
        {"eps": 1e-6, "activations": "bf16"},
        {"eps": 0.5, "activations": "fp8"},
    ),
    make=_norms_call,
    precise=_norms_precise,
)


def _swiglu_cases() -> list[Case]:
    weight = torch.full((256, 128), 3.0)
    weight[128:] = -2.0
    x, scale = torch.ones(2, 128).bfloat16(), torch.full((2, 1), 2.0**-7)
    x[1] = 4.0
    tensors = (x, weight.to(torch.float8_e4m3fn), scale)
    settings = {"swiglu_limit": 5.0, "activations": "bf16"}
    # 3 * 0.9526 * -2 = -5.7155, and 5 * 0.9933 * -5 = -24.8327
    rows = [[-5.71875] * 128, [-24.875] * 128]
    return [
        Case("gate and up", tensors, settings, (rows,)),
        Case("no token", (x[:0], *tensors[1:]), settings, ([],)),
    ]


def _swiglu_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5, 17, 40), min_size)
    sizes = ((256, 384), (128, 128), (384, 256))
    rows, columns = sizes[0] if min_size else draw.one_of(*sizes)
    ue8m0 = bool(min_size) or draw.flag()
    weight = fp8_weight(draw.generator(), rows, columns, ue8m0=ue8m0)
    # codes of weights reach 448, so activations are small
    x = activations(draw, num_tokens, columns, infinite=False) * 2.0**-8
    return Case("sampled", (x, *weight), settings)


def _swiglu_precise(
    x: Tensor, weight: Tensor, scale: Tensor, *, swiglu_limit: float, **settings: Any
) -> tuple[Exact | None, ...]:
    rows = activation_values(x, None, settings["activations"])
    product = exact_product(rows, block_values(weight, scale, 128, 128), torch.bfloat16)
    (gate, up), (of_gate, of_up) = (each.chunk(2, 1) for each in product[:2])
    gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    active = gate * torch.sigmoid(gate)
    value = active * up
    # gate and up are rounded before SiLU; the slope of SiLU is at most 1.1, so the error of the
    # gate grows by at most this factor
    error = 2 * (1.1 * of_gate * up.abs() + of_up * active.abs())
    return (Exact(value, value.abs() + error),)


fp8_linear_swiglu = OpTesting(
    cases=_swiglu_cases,
    settings=(
        {"swiglu_limit": 10.0, "activations": "bf16"},
        {"swiglu_limit": 0.75, "activations": "fp8"},
    ),
    make=_swiglu_call,
    precise=_swiglu_precise,
)


def _grouped_cases() -> list[Case]:
    weight, scale = _worked_weight()
    x = torch.ones(1, 2, 256, dtype=torch.bfloat16)
    x[0, 1] = 0.3
    whole = [[480.0] * 128 + [38.5] * 128]
    codes = torch.full((2, 1, 256), 320.0).to(torch.float8_e4m3fn)
    scales = torch.tensor([[[1.0, 0.25]], [[2.0**-10, 2.0**-10]]])
    scaled = [[161280.0] * 128 + [40.0] * 128]
    settings = {**W8A16, "out_dtype": torch.float32}
    rounded = [[480.0] * 128 + [40.0] * 128]
    return [
        Case("two groups", (x, weight, scale), settings, (whole,)),
        Case("quantised", (x, weight, scale), {**settings, "activations": "fp8"}, (rounded,)),
        Case("codes", (codes, weight, scale, scales), settings, (scaled,)),
        Case(
            "many codes",
            (codes.expand(-1, 17, -1), weight, scale, scales[1:].expand(2, 17, -1)),
            W8A16,
            ([[150.0] * 128 + [40.0] * 128] * 17,),
        ),
        Case("no token", (x[:0], weight, scale), settings, ([],)),
    ]


def _grouped_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5, 17), min_size)
    sizes = ((2, 128, 256), (1, 256, 128), (3, 128, 128))
    groups, rows, columns = sizes[0] if min_size else draw.one_of(*sizes)
    return _sampled(draw, settings, min_size, groups * rows, (num_tokens, groups, columns))


def _grouped_precise(
    x: Tensor, weight: Tensor, scale: Tensor, x_scale: Tensor | None = None, **settings: Any
) -> tuple[Exact | None, ...]:
    rows = activation_values(x, x_scale, settings["activations"])
    groups = rows.transpose(0, 1) if x_scale is None else rows
    values = block_values(weight, scale, 128, 128).unflatten(0, (groups.shape[0], -1))
    product = exact_product(groups, values, settings["out_dtype"])
    value, magnitude = (part.transpose(0, 1).flatten(1) for part in product[:2])
    return (Exact(value, magnitude),)


fp8_grouped_linear = OpTesting(
    cases=_grouped_cases, settings=_WEIGHT_SETTINGS, make=_grouped_call, precise=_grouped_precise
)
