"""Rotary embedding. Like the kernels, it rounds every product before the sum."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.reference.common import dense, masked_index


def angles(cos_sin_cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines [..., rope_dim // 2] of ``positions``; 1 and 0 for positions
    outside the table."""
    half = int(cos_sin_cache.shape[1]) // 2
    in_table = ((positions >= 0) & (positions < cos_sin_cache.shape[0])).unsqueeze(-1)
    column = torch.arange(half, device=positions.device)
    row, in_table, column = torch.broadcast_tensors(positions.unsqueeze(-1), in_table, column)
    cos = torch.where(in_table, masked_index(cos_sin_cache, in_table, [row, column], 0), 1.0)
    return cos, masked_index(cos_sin_cache, in_table, [row, column + half], 0)


def rotate_values(
    values: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    inverse: bool = False,
    rope_first: bool = False,
    interleaved: bool = True,
) -> Tensor:
    """Rotate the last rope_dim of the float32 ``values`` [num_tokens, ..., dim], or with
    ``rope_first`` the first rope_dim; with ``inverse``, rotate them back.

    Rows whose position is not in the table stay unchanged. The code neither slices with a stride
    nor concatenates, so that the rotation compiles to one loop. The sign of a product with the sine
    is applied to the sine, which changes no bit of the product.
    """
    dim, half = values.shape[-1], cos_sin_cache.shape[1] // 2
    first = 0 if rope_first else dim - 2 * half
    behind = dim - 2 * half - first
    rows = (values.shape[0], *[1] * (values.dim() - 2))
    in_table = ((positions >= 0) & (positions < cos_sin_cache.shape[0])).reshape(*rows, 1)
    pair, shape = ((half, 1), (half, 2)) if interleaved else ((1, half), (2, half))
    axis = -1 if interleaved else -2
    cos, sin = (angle.reshape(*rows, *pair) for angle in angles(cos_sin_cache, positions))
    sign = torch.arange(2, device=values.device) * 2 - 1
    sign = sign if interleaved else sign[:, None]
    pairs = dense(values[..., first : dim - behind]).unflatten(-1, shape)
    rotated = pairs * cos + pairs.flip(axis) * (sin * (-sign if inverse else sign))
    column = torch.arange(dim, device=values.device)
    is_rotated = in_table & (column < 2 * half if rope_first else column >= first)
    return torch.where(is_rotated, pad(rotated.flatten(-2), (first, behind)), values)
