"""Pack the rows of ragged requests into a rectangle, and unpack them."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.reference.batch import token_map
from dsv4_ops.reference.common import dense, masked_index, query_lens


def _words(rows: Tensor) -> Tensor:
    """View float8 as bytes, because compilers cannot select between float8 values; return other
    dtypes unchanged."""
    return rows.view(torch.uint8) if rows.is_floating_point() and rows.itemsize == 1 else rows


def _rows(rows: Tensor, mask: Tensor, places: list[Tensor], fill: float) -> Tensor:
    """Return ``rows[places]`` where ``mask`` is True, else ``fill``. A row ``rows[places]`` may
    have any number of dimensions."""
    trailing = rows.shape[len(places) :]
    flat = rows.flatten(len(places)) if trailing else rows.unsqueeze(-1)
    column = torch.arange(flat.shape[-1], device=rows.device)
    index = torch.broadcast_tensors(mask.unsqueeze(-1), *(p.unsqueeze(-1) for p in places), column)
    words = masked_index(_words(flat), index[0], list(index[1:]), _filler(rows.dtype, fill))
    return dense(words.reshape(*mask.shape, *trailing)).view(rows.dtype)


def _filler(dtype: torch.dtype, fill: float) -> float | int | bool:
    if dtype == torch.bool:
        return bool(fill)
    return fill if dtype.is_floating_point and dtype.itemsize > 1 else int(fill)


def pack_seq(x: Tensor, query_start_loc: Tensor, *, next_n: int, pad: float) -> Tensor:
    place = torch.arange(next_n, device=x.device)
    token = query_start_loc[:-1, None].to(torch.int64) + place
    mask = (place < query_lens(query_start_loc)[:, None]) & (token >= 0) & (token < x.shape[0])
    return _rows(x, mask, [token], pad)


def unpack_seq(packed: Tensor, query_start_loc: Tensor, *, num_tokens: int) -> Tensor:
    lens = query_lens(query_start_loc)
    req_indices, places = token_map(query_start_loc, lens, num_tokens=num_tokens)
    return unpacked(packed, req_indices, places)


def unpacked(packed: Tensor, req_indices: Tensor, places: Tensor) -> Tensor:
    """Return, for every token, row ``places`` of request ``req_indices``; zeros for absent rows."""
    mask = (req_indices >= 0) & (places >= 0) & (places < packed.shape[1])
    return _rows(packed, mask, [req_indices, places], 0)
