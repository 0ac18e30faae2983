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
    return swa_lens.new_empty((num_sm_parts + swa_lens.shape[0] + 1, METADATA_COLUMNS))
