"""Quantise to e4m3 codes with power-of-two block scales, on bit patterns.

All results derive from the bits of the bf16 input, not from its float value. A compiler may keep a
fused intermediate in more than bf16 precision, and rounds it only where code uses its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import FP8_MAX, SCALE_BIAS, SCALE_FLOOR
from dsv4_ops.core.target import capability_of, target_of
from dsv4_ops.reference.common import materialized, runs_on_cpu

_ABSOLUTE = 0x7FFF
_INFINITY = 0x7F80
_LARGEST_FINITE = 0x7F7F
_NAN_CODE = 0x7F
_EXPONENT = 23
_UP_TO_SEVEN_QUARTERS = 0x1F
"""The sum of this number and the bf16 pattern of an amax carries into the exponent if the
significand is above 1.75. 448 is 1.75 * 2^8. So the exponent of the sum, minus 8, is the exponent
of amax / 448 rounded up to a power of two."""


def bf16_bits(values: Tensor) -> Tensor:
    """Return the bit patterns of bf16 values, int32."""
    return values.view(torch.int16).to(torch.int32)


def quantize(
    bits: Tensor, quant_block: int, scale_floor: int = SCALE_FLOOR
) -> tuple[Tensor, Tensor]:
    """Quantise bf16 patterns to e4m3 codes with one UE8M0 byte per ``quant_block`` values.

    Args:
        bits: int32 [..., dim], from ``bf16_bits``.
        quant_block: Values per scale; divides dim.
        scale_floor: Smallest scale byte.

    Returns:
        uint8 [..., dim] codes and int32 [..., dim // quant_block] scale bytes. NaN becomes code
        0x7F and counts as 0 for the scale; infinities saturate and count as the largest finite
        bf16.
    """
    blocks = bits.unflatten(-1, (-1, quant_block))
    amax, is_nan = _amax_of(blocks)
    scale = (((amax + _UP_TO_SEVEN_QUARTERS) >> 7) - 8).clamp(min=scale_floor)
    inverse = ((2 * SCALE_BIAS - scale) << 23).view(torch.float32)
    scaled = (blocks << 16).view(torch.float32) * inverse
    return _codes_of(scaled, is_nan), scale.squeeze(-1)


def _amax_of(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pattern of every block's amax, and the mask of NaN values. The amax ignores NaN,
    and is at most the largest finite bf16."""
    absolute = blocks & _ABSOLUTE
    is_nan = absolute > _INFINITY
    return torch.where(is_nan, 0, absolute).amax(-1, keepdim=True).clamp(
        max=_LARGEST_FINITE
    ), is_nan


def _codes_of(scaled: Tensor, is_nan: Tensor) -> Tensor:
    return torch.where(is_nan, _NAN_CODE, saturated_codes(scaled)).flatten(-2)


def converts_codes(device: torch.device) -> bool:
    """Return whether compiled code may hold e4m3 values on ``device``. Triton refuses pointers to
    e4m3 values on devices where it cannot convert such values."""
    return target_of(capability_of(device)).converts_codes


def saturated_codes(values: Tensor) -> Tensor:
    """Return uint8 e4m3 codes of float32 values, saturated; codes of NaN are undefined."""
    values = values.clamp(-FP8_MAX, FP8_MAX)
    if converts_codes(values.device):
        return values.to(torch.float8_e4m3fn).view(torch.uint8)
    bits = values.view(torch.int32)
    size = bits & 0x7FFFFFFF
    # as in kernels/common/fp8.py: round to nearest even; subnormal codes are multiples of 2^-9
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (size.view(torch.float32) + 16384.0).view(torch.int32) & 0xF
    codes = torch.where(size < 121 << _EXPONENT, subnormal, normal)
    return (codes | ((bits >> 24) & 0x80)).to(torch.uint8)


def as_e4m3(codes: Tensor) -> Tensor:
    """Return uint8 codes as a tensor of dtype e4m3."""
    if not converts_codes(codes.device):
        codes = materialized(codes)
    return codes.view(torch.float8_e4m3fn)


_NAN_PATTERN = 0x7FC00000
_ABOVE_SEVEN_QUARTERS = 0x1FFFFF
"""``_UP_TO_SEVEN_QUARTERS``, but for float32 patterns."""


def quantize_blocks(
    bits: Tensor, quant_block: int, pow2: bool, min_amax: float
) -> tuple[Tensor, Tensor]:
    """Quantise bf16 patterns to e4m3 codes with one float32 scale per ``quant_block`` values.

    Args:
        bits: int32 [..., dim], from ``bf16_bits``.
        quant_block: Values per scale; divides dim.
        pow2: Whether scales are rounded up to powers of two, at least 2^-126.
        min_amax: A block with a smaller amax is scaled as if it had this amax.

    Returns:
        uint8 [..., dim] codes and float32 [..., dim // quant_block] scales. NaN becomes code 0x7F
        and counts as 0 for the scale; infinities saturate and count as the largest finite bf16.
    """
    blocks = bits.unflatten(-1, (bits.shape[-1] // quant_block, quant_block))
    amax, is_nan = _amax_of(blocks)
    amax = (amax << 16).view(torch.float32).clamp(min=min_amax)
    values = (blocks << 16).view(torch.float32)
    if pow2:
        exponent = ((amax.view(torch.int32) + _ABOVE_SEVEN_QUARTERS) >> _EXPONENT) - 8
        exponent = exponent.clamp(min=1)
        scales = (exponent << _EXPONENT).view(torch.float32)
        scaled = values * ((2 * SCALE_BIAS - exponent) << _EXPONENT).view(torch.float32)
    else:
        scales = amax / FP8_MAX
        scaled = values / scales
    return _codes_of(scaled, is_nan), scales.squeeze(-1)


def ue8m0_values(scale: Tensor) -> Tensor:
    """Return 2^(byte - 127) as float32: a subnormal for byte 0, and NaN for byte 255."""
    pattern = scale.to(torch.int32) << _EXPONENT
    pattern = torch.where(scale == 0, 1 << (_EXPONENT - 1), pattern)
    return torch.where(scale == 255, _NAN_PATTERN, pattern).view(torch.float32)


def scale_values(scale: Tensor) -> Tensor:
    """Return 2^(byte - 127) as float32, but 0 for byte 0 and infinity for byte 255."""
    return (scale.to(torch.int32) << 23).view(torch.float32)


def e4m3_values(codes: Tensor) -> Tensor:
    """Return the float32 values of uint8 e4m3 codes."""
    if runs_on_cpu(codes):
        # PyTorch's FP8 conversion takes six times as long as a table look-up
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
        return every.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
    if converts_codes(codes.device):
        return codes.view(torch.float8_e4m3fn).to(torch.float32)
    bits = codes.to(torch.int32)
    scaled = (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).view(torch.float32)
    return torch.where((bits & 0x7F) == _NAN_CODE, torch.nan, scaled * 2.0**120)


def float_values(values: Tensor) -> Tensor:
    """Return ``values`` as float32. They may be e4m3 values, which compiled code cannot load where
    ``converts_codes`` is false."""
    if values.dtype == torch.float8_e4m3fn and not converts_codes(values.device):
        return e4m3_values(values.view(torch.uint8))
    return values.to(torch.float32)


def dequantize(codes: Tensor, scale: Tensor, quant_block: int) -> Tensor:
    """Dequantise uint8 codes [..., dim] with scale bytes [..., dim // quant_block] to float32."""
    blocks = e4m3_values(codes).unflatten(-1, (-1, quant_block))
    values: Tensor = blocks * scale_values(scale).unsqueeze(-1)
    return values.flatten(-2)


def to_bytes(words: Tensor, size: int) -> Tensor:
    """Split int32 words into their low ``size`` bytes, little-endian: [..., n] to [..., n *
    size]."""
    shifts = 8 * torch.arange(size, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 0xFF).to(torch.uint8).flatten(-2)


def from_bytes(stored: Tensor, size: int) -> Tensor:
    """Assemble int32 words from little-endian bytes: [..., n * size] to [..., n]."""
    # take slices, not single bytes, which would be views with fewer dimensions: for such views,
    # Inductor on a CPU guards on num_tokens == 1
    values = stored.to(torch.int32)
    words = values[..., ::size]
    for byte in range(1, size):
        words = words | (values[..., byte::size] << (8 * byte))
    return words
