"""Launcher of everything that a C4 layer writes before it selects rows, and of its queries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout, MainLayout, QuantizedLayout, StateLayout
from dsv4_ops.kernels.c4_step.fused_kernel import insert_c4_step_kernel
from dsv4_ops.kernels.compressor import launch as compressor
from dsv4_ops.kernels.compressor.launch import save_and_compress
from dsv4_ops.kernels.indexer import logits
from dsv4_ops.kernels.launcher import EMULATE, Launch
from dsv4_ops.kernels.rope import qnorm_rope_insert

WARPS = 4
"""Warps of every program: as many as the main compressor's channels fill."""

HEADS = 16
"""Heads of a token that a program normalises: few programs fit on an SM, because the compressors'
have many registers, so that each has more values under way."""


class _Compressor(NamedTuple):
    """What the kernel is given of one of the two compressors.

    Args:
        tensors: Its arguments, tensors and sizes.
        constants: Its constants.
        programs: Its programs.
    """

    tensors: tuple[Any, ...]
    constants: dict[str, int]
    programs: int

    @classmethod
    def of(
        cls,
        prefix: str,
        layout: QuantizedLayout,
        window: dict[str, int],
        kv_score: Tensor,
        ape: Tensor,
        norm_weight: Tensor,
        states: Tensor,
        k_cache: Tensor,
    ) -> _Compressor:
        """That whose tensors are called so."""
        width = int(ape.shape[1])
        if kv_score.stride(1) != 1:
            kv_score = kv_score.contiguous()
        tensors = (
            kv_score,
            int(kv_score.stride(0)),
            ape.contiguous(),
            states,
            int(states.stride(0)),
            states.shape[0],
            norm_weight.contiguous(),
            k_cache,
            int(k_cache.stride(0)),
            k_cache.shape[0],
        )
        save = compressor.save_tiles(True, width, WARPS, compressor.SHORT_SAVED)
        constants = {
            "WIDTH": width,
            "DIM": layout.head_dim,
            "CODE_DIM": layout.code_dim,
            "QUANT_BLOCK": layout.quant_block,
            "DATA_BYTES": layout.data_bytes,
            "SCALE_BYTES": layout.scale_bytes,
            "VALUES": _threads(window, layout)["VALUES"],
            **save,
        }
        num_tokens = kv_score.shape[0]
        looking = compressor.looking_programs(
            num_tokens, compressor.SHORT_TOKENS_SAVED, compressor.SHORT_PROGRAMS
        )
        programs = looking + compressor.num_tiles(num_tokens, save)
        named = {f"{prefix}{name}".upper(): value for name, value in constants.items()}
        return cls(tensors, named, programs)


def _states(block_size: int, layout: QuantizedLayout) -> StateLayout:
    """Of both halves of the windows, keys and scores."""
    return StateLayout(block_size, 4 * layout.head_dim)


def _threads(window: dict[str, int], layout: QuantizedLayout) -> dict[str, Any]:
    return compressor.rows_of_threads(window, layout.head_dim, WARPS, compressor.DEPTH)


