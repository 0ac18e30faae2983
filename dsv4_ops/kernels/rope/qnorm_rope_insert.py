"""Normalise and rotate queries, rotate and insert keys, in one kernel."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.kernels.arguments import angles, strided
from dsv4_ops.kernels.common.fp8 import round_to_bf16, widen  # by name: Inductor copies kernels
from dsv4_ops.kernels.common.paging import place_slots
from dsv4_ops.kernels.common.rope import rotate_pairs
from dsv4_ops.kernels.kv_cache.quantize_insert import insert_codes
from dsv4_ops.kernels.launcher import Launcher

_NAN_BITS = tl.constexpr(0x7FC0)


@triton.jit
def _rotated_tail(
    source, dim_stride, given, factor, token, positions, angles,
    CODE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
):  # fmt: skip
    """float32 [rows, ROPE_DIM]: the end of the rows at ``source`` that are ``given``, times
    ``factor``, rotated by the positions of ``token``, of which there may be one for all rows."""
    ROWS: tl.constexpr = source.shape[0]
    cos_sin_cache, table_stride, column_stride, num_positions = angles
    lane = tl.arange(0, ROPE_DIM)[None, :]
    tail = source[:, None] + (CODE_DIM + lane).to(tl.int64) * dim_stride
    values = widen(tl.load(tail, mask=given[:, None], other=0.0)) * factor[:, None]
    position = tl.load(positions[0] + token.to(tl.int64) * positions[1])
    known = (position >= 0) & (position < num_positions)
    angle = cos_sin_cache + tl.where(known, position, 0) * table_stride
    column = tl.arange(0, ROPE_DIM // 2)[None, :].to(tl.int64) * column_stride
    known = known[:, None]
    cos = tl.load(angle[:, None] + column, mask=known, other=1.0)
    sin = tl.load(angle[:, None] + column + ROPE_DIM // 2 * column_stride, mask=known, other=0.0)
    even, odd = tl.split(tl.reshape(values, (ROWS, ROPE_DIM // 2, 2)))
    first, second = rotate_pairs(even, odd, cos, sin)
    pairs = tl.join(tl.where(known, first, even), tl.where(known, second, odd))
    return tl.reshape(pairs, (ROWS, ROPE_DIM))


@triton.jit
def _normalise_heads(
    q, positions, angles, token, first_head,
    EPS: tl.constexpr, FORMAT: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    HEAD_DIM: tl.constexpr = FORMAT[1]
    CODE_DIM: tl.constexpr = FORMAT[2]
    ROPE_DIM: tl.constexpr = HEAD_DIM - CODE_DIM
    q, token_stride, head_stride, dim_stride, out, num_heads = q
    head = first_head + tl.arange(0, HEADS)
    given = head < num_heads
    source = q + token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    target = out + (token.to(tl.int64) * num_heads + head) * HEAD_DIM
    dim = tl.arange(0, HEAD_DIM)[None, :]
    address = source[:, None] + dim.to(tl.int64) * dim_stride
    values = widen(tl.load(address, mask=given[:, None], other=0.0))
    factor = tl.rsqrt(tl.sum(values * values, axis=1) / HEAD_DIM + EPS)
    every = token + tl.zeros((1,), tl.int32)
    # loaded again, from the first cache: few values, in their own layout
    rotated = _rotated_tail(
        source, dim_stride, given, factor, every, positions, angles, CODE_DIM, ROPE_DIM
    )
    normed = round_to_bf16(values * factor[:, None])
    tl.store(target[:, None] + dim, normed, mask=given[:, None] & (dim < CODE_DIM))
    lane = tl.arange(0, HEAD_DIM - CODE_DIM)[None, :]
    tail = target[:, None] + CODE_DIM + lane
    tl.store(tail, round_to_bf16(rotated), mask=given[:, None])


@triton.jit
def _insert_keys(
    kv, cache, slots, positions, angles, token,
    FORMAT: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    HEAD_DIM: tl.constexpr = FORMAT[1]
    CODE_DIM: tl.constexpr = FORMAT[2]
    DATA_BYTES: tl.constexpr = FORMAT[4]
    kv, row_stride, dim_stride = kv
    k_cache, page_stride, num_blocks, cache_row_stride = cache
    slot_mapping, slot_stride, num_slots = slots
    given = token < num_slots
    slot = tl.load(slot_mapping + token.to(tl.int64) * slot_stride, mask=given, other=-1)
    page, row, exists = place_slots(slot, num_blocks, FORMAT[0])
    source = kv + token.to(tl.int64) * row_stride
    start = k_cache + page * page_stride
    if FORMAT[5] == 0:  # plain: words, which keep the payload of a NaN
        lane = tl.arange(0, HEAD_DIM)[None, :]
        stored = start.to(tl.pointer_type(tl.int16), bitcast=True) + row * cache_row_stride
        nope = source.to(tl.pointer_type(tl.int16), bitcast=True)[:, None]
        coded = lane < CODE_DIM
        words = tl.load(nope + lane.to(tl.int64) * dim_stride, mask=given[:, None] & coded, other=0)
        tl.store(stored[:, None] + lane, words, mask=exists[:, None] & coded)
        target = stored + CODE_DIM
    else:
        insert_codes(source, dim_stride, given, start, row, exists, FORMAT)
        rope_bytes = start + row * DATA_BYTES + CODE_DIM
        target = rope_bytes.to(tl.pointer_type(tl.int16), bitcast=True)
    lane = tl.arange(0, HEAD_DIM - CODE_DIM)[None, :]
    factor = tl.full((KEYS,), 1.0, tl.float32)
    known = tl.where(given, token, 0)
    ROPE_DIM: tl.constexpr = HEAD_DIM - CODE_DIM
    rotated = _rotated_tail(
        source, dim_stride, given, factor, known, positions, angles, CODE_DIM, ROPE_DIM
    )
    bits = round_to_bf16(rotated).to(tl.int16, bitcast=True)
    bits = tl.where(rotated != rotated, _NAN_BITS, bits).to(tl.int16)
    tl.store(target[:, None] + lane, bits, mask=exists[:, None])


@triton.jit
def normalise_and_insert(
    program, q, kv, cache, slots, positions, angles,
    EPS: tl.constexpr, FORMAT: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The keys come first: their loads depend on each other.

    Args:
        program: Which tile of keys, or of the heads of a token.
        q: Queries, the strides of tokens, heads and values, the result, and the number of heads.
        kv: Keys and the strides of rows and values.
        cache, slots, angles, FORMAT: See ``kernels.common``.
        positions: Positions and their stride.
        EPS: Of the norm.
        HEADS, KEYS: Of a tile.
    """
    num_slots, num_heads = slots[2], q[5]
    key_programs = (num_slots + KEYS - 1) // KEYS
    if program < key_programs:
        tokens = program * KEYS + tl.arange(0, KEYS)
        _insert_keys(kv, cache, slots, positions, angles, tokens, FORMAT, KEYS)
    else:
        parts = (num_heads + HEADS - 1) // HEADS
        part = program - key_programs
        token, first = part // parts, part % parts * HEADS
        _normalise_heads(q, positions, angles, token, first, EPS, FORMAT, HEADS)


