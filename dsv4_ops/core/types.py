"""Result types of the public functions, and the limits that several layers share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dsv4_ops.core.torch_compat import sym_min

MAX_REQUESTS = 16383
"""Maximum requests per batch. The limit bounds the unrolled binary searches of compiled code."""

INT32_MAX = 2**31 - 1

ABSENT = -1
"""Value of every index, slot and request id that does not exist."""


class FlashMlaPlan(NamedTuple):
    """FlashMLA's plan, and the sizes of the calls that it is for; see
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
    """Result of ``dsv4_ops.flatten_decode``.

    The number of visible keys, and the request, of every decode token."""

    seq_lens: Tensor
    req_indices: Tensor


class PrefillChunks(NamedTuple):
    """Prefill chunk plan; see ``dsv4_ops.split_prefill_chunks``."""

    chunks: Tensor
    num_chunks: Tensor


class VerifiedDraft(NamedTuple):
    """Result of ``dsv4_ops.verify_draft``."""

    tokens: Tensor
    num_accepted: Tensor


class PrefillRowBounds(NamedTuple):
    """Result of ``dsv4_ops.prefill_row_bounds``.

    Rows of gathered keys that each token may see."""

    cu_seq_lens: Tensor
    row_start: Tensor
    row_stop: Tensor


class SwaIndices(NamedTuple):
    """Sliding-window slots of every token; see ``dsv4_ops.swa_indices_and_lens``."""

    indices: Tensor
    lens: Tensor


class TopkIndices(NamedTuple):
    """Result of ``dsv4_ops.global_topk_indices_and_lens``.

    Slots of the compressed rows of every token."""

    indices: Tensor
    lens: Tensor


class LocalRows(NamedTuple):
    """The selected rows of each token that a rank owns; see ``dsv4_ops.cp_local_rows``."""

    rows: Tensor
    lens: Tensor


class C4Step(NamedTuple):
    """Result of ``dsv4_ops.insert_c4_step``.

    Queries of a C4 layer, and FP8 queries of its indexer with the weights of their heads."""

    q: Tensor
    indexer_q: Tensor
    indexer_weights: Tensor


class IndexerKeys(NamedTuple):
    """Gathered keys of the lightning indexer; see ``dsv4_ops.gather_indexer_k``."""

    k: Tensor
    scales: Tensor


class IndexerQuery(NamedTuple):
    """Result of ``dsv4_ops.indexer_quantize_q``.

    FP8 queries of the lightning indexer and the weights of their heads."""

    q: Tensor
    weights: Tensor


class ExpertPlan(NamedTuple):
    """The rows and the expert of every block; see ``dsv4_ops.expert_plan``."""

    sorted_rows: Tensor
    expert_of_block: Tensor
    num_blocks: Tensor


def max_expert_blocks(num_rows: int, num_experts: int, block_size: int) -> int:
    """Return the maximum number of blocks that ``num_rows`` rows fill if no block mixes experts."""
    padded = num_rows + sym_min(num_experts, num_rows) * (block_size - 1)
    return padded // block_size


class HyperConnection(NamedTuple):
    """Streams, their weights and a block's input; see ``hyper_connection``."""

    streams: Tensor
    post: Tensor
    mix: Tensor
    x: Tensor


class NormedPair(NamedTuple):
    """Two parts of a product, each normalised; see ``fp8_linear_norms``."""

    first: Tensor
    second: Tensor


class Routing(NamedTuple):
    """Experts of every token and their weights; see ``dsv4_ops.route``."""

    ids: Tensor
    weights: Tensor


class QuantizedGroups(NamedTuple):
    """e4m3 rows and their scales; see ``dsv4_ops.inverse_rope_group_quantize``."""

    values: Tensor
    scales: Tensor


class ContextChunks(NamedTuple):
    """Chunks of the contexts of a batch; see ``dsv4_ops.context_chunks``."""

    local_starts: Tensor
    cu_seq_lens: Tensor
    local_cu_seq_lens: Tensor
    num_chunks: Tensor


class MergedStates(NamedTuple):
    """Attention over several parts of the keys; see ``dsv4_ops.merge_attn_states``."""

    out: Tensor
    lse: Tensor


class MlaAttention(NamedTuple):
    """Attention output and log-sum-exp of dense MLA; see ``dsv4_ops.mla_decode``."""

    out: Tensor
    lse: Tensor


class PerTensor(NamedTuple):
    """e4m3 codes with one scale; see ``dsv4_ops.quantize_per_tensor``."""

    codes: Tensor
    scale: Tensor


class AbsorbedWeights(NamedTuple):
    """Weights of the absorbed projections; see ``dsv4_ops.split_kv_b_proj``."""

    w_uk_t: Tensor
    w_uv: Tensor


class QuantizedRows(NamedTuple):
    """e4m3 rows and their scales; see ``dsv4_ops.quantize_rows``."""

    values: Tensor
    scales: Tensor


class SparseMla(NamedTuple):
    """Result of ``dsv4_ops.sparse_mla_decode``.

    Attention output, and log-sum-exp without the sink."""

    out: Tensor
    lse: Tensor


class SparseMlaGathered(NamedTuple):
    """Result of ``dsv4_ops.sparse_mla_gathered``.

    Attention output, largest logit, and log-sum-exp without the sink."""

    out: Tensor
    max_logits: Tensor
    lse: Tensor


def search_steps(size: object) -> int:
    """Return the number of steps of a branch-free binary search over 0..size. A symbolic size takes
    the steps of ``MAX_REQUESTS``."""
    return size.bit_length() if isinstance(size, int) else (MAX_REQUESTS + 1).bit_length()
