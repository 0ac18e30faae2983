"""Fake of FlashMLA's tile scheduler metadata."""

from __future__ import annotations

from torch import Tensor

from dsv4_ops.core.tiles import METADATA_COLUMNS


def flash_mla_metadata(
    swa_lens: Tensor,
    extra_lens: Tensor | None,
    *,
    swa_width: int,
    extra_width: int,
    num_sm_parts: int,
) -> Tensor:
    rows_of_splits = swa_lens.shape[0] // METADATA_COLUMNS + 1
    return swa_lens.new_empty((num_sm_parts + rows_of_splits, METADATA_COLUMNS))