HEADS = 4
"""Heads of a token that a program normalises: 16 values per thread."""

KEYS = 4
"""Keys per program, as in the insert."""

WARPS = 4


@triton.jit
def qnorm_rope_kv_insert_kernel(
    q, token_stride, head_stride, q_dim_stride,
    out, num_heads,
    kv, row_stride, kv_dim_stride,
    k_cache, page_stride, cache_row_stride, num_blocks,
    slot_mapping, slot_stride, num_slots,
    positions, position_stride,
    cos_sin_cache, table_stride, column_stride, num_positions,
    EPS: tl.constexpr, FORMAT: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    normalise_and_insert(
        tl.program_id(0), (q, token_stride, head_stride, q_dim_stride, out, num_heads),
        (kv, row_stride, kv_dim_stride), (k_cache, page_stride, num_blocks, cache_row_stride),
        (slot_mapping, slot_stride, num_slots), (positions, position_stride),
        (cos_sin_cache, table_stride, column_stride, num_positions),
        EPS, FORMAT, HEADS, KEYS,
    )  # fmt: skip


def qnorm_rope_kv_insert(
    launch: Launcher,
    q: torch.Tensor,
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    eps: float,
    block_size: int,
    layout: str,
) -> torch.Tensor:
    main = MainLayout(block_size)
    plain = layout != main.tag
    if not plain:
        Checks("qnorm_rope_kv_insert").page_start("k_cache", k_cache, main)
    num_tokens, num_heads, num_slots = q.shape[0], q.shape[1], slot_mapping.shape[0]
    out = q.new_empty((num_tokens, num_heads, main.head_dim))
    programs = num_tokens * ((num_heads + HEADS - 1) // HEADS) + (num_slots + KEYS - 1) // KEYS
    if num_tokens == 0:
        return out
    launch(qnorm_rope_kv_insert_kernel)[programs,](
        *strided(q), out, num_heads, *strided(kv),
        k_cache, k_cache.stride(0), k_cache.stride(1), k_cache.shape[0],
        *strided(slot_mapping), num_slots, *strided(positions), *angles(cos_sin_cache),
        EPS=float(eps), FORMAT=(*main.format[:5], 0, False) if plain else main.format,
        HEADS=HEADS, KEYS=KEYS, num_warps=WARPS,
    )  # fmt: skip
    return out
