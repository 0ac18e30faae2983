"""Hyper-connections in two kernels. The first kernel computes split-K products of the streams. The
second kernel computes the collapsed stream of each token, and the token's weights for the next
call."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.types import HyperConnection
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies no modules
    multiply_add,
    round_to_bf16,
    widen,
)
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

FEW_TOKENS = 16
FEW, MANY = (16, 16, 4), (32, 64, 4)
"""Columns of each stream, tokens, and warps of a program that computes products. FEW is for a small
batch (256 programs with V4 Flash), MANY for a large or symbolic batch. On GPUs without
``large_tiles``, the tiles of a large batch need twice as many warps."""

MANY_STREAMS = 4
"""With more streams than this, a program of a large batch has half as many tokens, and twice as
many warps on every GPU. Otherwise a thread would spill 0.5 to 4.5 KB of registers."""

PROGRAMS, STEPS = 256, (4, 8)
"""Minimum number of programs for a large batch; minimum and maximum number of column steps of a
program that takes several steps. A program adds its steps to one partial sum. A program takes one
step if the minimum number of steps would leave too few programs, or if several steps need too much
shared memory."""

STAGES = 2
"""Column steps that are in shared memory at a time if a program takes several steps: Triton's
three-stage pipeline holds two."""

END_WARPS = 8
"""Warps of a program that collapses a token's streams of up to 4096 columns; otherwise 16."""

PARTS = {False: 128, True: 32}
"""Number of partial sums that are added at a time. The key says whether programs take several
steps."""


