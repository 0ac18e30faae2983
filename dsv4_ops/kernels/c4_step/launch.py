"""Launch the kernel for everything that a C4 layer writes before it selects rows."""

from __future__ import annotations

from collections import namedtuple
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout, MainLayout, QuantizedLayout, StateLayout
from dsv4_ops.kernels.arguments import paged, row_format, strided
from dsv4_ops.kernels.c4_step.fused_kernel import insert_c4_step_kernel
from dsv4_ops.kernels.compressor import launch as compressor
from dsv4_ops.kernels.compressor.launch import save_and_compress
from dsv4_ops.kernels.compressor.save_states import save_compressor_states
from dsv4_ops.kernels.indexer import logits
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.kernels.rope import qnorm_rope_insert
from dsv4_ops.reference import c4_step as reference

WARPS = 4
"""Warps per program: enough for the main compressor's channels."""

HEADS = 16
"""Heads of one token per program that normalises queries. The compressors need so many registers
that few programs fit on an SM, so each program must load many values at once."""


class _Compressor(NamedTuple):
    """A compressor's arguments (tensors and sizes), constants, and number of programs."""

    tensors: tuple[Any, ...]
    constants: dict[str, tuple[Any, ...]]
    programs: int


def _compressor(
    launch: Launcher,
    prefix: str,
    layout: QuantizedLayout,
    call: Call,
    kv_score: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    states: Tensor,
    k_cache: Tensor,
) -> _Compressor:
    """Return what the kernel needs for one compressor. The names of its constants begin with
    ``prefix``."""
    width = int(ape.shape[1])
    state_tensors = compressor.state_arguments(kv_score, ape, states)
    tensors = (*state_tensors, norm_weight.contiguous(), *compressor.static_pages(k_cache))
    ratio, head_dim = call.compress_ratio, layout.head_dim
    window = (call.state_block_size, ratio, width, 2 * ratio, head_dim)
    threads, _ = compressor.thread_layout(window, head_dim, WARPS, compressor.DEPTH)
    saves = not call.save_first
    save = compressor.state_tile(saves, width, WARPS, compressor.SHORT_SAVE_VALUES)
    constants = {
        "WINDOW": window,
        "FINISH": (head_dim, int(call.cos_sin_cache.shape[1]), float(call.eps)),
        "FORMAT": row_format(launch, layout, k_cache),
        "THREADS": threads,
        "SAVE": save,
    }
    num_tokens = kv_score.shape[0]
    scanners = compressor.scanning_programs(
        num_tokens, compressor.SHORT_TOKENS_SAVING, compressor.SHORT_PROGRAMS
    )
    programs = scanners + compressor.num_tiles(num_tokens, save)
    named = {f"{prefix}{name}".upper(): value for name, value in constants.items()}
    return _Compressor(tensors, named, programs)


def _states(block_size: int, layout: QuantizedLayout) -> StateLayout:
    """Return the layout of states. A row has kv and score for both halves of a window."""
    return StateLayout(block_size, 4 * layout.head_dim)


_NAMES = tuple(signature(reference.insert_c4_step).parameters)


class Call(namedtuple("Call", _NAMES, defaults=(False,))):
    """The arguments of the op, with the names of the reference's parameters."""

    __slots__ = ()

    @property
    def main(self) -> tuple[Tensor, ...]:
        """The main compressor's own tensors."""
        return (self.kv_score, self.ape, self.norm_weight, self.states, self.k_cache)

    @property
    def indexer(self) -> tuple[Tensor, ...]:
        """The indexer compressor's own tensors."""
        inputs = (self.indexer_kv_score, self.indexer_ape, self.indexer_norm_weight)
        return (*inputs, self.indexer_states, self.indexer_cache)


