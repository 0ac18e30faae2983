"""DeepSeek-V4's attention stack as PyTorch ops that compile.

Importing this package registers the ops with ``torch.library`` and loads nothing but torch. Their
Inductor lowerings take effect by themselves with ``torch.compile`` and AOTInductor (see
``core/registry.py`` for how).
"""

from dsv4_ops._version import __version__
from dsv4_ops.core.fingerprint import extend_cache_key as _extend_cache_key
from dsv4_ops.core.types import (
    FlattenedDecode,
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
from dsv4_ops.ops.slot_mapping import compressed_slot_mapping
from dsv4_ops.ops.swa import prefill_gather_lens, swa_indices_and_lens
from dsv4_ops.ops.topk_indices import dense_compressed_indices, global_topk_indices_and_lens

_extend_cache_key(__version__)

__all__ = [
    "FlattenedDecode",
    "PrefillChunks",
    "PrefillRowBounds",
    "SwaIndices",
    "TokenMap",
    "TopkIndices",
    "__version__",
    "compressed_slot_mapping",
    "dense_compressed_indices",
    "expand_block_table",
    "flatten_decode",
    "global_topk_indices_and_lens",
    "max_prefill_chunks",
    "mtp_seq_lens",
    "plan_prefill_chunks",
    "prefill_chunk_row_bounds",
    "prefill_gather_lens",
    "prefill_row_bounds",
    "split_decodes_and_prefills",
    "split_prefill_chunks",
    "swa_indices_and_lens",
    "token_map",
]
