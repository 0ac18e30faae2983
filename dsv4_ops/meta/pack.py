"""Fakes of ``pack_seq`` and ``unpack_seq``."""

from __future__ import annotations

from torch import Tensor


def pack_seq(x: Tensor, query_start_loc: Tensor, next_n: int) -> Tensor:
    return x.new_empty((query_start_loc.shape[0] - 1, next_n, *x.shape[1:]))


def unpack_seq(packed: Tensor, num_tokens: int) -> Tensor:
    return packed.new_empty((num_tokens, *packed.shape[2:]))