def insert_c4_step(launch: Launcher, *args: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(*args, **named)
    checks, block_size = Checks("insert_c4_step"), call.block_size
    main_layout, indexer_layout = MainLayout(block_size), IndexerLayout(block_size)
    checks.page_start("swa_cache", call.swa_cache, MainLayout(call.swa_block_size))
    for prefix, cache_name, layout, (*_, states, cache) in (
        ("", "k_cache", main_layout, call.main),
        ("indexer_", "indexer_cache", indexer_layout, call.indexer),
    ):
        checks.page_start(f"{prefix}states", states, _states(call.state_block_size, layout))
        checks.page_start(cache_name, cache, layout)
    num_tokens, num_heads = call.q.shape[:2]
    num_reqs, num_slots = call.state_block_table.shape[0], call.swa_slot_mapping.shape[0]
    num_indexer_heads = call.indexer_q.shape[1]
    sizes = (num_tokens, num_reqs, num_heads, num_indexer_heads, call.k_cache.shape[0])
    is_empty = any(size == 0 for size in (*sizes, call.indexer_cache.shape[0]))
    if is_empty or 2 * call.compress_ratio > compressor.DEPTH:
        return _one_by_one(launch, call)
    main = _compressor(launch, "", main_layout, call, *call.main)
    indexer = _compressor(launch, "indexer_", indexer_layout, call, *call.indexer)
    tiles = (num_indexer_heads + logits.QUANTIZED_HEADS - 1) // logits.QUANTIZED_HEADS
    row_programs = num_tokens * ((num_heads + HEADS - 1) // HEADS)
    row_programs += (num_slots + qnorm_rope_insert.KEYS - 1) // qnorm_rope_insert.KEYS
    q_out = call.q.new_empty((num_tokens, num_heads, main_layout.head_dim))
    codes = call.indexer_q.new_empty(call.indexer_q.shape, dtype=torch.uint8)
    scaled = call.indexer_q.new_empty((num_tokens, num_indexer_heads), dtype=torch.float32)
    table = call.cos_sin_cache.contiguous()
    programs = main.programs + indexer.programs + row_programs + num_tokens * tiles
    if call.save_first:
        for kv_score, ape, _, states, _ in (call.main, call.indexer):
            saved = (kv_score, ape, states, call.state_slot_mapping, call.positions)
            sizes = {"compress_ratio": call.compress_ratio, "block_size": call.state_block_size}
            save_compressor_states(launch, *saved, **sizes)
    launch(insert_c4_step_kernel)[programs,](
        *strided(call.q), q_out, num_heads, *strided(call.kv),
        *paged(call.swa_cache), *strided(call.swa_slot_mapping), num_slots,
        *main.tensors, *indexer.tensors,
        *strided(call.indexer_q), num_indexer_heads, *strided(call.indexer_weights), codes, scaled,
        *strided(call.state_block_table), num_reqs, call.state_block_table.shape[1],
        *strided(call.state_slot_mapping, call.positions, call.req_indices),
        table, table.shape[0], *strided(call.slot_mapping), num_tokens,
        main.programs, indexer.programs, row_programs,
        EPS=float(call.eps), SOFTMAX_SCALE=float(call.softmax_scale), ROPE=int(table.shape[1]),
        SWA_FORMAT=row_format(launch, MainLayout(call.swa_block_size), call.swa_cache),
        **main.constants, **indexer.constants, TOKENS=compressor.SHORT_TOKENS_SAVING,
        SPACING=compressor.SHORT_SPACING, HEADS=HEADS, KEYS=qnorm_rope_insert.KEYS,
        INDEXER_HEADS=logits.QUANTIZED_HEADS, num_warps=WARPS,
    )  # fmt: skip
    return q_out, codes.view(torch.float8_e4m3fn), scaled


def _one_by_one(launch: Launcher, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the four kernels one by one, for calls with empty tensors, or with windows of more
    rows than a thread reads at a time."""
    rotation = (call.positions, call.cos_sin_cache)
    q_out = qnorm_rope_insert.qnorm_rope_kv_insert(
        launch,
        *(call.q, call.kv, call.swa_cache, call.swa_slot_mapping, *rotation),
        eps=call.eps,
        block_size=call.swa_block_size,
        layout=MainLayout.tag,
    )
    for layout, tensors in ((MainLayout, call.main), (IndexerLayout, call.indexer)):
        kv_score, ape, norm_weight, states, cache = tensors
        tokens = (call.state_block_table, call.state_slot_mapping, call.positions, call.req_indices)
        save_and_compress(
            launch, kv_score, ape, states, *tokens, norm_weight, call.cos_sin_cache,
            cache, call.slot_mapping,
            compress_ratio=call.compress_ratio, overlap=True, eps=call.eps,
            state_block_size=call.state_block_size, block_size=call.block_size, layout=layout.tag,
            save_first=call.save_first,
        )  # fmt: skip
    queries = (call.indexer_q, call.indexer_weights, *rotation)
    codes, scaled = logits.indexer_quantize_q(launch, *queries, softmax_scale=call.softmax_scale)
    return q_out, codes, scaled
