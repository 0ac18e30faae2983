"""Result types of the public functions, and the limits that several layers share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MAX_REQUESTS = 16383
"""Most requests one batch may have: bounds the unrolled binary searches of the compiled code."""

INT32_MAX = 2**31 - 1

ABSENT = -1
"""What every index, slot and request id that does not exist is set to."""


class FlashMlaPlan(NamedTuple):
    """How FlashMLA shares keys among programs, for calls of these sizes; see
    ``dsv4_ops.dispatch.providers.flash_mla_plan``."""

    schedule: Tensor
    num_tokens: int
    num_heads: int
    swa_width: int
    extra_width: int


class TokenMap(NamedTuple):
    """Request and position of every token; see ``dsv4_ops.token_map``."""

    req_indices: Tensor
    positions: Tensor


class FlattenedDecode(NamedTuple):
    """Visible rows and request of every decode token; see ``dsv4_ops.flatten_decode``."""

    seq_lens: Tensor
    req_indices: Tensor


class PrefillChunks(NamedTuple):
    """Prefill chunk plan; see ``dsv4_ops.split_prefill_chunks``."""

    chunks: Tensor
    num_chunks: Tensor


class PrefillRowBounds(NamedTuple):
    """Rows of gathered keys that each token may see; see ``dsv4_ops.prefill_row_bounds``."""

    cu_seq_lens: Tensor
    row_start: Tensor
    row_stop: Tensor


class SwaIndices(NamedTuple):
    """Sliding-window slots of every token; see ``dsv4_ops.swa_indices_and_lens``."""

    indices: Tensor
    lens: Tensor


class TopkIndices(NamedTuple):
    """Compressed-row slots of every token; see ``dsv4_ops.global_topk_indices_and_lens``."""

    indices: Tensor
    lens: Tensor


class CompressorStep(NamedTuple):
    """States and cache behind a step; see ``dsv4_ops.save_and_compress_functional``."""

    states: Tensor
    k_cache: Tensor


class C4Step(NamedTuple):
    """Queries of a C4 layer, and FP8 queries of its indexer with the weights of their heads; see
    ``dsv4_ops.insert_c4_step``."""

    q: Tensor
    indexer_q: Tensor
    indexer_weights: Tensor


class IndexerKeys(NamedTuple):
    """Gathered keys of the lightning indexer; see ``dsv4_ops.gather_indexer_k``."""

    k: Tensor
    scales: Tensor


class IndexerQuery(NamedTuple):
    """FP8 queries of the lightning indexer and the weights of their heads; see
    ``dsv4_ops.indexer_quantize_q``."""

    q: Tensor
    weights: Tensor


class InsertedQuery(NamedTuple):
    """Queries and the cache that the keys are in; see
    ``dsv4_ops.qnorm_rope_kv_insert_functional``."""

    q: Tensor
    k_cache: Tensor


class ExpertPlan(NamedTuple):
    """Rows of every block and the expert that multiplies them; see ``dsv4_ops.expert_plan``."""

    sorted_rows: Tensor
    expert_of_block: Tensor
    num_blocks: Tensor


class QuantizedGroups(NamedTuple):
    """e4m3 rows and their scales; see ``dsv4_ops.inverse_rope_group_quantize``."""

    values: Tensor
    scales: Tensor


class QuantizedRows(NamedTuple):
    """e4m3 rows and their scales; see ``dsv4_ops.quantize_rows``."""

    values: Tensor
    scales: Tensor


class SparseMla(NamedTuple):
    """Attention output, and log-sum-exp without the sink; see ``dsv4_ops.sparse_mla_decode``."""

    out: Tensor
    lse: Tensor


class SparseMlaGathered(NamedTuple):
    """Attention output, largest logit, and log-sum-exp without the sink; see
    ``dsv4_ops.sparse_mla_gathered``."""

    out: Tensor
    max_logits: Tensor
    lse: Tensor


def search_steps(size: object) -> int:
    """Halvings that a branch-free binary search over 0..size needs; the bound of the package for a
    symbolic size."""
    return size.bit_length() if isinstance(size, int) else (MAX_REQUESTS + 1).bit_length()
