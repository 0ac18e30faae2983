"""Sparse attention with the keys of a token cut into splits, for Hopper: ``split_keys.py`` in three
partitions of four warps, so that the gathers and the dequantisation of the next keys go on beside
the matrix products of these."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4_ops.kernels.hopper_attend import (
    HEADS,
    WIDTH,
    allocate,
    allocate_heads,
    attend_left,
    attend_right,
    load_half_queries,
)
from dsv4_ops.kernels.hopper_cut import cut_batch, cut_tokens
from dsv4_ops.kernels.hopper_finish import (
    ask_sinks,
    finish_left,
    finish_right,
    part_left,
    part_right,
)
from dsv4_ops.kernels.hopper_rows import KEYS, dequantise
from dsv4_ops.kernels.hopper_split_rows import count_blocks, find_rows, place_rows

_LOG2_E = gl.constexpr(1.4426950408889634)

ATTENDING, DEQUANTISING = gl.constexpr(160), gl.constexpr(152)
"""Registers of the partitions' threads; the one that has the logits gets the rest."""


@gluon.jit
def attend_and_finish_left(
    q,
    queries,
    keys,
    existing,
    weights,
    exchange,
    barriers,
    blocks,
    attn_sink,
    goals,
    splits,
    heads,
    SCALE: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    """The partition that has the logits, and writes the left half: of results where there is one
    split, else of a partial result."""
    if HAS_SINK:
        if splits == 1:
            ask_sinks(exchange[1].index(0), attn_sink, goals[0][3], heads)
            async_copy.commit_group()
    load_half_queries(queries.index(0), q, heads, 0, barriers[4])
    mbarrier.wait(barriers[4], 0)
    sums, largest, total = attend_left(
        blocks, SCALE, queries, keys, existing, weights, exchange[0], barriers
    )
    if splits == 1:
        finish_left(
            sums,
            largest,
            total,
            blocks,
            goals[0],
            heads,
            queries.index(0),
            exchange,
            barriers,
            HAS_SINK,
        )
    else:
        part_left(
            sums, largest, total, blocks, goals[1], heads, queries.index(0), exchange, barriers
        )


@gluon.jit
def attend_and_finish_right(
    q,
    queries,
    keys,
    weights,
    exchange,
    barriers,
    blocks,
    goals,
    rotation,
    splits,
    heads,
    TURNED: gl.constexpr,
):
    """The partition that writes the right half likewise."""
    cos_sin_cache, positions, num_positions = rotation
    load_half_queries(queries.index(0), q, heads, WIDTH, barriers[4])
    position = gl.to_tensor(0).to(gl.int64)
    if TURNED:
        position = gl.load(positions)  # before the keys, as the sinks
    sums = attend_right(blocks, keys, weights, exchange[0], barriers)
    if splits == 1:
        turn = (cos_sin_cache, position, num_positions)
        finish_right(
            sums, blocks, goals[0], turn, heads, queries.index(0), exchange, barriers, TURNED
        )
    else:
        part_right(sums, blocks, goals[1], heads, queries.index(0), exchange, barriers)


@gluon.jit
def _rows(place, blocks, keys, existing, barriers, SIZES: gl.constexpr):
    full, empty, _weighed, _taken, _asked = barriers
    dequantise(find_rows, place_rows, SIZES, place, blocks, keys, existing, full, empty)


@gluon.jit
def _tiles(length):
    """Blocks of so many keys, which may be the most that an int32 holds."""
    return length // KEYS + gl.where(length % KEYS > 0, 1, 0)


@gluon.jit
def hopper_split_keys_kernel(
    q,
    q_stride,
    q_head_stride,
    q_dim_stride,
    out,
    lse,
    partial,
    partial_lse,
    partial_peak,
    attn_sink,
    swa_cache,
    swa_page_stride,
    swa_blocks,
    swa_indices,
    swa_stride,
    swa_column_stride,
    swa_lens,
    swa_len_stride,
    swa_width,
    extra_cache,
    extra_page_stride,
    extra_blocks,
    extra_indices,
    extra_stride,
    extra_column_stride,
    extra_lens,
    extra_len_stride,
    extra_width,
    req_indices,
    req_stride,
    num_reqs,
    plan,
    plan_stride,
    plan_column_stride,
    positions,
    positions_stride,
    cos_sin_cache,
    num_positions,
    room,
    num_tokens,
    num_heads,
    splits,
    joins,
    by_lens,
    cut_programs,
    SOFTMAX_SCALE: gl.constexpr,
    SWA_BLOCK_SIZE: gl.constexpr,
    EXTRA_BLOCK_SIZE: gl.constexpr,
    HAS_EXTRA: gl.constexpr,
    PAGED: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_PLAN: gl.constexpr,
    CUTS: gl.constexpr,
    LANES: gl.constexpr,
    TURNED: gl.constexpr,
    ROW: gl.constexpr,
    SCALE_BYTES: gl.constexpr,
):
    """The arguments are those of ``split_keys_kernel``; ``q_dim_stride`` is 1, and splits are of
    whole blocks. LANES are no fewer than tokens that are cut by their lens. A program ends at once
    if its row of a plan is no piece."""
    if HAS_PLAN:
        piece = plan + gl.program_id(0).to(gl.int64) * plan_stride
        token = gl.load(piece).to(gl.int64)
        split = gl.load(piece + plan_column_stride)
        splits = gl.load(piece + 2 * plan_column_stride)
        first = gl.load(piece + 3 * plan_column_stride)
        fits = (splits == 1) | ((first >= 0) & (first <= room - splits))
        real = (token >= 0) & (token < num_tokens) & (split >= 0) & (split < splits) & fits
        if not real:
            return
        spot = first + split
    elif CUTS:
        splits = gl.to_tensor(splits)  # a number that is known is a constant
        if by_lens > 0:
            token, split, splits, first = cut_batch(
                (swa_lens, swa_len_stride),
                (extra_lens, extra_len_stride),
                (req_indices, req_stride),
                (swa_width, extra_width, num_reqs),
                num_tokens,
                cut_programs,
                joins,
                LANES,
            )
        else:
            token, split, splits, first = cut_tokens(splits, joins)
        if token >= num_tokens:
            return
        spot = gl.where(splits > 1, first + split, 0)
    else:
        token = (gl.program_id(0) // splits).to(gl.int64)
        split = gl.program_id(0) % splits
        spot = gl.program_id(0)
    swa_len = gl.load(swa_lens + token * swa_len_stride)
    swa_len = gl.minimum(gl.maximum(swa_len, 0), swa_width)
    extra_len = swa_len * 0
    request = token
    if HAS_EXTRA:
        extra_len = gl.load(extra_lens + token * extra_len_stride)
        extra_len = gl.minimum(gl.maximum(extra_len, 0), extra_width)
        if PAGED:
            request = gl.load(req_indices + token * req_stride).to(gl.int64)
            extra_len = gl.where((request >= 0) & (request < num_reqs), extra_len, 0)
            request = gl.where(extra_len > 0, request, 0)
    swa_tiles = _tiles(swa_len)
    tiles = (swa_tiles + _tiles(extra_len)).to(gl.int64)
    first_tile = (tiles * split // splits).to(gl.int32)
    stop = (tiles * (split + 1) // splits).to(gl.int32)
    blocks, window_blocks = count_blocks(first_tile, stop, swa_tiles)

    queries, keys, existing, weights, factors, barriers = allocate()
    peaks = allocate_heads(2)  # of a partial result, or sinks

    SIZES: gl.constexpr = (
        ROW,
        SCALE_BYTES,
        SWA_BLOCK_SIZE,
        EXTRA_BLOCK_SIZE,
        HAS_EXTRA,
        PAGED,
    )
    swa_slots = swa_indices + token * swa_stride
    swa = (swa_cache, swa_page_stride, swa_blocks, swa_slots, swa_column_stride, swa_len)
    extra_slots = extra_indices + (request if PAGED else token) * extra_stride
    extra = (
        extra_cache,
        extra_page_stride,
        extra_blocks,
        extra_slots,
        extra_column_stride,
        extra_len,
    )
    place = ((first_tile, stop, swa_tiles, window_blocks), swa, extra)
    exchange = (factors, peaks)
    first_head = gl.program_id(1) * HEADS
    row = token * num_heads
    part = spot.to(gl.int64) * num_heads
    heads = num_heads - first_head  # no more are read and written
    here = (q + token * q_stride + first_head.to(gl.int64) * q_head_stride, q_head_stride)
    left = (
        (out, lse, row, first_head),
        (partial, partial_lse, partial_peak, part, first_head),
    )
    right = ((out, row, first_head), (partial, part, first_head))
    rotation = (cos_sin_cache, positions + token * positions_stride, num_positions)
    SCALE: gl.constexpr = SOFTMAX_SCALE * _LOG2_E
    gl.warp_specialize(
        [
            (
                attend_and_finish_left,
                (
                    here,
                    queries,
                    keys,
                    existing,
                    weights,
                    exchange,
                    barriers,
                    blocks,
                    attn_sink,
                    left,
                    splits,
                    heads,
                    SCALE,
                    HAS_SINK,
                ),
            ),
            (
                attend_and_finish_right,
                (
                    here,
                    queries,
                    keys,
                    weights,
                    exchange,
                    barriers,
                    blocks,
                    right,
                    rotation,
                    splits,
                    heads,
                    TURNED,
                ),
            ),
            (_rows, (place, blocks, keys, existing, barriers, SIZES)),
        ],
        [4, 4],
        [ATTENDING, DEQUANTISING],
    )
