"""Launch the compressor: save states, insert compressed rows, or both."""

from __future__ import annotations

from collections import namedtuple
from inspect import signature
from typing import Any

import torch
import triton
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout, MainLayout, QuantizedLayout, StateLayout
from dsv4_ops.kernels.arguments import row_format, strided
from dsv4_ops.kernels.compressor.pool_long import insert_pooled_kernel, pool_windows_kernel
from dsv4_ops.kernels.compressor.pool_short import compress_and_insert_kernel
from dsv4_ops.kernels.compressor.save_states import save_compressor_states
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.reference import compressor as reference

VALUES = 4
"""Maximum consecutive channels per thread: 16 bytes."""

DEPTH, LONG_DEPTH = 8, 16
"""Maximum number of rows of a short window, and of a long window, that a thread reads at a time. C4
windows have 8 rows."""

CHANNELS = 64
"""Channels of a long window per program."""

SHORT_WARPS, LONG_WARPS, INSERT_WARPS = 1, 2, 4
"""Warps of a program that compresses short windows, pools long windows, or inserts pooled rows. The
warps are few, because each warp repeats the work per row. If a short window has many channels, a
program has as many warps as the channels fill."""

MAX_WARPS = 16

SHORT_WINDOW = 32
"""Maximum rows of a short window, which ``pool_short.py`` compresses in one kernel."""

SHORT_TOKENS, LONG_TOKENS, INSERT_TOKENS = 4, 128, 32
"""Tokens that a program scans together."""

SAVE_COLUMNS = 1024
"""Maximum columns of a tile of states."""

SHORT_SAVE_VALUES, LONG_SAVE_VALUES, INSERT_SAVE_VALUES = 32, 64, 16
"""Values per thread of a tile of states. A thread has more values in kernels that need many
registers, because an SM runs few programs of such kernels."""

SHORT_TOKENS_SAVING, CHANNELS_SAVING, LONG_WARPS_SAVING = 8, 32, 1
"""Values of ``SHORT_TOKENS``, ``CHANNELS`` and ``LONG_WARPS`` in launches that also save states."""

MIXED_WARPS = 4
"""If programs have at least this many warps, the programs that scan for completed windows cannot
all run at once. The programs that save states are then interleaved with them. With fewer warps, the
programs that save states come last."""

SAVED_EARLY = 7
"""The kernel that pools long windows saves the states of this many eighths of the tokens. The
kernel that inserts rows saves the other states."""

SHORT_SPACING, LONG_SPACING = 0, 2
"""Spacing of scanning programs if other programs save states: see ``assign_role``."""

SHORT_PROGRAMS, LONG_PROGRAMS, INSERT_PROGRAMS = 8 * 132 + 1, 33, 133
"""Minimum number of scanning programs, unless there are fewer tokens. The numbers are odd:
``scanning_programs`` says why."""

FEW_TOKENS = 2176
"""If a batch has fewer tokens than this, 2 more programs scan for long windows per 128 missing
tokens. In a decode, every token may complete a window; in a prefill, only one token in
``compress_ratio`` does."""


_NAMES = tuple(signature(reference.save_and_compress).parameters)


class Call(namedtuple("Call", _NAMES, defaults=(False,))):
    """The arguments of ``save_and_compress``, with the names of the reference's parameters."""

    __slots__ = ()


_TENSORS = tuple(signature(reference.compress_and_insert).parameters)


def compress_and_insert(launch: Launcher, *tensors: Tensor, **settings: Any) -> None:
    """Run ``save_and_compress`` without saving states."""
    named = dict(zip(_TENSORS, tensors, strict=False))
    _launch(launch, "compress_and_insert", Call(**named, **settings, state_slot_mapping=None))


def save_and_compress(launch: Launcher, *tensors: Tensor, **settings: Any) -> None:
    _launch(launch, "save_and_compress", Call(*tensors, **settings))


