"""RoPE in float64, and the tables and positions that RoPE cases share."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.testing.case import Exact, i64
from dsv4_ops.testing.strategies.batches import ADVERSARIAL_POSITIONS
from dsv4_ops.testing.strategies.draw import Draw

FP32_UNIT = 2.0**-24


def worked_table() -> Tensor:
    """Return a table [2, 64] of two positions.

    Position 0 is the identity; position 1 has (cos, sin) = (0, 1) and (-1, 2) in its first pairs.
    """
    table = torch.zeros(2, 64)
    table[:, :32] = 1.0
    table[1, 0], table[1, 32], table[1, 1], table[1, 33] = 0.0, 1.0, -1.0, 2.0
    return table


def worked_row() -> list[float]:
    """Return 512 values. RoPE at position 1 of ``worked_table`` changes only values 448 to 451."""
    row = [5.0, *[0.0] * 511]
    row[448:452] = [1.0, 2.0, 3.0, 4.0]
    return row


def rotated_row(*, inverse: bool = False) -> list[float]:
    """Return ``worked_row`` after RoPE, or inverse RoPE, at position 1."""
    row = worked_row()
    row[448:452] = [2.0, -1.0, 5.0, -10.0] if inverse else [-2.0, 1.0, -11.0, 2.0]
    return row


def tables(draw: Draw, *, rope_dim: int, min_size: int) -> Tensor:
    """Sample cosines and sines of random angles, [num_positions, rope_dim]."""
    num_positions = max(draw.one_of(130, 0, 1, 2, 5, 9, 33), min_size)
    angles = torch.rand(num_positions, rope_dim // 2, generator=draw.generator()) * 7
    angles[:1] = 0
    return torch.cat([angles.cos(), angles.sin()], 1)


def positions(draw: Draw, *, num_tokens: int, num_positions: int) -> Tensor:
    """Sample consecutive positions. Some are padding, adversarial or past the table."""
    start = draw.integer(0, max(num_positions - 1, 0))
    values = [start + token for token in range(num_tokens)]
    ends = (0, num_positions - 1, num_positions, 2**63 - 1)
    draw.spoil(values, (*ADVERSARIAL_POSITIONS, *ends), 4)
    return i64(values)


def exact_rotation(
    values: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    inverse: bool = False,
    rope_first: bool = False,
    interleaved: bool = True,
) -> tuple[Tensor, Tensor]:
    """Rotate float64 ``values`` [num_tokens, num_heads, dim]; also return the error scale.

    A rotated value is a sum of two products, and its error scale is the sum of the absolute
    products.
    """
    table, rope_dim = cos_sin_cache.to(torch.float64), cos_sin_cache.shape[1]
    first = 0 if rope_first else values.shape[2] - rope_dim
    place = torch.arange(first, first + rope_dim, device=values.device)
    pairs = place.view(-1, 2).T if interleaved else place.view(2, -1)
    rotated, products = values.clone(), values.abs()
    for token, position in enumerate(positions.tolist()):
        if not 0 <= position < table.shape[0]:
            continue
        cos, sin = table[position, : rope_dim // 2], table[position, rope_dim // 2 :]
        sin = -sin if inverse else sin
        even, odd = (values[token][:, columns] for columns in pairs)
        both = (even * cos, -odd * sin), (odd * cos, even * sin)
        for columns, (left, right) in zip(pairs, both, strict=True):
            rotated[token, :, columns] = left + right
            products[token, :, columns] = left.abs() + right.abs()
    return rotated, products


def exact(value: Tensor, products: Tensor, dtype: torch.dtype, roundings: int = 2) -> Exact:
    """Return ``value`` with an error scale. The scale counts ``roundings`` float32 roundings of
    ``products``, and one final rounding to ``dtype``."""
    unit = torch.finfo(dtype).eps / 2
    return Exact(value, value.abs() + roundings * (FP32_UNIT / unit) * products)
