"""Launchers of the lightning indexer."""

from dsv4_ops.kernels.indexer.cache import gather_indexer_k, quantize_and_insert_indexer_k
from dsv4_ops.kernels.indexer.logits import (
    indexer_logits,
    indexer_logits_ragged,
    indexer_quantize_q,
)
from dsv4_ops.kernels.indexer.topk import indexer_select, indexer_topk

__all__ = [
    "gather_indexer_k",
    "indexer_logits",
    "indexer_logits_ragged",
    "indexer_quantize_q",
    "indexer_select",
    "indexer_topk",
    "quantize_and_insert_indexer_k",
]
