"""Launchers of the lightning indexer."""

from dsv4_ops.kernels.indexer.cache import (
    gather_indexer_k as gather_indexer_k,
    quantize_and_insert_indexer_k as quantize_and_insert_indexer_k,
)
from dsv4_ops.kernels.indexer.logits import (
    indexer_logits as indexer_logits,
    indexer_logits_ragged as indexer_logits_ragged,
    indexer_quantize_q as indexer_quantize_q,
)
from dsv4_ops.kernels.indexer.topk import (
    indexer_select as indexer_select,
    indexer_topk as indexer_topk,
)
