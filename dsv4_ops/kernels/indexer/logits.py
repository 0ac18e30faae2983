"""Kernels and launchers of the lightning indexer's queries and logits."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.registry import AUTO
from dsv4_ops.core.target import Target
from dsv4_ops.core.tiles import PROGRAMS
from dsv4_ops.core.torch_compat import statically_known_true
from dsv4_ops.kernels.arguments import angles, paged, strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.indexer.quantize_q import quantize_query_kernel  # Inductor needs functions
from dsv4_ops.kernels.indexer.score_tile import (
    load_codes,
    load_query,
    load_tile_pages,
    load_weights,
    score_codes,
    score_tile,
)
from dsv4_ops.kernels.launcher import Launcher

DIM = IndexerLayout.head_dim

QUANTIZED_HEADS = 16
"""Heads of a token per program that quantises."""

STEP = 128
"""Number of keys that are scored at a time: a multiple of 64, as the matrix unit needs."""

ROWS = 512
"""Logits of a token per program of the paged kernel. If keys are converted to bf16, a tile holds
half as many keys, and in a small call a program computes half as many logits."""

_FEW = 4 * PROGRAMS * ROWS

TOKENS = 8
"""Queries per program of the ragged kernel. A program scores the same keys with all its queries."""

STAGES = 4

WARPS = 4


def tile_sizes(num_heads: int, target: Target) -> dict[str, int]:
    """Return the padded number of heads, and the number of keys that are scored at a time. The
    second number is halved for bf16 keys, which need twice the registers of codes."""
    heads = max(16, triton.next_power_of_2(num_heads))
    step = STEP if target.converts_codes else STEP // 2
    return {"HEADS": heads, "STEP": min(step, max(64 * step // heads, 16))}


def indexer_quantize_q(
    launch: Launcher,
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    softmax_scale: float,
    rope_first: bool = False,
    interleaved: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads = q.shape[0], q.shape[1]
    codes = q.new_empty(q.shape, dtype=torch.uint8)
    scaled = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
    if num_tokens != 0 and num_heads != 0:
        tiles = (num_heads + QUANTIZED_HEADS - 1) // QUANTIZED_HEADS
        launch(quantize_query_kernel)[num_tokens * tiles,](
            *strided(q), num_heads, *strided(weights, positions), *angles(cos_sin_cache),
            codes, scaled,
            SOFTMAX_SCALE=float(softmax_scale),
            ROPE=(int(cos_sin_cache.shape[1]), rope_first, interleaved), DIM=DIM,
            HEADS=QUANTIZED_HEADS, CONVERTS=launch.converts_codes(q.device), num_warps=WARPS,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scaled


@triton.jit(do_not_specialize=SIZES)
def indexer_logits_kernel(
    q, token_stride, head_stride, dim_stride, num_heads,
    weights, weight_token_stride, weight_head_stride,
    k_cache, page_stride, num_blocks,
    lens, lens_stride,
    req_indices, request_stride,
    block_table, table_stride, column_stride, num_reqs, max_blocks,
    out, num_rows,
    BLOCK_SIZE: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    HEADS: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Score up to ROWS keys of a token through its request's row of the block table."""
    wait_for_previous_kernel()
    cache = (k_cache, page_stride, num_blocks)
    FORMAT: tl.constexpr = (BLOCK_SIZE, DATA_BYTES, SCALE_BYTES, CONVERTS)
    queries = (q, token_stride, head_stride, dim_stride, num_heads)
    head_weights = (weights, weight_token_stride, weight_head_stride)
    programs = (num_rows + ROWS - 1) // ROWS
    token = (tl.program_id(0) // programs).to(tl.int64)
    first = tl.program_id(0) % programs * ROWS
    request = tl.load(req_indices + token * request_stride).to(tl.int64)
    valid = (request >= 0) & (request < num_reqs)
    request = tl.where(valid, request, 0)
    length = tl.where(valid, tl.load(lens + token * lens_stride), 0)
    lane = tl.arange(0, STEP)
    target = out + token * num_rows
    if first < length:
        query = load_query(queries, token, HEADS, DATA_BYTES, CONVERTS)
        weight = load_weights(head_weights, token, num_heads, HEADS)
        table_rows = tl.cast(max_blocks, tl.int64) * BLOCK_SIZE
        stop = tl.minimum(tl.minimum(length, num_rows), table_rows).to(tl.int32)
        table_row = (block_table + request * table_stride, column_stride)
        pages = load_tile_pages(table_row, first, stop, BLOCK_SIZE, STEP, ROWS)
        for tile in tl.range(0, ROWS // STEP, num_stages=STAGES):
            score, kv_valid = score_tile(
                cache, table_row, pages, first, tile, stop, query, weight, FORMAT, STEP
            )
            row = first + tile * STEP + lane
            score = tl.where(kv_valid & (row < stop), score, float("-inf"))
            tl.store(target + row, score, mask=row < num_rows)
    else:
        row = first + tl.arange(0, ROWS)
        tl.store(target + row, float("-inf"), mask=row < num_rows)


def indexer_logits(
    launch: Launcher,
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    lens: torch.Tensor,
    req_indices: torch.Tensor,
    block_table: torch.Tensor,
    schedule: torch.Tensor | None = None,
    *,
    block_size: int,
    num_rows: int,
    layout: str,
    impl: str = AUTO,
) -> torch.Tensor:
    indexer = IndexerLayout(block_size)
    Checks("indexer_logits").page_start("k_cache", k_cache, indexer)
    num_tokens, num_heads = q.shape[0], q.shape[1]
    out = q.new_empty((num_tokens, num_rows), dtype=torch.float32)
    if num_tokens == 0 or num_rows == 0:
        return out
    target = launch.target(q.device)
    sizes = tile_sizes(int(num_heads), target)
    rows = ROWS
    if not target.converts_codes and statically_known_true(num_tokens * num_rows < _FEW):
        rows //= 2
    launch(indexer_logits_kernel)[num_tokens * ((num_rows + rows - 1) // rows),](
        *strided(q.view(torch.uint8)), num_heads,
        *strided(weights), *paged(k_cache), *strided(lens.reshape(-1), req_indices),
        *strided(block_table), block_table.shape[0], block_table.shape[1],
        out, num_rows,
        BLOCK_SIZE=block_size, DATA_BYTES=indexer.data_bytes, SCALE_BYTES=indexer.scale_bytes,
        ROWS=rows, STAGES=STAGES, CONVERTS=launch.converts_codes(q.device), num_warps=WARPS,
        **sizes,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=SIZES)
def indexer_logits_ragged_kernel(
    q, token_stride, head_stride, dim_stride, num_heads,
    weights, weight_token_stride, weight_head_stride,
    k, row_stride, byte_stride,
    scales, scale_stride,
    row_start, start_stride,
    row_stop, stop_stride,
    out, num_tokens, num_k,
    DIM: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Load a tile of keys once, and score it with the queries of TOKENS tokens."""
    wait_for_previous_kernel()
    queries = (q, token_stride, head_stride, dim_stride, num_heads)
    head_weights = (weights, weight_token_stride, weight_head_stride)
    tiles = (num_k + STEP - 1) // STEP
    first = tl.program_id(0) // tiles * TOKENS
    row = tl.program_id(0) % tiles * STEP + tl.arange(0, STEP)
    in_range = row < num_k
    tokens = tl.minimum(first + tl.arange(0, TOKENS), num_tokens - 1).to(tl.int64)
    min_start = tl.min(tl.load(row_start + tokens * start_stride))
    max_stop = tl.max(tl.load(row_stop + tokens * stop_stride))
    if (min_start < tl.max(row) + 1) & (max_stop > tl.min(row)):
        code_rows = k + row.to(tl.int64) * row_stride
        codes = load_codes(code_rows, byte_stride, in_range, DIM, CONVERTS)
        scale = tl.load(scales + row.to(tl.int64) * scale_stride, mask=in_range, other=0.0)
        for index in tl.range(0, TOKENS, num_stages=STAGES):
            token = tl.minimum(first + index, num_tokens - 1).to(tl.int64)
            start = tl.load(row_start + token * start_stride)
            stop = tl.load(row_stop + token * stop_stride)
            query = load_query(queries, token, HEADS, DIM, CONVERTS)
            weight = load_weights(head_weights, token, num_heads, HEADS)
            score = score_codes(codes, scale, query, weight, CONVERTS)
            score = tl.where((row >= start) & (row < stop), score, float("-inf"))
            tl.store(out + token * num_k + row, score, mask=in_range)
    else:
        offset = tokens[:, None] * num_k + row[None, :]
        tl.store(out + offset, float("-inf"), mask=in_range[None, :])


def indexer_logits_ragged(
    launch: Launcher,
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    scales: torch.Tensor,
    row_start: torch.Tensor,
    row_stop: torch.Tensor,
) -> torch.Tensor:
    num_tokens, num_heads, num_k = q.shape[0], q.shape[1], k.shape[0]
    out = q.new_empty((num_tokens, num_k), dtype=torch.float32)
    if num_tokens == 0 or num_k == 0:
        return out
    sizes = tile_sizes(int(num_heads), launch.target(q.device))
    step = sizes["STEP"]
    programs = ((num_tokens + TOKENS - 1) // TOKENS) * ((num_k + step - 1) // step)
    launch(indexer_logits_ragged_kernel)[programs,](
        *strided(q.view(torch.uint8)), num_heads,
        *strided(weights, k, scales, row_start, row_stop),
        out, num_tokens, num_k,
        DIM=DIM, TOKENS=TOKENS, STAGES=STAGES, CONVERTS=launch.converts_codes(q.device),
        num_warps=WARPS, **sizes,
    )  # fmt: skip
    return out
