"""References of the ops on paged key caches."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.reference.common import dense, runs_on_cpu
from dsv4_ops.reference.pages import (
    Columns,
    gather_rows,
    insert_parts,
    locate,
    row_columns,
    scatter_rows,
    words,
    write_rows,
)
from dsv4_ops.reference.quantization import bf16_bits, dequantize, from_bytes, quantize, to_bytes


def insert_bits(bits: Tensor, k_cache: Tensor, slot_mapping: Tensor, block_size: int) -> None:
    """Insert keys from their bf16 patterns ``bits``, int32 [num_tokens, 512]."""
    main = MainLayout(block_size)
    # dense, because a view of a slice would fix the number of tokens in a graph
    codes, scales = quantize(dense(bits[:, : main.code_dim]), main.quant_block)
    parts = {
        0: codes,
        main.code_dim: to_bytes(dense(bits[:, main.code_dim :]), 2),
        main.data_bytes: pad(scales.to(torch.uint8), (0, main.scale_bytes - main.num_scales)),
    }
    insert_parts(main, parts, k_cache, slot_mapping)


def quantize_and_insert_k_cache(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, *, block_size: int, layout: str
) -> None:
    insert_bits(bf16_bits(k[: slot_mapping.shape[0]]), k_cache, slot_mapping, block_size)


def _gathered(
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    *,
    block_size: int,
    num_rows: int,
    offset: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Gather the bit patterns [num_reqs, num_rows, width] of rows, and the mask of valid rows."""
    wanted_lens = seq_lens if gather_lens is None else gather_lens
    row = torch.arange(num_rows, device=k_cache.device) - offset
    mask = (row >= 0) & (row < wanted_lens[:, None])
    request = torch.arange(seq_lens.shape[0], device=k_cache.device)[:, None]
    first = seq_lens.to(torch.int64) - wanted_lens
    pages, rows = locate(block_table, request, first[:, None] + row, mask, block_size)
    return row_bits(k_cache, pages, rows, block_size=block_size, layout=layout), mask


def row_bits(
    k_cache: Tensor, pages: Tensor, rows: Tensor, *, block_size: int, layout: str
) -> Tensor:
    """Return the bit patterns [..., width] of the rows at (block, row); zeros for absent blocks."""
    if layout == "plain":
        return gathered_bits(k_cache, pages, rows)
    main = MainLayout(block_size)

    def stored(byte: int, width: int) -> Tensor:
        return gather_rows(k_cache, pages, rows, row_columns(main, byte, width))

    scales = stored(main.data_bytes, main.num_scales)
    nope = dequantize(stored(0, main.code_dim), scales, main.quant_block)
    rope = from_bytes(stored(main.code_dim, main.data_bytes - main.code_dim), 2)
    nope_bits = nope.to(torch.bfloat16).view(torch.int16)
    return torch.cat([nope_bits, rope.to(torch.int16)], -1)


def dequantize_and_gather_k_cache(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    *,
    block_size: int,
    offset: int,
    layout: str,
) -> None:
    rows = (k_cache, seq_lens, gather_lens, block_table)
    bits, mask = _gathered(
        *rows, block_size=block_size, num_rows=out.shape[1], offset=offset, layout=layout
    )
    existing = out.view(torch.int16)
    out.copy_(torch.where(mask[..., None], bits, existing).view(torch.bfloat16))


def gather_k_cache(
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    *,
    block_size: int,
    num_rows: int,
    offset: int,
    layout: str,
) -> Tensor:
    rows = (k_cache, seq_lens, gather_lens, block_table)
    bits, _ = _gathered(
        *rows, block_size=block_size, num_rows=num_rows, offset=offset, layout=layout
    )
    return bits.view(k_cache.dtype if layout == "plain" else torch.bfloat16)


def page_columns(k_cache: Tensor) -> Columns:
    """Return where a block of an unquantised cache holds a row's values."""
    _, block_size, width = k_cache.shape
    return Columns(block_size, 0, width, width)


def insert_k_cache(k: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> None:
    rows = k[: slot_mapping.shape[0]]
    if runs_on_cpu(k_cache):
        write_rows(k_cache, rows, slot_mapping)
        return
    # a write through a view of another dtype would make Inductor convert the values
    written = scatter_rows(k_cache.flatten(1), rows, slot_mapping, page_columns(k_cache))
    k_cache.copy_(written.view(k_cache.shape))


def gathered_bits(k_cache: Tensor, pages: Tensor, rows: Tensor) -> Tensor:
    """Return the rows at (block, row) as integers [..., width]; zeros for absent blocks."""
    return gather_rows(words(k_cache).flatten(1), pages, rows, page_columns(k_cache))
