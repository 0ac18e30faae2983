"""Public functions and specs of ops, one file per stem. Importing this registers every op."""

from dsv4_ops.ops import (
    batch,
    c4_step,
    chunking,
    compressor,
    context_parallel,
    experts,
    indexer,
    indices,
    kv_cache,
    linear,
    pack,
    rope,
    sinkhorn,
    slot_mapping,
    sparse_mla,
)

__all__ = [
    "batch",
    "c4_step",
    "chunking",
    "compressor",
    "context_parallel",
    "experts",
    "indexer",
    "indices",
    "kv_cache",
    "linear",
    "pack",
    "rope",
    "sinkhorn",
    "slot_mapping",
    "sparse_mla",
]
