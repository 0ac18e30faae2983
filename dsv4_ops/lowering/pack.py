"""Lowering of ``unpack_seq``: the search of ``token_map`` for every token's request, and a
gather."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.lowering.kinds import Decompose
from dsv4_ops.reference import pack as reference
from dsv4_ops.reference.common import query_lens


def _unpack_seq(packed: Tensor, query_start_loc: Tensor, *, num_tokens: int) -> Tensor:
    req_indices, places = torch.ops.dsv4_ops.token_map.default(
        query_start_loc, query_lens(query_start_loc), num_tokens=num_tokens
    )
    return reference.unpacked(packed, req_indices, places)


unpack_seq = Decompose(_unpack_seq)
