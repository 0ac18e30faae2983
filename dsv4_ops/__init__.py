"""DeepSeek-V4's attention stack as PyTorch ops that compile.

Importing this package registers the ops with ``torch.library`` and loads no library but torch. The
Inductor lowerings of the ops are loaded when ``torch.compile`` or AOTInductor first traces an op
(see ``dispatch/define.py``).
"""

import torch as _torch

from dsv4_ops._version import __version__
from dsv4_ops.core.fingerprint import extend_cache_key as _extend_cache_key
from dsv4_ops.core.public import public_names as _public_names
from dsv4_ops.core.types import (
    AbsorbedWeights as AbsorbedWeights,
    C4Step as C4Step,
    ContextChunks as ContextChunks,
    ExpertPlan as ExpertPlan,
    FlattenedDecode as FlattenedDecode,
    HyperConnection as HyperConnection,
    IndexerKeys as IndexerKeys,
    IndexerQuery as IndexerQuery,
    MergedStates as MergedStates,
    MlaAttention as MlaAttention,
    PerTensor as PerTensor,
    PrefillChunks as PrefillChunks,
    PrefillRowBounds as PrefillRowBounds,
    QuantizedGroups as QuantizedGroups,
    QuantizedRows as QuantizedRows,
    Routing as Routing,
    SparseMla as SparseMla,
    SparseMlaGathered as SparseMlaGathered,
    SwaIndices as SwaIndices,
    TokenMap as TokenMap,
    TopkIndices as TopkIndices,
    VerifiedDraft as VerifiedDraft,
)
from dsv4_ops.core.versions import warn_if_newer as _warn_if_newer
from dsv4_ops.core.yarn import YarnScaling as YarnScaling
from dsv4_ops.dispatch.libraries import tag_libraries as _tag_libraries
from dsv4_ops.dispatch.tensorrt import install_once_imported as _guard_tensorrt
from dsv4_ops.ops.batch import (
    expand_block_table as expand_block_table,
    flatten_decode as flatten_decode,
    mtp_seq_lens as mtp_seq_lens,
    split_decodes_and_prefills as split_decodes_and_prefills,
    token_map as token_map,
)
from dsv4_ops.ops.c4_step import insert_c4_step as insert_c4_step
from dsv4_ops.ops.chunking import (
    max_prefill_chunks as max_prefill_chunks,
    plan_prefill_chunks as plan_prefill_chunks,
    prefill_chunk_row_bounds as prefill_chunk_row_bounds,
    prefill_row_bounds as prefill_row_bounds,
    split_prefill_chunks as split_prefill_chunks,
)
from dsv4_ops.ops.compressor import (
    compress_and_insert as compress_and_insert,
    save_and_compress as save_and_compress,
    save_compressor_states as save_compressor_states,
)
from dsv4_ops.ops.context_parallel import (
    cp_combine as cp_combine,
    cp_correct_out as cp_correct_out,
    cp_gather_heads as cp_gather_heads,
    cp_gather_rows as cp_gather_rows,
    cp_local_rows as cp_local_rows,
    cp_row_indices as cp_row_indices,
    cp_seq_lens as cp_seq_lens,
    cp_slot_mapping as cp_slot_mapping,
    cp_topk as cp_topk,
)
from dsv4_ops.ops.draft import verify_draft as verify_draft
from dsv4_ops.ops.experts import (
    expert_plan as expert_plan,
    experts as experts,
    grouped_topk as grouped_topk,
    route as route,
)
from dsv4_ops.ops.indexer import (
    gather_indexer_k as gather_indexer_k,
    indexer_logits as indexer_logits,
    indexer_logits_ragged as indexer_logits_ragged,
    indexer_quantize_q as indexer_quantize_q,
    indexer_select as indexer_select,
    indexer_topk as indexer_topk,
    paged_mqa_logits_metadata as paged_mqa_logits_metadata,
    quantize_and_insert_indexer_k as quantize_and_insert_indexer_k,
)
from dsv4_ops.ops.indices import (
    combine_topk_swa_indices as combine_topk_swa_indices,
    dense_compressed_indices as dense_compressed_indices,
    global_topk_indices_and_lens as global_topk_indices_and_lens,
    mixed_sparse_indices as mixed_sparse_indices,
    prefill_gather_lens as prefill_gather_lens,
    swa_indices_and_lens as swa_indices_and_lens,
)
from dsv4_ops.ops.kv_cache import (
    dequantize_and_gather_k_cache as dequantize_and_gather_k_cache,
    gather_k_cache as gather_k_cache,
    insert_k_cache as insert_k_cache,
    quantize_and_insert_k_cache as quantize_and_insert_k_cache,
)
from dsv4_ops.ops.linear import (
    fp8_grouped_linear as fp8_grouped_linear,
    fp8_linear as fp8_linear,
    fp8_linear_norms as fp8_linear_norms,
    fp8_linear_swiglu as fp8_linear_swiglu,
    quantize_rows as quantize_rows,
)
from dsv4_ops.ops.mla import (
    mla_absorb_q as mla_absorb_q,
    mla_decode as mla_decode,
    mla_dequantize_rows as mla_dequantize_rows,
    mla_expand_kv as mla_expand_kv,
    mla_gather_codes as mla_gather_codes,
    mla_gather_kv as mla_gather_kv,
    mla_insert_kv as mla_insert_kv,
    mla_sparse as mla_sparse,
    mla_v_up as mla_v_up,
    quantize_per_tensor as quantize_per_tensor,
    split_kv_b_proj as split_kv_b_proj,
)
from dsv4_ops.ops.mla_context import (
    context_chunks as context_chunks,
    max_context_chunks as max_context_chunks,
    merge_attn_states as merge_attn_states,
    merge_states as merge_states,
    mla_prefill as mla_prefill,
    mla_workspace_rows as mla_workspace_rows,
    plan_context_chunks as plan_context_chunks,
)
from dsv4_ops.ops.pack import (
    pack_seq as pack_seq,
    unpack_seq as unpack_seq,
)
from dsv4_ops.ops.rope import (
    apply_rope as apply_rope,
    inverse_rope_group as inverse_rope_group,
    inverse_rope_group_quantize as inverse_rope_group_quantize,
    qnorm_rope_kv_insert as qnorm_rope_kv_insert,
    rope_cos_sin_cache as rope_cos_sin_cache,
)
from dsv4_ops.ops.sinkhorn import sinkhorn as sinkhorn
from dsv4_ops.ops.slot_mapping import compressed_slot_mapping as compressed_slot_mapping
from dsv4_ops.ops.sparse_mla import (
    flash_mla_metadata as flash_mla_metadata,
    sparse_mla_decode as sparse_mla_decode,
    sparse_mla_decode_paged as sparse_mla_decode_paged,
    sparse_mla_gathered as sparse_mla_gathered,
    sparse_mla_plan as sparse_mla_plan,
    sparse_mla_prefill as sparse_mla_prefill,
)
from dsv4_ops.ops.streams import hyper_connection as hyper_connection

_extend_cache_key(__version__)
_tag_libraries()
_guard_tensorrt()
_warn_if_newer("torch", str(_torch.__version__))

__all__ = ["__version__", *_public_names(globals())]