def _launch(launch: Launcher, op: str, call: Call) -> None:
    """Launch the kernels of ``op``. If the call has a ``state_slot_mapping``, states are saved: by
    extra programs of these kernels, or by a separate kernel before them."""
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
    saves, state_inputs = state_slots is not None, (call.kv_score, call.ape, call.states)
    no_window = num_reqs == 0 or k_cache.shape[0] == 0
    if saves and (call.save_first or no_window):
        settings = {"compress_ratio": ratio, "block_size": state_block_size}
        save_compressor_states(launch, *state_inputs, state_slots, call.positions, **settings)
        saves = False
    if no_window:
        return
    state_tensors, table = state_arguments(*state_inputs), call.state_block_table
    rows = (*state_tensors, *strided(table), num_reqs, table.shape[1])
    angles = call.cos_sin_cache
    tokens = strided(call.positions, call.req_indices)
    rotation = (call.norm_weight.contiguous(), angles.contiguous(), angles.shape[0])
    pages = static_pages(k_cache)
    slots = (*strided(call.slot_mapping), num_tokens)
    state_slots = strided(state_slots if saves else call.slot_mapping)
    num_rows = ratio * (2 if call.overlap else 1)
    window = (state_block_size, ratio, width, num_rows, head_dim)
    finish = (triton.next_power_of_2(head_dim), int(angles.shape[1]), float(call.eps))
    plain = (block_size, head_dim, 0, 0, 0, 0, False, False)
    constants: dict[str, Any] = {"WINDOW": window}
    insert_constants = {
        "ROW_STRIDE": 0 if quantized else int(k_cache.stride(1)),
        "FINISH": finish,
        "FORMAT": row_format(launch, quantized, k_cache) if quantized else plain,
    }
    if num_rows <= SHORT_WINDOW:
        threads, warps = thread_layout(window, finish[0], SHORT_WARPS, DEPTH)
        save = state_tile(saves, width, warps, SHORT_SAVE_VALUES)
        scanned = SHORT_TOKENS_SAVING if saves else SHORT_TOKENS
        programs = scanning_programs(num_tokens, scanned, SHORT_PROGRAMS)
        launch(compress_and_insert_kernel)[programs + num_tiles(num_tokens, save),](
            *rows, *tokens, *rotation, *pages, *slots, *state_slots,
            THREADS=threads, SAVE=save, TOKENS=scanned,
            SPACING=SHORT_SPACING if warps >= MIXED_WARPS else 1, num_warps=warps,
            **insert_constants, **constants,
        )  # fmt: skip
        return
    pooled = call.kv_score.new_empty((num_tokens, head_dim))
    channels = min(CHANNELS_SAVING if saves else CHANNELS, finish[0])
    parts = (head_dim + channels - 1) // channels
    warps = LONG_WARPS_SAVING if saves else LONG_WARPS
    threads, warps = thread_layout(window, channels, warps, LONG_DEPTH)
    save = state_tile(saves, width, warps, LONG_SAVE_VALUES)
    programs, num_early = _long_programs(num_tokens), num_tokens * SAVED_EARLY // 8
    grid = (programs * parts + num_tiles(num_early, save),) if saves else (programs, parts)
    launch(pool_windows_kernel)[grid](
        *rows, *tokens, pages[2], *slots, *state_slots, num_early, pooled,
        CHANNELS=channels, BLOCK_SIZE=block_size, THREADS=threads, SAVE=save, TOKENS=LONG_TOKENS,
        SPACING=LONG_SPACING, num_warps=warps, **constants,
    )  # fmt: skip
    save = state_tile(saves, width, INSERT_WARPS, INSERT_SAVE_VALUES)
    programs = scanning_programs(num_tokens, INSERT_TOKENS, INSERT_PROGRAMS)
    launch(insert_pooled_kernel)[programs + num_tiles(num_tokens - num_early, save),](
        pooled, num_reqs, *tokens, *rotation, *pages, *slots, *state_tensors, *state_slots,
        num_early,
        SAVE=save, TOKENS=INSERT_TOKENS, num_warps=INSERT_WARPS, **insert_constants, **constants,
    )  # fmt: skip


def state_arguments(kv_score: Tensor, ape: Tensor, states: Tensor) -> tuple[Any, ...]:
    """Return the kernels' arguments for states: the tensors from which states are computed, and the
    cache of states."""
    scores = kv_score if kv_score.stride(1) == 1 else kv_score.contiguous()
    return (scores, int(scores.stride(0)), ape.contiguous(), *static_pages(states))


def static_pages(cache: Tensor) -> tuple[Any, ...]:
    """Return a cache, its block stride, which is never symbolic, and its number of blocks."""
    return (cache, int(cache.stride(0)), cache.shape[0])


def state_tile(saves: bool, width: int, warps: int, values: int) -> tuple[int, int, int]:
    """Return ``SAVE`` of a kernel: tokens and columns of a tile of states, and tiles per row. One
    program of ``warps`` warps saves a tile, with ``values`` values per thread."""
    if not saves:
        return 0, 0, 0
    columns = min(SAVE_COLUMNS, triton.next_power_of_2(2 * width))
    return max(warps * 32 * values // columns, 1), columns, (2 * width + columns - 1) // columns


def num_tiles(num_tokens: int, save: tuple[int, int, int]) -> int:
    """Return the number of tiles for the states of ``num_tokens`` tokens."""
    tokens, _, parts = save
    return (num_tokens + tokens - 1) // tokens * parts if tokens else 0


def _quantized(layout: str, block_size: int) -> QuantizedLayout | None:
    if layout == MainLayout.tag:
        return MainLayout(block_size)
    return IndexerLayout(block_size) if layout == IndexerLayout.tag else None


def thread_layout(
    window: tuple[int, ...], channels: int, warps: int, max_depth: int
) -> tuple[tuple[int, ...], int]:
    """Return ``THREADS`` of a program that pools ``channels`` channels of a window, and the number
    of warps of the program."""
    state_block, ratio, _, num_rows, _ = window
    rows = triton.next_power_of_2(num_rows)
    warps = min(max(warps, channels // (32 * VALUES)), MAX_WARPS)
    values, groups = min(VALUES, channels), 1
    if rows > max_depth:
        groups = min(max(32 * warps * values // channels, 1), rows)
    elif channels < 32 * warps * values:
        values = max(channels // (32 * warps), 1)
    depth = min(rows // groups, max_depth)
    one_block = ratio % depth == 0 and state_block % depth == 0
    return (rows // (depth * groups), depth, groups, values, one_block), warps


def _long_programs(num_tokens: int) -> int:
    """Return the number of programs that scan for long windows, for each part of the channels."""
    extra = torch.sym_max(FEW_TOKENS - num_tokens, 0) // 128 * 2
    return scanning_programs(num_tokens, LONG_TOKENS, LONG_PROGRAMS + extra)


def scanning_programs(num_tokens: int, tokens: int, min_programs: int) -> int:
    """Return the number of programs that scan for windows, ``tokens`` tokens at a time.

    The number is odd unless every token has a program. In a prefill, tokens that complete windows
    are an even number of tokens apart, so an odd number of programs shares these tokens evenly."""
    odd = (num_tokens + tokens - 1) // tokens // 2 * 2 + 1
    return torch.sym_min(num_tokens, torch.sym_max(odd, min_programs))
