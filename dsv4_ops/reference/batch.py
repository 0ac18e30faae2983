"""Split a batch into decodes and prefills, and find the request and position of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import ABSENT
from dsv4_ops.reference.common import gather_rows, masked_index, query_lens, take, visible_rows


def split_decodes_and_prefills(
    query_start_loc: Tensor, *, decode_threshold: int, require_uniform: bool
) -> Tensor:
    num_reqs = query_start_loc.shape[0] - 1
    lens = query_lens(query_start_loc)
    is_prefill = lens > decode_threshold
    if require_uniform:
        first = _first_true(lens > 0)
        uniform_len = gather_rows(lens, first, first < num_reqs)
        is_prefill = (lens > 0) & (is_prefill | (lens != uniform_len))
    boundary = _first_true(is_prefill)
    at_boundary = take(query_start_loc, boundary).reshape(())
    boundary = boundary.reshape(()).to(torch.int32)
    return torch.stack(
        (boundary, num_reqs - boundary, at_boundary, query_start_loc[-1] - at_boundary)
    )


def _first_true(flags: Tensor) -> Tensor:
    """Return the index of the first True, or ``len(flags)``, as a tensor [1]; ``flags`` may be
    empty."""
    size = flags.shape[0]
    index = torch.arange(size + 1, device=flags.device)
    stop = torch.nn.functional.pad(flags, (0, 1), value=True)
    return torch.where(stop, index, size).amin(0, keepdim=True)


def token_map(
    query_start_loc: Tensor, seq_lens: Tensor, *, num_tokens: int
) -> tuple[Tensor, Tensor]:
    token = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    request = (
        torch.searchsorted(query_start_loc.contiguous(), token, right=True, out_int32=True) - 1
    )
    valid = (request >= 0) & (request < seq_lens.shape[0])
    query_stop = gather_rows(query_start_loc, request + 1, valid).long()
    positions = gather_rows(seq_lens, request, valid).long() - query_stop + token
    valid = valid & (positions >= 0)
    return torch.where(valid, request, ABSENT), torch.where(valid, positions, ABSENT)


def flatten_decode(
    query_start_loc: Tensor, seq_lens: Tensor, *, num_tokens: int, compress_ratio: int
) -> tuple[Tensor, Tensor]:
    req_indices, positions = token_map(query_start_loc, seq_lens, num_tokens=num_tokens)
    return visible_rows(positions, compress_ratio), req_indices


def expand_block_table(block_table: Tensor, req_indices: Tensor) -> Tensor:
    num_reqs, max_blocks = block_table.shape
    rows = req_indices[:, None].expand(-1, max_blocks)
    columns = torch.arange(max_blocks, device=block_table.device).expand(rows.shape)
    valid = (rows >= 0) & (rows < num_reqs)
    return masked_index(block_table, valid, [rows, columns], 0)


def mtp_seq_lens(
    query_start_loc: Tensor, seq_lens: Tensor, *, next_n: int, compress_ratio: int
) -> Tensor:
    lens = query_lens(query_start_loc)[:, None]
    row = torch.arange(next_n, dtype=torch.int32, device=seq_lens.device)
    positions = seq_lens[:, None].long() - lens + row
    return torch.where(row < lens, visible_rows(positions, compress_ratio), 0)
