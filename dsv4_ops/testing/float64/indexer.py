"""Scores of the lightning indexer in float64, and whether float32 represents these scores
exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_ops.core.layout import IndexerLayout, PlainLayout
from dsv4_ops.testing.case import Exact

FP32_UNIT = 2.0**-24

HOPPER_UNIT = 2.0**-12
"""Hopper's FP8 tensor cores align the addends to the largest addend and keep about 14 bits."""

LARGEST_INTEGER = 4
"""Largest integer of exact cases. Sums of products of such integers over 128 values and 64 heads
are exact in float32."""


@dataclass(frozen=True)
class Scores:
    """float64 scores of all keys, [num_tokens, num_keys].

    Attributes:
        value: The scores; -inf for keys that are no candidates.
        magnitude: Sums of the absolute terms.
        candidate: Which keys the token may select.
        unit: Relative error of a sum.
        is_exact: Whether float32 represents every intermediate sum exactly.
    """

    value: Tensor
    magnitude: Tensor
    candidate: Tensor
    unit: float
    is_exact: bool

    @staticmethod
    def of(q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, candidate: Tensor) -> Scores:
        """Compute scores from float64 keys [num_tokens, num_keys, 128] and their ``scales``."""
        queries, factors = q.to(torch.float64), weights.to(torch.float64)[:, :, None]
        scales = scales.to(torch.float64)
        products = (queries @ keys.transpose(1, 2)).relu() * factors
        terms = (queries.abs() @ keys.abs().transpose(1, 2)) * factors.abs()
        visible = keys[candidate]
        whole = _is_whole(queries) and _is_whole(visible) and _is_whole(8 * weights, 8)
        powers = torch.frexp(scales[candidate].nan_to_num(1.0, 1.0, 1.0)).mantissa.abs()
        is_exact = whole and bool((powers == 0.5).all())
        value = torch.where(candidate, products.sum(1) * scales, -torch.inf)
        hopper = q.is_cuda and q.dtype == torch.float8_e4m3fn
        unit = HOPPER_UNIT if hopper else 4 * FP32_UNIT
        return Scores(value, terms.sum(1) * scales.abs(), candidate, unit, is_exact)

    def exact(self) -> Exact:
        """Return the scores with the scale of their errors."""
        return Exact(self.value, torch.where(self.candidate, self.magnitude, 0.0), self.unit)


def _is_whole(values: Tensor, factor: int = 1) -> bool:
    values = values.nan_to_num(0.0, 0.0, 0.0)  # special values give the same sum in any order
    small = values.abs() <= factor * LARGEST_INTEGER
    return bool(((values == values.round()) & small).all())


def paged_scores(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    block_size: int,
    num_rows: int,
    layout: str,
) -> Scores:
    """Compute the scores of the first ``num_rows`` rows of every token's request, token by
    token."""
    num_reqs, max_blocks = block_table.shape
    shape = (q.shape[0], num_rows)
    keys = torch.zeros((*shape, 128), dtype=torch.float64, device=q.device)
    scales = torch.ones(shape, dtype=torch.float64, device=q.device)
    candidate = torch.zeros(shape, dtype=torch.bool, device=q.device)
    for token, (length, request) in enumerate(
        zip(lens.tolist(), req_indices.tolist(), strict=True)
    ):
        if not 0 <= request < num_reqs:
            continue
        row = torch.arange(min(max(length, 0), num_rows, max_blocks * block_size), device=q.device)
        block, offset = block_table[request, row // block_size].long(), row % block_size
        row = row[(block >= 0) & (block < k_cache.shape[0])]
        block, offset = block_table[request, row // block_size].long(), row % block_size
        candidate[token, row] = True
        if layout == PlainLayout.tag:
            keys[token, row] = k_cache[block, offset].to(torch.float64)
            continue
        keys[token, row], scales[token, row] = _stored(k_cache, block, offset, block_size)
    return Scores.of(q, weights, keys, scales, candidate)


def _stored(
    k_cache: Tensor, block: Tensor, offset: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Decode FP8 blocks to unscaled float64 keys [num_keys, 128], and their scales."""
    lane = torch.arange(IndexerLayout.data_bytes, device=block.device)
    at = offset[:, None] * IndexerLayout.data_bytes + lane
    keys = k_cache[block[:, None], at].view(torch.float8_e4m3fn).to(torch.float64)
    at = block_size * IndexerLayout.data_bytes + 4 * offset[:, None] + lane[:4]
    scales = k_cache[block[:, None], at].contiguous().view(torch.float32)
    return keys, scales.to(torch.float64)[:, 0]
