"""Key cache of the lightning indexer: quantise and insert, gather."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.reference.batch import token_map
from dsv4_ops.reference.pages import gather_rows, locate, row_columns, scatter_rows
from dsv4_ops.reference.quantization import bf16_bits, from_bytes, quantize, to_bytes


def quantize_and_insert_indexer_k_functional(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, *, block_size: int, layout: str
) -> Tensor:
    indexer = IndexerLayout(block_size)
    codes, scales = quantize(bf16_bits(k[: slot_mapping.shape[0]]), indexer.quant_block)
    parts = {0: codes, indexer.data_bytes: to_bytes(scales << 23, indexer.scale_bytes)}
    for byte, values in parts.items():
        columns = row_columns(indexer, byte, values.shape[1], k_cache.device)
        k_cache = scatter_rows(k_cache, values, slot_mapping, block_size, columns)
    return k_cache.clone(memory_format=torch.contiguous_format)


def quantize_and_insert_indexer_k(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, *, block_size: int, layout: str
) -> None:
    k_cache.copy_(
        quantize_and_insert_indexer_k_functional(
            k, k_cache, slot_mapping, block_size=block_size, layout=layout
        )
    )


def gather_indexer_k(
    k_cache: Tensor,
    cu_seq_lens: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_rows: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    lens = cu_seq_lens[1:] - cu_seq_lens[:-1]
    req_indices, positions = token_map(cu_seq_lens, lens, num_tokens=num_rows)
    return keys_at(k_cache, req_indices, positions, block_table, block_size=block_size)


def keys_at(
    k_cache: Tensor, req_indices: Tensor, positions: Tensor, block_table: Tensor, *, block_size: int
) -> tuple[Tensor, Tensor]:
    """Codes and scales of one cache row per (request, position); zeros where there is none."""
    indexer = IndexerLayout(block_size)
    pages, rows = locate(block_table, req_indices, positions, req_indices >= 0, block_size)

    def stored(byte: int, width: int) -> Tensor:
        columns = row_columns(indexer, byte, width, k_cache.device)
        return gather_rows(k_cache, pages, rows, columns)

    scales = from_bytes(stored(indexer.data_bytes, indexer.scale_bytes), indexer.scale_bytes)
    return stored(0, indexer.data_bytes), scales.squeeze(-1).view(torch.float32)
