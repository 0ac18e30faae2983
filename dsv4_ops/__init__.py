"""DeepSeek-V4's attention stack as PyTorch ops that compile.

Importing this package registers the ops with ``torch.library`` and loads nothing but torch. Their
Inductor lowerings take effect by themselves with ``torch.compile`` and AOTInductor (see
``core/registry.py`` for how).
"""

from dsv4_ops._version import __version__
from dsv4_ops.core.fingerprint import extend_cache_key as _extend_cache_key
from dsv4_ops.core.types import (
    FlattenedDecode,
    IndexerKeys,
    PrefillChunks,
    PrefillRowBounds,
    SwaIndices,
    TokenMap,
    TopkIndices,
)
from dsv4_ops.ops.batch import (
    expand_block_table,
    flatten_decode,
    mtp_seq_lens,
    split_decodes_and_prefills,
    token_map,
)
from dsv4_ops.ops.chunking import (
    max_prefill_chunks,
    plan_prefill_chunks,
    prefill_chunk_row_bounds,
    prefill_row_bounds,
    split_prefill_chunks,
)
from dsv4_ops.ops.indexer_cache import (
    gather_indexer_k,
    quantize_and_insert_indexer_k,
    quantize_and_insert_indexer_k_functional,
)
from dsv4_ops.ops.kv_cache import (
    dequantize_and_gather_k_cache,
    gather_k_cache,
    quantize_and_insert_k_cache,
    quantize_and_insert_k_cache_functional,
)
from dsv4_ops.ops.plain_cache import insert_k_cache, insert_k_cache_functional
from dsv4_ops.ops.slot_mapping import compressed_slot_mapping
from dsv4_ops.ops.sparse_indices import combine_topk_swa_indices, mixed_sparse_indices
from dsv4_ops.ops.swa import prefill_gather_lens, swa_indices_and_lens
from dsv4_ops.ops.topk_indices import dense_compressed_indices, global_topk_indices_and_lens

_extend_cache_key(__version__)

__all__ = [
    "FlattenedDecode",
    "IndexerKeys",
    "PrefillChunks",
    "PrefillRowBounds",
    "SwaIndices",
    "TokenMap",
    "TopkIndices",
    "__version__",
    "combine_topk_swa_indices",
    "compressed_slot_mapping",
    "dense_compressed_indices",
    "dequantize_and_gather_k_cache",
    "expand_block_table",
    "flatten_decode",
    "gather_indexer_k",
    "gather_k_cache",
    "global_topk_indices_and_lens",
    "insert_k_cache",
    "insert_k_cache_functional",
    "max_prefill_chunks",
    "mixed_sparse_indices",
    "mtp_seq_lens",
    "plan_prefill_chunks",
    "prefill_chunk_row_bounds",
    "prefill_gather_lens",
    "prefill_row_bounds",
    "quantize_and_insert_indexer_k",
    "quantize_and_insert_indexer_k_functional",
    "quantize_and_insert_k_cache",
    "quantize_and_insert_k_cache_functional",
    "split_decodes_and_prefills",
    "split_prefill_chunks",
    "swa_indices_and_lens",
    "token_map",
]
