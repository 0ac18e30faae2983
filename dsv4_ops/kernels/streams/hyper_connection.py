"""Hyper-connections: products of a part of the hidden size each, and the ends of every token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.types import HyperConnection
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies kernels
    multiply_add,
    round_to_bf16,
    widen,
)
from dsv4_ops.kernels.launcher import Launcher

FEW_TOKENS = 16
FEW, MANY = (16, 16, 4), (32, 64, 4)
"""Columns of every stream, tokens and warps of a program that multiplies: of few tokens, which are
256 programs of Flash, and of more or a symbol."""

PROGRAMS, STEPS = 256, (4, 8)
"""Programs at least that multiply many tokens, and how often one goes on to the next columns, so
that it leaves one partial sum for all: where it would be fewer times, not at all."""

END_WARPS = 8
"""Of a program that ends a token, up to 4096 columns."""

PARTS = {False: 128, True: 32}
"""Partial sums that are added at a time, whether programs have gone on to other columns."""


@triton.jit
def stream_products_kernel(
    streams, token_stride, stream_stride, width_stride,
    fn, fn_row_stride, fn_column_stride,
    block_out, out_token_stride, out_width_stride,
    post, post_token_stride, post_stride,
    mix, mix_token_stride, mix_row_stride, mix_stride,
    written, partial,
    num_tokens,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, MIXED: tl.constexpr, WEIGHTS: tl.constexpr,
    SUMS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Mix the streams, and multiply some columns of all of them by ``fn``, in steps of ``COLUMNS``;
    in the column behind the products stands the sum of squares."""
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    weight = tl.arange(0, SUMS)
    sums = tl.zeros((TOKENS, SUMS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    given = token < num_tokens
    at = tl.where(given, token, 0).to(tl.int64)
    posts, mixes = (), ()
    if MIXED:
        for stream in tl.static_range(COUNT):
            of_post = post + at * post_token_stride + stream * post_stride
            posts += (tl.load(of_post, mask=given, other=0.0)[:, None],)
            for other in tl.static_range(COUNT):
                of_mix = mix + at * mix_token_stride + other * mix_row_stride + stream * mix_stride
                mixes += (tl.load(of_mix, mask=given, other=0.0)[:, None],)
    for step in range(STEPS):
        column = (tl.program_id(0) * STEPS + step) * COLUMNS + tl.arange(0, COLUMNS)
        inside, offset = column < WIDTH, column.to(tl.int64)
        both = given[:, None] & inside[None, :]
        rows = streams + at[:, None] * token_stride + offset[None, :] * width_stride
        of_weight = (weight < WEIGHTS)[:, None] & inside[None, :]
        of_column = offset[None, :] * fn_column_stride
        weights = fn + weight.to(tl.int64)[:, None] * fn_row_stride + of_column
        # every load stands in front of the first store, behind which the compiler leaves it, but
        # weights after the mix, which leaves no registers for them
        kept, tiles = (), ()
        for stream in tl.static_range(COUNT):
            kept += (widen(tl.load(rows + stream * stream_stride, mask=both, other=0.0)),)
            if not MIXED:
                of_stream = weights + stream * WIDTH * fn_column_stride
                tiles += (tl.load(of_stream, mask=of_weight, other=0.0),)
        if MIXED:
            target = block_out + at[:, None] * out_token_stride + offset[None, :] * out_width_stride
            output = widen(tl.load(target, mask=both, other=0.0))
            mixed = ()
            for stream in tl.static_range(COUNT):
                values = tl.zeros((TOKENS, COLUMNS), tl.float32)
                for other in tl.static_range(COUNT):
                    values += mixes[stream * COUNT + other] * kept[other]
                mixed += (round_to_bf16(posts[stream] * output + values),)
            for stream in tl.static_range(COUNT):
                of_stream = weights + stream * WIDTH * fn_column_stride
                tiles += (tl.load(of_stream, mask=of_weight, other=0.0),)
            kept = ()
            for stream in tl.static_range(COUNT):
                place = (at[:, None] * COUNT + stream) * WIDTH + offset[None, :]
                tl.store(written + place, mixed[stream], mask=both)
                kept += (tl.where(both, widen(mixed[stream]), 0.0),)
        of_step = tl.zeros((TOKENS, COLUMNS), tl.float32)
        for stream in tl.static_range(COUNT):
            of_step += kept[stream] * kept[stream]
        squares += tl.sum(of_step, 1)
        for stream in tl.static_range(COUNT):
            values = round_to_bf16(kept[stream])
            rest = tl.trans(tiles[stream])
            for _ in tl.static_range(3):  # parts of 8 bits: exact, as the streams are
                bits = rest.to(tl.int32, bitcast=True) >> 16
                part = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
                sums = multiply_add(values, part, sums)
                rest = tl.where(widen(part) == rest, 0.0, rest - widen(part))
    sums = tl.where(weight[None, :] == WEIGHTS, squares[:, None], sums)
    row = partial + (tl.program_id(0).to(tl.int64) * num_tokens + token)[:, None] * SUMS
    tl.store(row + weight[None, :], sums, mask=given[:, None])


@triton.jit
def _entries(weights, index, first, COUNT: tl.constexpr):
    """Entries ``first`` on of ``weights``, in the shape of a square of ``index``."""
    row, column = index
    SUMS: tl.constexpr = weights.shape[0]
    wanted = (first + row * COUNT + column)[:, :, None] == tl.arange(0, SUMS)[None, None, :]
    return tl.sum(tl.where(wanted, weights[None, None, :], 0.0), 2)


@triton.jit
def _sinkhorn(logits, index, COUNT: tl.constexpr, ITERATIONS: tl.constexpr, EPS: tl.constexpr):
    row, column = index
    inside = (row < COUNT) & (column < COUNT)
    logits = tl.where(column < COUNT, logits, -float("inf"))
    logits = tl.where(row < COUNT, logits, 0.0)
    shifted = tl.exp(logits - tl.max(logits, 1)[:, None])
    mix = tl.where(inside, shifted / tl.sum(shifted, 1)[:, None] + EPS, 0.0)
    mix = mix / (tl.sum(mix, 0)[None, :] + EPS)
    for _ in tl.range(1, ITERATIONS):
        mix = mix / (tl.sum(mix, 1)[:, None] + EPS)
        mix = mix / (tl.sum(mix, 0)[None, :] + EPS)
    return mix


@triton.jit
def _weights(
    partial, token, num_tokens, base, base_stride, scale, scale_stride,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, WEIGHTS: tl.constexpr, SUMS: tl.constexpr,
    NUM_PARTS: tl.constexpr, PARTS: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """A token's weights of pre, post and mix, from its partial sums."""
    weight = tl.arange(0, SUMS)
    known = weight < WEIGHTS
    kind = (weight >= COUNT).to(tl.int32) + (weight >= 2 * COUNT).to(tl.int32)
    factor = tl.load(scale + kind * scale_stride, mask=known, other=0.0)
    bias = tl.load(base + weight * base_stride, mask=known, other=0.0)
    sums = tl.zeros((SUMS,), tl.float32)
    for first in tl.static_range(0, NUM_PARTS, PARTS):
        part = first + tl.arange(0, PARTS)
        row = partial + (part.to(tl.int64) * num_tokens + token)[:, None] * SUMS
        sums += tl.sum(tl.load(row + weight[None, :], mask=(part < NUM_PARTS)[:, None], other=0), 0)
    squares = tl.sum(tl.where(weight == WEIGHTS, sums, 0.0))
    normed = tl.where(known, sums, 0.0) * tl.rsqrt(squares / (COUNT * WIDTH) + NORM_EPS)
    return normed * factor + bias


@triton.jit
def stream_ends_kernel(
    streams, token_stride, stream_stride, width_stride,
    base, base_stride,
    scale, scale_stride,
    norm_weight, norm_stride,
    partial, post, mix, out, num_tokens,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, WEIGHTS: tl.constexpr, SUMS: tl.constexpr,
    NUM_PARTS: tl.constexpr, PARTS: tl.constexpr, ITERATIONS: tl.constexpr, EPS: tl.constexpr,
    NORM_EPS: tl.constexpr, BLOCK: tl.constexpr, SIDE: tl.constexpr,
    COLLAPSES: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    """Of a token one program collapses and normalises the streams, and another makes the weights
    of the next call, whose iterations take about as long; a launch may have one of them alone."""
    token = tl.program_id(0).to(tl.int64)
    weight = tl.arange(0, SUMS)
    if COLLAPSES and (not WEIGHS or tl.program_id(1) == 0):
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        rows = streams + token * token_stride + column.to(tl.int64) * width_stride
        kept = ()
        for stream in tl.static_range(COUNT):
            kept += (tl.load(rows + stream * stream_stride, mask=inside, other=0.0),)
        of_norm = tl.load(norm_weight + column * norm_stride, mask=inside, other=0.0)
        weights = _weights(
            partial, token, num_tokens, base, base_stride, scale, scale_stride,
            WIDTH, COUNT, WEIGHTS, SUMS, NUM_PARTS, PARTS, NORM_EPS,
        )  # fmt: skip
        gates = 1 / (1 + tl.exp(-weights))
        values = tl.zeros((BLOCK,), tl.float32)
        for stream in tl.static_range(COUNT):
            pre = tl.sum(tl.where(weight == stream, gates, 0.0)) + EPS
            values += pre * widen(kept[stream])
        values = tl.where(inside, widen(round_to_bf16(values)), 0.0)
        normed = values * tl.rsqrt(tl.sum(values * values) / WIDTH + NORM_EPS) * of_norm
        tl.store(out + token * WIDTH + column, round_to_bf16(normed), mask=inside)
    else:
        weights = _weights(
            partial, token, num_tokens, base, base_stride, scale, scale_stride,
            WIDTH, COUNT, WEIGHTS, SUMS, NUM_PARTS, PARTS, NORM_EPS,
        )  # fmt: skip
        gates = 1 / (1 + tl.exp(-weights))
        is_post = (weight >= COUNT) & (weight < 2 * COUNT)
        tl.store(post + token * COUNT + weight - COUNT, 2 * gates, mask=is_post)
        row, entry = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
        logits = _entries(weights, (row, entry), 2 * COUNT, COUNT)
        found = _sinkhorn(logits, (row, entry), COUNT, ITERATIONS, EPS)
        place = token * COUNT * COUNT + row * COUNT + entry
        tl.store(mix + place, found, mask=(row < COUNT) & (entry < COUNT))


def hyper_connection(
    launch: Launcher,
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    block_out: Tensor | None = None,
    post: Tensor | None = None,
    mix: Tensor | None = None,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> HyperConnection:
    tokens, count, width = streams.shape[0], int(streams.shape[1]), int(streams.shape[2])
    weights, mixed = count * (count + 2), block_out is not None
    written = streams.new_empty((tokens if mixed else 0, count, width))
    floats = {"dtype": torch.float32}
    next_post = streams.new_empty((tokens, count), **floats)
    next_mix = streams.new_empty((tokens, count, count), **floats)
    out = streams.new_empty((tokens, width))
    found = HyperConnection(written, next_post, next_mix, out)
    if tokens == 0 or width == 0:
        return found
    sums = max(16, triton.next_power_of_2(weights + 1))
    few = isinstance(tokens, int) and tokens <= FEW_TOKENS
    columns, of_program, warps = FEW if few else MANY
    blocks, groups = triton.cdiv(width, columns), (tokens + of_program - 1) // of_program
    known = isinstance(tokens, int) and not few  # a step of a symbol of tokens may be of few
    steps = min(blocks * groups // PROGRAMS, STEPS[1]) if known else 1
    steps = steps if steps >= STEPS[0] else 1
    parts = triton.cdiv(blocks, steps)
    partial = streams.new_empty((parts, tokens, sums), **floats)
    block = (streams, 0, 0, fn, 0, 0, fn, 0, 0, 0)
    if block_out is not None and post is not None and mix is not None:
        block = strided(block_out, post, mix)
    sizes = {"WIDTH": width, "COUNT": count, "WEIGHTS": weights, "SUMS": sums}
    launch(stream_products_kernel)[parts, groups](
        *strided(streams, fn), *block, written, partial, tokens,
        **sizes, MIXED=mixed, COLUMNS=columns, TOKENS=of_program, STEPS=steps,
        num_warps=warps,
    )  # fmt: skip
    at_once = triton.next_power_of_2(width)
    end_warps = 16 if at_once > 4096 else END_WARPS
    # of many tokens the weights take a warp or few, not the places of programs that collapse
    apart = ((True, False, end_warps), (False, True, max(sums // 32, 1)))
    for collapses, weighs, warps in apart if steps > 1 else ((True, True, end_warps),):
        launch(stream_ends_kernel)[tokens, collapses + weighs](
            *strided(written if mixed else streams, base, scale, norm_weight),
            partial, next_post, next_mix, out, tokens,
            **sizes, NUM_PARTS=parts, PARTS=PARTS[steps > 1], ITERATIONS=iterations, EPS=eps,
            NORM_EPS=norm_eps, BLOCK=at_once, SIDE=triton.next_power_of_2(count),
            COLLAPSES=collapses, WEIGHS=weighs, num_warps=warps,
        )  # fmt: skip
    return found
