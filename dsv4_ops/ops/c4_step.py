"""One call that runs all inserts of a C4 layer (4 tokens per compressed row) and prepares its
queries."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout, MainLayout
from dsv4_ops.core.registry import KERNEL_ON_CUDA
from dsv4_ops.core.types import C4Step
from dsv4_ops.dispatch.define import define_op
from dsv4_ops.ops import indexer, rope
from dsv4_ops.ops.compressor import DIMENSIONS, check_states, check_tokens

_insert_c4_step = define_op(
    "c4_step",
    "insert_c4_step(Tensor q, Tensor kv, Tensor kv_score, Tensor indexer_q, "
    "Tensor indexer_weights, Tensor indexer_kv_score, Tensor(a!) swa_cache, "
    "Tensor swa_slot_mapping, Tensor ape, Tensor norm_weight, Tensor(b!) states, "
    "Tensor(c!) k_cache, Tensor indexer_ape, Tensor indexer_norm_weight, "
    "Tensor(d!) indexer_states, Tensor(e!) indexer_cache, Tensor state_block_table, "
    "Tensor state_slot_mapping, Tensor slot_mapping, Tensor positions, Tensor req_indices, "
    "Tensor cos_sin_cache, *, float eps, float softmax_scale, int compress_ratio, "
    "int state_block_size, int swa_block_size, int block_size, bool save_first=False) -> "
    "(Tensor, Tensor, Tensor)",
    lowering=KERNEL_ON_CUDA,
    dynamic=(
        *DIMENSIONS,
        "num_heads",
        "num_slots",
        "num_swa_blocks",
        "num_indexer_blocks",
        "num_indexer_state_blocks",
    ),
    source="qnorm_rope_kv_insert, save_and_compress and indexer_quantize_q in one launch",
)


def insert_c4_step(
    q: Tensor,
    kv: Tensor,
    kv_score: Tensor,
    indexer_q: Tensor,
    indexer_weights: Tensor,
    indexer_kv_score: Tensor,
    swa_cache: Tensor,
    swa_slot_mapping: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    states: Tensor,
    k_cache: Tensor,
    indexer_ape: Tensor,
    indexer_norm_weight: Tensor,
    indexer_states: Tensor,
    indexer_cache: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    cos_sin_cache: Tensor,
    *,
    eps: float,
    softmax_scale: float | None = None,
    compress_ratio: int,
    state_block_size: int,
    swa_block_size: int,
    block_size: int,
    save_first: bool = False,
) -> C4Step:
    """Run all inserts of a C4 layer, before the layer selects rows.

    One op does the work of four calls: ``qnorm_rope_kv_insert``, ``save_and_compress`` for the
    layer, ``save_and_compress`` for its indexer, and ``indexer_quantize_q``. The op normalises and
    rotates the queries, quantises the indexer's queries, writes the keys to the window cache, and
    saves states and compresses windows for both compressors.

    Args:
        q: Queries, [num_tokens, num_heads, 512], bfloat16, any strides.
        kv: Keys after their own RMSNorm, [num_tokens, 512], bfloat16, any strides.
        kv_score: Projections of the compressor, [num_tokens, 2048], float32.
        indexer_q: Queries of the indexer without RoPE, [num_tokens, num_index_heads, 128],
            bfloat16, any strides.
        indexer_weights: Weight of each indexer head, [num_tokens, num_index_heads], bfloat16 or
            float32, any strides.
        indexer_kv_score: Projections of the indexer's compressor, [num_tokens, 512], float32.
        swa_cache: Window cache, [num_swa_blocks, page_bytes], uint8, from ``MainLayout.allocate``.
        swa_slot_mapping: Slot in ``swa_cache`` of each of the first num_slots tokens, [num_slots],
            int64; num_slots is at most num_tokens. Keys of later tokens, and keys with a slot below
            0 or past the last block, are not written.
        ape: Position bias of the compressor's scores, [compress_ratio, 1024], float32.
        norm_weight: Weight of the compressor's RMSNorm, [512], float32.
        states: The compressor's paged states, [num_state_blocks, page_bytes / 4], float32, from
            ``StateLayout(state_block_size, 2048).allocate``.
        k_cache: Compressed rows, [num_blocks, page_bytes], uint8, from ``MainLayout.allocate``.
        indexer_ape: ``ape`` of the indexer: [compress_ratio, 256], float32.
        indexer_norm_weight: Weight of the RMSNorm of the indexer's keys, [128], float32.
        indexer_states: The indexer's paged states, [num_indexer_state_blocks, page_bytes / 4],
            float32, from ``StateLayout(state_block_size, 512).allocate``.
        indexer_cache: The indexer's keys, [num_indexer_blocks, page_bytes], uint8, from
            ``IndexerLayout.allocate``.
        state_block_table: Physical block in ``states`` and ``indexer_states`` of every logical
            block of state_block_size positions, [num_reqs, max_state_blocks], int32, any strides.
        state_slot_mapping: Slot of every token's own row in ``states`` and ``indexer_states``,
            block * state_block_size + row, [num_tokens], int64. States with a slot below 0 or past
            the last block are not saved.
        slot_mapping: Slot in ``k_cache`` and ``indexer_cache`` of the row that each token finishes,
            from ``compressed_slot_mapping``, [num_tokens], int64.
        positions: Absolute position of every token, [num_tokens], int64. Queries and keys at
            positions below 0 or past the end of ``cos_sin_cache`` are not rotated. Tokens at
            positions outside 0..2**31-2 finish no window. States at positions below 0 are not
            saved.
        req_indices: Request of every token, [num_tokens], int32. Tokens whose request is outside
            0..num_reqs-1 finish no window.
        cos_sin_cache: From ``rope_cos_sin_cache``, for the layers with a compressor,
            [num_positions, 64], float32.
        eps: Added to the mean square in all three RMSNorms. Above 0.
        softmax_scale: Factor applied to the weights of all indexer heads, above 0. None means
            128^-0.5 * num_index_heads^-0.5.
        compress_ratio: Tokens per window, 4 in C4. At least 1. Windows overlap, as in C4.
        state_block_size: Rows per block of ``states`` and ``indexer_states``: 4 for C4. At least 1.
        swa_block_size: Rows per block of ``swa_cache``. At least 1.
        block_size: Rows per block of ``k_cache`` and ``indexer_cache``: 64 for C4. At least 1.
        save_first: As for ``save_and_compress``, for both compressors.

    Returns:
        ``C4Step(q, indexer_q, indexer_weights)``, dense. ``q``, bfloat16, is the result of
        ``qnorm_rope_kv_insert``. ``indexer_q``, float8_e4m3fn, and ``indexer_weights``, float32,
        are the results of ``indexer_quantize_q``.

    Mutates: ``swa_cache``, as ``qnorm_rope_kv_insert`` does; ``states``, ``k_cache``,
        ``indexer_states`` and ``indexer_cache``, as ``save_and_compress`` does. The five caches
        must not overlap, because one launch writes them all. If the ring of states is too short for
        the step (see ``save_and_compress``), make the four calls instead, and replace each
        ``save_and_compress`` by ``compress_and_insert``, then ``save_compressor_states``.

    Raises:
        ValueError: shapes that disagree, a cache or states that are not of their layout, more
            window slots than tokens, ``eps`` or ``softmax_scale`` not above 0, a size below 1, one
            tensor passed as two caches, or several devices.
        TypeError: a dtype other than those above.

    Compile: writes in place, without a copy of states or caches. On CUDA, for ratios up to 4, one
        Triton kernel of ours runs, both in graphs and in AOTInductor packages; ``save_first`` adds
        two kernels that save states. For larger ratios, and on CPU, the code of the four calls
        runs. Dynamic in num_tokens, num_heads, num_reqs, num_slots, max_state_blocks, num_positions
        and the blocks of all five caches; CUDA graphs and export: yes. Results have the same bits
        as those of the four calls.

    Source: the four calls; vLLM 0.33 runs them as separate kernels.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import IndexerLayout, MainLayout, StateLayout
        >>> def ones(*shape, dtype=torch.float32):
        ...     return torch.ones(shape, dtype=dtype)
        >>> swa_cache, k_cache = (MainLayout(block_size=1).allocate(1) for _ in range(2))
        >>> indexer_cache, zero = IndexerLayout(block_size=1).allocate(1), torch.tensor([0])
        >>> states, indexer_states = (StateLayout(1, width).allocate(1) for width in (2048, 512))
        >>> step = dsv4_ops.insert_c4_step(
        ...     3 * ones(1, 2, 512, dtype=torch.bfloat16), ones(1, 512, dtype=torch.bfloat16),
        ...     ones(1, 2048), 3 * ones(1, 1, 128, dtype=torch.bfloat16), ones(1, 1), ones(1, 512),
        ...     swa_cache, zero, ones(1, 1024), ones(512), states, k_cache,
        ...     ones(1, 256), ones(128), indexer_states, indexer_cache, zero[None].int(),
        ...     zero, zero, zero, zero.int(), torch.zeros(0, 64),
        ...     eps=1e-6, softmax_scale=0.5, compress_ratio=1, state_block_size=1,
        ...     swa_block_size=1, block_size=1
        ... )
        >>> step.q[0, 1, 0].item(), step.indexer_q[0, 0, 0].item(), step.indexer_weights.item()
        (1.0, 384.0, 0.00390625)
        >>> states[0, 1023:1025].tolist(), indexer_states[0, 255:257].tolist()
        ([1.0, 2.0], [1.0, 2.0])
        >>> [cache[0, 0].item() for cache in (swa_cache, k_cache, indexer_cache)]
        [120, 120, 120]
    """
    checks = Checks("insert_c4_step")
    blocks = {"swa_block_size": swa_block_size, "block_size": block_size}
    windows = {"compress_ratio": compress_ratio, "state_block_size": state_block_size}
    checks.at_least(1, **windows, **blocks)
    checks.above(0, eps=eps)
    rope.check_query(checks, q, kv)
    check_tokens(checks, positions, req_indices, slot_mapping, state_block_table)
    checks.tensor("state_slot_mapping", state_slot_mapping, torch.int64, "num_tokens")
    checks.tensor("swa_slot_mapping", swa_slot_mapping, torch.int64, "num_slots")
    checks.no_more_than_tokens("swa_slot_mapping", swa_slot_mapping)
    checks.rotation(positions, cos_sin_cache, rope.ROPE_DIM)
    swa_dims = ("num_swa_blocks", "swa_page_bytes")
    checks.pages("swa_cache", swa_cache, MainLayout(swa_block_size), swa_dims, "swa_block_size")
    checks.pages("k_cache", k_cache, MainLayout(block_size))
    checks.tensor("norm_weight", norm_weight, torch.float32, MainLayout.head_dim)
    sizes = (compress_ratio, 2 * MainLayout.head_dim, state_block_size)
    check_states(checks, kv_score, ape, states, sizes)
    indexer_dims = ("num_indexer_blocks", "indexer_page_bytes")
    checks.pages("indexer_cache", indexer_cache, IndexerLayout(block_size), indexer_dims)
    checks.tensor("indexer_norm_weight", indexer_norm_weight, torch.float32, indexer.DIM)
    sizes = (compress_ratio, 2 * indexer.DIM, state_block_size)
    check_states(checks, indexer_kv_score, indexer_ape, indexer_states, sizes, "indexer_")
    indexer.check_unquantized(checks, indexer_q, indexer_weights, "num_index_heads", "indexer_")
    softmax_scale = indexer.checked_scale(checks, indexer_q, softmax_scale)
    checks.flag("save_first", save_first)
    # no other pair can be the same tensor: caches of equal dtype and block size differ in shape
    for name, cache in (("k_cache", k_cache), ("indexer_cache", indexer_cache)):
        if cache is swa_cache:
            raise checks.error(
                name,
                must="be another tensor than swa_cache",
                got="the same",
                do="Give each a cache of its own",
            )
    projected = (q, kv, kv_score, indexer_q, indexer_weights, indexer_kv_score)
    window = (swa_cache, swa_slot_mapping)
    compressor = (ape, norm_weight, states, k_cache)
    of_indexer = (indexer_ape, indexer_norm_weight, indexer_states, indexer_cache)
    slots = (state_block_table, state_slot_mapping, slot_mapping)
    tensors = (*projected, *window, *compressor, *of_indexer, *slots)
    settings = {"eps": eps, "softmax_scale": softmax_scale, **windows, **blocks}
    settings["save_first"] = save_first
    tokens = (positions, req_indices, cos_sin_cache)
    return C4Step(*_insert_c4_step(*tensors, *tokens, **settings))
