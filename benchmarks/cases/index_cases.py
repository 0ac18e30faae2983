"""Cases of the sparse index matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dsv4_ops
from benchmarks.harness.batches import rotating_sets
from benchmarks.harness.work import Case, Work
from dsv4_ops.core.layout import combined_width, mixed_width
from dsv4_ops.core.types import TopkIndices

_WINDOW = 128
_RATIO = 4
_CONTEXT = 8192  # tokens of a prefill request that are cached already
_PAGE = 64
_MIXED_TOPK = 512
_MAX_LEN = 65536


@functools.cache
def combine(topk: int, workspace_rows: int, swa_offset: int) -> Callable[..., TopkIndices]:
    """The op for one configuration."""

    def call(
        topk_indices: Tensor,
        positions: Tensor,
        req_indices: Tensor,
        seq_lens: Tensor,
        gather_lens: Tensor,
    ) -> TopkIndices:
        return dsv4_ops.combine_topk_swa_indices(
            topk_indices,
            positions,
            req_indices,
            seq_lens,
            gather_lens,
            window_size=_WINDOW,
            compress_ratio=_RATIO,
            topk=topk,
            workspace_rows=workspace_rows,
            swa_offset=swa_offset,
        )

    return call


def mixed(
    decode_swa: Tensor,
    decode_compressed: Tensor,
    decode_lens: Tensor,
    prefill_topk: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    swa_table: Tensor,
    compressed_table: Tensor,
) -> TopkIndices:
    return dsv4_ops.mixed_sparse_indices(
        decode_swa,
        decode_compressed,
        decode_lens,
        prefill_topk,
        positions,
        req_indices,
        swa_table,
        compressed_table,
        swa_block_size=_PAGE,
        compressed_block_size=_PAGE,
        window_size=_WINDOW,
        compress_ratio=_RATIO,
        topk=_MIXED_TOPK,
    )


def combine_cases(shapes: tuple[tuple[int, int, int], ...]) -> list[Case]:
    """Requests, tokens of each, topk: padding tokens and holes, then whole batches."""
    requests, tokens, topk = shapes[-1]
    edges = functools.partial(_combine_work, requests, tokens, topk, edges=True)
    cases = [Case("combine", "padding and holes", edges, rows=tokens, timed=False)]
    for requests, tokens, topk in shapes:
        build = functools.partial(_combine_work, requests, tokens, topk)
        total = requests * tokens
        cases.append(Case("combine", f"{total}x{topk}", build, rows=total, requests=requests))
    return cases


def _combine_work(
    requests: int, tokens: int, topk: int, device: torch.device, *, edges: bool = False
) -> Work:
    generator = torch.Generator(device).manual_seed(requests * topk)
    total, length = requests * tokens, _CONTEXT + tokens
    rows = length // _RATIO
    moved = total * (topk * 4 + 8 + 4) + total * 4 * (combined_width(topk, _WINDOW) + 1)

    def one_set() -> tuple[Any, ...]:
        selected = torch.randint(
            0, _CONTEXT // _RATIO, (total, topk),
            dtype=torch.int32, device=device, generator=generator,
        )  # fmt: skip
        token = torch.arange(total, device=device)
        positions, req_indices = _CONTEXT + token % tokens, (token // tokens).to(torch.int32)
        if edges:
            selected[::3, ::5] = -1
            selected[1::7, 1] = rows
            positions[::11], req_indices[::13] = -1, requests
        seq_lens = torch.full((requests,), length, dtype=torch.int32, device=device)
        gathered = torch.full_like(seq_lens, tokens + _WINDOW - 1)
        return selected, positions, req_indices, seq_lens, gathered

    workspace_rows = rows + _WINDOW + tokens
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * tokens

    def baseline(modules: Any) -> Callable[..., Any]:
        function = modules.cache.combine_topk_swa_indices
        return lambda selected, _positions, _requests, seq_lens, gathered: function(
            selected, starts, seq_lens, gathered, _WINDOW, _RATIO, topk, workspace_rows, rows
        )

    sets = [one_set() for _ in range(1 if edges else rotating_sets(moved, device))]
    return Work(combine(topk, workspace_rows, rows), sets, moved, baseline=baseline)


def mixed_cases(decode: int, prefill: int) -> list[Case]:
    """Decode tokens of as many requests, then prefill tokens of one more."""
    build = functools.partial(_mixed_work, decode, prefill)
    shape = f"{decode} decode + {prefill} prefill"
    edges = functools.partial(_mixed_work, decode, prefill, edges=True)
    return [
        Case("mixed", "padding and holes", edges, rows=decode + prefill, timed=False),
        Case("mixed", shape, build, rows=decode + prefill, requests=decode + 1),
    ]


def _mixed_work(decode: int, prefill: int, device: torch.device, *, edges: bool = False) -> Work:
    generator = torch.Generator(device).manual_seed(decode)
    total, requests = decode + prefill, decode + 1
    width = mixed_width(_WINDOW, _MIXED_TOPK, _MIXED_TOPK)
    moved = (
        decode * 4 * (_WINDOW + _MIXED_TOPK + 1)
        + prefill * 4 * _MIXED_TOPK
        + total * (8 + 4)
        + total * 4 * (width + 1)
    )

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, dtype=torch.int32, device=device, generator=generator)

    def one_set() -> tuple[Any, ...]:
        positions = torch.cat(
            [
                ints(_MAX_LEN, decode).long(),
                torch.arange(_CONTEXT, _CONTEXT + prefill, device=device),
            ]
        )
        req_indices = torch.arange(total, device=device).clamp(max=decode).to(torch.int32)
        decode_swa = ints(2**20, decode, _WINDOW)
        compressed = ints(2**20, decode, _MIXED_TOPK)
        lens = ints(_MIXED_TOPK + 1, decode)
        selected = ints(_CONTEXT // _RATIO, prefill, _MIXED_TOPK)
        if edges:
            decode_swa[::3, 5:] = -1
            selected[::3, ::5] = -1
            positions[::11], req_indices[::13] = -1, requests
        swa_table = ints(2**20, requests, _MAX_LEN // _PAGE)
        compressed_table = ints(2**20, requests, _MAX_LEN // _RATIO // _PAGE)
        vectors = (positions, req_indices)
        return decode_swa, compressed, lens, selected, *vectors, swa_table, compressed_table

    sets = [one_set() for _ in range(1 if edges else rotating_sets(moved, device))]
    return Work(mixed, sets, moved)