def insert_c4_step(
    launch: Launch,
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
    softmax_scale: float,
    compress_ratio: int,
    state_block_size: int,
    swa_block_size: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    checks = Checks("insert_c4_step")
    pages, keys_layout = MainLayout(block_size), IndexerLayout(block_size)
    for name, cache, layout in (
        ("swa_cache", swa_cache, MainLayout(swa_block_size)),
        ("states", states, _states(state_block_size, pages)),
        ("k_cache", k_cache, pages),
        ("indexer_states", indexer_states, _states(state_block_size, keys_layout)),
        ("indexer_cache", indexer_cache, keys_layout),
    ):
        checks.page_start(name, cache, layout)
    num_tokens, num_reqs = q.shape[0], state_block_table.shape[0]
    num_heads, num_indexer_heads, num_slots = (
        q.shape[1],
        indexer_q.shape[1],
        swa_slot_mapping.shape[0],
    )
    needed = (num_tokens, num_reqs, num_heads, num_indexer_heads, k_cache.shape[0])
    nothing = any(size == 0 for size in (*needed, indexer_cache.shape[0]))
    if nothing or 2 * compress_ratio > compressor.DEPTH:
        return _one_by_one(
            launch,
            q,
            kv,
            kv_score,
            indexer_q,
            indexer_weights,
            indexer_kv_score,
            swa_cache,
            swa_slot_mapping,
            ape,
            norm_weight,
            states,
            k_cache,
            indexer_ape,
            indexer_norm_weight,
            indexer_states,
            indexer_cache,
            state_block_table,
            state_slot_mapping,
            slot_mapping,
            positions,
            req_indices,
            cos_sin_cache,
            eps=eps,
            softmax_scale=softmax_scale,
            compress_ratio=compress_ratio,
            state_block_size=state_block_size,
            swa_block_size=swa_block_size,
            block_size=block_size,
        )
    window = {
        "RATIO": compress_ratio,
        "NUM_ROWS": 2 * compress_ratio,
        "STATE_BLOCK": state_block_size,
    }
    main = _Compressor.of("", pages, window, kv_score, ape, norm_weight, states, k_cache)
    keys = _Compressor.of(
        "indexer_",
        keys_layout,
        window,
        indexer_kv_score,
        indexer_ape,
        indexer_norm_weight,
        indexer_states,
        indexer_cache,
    )
    threads = _threads(window, pages)
    del threads["VALUES"]
    tiles = (num_indexer_heads + logits.QUANTIZED_HEADS - 1) // logits.QUANTIZED_HEADS
    row_programs = num_tokens * ((num_heads + HEADS - 1) // HEADS)
    row_programs += (num_slots + qnorm_rope_insert.KEYS - 1) // qnorm_rope_insert.KEYS
    q_out = q.new_empty((num_tokens, num_heads, pages.head_dim))
    codes = indexer_q.new_empty(indexer_q.shape, dtype=torch.uint8)
    scaled = indexer_q.new_empty((num_tokens, num_indexer_heads), dtype=torch.float32)
    table = cos_sin_cache.contiguous()
    launch(insert_c4_step_kernel)[
        main.programs + keys.programs + row_programs + num_tokens * tiles,
    ](
        q,
        *q.stride(),
        q_out,
        num_heads,
        kv,
        *kv.stride(),
        swa_cache,
        swa_cache.stride(0),
        swa_cache.shape[0],
        swa_slot_mapping,
        swa_slot_mapping.stride(0),
        num_slots,
        *main.tensors,
        *keys.tensors,
        indexer_q,
        *indexer_q.stride(),
        num_indexer_heads,
        indexer_weights,
        *indexer_weights.stride(),
        codes,
        scaled,
        state_block_table,
        *state_block_table.stride(),
        num_reqs,
        state_block_table.shape[1],
        state_slot_mapping,
        state_slot_mapping.stride(0),
        positions,
        positions.stride(0),
        req_indices,
        req_indices.stride(0),
        table,
        table.shape[0],
        slot_mapping,
        slot_mapping.stride(0),
        num_tokens,
        main.programs,
        keys.programs,
        row_programs,
        EPS=float(eps),
        SOFTMAX_SCALE=float(softmax_scale),
        ROPE=int(table.shape[1]),
        SWA_BLOCK_SIZE=swa_block_size,
        BLOCK_SIZE=block_size,
        TOKENS=compressor.SHORT_TOKENS_SAVED,
        APART=compressor.SHORT_APART,
        HEADS=HEADS,
        KEYS=qnorm_rope_insert.KEYS,
        INDEXER_HEADS=logits.QUANTIZED_HEADS,
        EMULATE=EMULATE,
        **window,
        **main.constants,
        **keys.constants,
        **threads,
    )
    return q_out, codes.view(torch.float8_e4m3fn), scaled


def _one_by_one(
    launch: Launch,
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
    softmax_scale: float,
    compress_ratio: int,
    state_block_size: int,
    swa_block_size: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The four launches that it stands for, where there is nothing to store, or a window is longer
    than the rows of a thread."""
    q_out = qnorm_rope_insert.qnorm_rope_kv_insert(
        launch,
        q,
        kv,
        swa_cache,
        swa_slot_mapping,
        positions,
        cos_sin_cache,
        eps=eps,
        block_size=swa_block_size,
        layout=MainLayout.tag,
    )
    save_and_compress(
        launch,
        kv_score,
        ape,
        states,
        state_block_table,
        state_slot_mapping,
        positions,
        req_indices,
        norm_weight,
        cos_sin_cache,
        k_cache,
        slot_mapping,
        compress_ratio=compress_ratio,
        overlap=True,
        eps=eps,
        state_block_size=state_block_size,
        block_size=block_size,
        layout=MainLayout.tag,
    )
    save_and_compress(
        launch,
        indexer_kv_score,
        indexer_ape,
        indexer_states,
        state_block_table,
        state_slot_mapping,
        positions,
        req_indices,
        indexer_norm_weight,
        cos_sin_cache,
        indexer_cache,
        slot_mapping,
        compress_ratio=compress_ratio,
        overlap=True,
        eps=eps,
        state_block_size=state_block_size,
        block_size=block_size,
        layout=IndexerLayout.tag,
    )
    codes, scaled = logits.indexer_quantize_q(
        launch,
        indexer_q,
        indexer_weights,
        positions,
        cos_sin_cache,
        softmax_scale=softmax_scale,
    )
    return q_out, codes, scaled