@triton.jit(do_not_specialize=SIZES)
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
    """With MIXED, mix the streams. Multiply some columns of each stream by ``fn``, COLUMNS at a
    time. The column after the products holds the sum of squares.

    COUNT is the number of streams, WEIGHTS is the number of rows of ``fn``, and SUMS is one more
    than WEIGHTS, rounded up to a power of two, at least 16."""
    wait_for_previous_kernel()
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    weight = tl.arange(0, SUMS)
    acc = tl.zeros((TOKENS, SUMS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    token_valid = token < num_tokens
    src_token = tl.where(token_valid, token, 0).to(tl.int64)
    posts, mixes = (), ()
    if MIXED:
        for stream in tl.static_range(COUNT):
            src_post = post + src_token * post_token_stride + stream * post_stride
            posts += (tl.load(src_post, mask=token_valid, other=0.0)[:, None],)
            for other in tl.static_range(COUNT):
                src_mix = mix + src_token * mix_token_stride + other * mix_row_stride
                src_mix += stream * mix_stride
                mixes += (tl.load(src_mix, mask=token_valid, other=0.0)[:, None],)
    for step in range(STEPS):
        column = (tl.program_id(0) * STEPS + step) * COLUMNS + tl.arange(0, COLUMNS)
        column_valid, offset = column < WIDTH, column.to(tl.int64)
        mask = token_valid[:, None] & column_valid[None, :]
        rows = streams + src_token[:, None] * token_stride + offset[None, :] * width_stride
        fn_mask = (weight < WEIGHTS)[:, None] & column_valid[None, :]
        fn_columns = offset[None, :] * fn_column_stride
        fn_rows = fn + weight.to(tl.int64)[:, None] * fn_row_stride + fn_columns
        # all loads precede the first store, because the compiler moves no load across a store; with
        # a mix, load ``fn`` after the mix, because the mix needs the registers
        tiles, fn_tiles = (), ()
        for stream in tl.static_range(COUNT):
            tiles += (widen(tl.load(rows + stream * stream_stride, mask=mask, other=0.0)),)
            if not MIXED:
                src_fn = fn_rows + stream * WIDTH * fn_column_stride
                fn_tiles += (tl.load(src_fn, mask=fn_mask, other=0.0),)
        if MIXED:
            src_out = block_out + src_token[:, None] * out_token_stride
            src_out += offset[None, :] * out_width_stride
            output = widen(tl.load(src_out, mask=mask, other=0.0))
            mixed = ()
            for stream in tl.static_range(COUNT):
                values = tl.zeros((TOKENS, COLUMNS), tl.float32)
                for other in tl.static_range(COUNT):
                    values += mixes[stream * COUNT + other] * tiles[other]
                mixed += (round_to_bf16(posts[stream] * output + values),)
            for stream in tl.static_range(COUNT):
                src_fn = fn_rows + stream * WIDTH * fn_column_stride
                fn_tiles += (tl.load(src_fn, mask=fn_mask, other=0.0),)
            tiles = ()
            for stream in tl.static_range(COUNT):
                dst = written + ((src_token[:, None] * COUNT + stream) * WIDTH + offset[None, :])
                tl.store(dst, mixed[stream], mask=mask)
                tiles += (tl.where(mask, widen(mixed[stream]), 0.0),)
        step_squares = tl.zeros((TOKENS, COLUMNS), tl.float32)
        for stream in tl.static_range(COUNT):
            step_squares += tiles[stream] * tiles[stream]
        squares += tl.sum(step_squares, 1)
        for stream in tl.static_range(COUNT):
            values = round_to_bf16(tiles[stream])
            residual = tl.trans(fn_tiles[stream])
            for _ in tl.static_range(3):  # three bf16 parts of 8 bits represent ``fn`` exactly
                bits = residual.to(tl.int32, bitcast=True) >> 16
                part = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
                acc = multiply_add(values, part, acc)
                residual = tl.where(widen(part) == residual, 0.0, residual - widen(part))
    acc = tl.where(weight[None, :] == WEIGHTS, squares[:, None], acc)
    dst = partial + (tl.program_id(0).to(tl.int64) * num_tokens + token)[:, None] * SUMS
    tl.store(dst + weight[None, :], acc, mask=token_valid[:, None])


@triton.jit
def _square(weights, index, first, COUNT: tl.constexpr):
    """Return COUNT x COUNT entries of ``weights``, from ``first`` on, in the shape of ``index``."""
    row, column = index
    SUMS: tl.constexpr = weights.shape[0]
    entry = (first + row * COUNT + column)[:, :, None]
    is_entry = entry == tl.arange(0, SUMS)[None, None, :]
    return tl.sum(tl.where(is_entry, weights[None, None, :], 0.0), 2)


@triton.jit
def _sinkhorn(logits, index, COUNT: tl.constexpr, ITERATIONS: tl.constexpr, EPS: tl.constexpr):
    row, column = index
    mask = (row < COUNT) & (column < COUNT)
    logits = tl.where(column < COUNT, logits, -float("inf"))
    logits = tl.where(row < COUNT, logits, 0.0)
    exp_logits = tl.exp(logits - tl.max(logits, 1)[:, None])
    mix = tl.where(mask, exp_logits / tl.sum(exp_logits, 1)[:, None] + EPS, 0.0)
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
    """Return the logits of pre, post and mix: add a token's partial sums, then normalise, scale and
    shift the sums."""
    weight = tl.arange(0, SUMS)
    mask = weight < WEIGHTS
    kind = (weight >= COUNT).to(tl.int32) + (weight >= 2 * COUNT).to(tl.int32)
    factor = tl.load(scale + kind * scale_stride, mask=mask, other=0.0)
    bias = tl.load(base + weight * base_stride, mask=mask, other=0.0)
    acc = tl.zeros((SUMS,), tl.float32)
    for first in tl.static_range(0, NUM_PARTS, PARTS):
        part = first + tl.arange(0, PARTS)
        row = partial + (part.to(tl.int64) * num_tokens + token)[:, None] * SUMS
        acc += tl.sum(tl.load(row + weight[None, :], mask=(part < NUM_PARTS)[:, None], other=0), 0)
    squares = tl.sum(tl.where(weight == WEIGHTS, acc, 0.0))
    normed = tl.where(mask, acc, 0.0) * tl.rsqrt(squares / (COUNT * WIDTH) + NORM_EPS)
    return normed * factor + bias


@triton.jit(do_not_specialize=SIZES)
def stream_ends_kernel(
    streams, token_stride, stream_stride, width_stride,
    base, base_stride,
    scale, scale_stride,
    norm_weight, norm_stride,
    partial, post, mix, out, num_tokens,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, WEIGHTS: tl.constexpr, SUMS: tl.constexpr,
    NUM_PARTS: tl.constexpr, PARTS: tl.constexpr, ITERATIONS: tl.constexpr, EPS: tl.constexpr,
    NORM_EPS: tl.constexpr, BLOCK: tl.constexpr, SIDE: tl.constexpr,
    COLLAPSES: tl.constexpr, MIXES: tl.constexpr,
):  # fmt: skip
    """Finish one token. With COLLAPSES, a program collapses and normalises the streams. With MIXES,
    a program computes post and mix for the next call. With COLLAPSES and MIXES, a token has two
    programs, which take about equally long."""
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    weight = tl.arange(0, SUMS)
    if COLLAPSES and (not MIXES or tl.program_id(1) == 0):
        column = tl.arange(0, BLOCK)
        mask = column < WIDTH
        rows = streams + token * token_stride + column.to(tl.int64) * width_stride
        tiles = ()
        for stream in tl.static_range(COUNT):
            tiles += (tl.load(rows + stream * stream_stride, mask=mask, other=0.0),)
        norm = tl.load(norm_weight + column * norm_stride, mask=mask, other=0.0)
        weights = _weights(
            partial, token, num_tokens, base, base_stride, scale, scale_stride,
            WIDTH, COUNT, WEIGHTS, SUMS, NUM_PARTS, PARTS, NORM_EPS,
        )  # fmt: skip
        gates = 1 / (1 + tl.exp(-weights))
        values = tl.zeros((BLOCK,), tl.float32)
        for stream in tl.static_range(COUNT):
            pre = tl.sum(tl.where(weight == stream, gates, 0.0)) + EPS
            values += pre * widen(tiles[stream])
        values = tl.where(mask, widen(round_to_bf16(values)), 0.0)
        normed = values * tl.rsqrt(tl.sum(values * values) / WIDTH + NORM_EPS) * norm
        tl.store(out + token * WIDTH + column, round_to_bf16(normed), mask=mask)
    else:
        weights = _weights(
            partial, token, num_tokens, base, base_stride, scale, scale_stride,
            WIDTH, COUNT, WEIGHTS, SUMS, NUM_PARTS, PARTS, NORM_EPS,
        )  # fmt: skip
        gates = 1 / (1 + tl.exp(-weights))
        is_post = (weight >= COUNT) & (weight < 2 * COUNT)
        tl.store(post + token * COUNT + weight - COUNT, 2 * gates, mask=is_post)
        # not named ``column``, to which both branches would have to give the same shape
        row, entry = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
        logits = _square(weights, (row, entry), 2 * COUNT, COUNT)
        doubly_stochastic = _sinkhorn(logits, (row, entry), COUNT, ITERATIONS, EPS)
        offset = token * COUNT * COUNT + row * COUNT + entry
        tl.store(mix + offset, doubly_stochastic, mask=(row < COUNT) & (entry < COUNT))


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
    num_tokens, count, width = streams.shape[0], int(streams.shape[1]), int(streams.shape[2])
    weights, mixed = count * (count + 2), block_out is not None
    written = streams.new_empty((num_tokens if mixed else 0, count, width))
    floats = {"dtype": torch.float32}
    next_post = streams.new_empty((num_tokens, count), **floats)
    next_mix = streams.new_empty((num_tokens, count, count), **floats)
    out = streams.new_empty((num_tokens, width))
    results = HyperConnection(written, next_post, next_mix, out)
    if num_tokens == 0 or width == 0:
        return results
    sums = max(16, triton.next_power_of_2(weights + 1))
    is_static = isinstance(num_tokens, int)
    is_small = is_static and num_tokens <= FEW_TOKENS
    columns, tokens, warps = FEW if is_small else MANY
    has_many = count > MANY_STREAMS and not is_small
    tokens //= 1 + has_many
    target = launch.target(streams.device)
    if has_many or not (is_small or target.large_tiles):
        warps *= 2
    blocks, groups = triton.cdiv(width, columns), (num_tokens + tokens - 1) // tokens
    steps = 1  # a symbolic batch may be small
    if is_static and not is_small:
        min_steps, max_steps = STEPS
        steps = min(blocks * groups // PROGRAMS, max_steps)
        step_bytes = columns * (count + 1) * (4 * sums + 2 * tokens)
        steps = steps if steps >= min_steps and STAGES * step_bytes <= target.shared else 1
    parts = triton.cdiv(blocks, steps)
    partial = streams.new_empty((parts, num_tokens, sums), **floats)
    block = (streams, 0, 0, fn, 0, 0, fn, 0, 0, 0)
    if block_out is not None and post is not None and mix is not None:
        block = strided(block_out, post, mix)
    sizes = {"WIDTH": width, "COUNT": count, "WEIGHTS": weights, "SUMS": sums}
    launch(stream_products_kernel)[parts, groups](
        *strided(streams, fn), *block, written, partial, num_tokens,
        **sizes, MIXED=mixed, COLUMNS=columns, TOKENS=tokens, STEPS=steps,
        num_warps=warps,
    )  # fmt: skip
    width_block = triton.next_power_of_2(width)
    end_warps = 16 if width_block > 4096 else END_WARPS
    # for a large batch, a second launch of few warps computes post and mix, so that the programs
    # that collapse have the SMs to themselves
    two_launches = ((True, False, end_warps), (False, True, max(sums // 32, 1)))
    for collapses, mixes, warps in two_launches if steps > 1 else ((True, True, end_warps),):
        launch(stream_ends_kernel)[num_tokens, collapses + mixes](
            *strided(written if mixed else streams, base, scale, norm_weight),
            partial, next_post, next_mix, out, num_tokens,
            **sizes, NUM_PARTS=parts, PARTS=PARTS[steps > 1], ITERATIONS=iterations, EPS=eps,
            NORM_EPS=norm_eps, BLOCK=width_block, SIDE=triton.next_power_of_2(count),
            COLLAPSES=collapses, MIXES=mixes, num_warps=warps,
        )  # fmt: skip
    return results
