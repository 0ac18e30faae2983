"""Launch the kernels of the compressor: states, compressed rows, or both."""

from __future__ import annotations

from collections import namedtuple
from inspect import signature
from typing import Any

import torch
import triton
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout, MainLayout, QuantizedLayout, StateLayout
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.compressor.pool_long import insert_pooled_kernel, pool_windows_kernel
from dsv4_ops.kernels.compressor.pool_short import compress_and_insert_kernel
from dsv4_ops.kernels.compressor.save_states import save_compressor_states
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.reference import compressor as reference

VALUES = 4
"""Most consecutive channels of a thread: 16 bytes."""

DEPTH, LONG_DEPTH = 8, 16
"""Most rows of a short and of a long window that a thread reads at a time: all of C4's."""

CHANNELS = 64
"""Channels of a long window that a program reads."""

SHORT_WARPS, LONG_WARPS, INSERT_WARPS = 1, 2, 4
"""Warps of a program: few, as each repeats what is done once per row. Of a short window as many as
its channels fill."""

MAX_WARPS = 16

SHORT_WINDOW = 32
"""Most rows of a window that is short: it takes less than a look at a token does."""

SHORT_TOKENS, LONG_TOKENS, INSERT_TOKENS = 4, 128, 32
"""Tokens that a program looks at together."""

SAVE_COLUMNS, SHORT_SAVED, LONG_SAVED, INSERT_SAVED = 1024, 32, 64, 16
"""Most values of a row of states that a program saves, and values per thread: more where a program
has many registers, and an SM few programs."""

SHORT_TOKENS_SAVED, CHANNELS_SAVED, LONG_WARPS_SAVED = 8, 32, 1
"""``SHORT_TOKENS``, ``CHANNELS`` and ``LONG_WARPS`` where other programs save states."""

MIXED_WARPS = 4
"""Warps with which not all programs that look for windows run at once: those that save states then
come between them, else behind them."""

SAVED_EARLY = 7
"""Eighths of the tokens whose states are saved while long windows are read; the others' are while
their rows are finished."""

SHORT_APART, LONG_APART = 0, 2
"""How far apart programs are that look for windows where others save states: ``find_role``."""

SHORT_PROGRAMS, LONG_PROGRAMS, INSERT_PROGRAMS = 8 * 132 + 1, 33, 133
"""Programs below which each gets fewer tokens; odd."""

FEW_TOKENS = 2176
"""Tokens below which 2 programs more per 128 look for long windows: all tokens of a decode may
finish one, and 1 in a ratio of a prefill's."""


class Call(namedtuple("Call", signature(reference.save_and_compress).parameters)):
    """The arguments of ``save_and_compress``, as its reference names them."""

    __slots__ = ()


_TENSORS = tuple(signature(reference.compress_and_insert).parameters)


def compress_and_insert(launch: Launcher, *tensors: Tensor, **settings: Any) -> None:
    """The same, but that no state has a slot."""
    named = dict(zip(_TENSORS, tensors, strict=False))
    _launch(launch, "compress_and_insert", Call(**named, **settings, state_slot_mapping=None))


def save_and_compress(launch: Launcher, *tensors: Tensor, **settings: Any) -> None:
    _launch(launch, "save_and_compress", Call(*tensors, **settings))


