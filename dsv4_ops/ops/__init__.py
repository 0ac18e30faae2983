"""Public functions and passports, one file per stem. Importing this package registers every op."""

from dsv4_ops.ops import (
    batch,
    chunking,
    indexer_cache,
    kv_cache,
    plain_cache,
    slot_mapping,
    sparse_indices,
    swa,
    topk_indices,
)

__all__ = [
    "batch",
    "chunking",
    "indexer_cache",
    "kv_cache",
    "plain_cache",
    "slot_mapping",
    "sparse_indices",
    "swa",
    "topk_indices",
]
