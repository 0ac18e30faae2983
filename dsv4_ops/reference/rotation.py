"""Rotary embedding of interleaved pairs: every product rounded before the sum, as kernels do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.reference.common import masked_index


def angles(cos_sin_cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [..., rope_dim // 2] of ``positions``; 1 and 0 where the table has no row."""
    half = int(cos_sin_cache.shape[1]) // 2
    known = ((positions >= 0) & (positions < cos_sin_cache.shape[0])).unsqueeze(-1)
    column = torch.arange(half, device=positions.device)
    row, known, column = torch.broadcast_tensors(positions.unsqueeze(-1), known, column)
    cos = torch.where(known, masked_index(cos_sin_cache, known, [row, column], 0), 1.0)
    return cos, masked_index(cos_sin_cache, known, [row, column + half], 0)


def rotate_tail(
    values: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, inverse: bool = False
) -> Tensor:
    """fp32 ``values`` [num_tokens, ..., dim] with the trailing rope_dim rotated, or inverse RoPE;
    rows of positions that the table does not have as they were.

    Written without strided halves and without concatenation, so that it is one loop when compiled.
    The second product of a pair is added with its sign in the sine, which changes no bit.
    """
    dim, half = values.shape[-1], cos_sin_cache.shape[1] // 2
    first = dim - 2 * half
    rows = (values.shape[0], *[1] * (values.dim() - 2))
    known = ((positions >= 0) & (positions < cos_sin_cache.shape[0])).reshape(*rows, 1)
    cos, sin = (angle.reshape(*rows, half, 1) for angle in angles(cos_sin_cache, positions))
    sign = torch.arange(2, device=values.device) * 2 - 1
    pairs = values[..., first:].unflatten(-1, (half, 2))
    rotated = pairs * cos + pairs.flip(-1) * (sin * (-sign if inverse else sign))
    column = torch.arange(dim, device=values.device)
    return torch.where(known & (column >= first), pad(rotated.flatten(-2), (first, 0)), values)