def _launch(launch: Launcher, op: str, call: Call) -> None:
    """``compress_and_insert``; with a ``state_slot_mapping``, extra programs save the states."""
    width, head_dim = int(call.ape.shape[1]), int(call.norm_weight.shape[0])
    k_cache, block_size, state_block_size = call.k_cache, call.block_size, call.state_block_size
    checks = Checks(op)
    checks.page_start("states", call.states, StateLayout(state_block_size, max(2 * width, 1)))
    quantized = _quantized(call.layout, block_size)
    if quantized is not None:
        checks.page_start("k_cache", k_cache, quantized)
    num_tokens, num_reqs = call.positions.shape[0], call.state_block_table.shape[0]
    if num_tokens == 0 or head_dim == 0:
        return
    ratio, state_slots = call.compress_ratio, call.state_slot_mapping
    saves, saved = state_slots is not None, (call.kv_score, call.ape, call.states)
    if num_reqs == 0 or k_cache.shape[0] == 0:  # no window is stored
        if saves:
            settings = {"compress_ratio": ratio, "block_size": state_block_size}
            save_compressor_states(launch, *saved, state_slots, call.positions, **settings)
        return
    own, table, angles = own_tensors(*saved), call.state_block_table, call.cos_sin_cache
    rows = (*own, *strided(table), num_reqs, table.shape[1])
    tokens = strided(call.positions, call.req_indices)
    rotation = (call.norm_weight.contiguous(), angles.contiguous(), angles.shape[0])
    pages = fixed_pages(k_cache)
    slots = (*strided(call.slot_mapping), num_tokens)
    state_slots = strided(state_slots if saves else call.slot_mapping)
    num_rows = ratio * (2 if call.overlap else 1)
    window = (state_block_size, ratio, width, num_rows, head_dim)
    finish = (triton.next_power_of_2(head_dim), int(angles.shape[1]), float(call.eps))
    plain = (block_size, head_dim, 0, 0, 0, 0, False)
    constants: dict[str, Any] = {"WINDOW": window}
    inserted = {
        "ROW_STRIDE": 0 if quantized else int(k_cache.stride(1)),
        "FINISH": finish,
        "FORMAT": quantized.format if quantized else plain,
    }
    if num_rows <= SHORT_WINDOW:
        threads, warps = rows_of_threads(window, finish[0], SHORT_WARPS, DEPTH)
        save = save_tiles(saves, width, warps, SHORT_SAVED)
        looked_at = SHORT_TOKENS_SAVED if saves else SHORT_TOKENS
        programs = looking_programs(num_tokens, looked_at, SHORT_PROGRAMS)
        launch(compress_and_insert_kernel)[programs + num_tiles(num_tokens, save),](
            *rows, *tokens, *rotation, *pages, *slots, *state_slots,
            THREADS=threads, SAVE=save, TOKENS=looked_at,
            APART=SHORT_APART if warps >= MIXED_WARPS else 1, num_warps=warps,
            **inserted, **constants,
        )  # fmt: skip
        return
    pooled = call.kv_score.new_empty((num_tokens, head_dim))
    channels = min(CHANNELS_SAVED if saves else CHANNELS, finish[0])
    parts = (head_dim + channels - 1) // channels
    warps = LONG_WARPS_SAVED if saves else LONG_WARPS
    threads, warps = rows_of_threads(window, channels, warps, LONG_DEPTH)
    save = save_tiles(saves, width, warps, LONG_SAVED)
    programs, num_early = _long_programs(num_tokens), num_tokens * SAVED_EARLY // 8
    grid = (programs * parts + num_tiles(num_early, save),) if saves else (programs, parts)
    launch(pool_windows_kernel)[grid](
        *rows, *tokens, pages[2], *slots, *state_slots, num_early, pooled,
        CHANNELS=channels, BLOCK_SIZE=block_size, THREADS=threads, SAVE=save, TOKENS=LONG_TOKENS,
        APART=LONG_APART, num_warps=warps, **constants,
    )  # fmt: skip
    save = save_tiles(saves, width, INSERT_WARPS, INSERT_SAVED)
    programs = looking_programs(num_tokens, INSERT_TOKENS, INSERT_PROGRAMS)
    launch(insert_pooled_kernel)[programs + num_tiles(num_tokens - num_early, save),](
        pooled, num_reqs, *tokens, *rotation, *pages, *slots, *own, *state_slots, num_early,
        SAVE=save, TOKENS=INSERT_TOKENS, num_warps=INSERT_WARPS, **inserted, **constants,
    )  # fmt: skip


def own_tensors(kv_score: Tensor, ape: Tensor, states: Tensor) -> tuple[Any, ...]:
    """What a compressor saves, and where to, as kernels take it."""
    scores = kv_score if kv_score.stride(1) == 1 else kv_score.contiguous()
    return (scores, int(scores.stride(0)), ape.contiguous(), *fixed_pages(states))


def fixed_pages(cache: Tensor) -> tuple[Any, ...]:
    """A cache, the stride of its blocks, which is no symbol, and how many blocks it has."""
    return (cache, int(cache.stride(0)), cache.shape[0])


def save_tiles(saves: bool, width: int, warps: int, values: int) -> tuple[int, int, int]:
    """How programs of some warps share the states of all tokens, if a call saves any: tokens and
    columns of a tile, and tiles of a row."""
    if not saves:
        return 0, 0, 0
    columns = min(SAVE_COLUMNS, triton.next_power_of_2(2 * width))
    return max(warps * 32 * values // columns, 1), columns, (2 * width + columns - 1) // columns


def num_tiles(num_tokens: int, save: tuple[int, int, int]) -> int:
    tokens, _, parts = save
    return (num_tokens + tokens - 1) // tokens * parts if tokens else 0


def _quantized(layout: str, block_size: int) -> QuantizedLayout | None:
    if layout == MainLayout.tag:
        return MainLayout(block_size)
    return IndexerLayout(block_size) if layout == IndexerLayout.tag else None


def rows_of_threads(
    window: tuple[int, ...], channels: int, warps: int, deepest: int
) -> tuple[tuple[int, ...], int]:
    """How the rows of some channels of a window lie in the threads of a program: ``THREADS`` of
    ``pool_window``, and warps."""
    state_block, ratio, _, num_rows, _ = window
    rows = triton.next_power_of_2(num_rows)
    warps = min(max(warps, channels // (32 * VALUES)), MAX_WARPS)
    values, groups = min(VALUES, channels), 1
    if rows > deepest:
        groups = min(max(32 * warps * values // channels, 1), rows)
    elif channels < 32 * warps * values:
        values = max(channels // (32 * warps), 1)
    depth = min(rows // groups, deepest)
    one_block = ratio % depth == 0 and state_block % depth == 0
    return (rows // (depth * groups), depth, groups, values, one_block), warps


def _long_programs(num_tokens: int) -> int:
    """Programs that look for long windows, for each part of a window's channels."""
    few = torch.sym_max(FEW_TOKENS - num_tokens, 0) // 128 * 2
    return looking_programs(num_tokens, LONG_TOKENS, LONG_PROGRAMS + few)


def looking_programs(num_tokens: int, tokens: int, least: int) -> int:
    """Programs, an odd number where there are fewer than tokens: those that finish a window, an
    even number of tokens apart, then are of different programs."""
    odd = (num_tokens + tokens - 1) // tokens // 2 * 2 + 1
    return torch.sym_min(num_tokens, torch.sym_max(odd, least))
