"""DeepSeek-V4's attention stack as PyTorch ops that compile.

Importing this package registers the ops with ``torch.library`` and loads nothing but torch. Their
Inductor lowerings take effect by themselves with ``torch.compile`` and AOTInductor (see
``core/registry.py`` for how).
"""

from dsv4_ops._version import __version__
from dsv4_ops.core.fingerprint import extend_cache_key as _extend_cache_key
from dsv4_ops.core.types import (
    C4Step,
    CompressorStep,
    ExpertPlan,
    FlattenedDecode,
    IndexerKeys,
    IndexerQuery,
    InsertedQuery,
    PrefillChunks,
    PrefillRowBounds,
    QuantizedGroups,
    QuantizedRows,
    SparseMla,
    SparseMlaGathered,
    SwaIndices,
    TokenMap,
    TopkIndices,
)
from dsv4_ops.core.yarn import YarnScaling
from dsv4_ops.ops.batch import (
    expand_block_table,
    flatten_decode,
    mtp_seq_lens,
    split_decodes_and_prefills,
    token_map,
)
from dsv4_ops.ops.c4_step import insert_c4_step
from dsv4_ops.ops.chunking import (
    max_prefill_chunks,
    plan_prefill_chunks,
    prefill_chunk_row_bounds,
    prefill_row_bounds,
    split_prefill_chunks,
)
from dsv4_ops.ops.compressor import (
    compress_and_insert,
    compress_and_insert_functional,
    save_and_compress,
    save_and_compress_functional,
    save_compressor_states,
    save_compressor_states_functional,
)
from dsv4_ops.ops.context_parallel import cp_seq_lens
from dsv4_ops.ops.experts import expert_plan, experts
from dsv4_ops.ops.indexer import (
    gather_indexer_k,
    indexer_logits,
    indexer_logits_ragged,
    indexer_quantize_q,
    indexer_select,
    indexer_topk,
    paged_mqa_logits_metadata,
    quantize_and_insert_indexer_k,
    quantize_and_insert_indexer_k_functional,
)
from dsv4_ops.ops.indices import (
    combine_topk_swa_indices,
    dense_compressed_indices,
    global_topk_indices_and_lens,
    mixed_sparse_indices,
    prefill_gather_lens,
    swa_indices_and_lens,
)
from dsv4_ops.ops.kv_cache import (
    dequantize_and_gather_k_cache,
    gather_k_cache,
    insert_k_cache,
    insert_k_cache_functional,
    quantize_and_insert_k_cache,
    quantize_and_insert_k_cache_functional,
)
from dsv4_ops.ops.linear import fp8_grouped_linear, fp8_linear, quantize_rows
from dsv4_ops.ops.pack import pack_seq, unpack_seq
from dsv4_ops.ops.rope import (
    apply_rope,
    inverse_rope_group,
    inverse_rope_group_quantize,
    qnorm_rope_kv_insert,
    qnorm_rope_kv_insert_functional,
    rope_cos_sin_cache,
)
from dsv4_ops.ops.sinkhorn import sinkhorn
from dsv4_ops.ops.slot_mapping import compressed_slot_mapping
from dsv4_ops.ops.sparse_mla import (
    flash_mla_metadata,
    sparse_mla_decode,
    sparse_mla_decode_paged,
    sparse_mla_gathered,
    sparse_mla_plan,
    sparse_mla_prefill,
)

_extend_cache_key(__version__)

__all__ = [
    "C4Step",
    "CompressorStep",
    "ExpertPlan",
    "FlattenedDecode",
    "IndexerKeys",
    "IndexerQuery",
    "InsertedQuery",
    "PrefillChunks",
    "PrefillRowBounds",
    "QuantizedGroups",
    "QuantizedRows",
    "SparseMla",
    "SparseMlaGathered",
    "SwaIndices",
    "TokenMap",
    "TopkIndices",
    "YarnScaling",
    "__version__",
    "apply_rope",
    "combine_topk_swa_indices",
    "compress_and_insert",
    "compress_and_insert_functional",
    "compressed_slot_mapping",
    "cp_seq_lens",
    "dense_compressed_indices",
    "dequantize_and_gather_k_cache",
    "expand_block_table",
    "expert_plan",
    "experts",
    "flash_mla_metadata",
    "flatten_decode",
    "fp8_grouped_linear",
    "fp8_linear",
    "gather_indexer_k",
    "gather_k_cache",
    "global_topk_indices_and_lens",
    "indexer_logits",
    "indexer_logits_ragged",
    "indexer_quantize_q",
    "indexer_select",
    "indexer_topk",
    "insert_c4_step",
    "insert_k_cache",
    "insert_k_cache_functional",
    "inverse_rope_group",
    "inverse_rope_group_quantize",
    "max_prefill_chunks",
    "mixed_sparse_indices",
    "mtp_seq_lens",
    "pack_seq",
    "paged_mqa_logits_metadata",
    "plan_prefill_chunks",
    "prefill_chunk_row_bounds",
    "prefill_gather_lens",
    "prefill_row_bounds",
    "qnorm_rope_kv_insert",
    "qnorm_rope_kv_insert_functional",
    "quantize_and_insert_indexer_k",
    "quantize_and_insert_indexer_k_functional",
    "quantize_and_insert_k_cache",
    "quantize_and_insert_k_cache_functional",
    "quantize_rows",
    "rope_cos_sin_cache",
    "save_and_compress",
    "save_and_compress_functional",
    "save_compressor_states",
    "save_compressor_states_functional",
    "sinkhorn",
    "sparse_mla_decode",
    "sparse_mla_decode_paged",
    "sparse_mla_gathered",
    "sparse_mla_plan",
    "sparse_mla_prefill",
    "split_decodes_and_prefills",
    "split_prefill_chunks",
    "swa_indices_and_lens",
    "token_map",
    "unpack_seq",
]
