"""Check that the codes, scales and weights of a checkpoint are finite numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.errors import argument_error

NAN_SCALE = 255
"""The UE8M0 byte for NaN."""
NAN_CODE = 0x7F
"""The e4m3 byte for NaN, without its sign bit."""
LEAST_SCALE = 1 << 22
"""The float32 bits of 2^-127, the scale of UE8M0 byte 0."""


def check_values(
    op: str,
    name: str,
    values: Tensor,
    advice: str,
    *,
    scale: bool = False,
    power_of_two: bool = False,
) -> None:
    """Raise if a stored tensor holds NaN or infinity, or a scale that no quantiser writes.

    FP4 codes and integers are always numbers, so their values are not read. Meta tensors have no
    values to read. The check of FP8 codes makes two reductions over their bytes, on the tensor's
    device and without a copy: 1.1 ms per GB on an H100. A float32 scale is an amax divided by the
    largest code: 0 for a block of zeros, and never negative.

    Args:
        op: Public function that an error names.
        name: Name of the tensor.
        values: Values of the tensor, in the stored dtype.
        advice: What the caller can do, a sentence without its period.
        scale: Whether the values are scales. If so, bytes are UE8M0; otherwise bytes are FP4 codes
            or integers.
        power_of_two: Whether a loader converts float32 scales to UE8M0 bytes.

    Raises:
        ValueError: a value is NaN or infinite, or a scale is negative, or not a power of two
            although ``power_of_two`` is set.
    """
    if values.is_meta or not values.numel():
        return
    if values.dtype == torch.float8_e4m3fn:
        must, wrong = "hold codes of numbers", "NaN (0x7F or 0xFF)" if _has_nan(values) else ""
    elif scale:
        must, broken = _scale_rule(values, power_of_two)
        count = int(broken.sum())
        wrong = f"{count} other values" if count else ""
    elif values.is_floating_point():
        must, wrong = "hold finite numbers", "" if _is_finite(values) else "NaN or an infinity"
    else:
        return
    if wrong:
        raise argument_error(op, name, must=must, got=wrong, do=advice)


def _has_nan(codes: Tensor) -> bool:
    """Whether e4m3 codes contain NaN. NaN has two codes: 0x7F is the largest signed byte, and 0xFF
    the largest unsigned byte."""
    signed, unsigned = codes.view(torch.int8), codes.view(torch.uint8)
    return int(signed.amax()) == NAN_CODE or int(unsigned.amax()) == NAN_CODE | 0x80


def _is_finite(values: Tensor) -> bool:
    low, high = values.aminmax()  # both are NaN if any value is NaN
    return bool(low.isfinite()) and bool(high.isfinite())


def _scale_rule(scales: Tensor, power_of_two: bool) -> tuple[str, Tensor]:
    """Return the rule for scales, and the mask of the scales that break this rule."""
    if scales.dtype != torch.float32:
        must = f"hold bytes of 0 to {NAN_SCALE - 1}, as {NAN_SCALE} is NaN"
        return must, scales.view(torch.uint8) == NAN_SCALE
    if power_of_two:
        bits = scales.view(torch.int32)
        normal = (bits >= 1 << 23) & (bits < 255 << 23) & (bits & 0x7FFFFF == 0)
        must = "hold powers of two only, as loaders make bytes of them"
        return must, ~normal & (bits != LEAST_SCALE)
    return "hold finite numbers of 0 or more", ~((scales >= 0) & scales.isfinite())
