"""Normalise and rotate queries, and rotate and insert keys, in one kernel."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.kernels.arguments import angles, row_format, strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import round_to_bf16, widen  # by name: Inductor copies no modules
from dsv4_ops.kernels.common.paging import locate_slots
from dsv4_ops.kernels.common.quantize_insert import insert_codes
from dsv4_ops.kernels.common.rope import rotate_pairs
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

_NAN_BITS = tl.constexpr(0x7FC0)


@triton.jit
def _load_rotated_tail(
    src, dim_stride, mask, factor, token, positions, angles,
    CODE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
):  # fmt: skip
    """Load the last ROPE_DIM values of the rows at ``src`` as float32 [rows, ROPE_DIM], multiply
    them by ``factor``, and rotate them by the position of each row's token. ``token`` holds a token
    per row, or one token for all rows."""
    ROWS: tl.constexpr = src.shape[0]
    cos_sin_cache, table_stride, column_stride, num_positions = angles
    position_rows, position_stride = positions[0], positions[1]
    lane = tl.arange(0, ROPE_DIM)[None, :]
    tail = src[:, None] + (CODE_DIM + lane).to(tl.int64) * dim_stride
    values = widen(tl.load(tail, mask=mask[:, None], other=0.0)) * factor[:, None]
    position = tl.load(position_rows + token.to(tl.int64) * position_stride)
    in_table = (position >= 0) & (position < num_positions)
    angle = cos_sin_cache + tl.where(in_table, position, 0) * table_stride
    column = tl.arange(0, ROPE_DIM // 2)[None, :].to(tl.int64) * column_stride
    in_table = in_table[:, None]
    cos = tl.load(angle[:, None] + column, mask=in_table, other=1.0)
    sin = tl.load(angle[:, None] + column + ROPE_DIM // 2 * column_stride, mask=in_table, other=0.0)
    even, odd = tl.split(tl.reshape(values, (ROWS, ROPE_DIM // 2, 2)))
    first, second = rotate_pairs(even, odd, cos, sin)
    pairs = tl.join(tl.where(in_table, first, even), tl.where(in_table, second, odd))
    return tl.reshape(pairs, (ROWS, ROPE_DIM))


@triton.jit
def _normalise_heads(
    q, positions, angles, token, first_head,
    EPS: tl.constexpr, FORMAT: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate HEADS heads of a token."""
    HEAD_DIM: tl.constexpr = FORMAT[1]
    CODE_DIM: tl.constexpr = FORMAT[2]
    ROPE_DIM: tl.constexpr = HEAD_DIM - CODE_DIM
    q, token_stride, head_stride, dim_stride, out, num_heads = q
    head = first_head + tl.arange(0, HEADS)
    mask = head < num_heads
    src = q + token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    dst = out + (token.to(tl.int64) * num_heads + head) * HEAD_DIM
    dim = tl.arange(0, HEAD_DIM)[None, :]
    address = src[:, None] + dim.to(tl.int64) * dim_stride
    values = widen(tl.load(address, mask=mask[:, None], other=0.0))
    inverse_rms = tl.rsqrt(tl.sum(values * values, axis=1) / HEAD_DIM + EPS)
    tokens = token + tl.zeros((1,), tl.int32)
    # load the last values again, from the L1, in a layout for the rotation
    rotated = _load_rotated_tail(
        src, dim_stride, mask, inverse_rms, tokens, positions, angles, CODE_DIM, ROPE_DIM
    )
    normed = round_to_bf16(values * inverse_rms[:, None])
    tl.store(dst[:, None] + dim, normed, mask=mask[:, None] & (dim < CODE_DIM))
    lane = tl.arange(0, HEAD_DIM - CODE_DIM)[None, :]
    tail = dst[:, None] + CODE_DIM + lane
    tl.store(tail, round_to_bf16(rotated), mask=mask[:, None])


@triton.jit
def _insert_keys(
    kv, cache, slots, positions, angles, token,
    FORMAT: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Rotate the keys of KEYS tokens and insert them at their slots."""
    BLOCK_SIZE: tl.constexpr = FORMAT[0]
    HEAD_DIM: tl.constexpr = FORMAT[1]
    CODE_DIM: tl.constexpr = FORMAT[2]
    DATA_BYTES: tl.constexpr = FORMAT[4]
    SCALE_BYTES: tl.constexpr = FORMAT[5]
    kv, row_stride, dim_stride = kv
    k_cache, page_stride, num_blocks, cache_row_stride = cache
    slot_mapping, slot_stride, num_slots = slots
    mask = token < num_slots
    slot = tl.load(slot_mapping + token.to(tl.int64) * slot_stride, mask=mask, other=-1)
    page, row, slot_valid = locate_slots(slot, num_blocks, BLOCK_SIZE)
    src = kv + token.to(tl.int64) * row_stride
    block = k_cache + page * page_stride
    if SCALE_BYTES == 0:  # in a plain cache, copy words, to keep the payload of a NaN
        lane = tl.arange(0, HEAD_DIM)[None, :]
        dst = block.to(tl.pointer_type(tl.int16), bitcast=True) + row * cache_row_stride
        src_words = src.to(tl.pointer_type(tl.int16), bitcast=True)[:, None]
        is_code = lane < CODE_DIM
        words = tl.load(
            src_words + lane.to(tl.int64) * dim_stride, mask=mask[:, None] & is_code, other=0
        )
        tl.store(dst[:, None] + lane, words, mask=slot_valid[:, None] & is_code)
        dst += CODE_DIM
    else:
        insert_codes(src, dim_stride, mask, block, row, slot_valid, FORMAT)
        rope_bytes = block + row * DATA_BYTES + CODE_DIM
        dst = rope_bytes.to(tl.pointer_type(tl.int16), bitcast=True)
    lane = tl.arange(0, HEAD_DIM - CODE_DIM)[None, :]
    ones = tl.full((KEYS,), 1.0, tl.float32)
    src_token = tl.where(mask, token, 0)
    ROPE_DIM: tl.constexpr = HEAD_DIM - CODE_DIM
    rotated = _load_rotated_tail(
        src, dim_stride, mask, ones, src_token, positions, angles, CODE_DIM, ROPE_DIM
    )
    bits = round_to_bf16(rotated).to(tl.int16, bitcast=True)
    bits = tl.where(rotated != rotated, _NAN_BITS, bits).to(tl.int16)
    tl.store(dst[:, None] + lane, bits, mask=slot_valid[:, None])


@triton.jit
def normalise_and_insert(
    program, q, kv, cache, slots, positions, angles,
    EPS: tl.constexpr, FORMAT: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate queries, or rotate and insert keys. Keys come first, because their loads
    depend on each other and so take longer.

    Args:
        program: Index of a tile: first the tiles of keys, then the tiles of heads of each token.
        q: Queries, the strides of tokens, heads and values, the result, and the number of heads.
        kv: Keys and the strides of rows and values.
        cache, slots, angles, FORMAT: See ``kernels.common``.
        positions: A tuple that begins with positions and their stride; the rest is not read.
        EPS: Epsilon of the norm.
        HEADS, KEYS: Heads and keys per tile.
    """
    num_slots, num_heads = slots[2], q[5]
    key_programs = (num_slots + KEYS - 1) // KEYS
    if program < key_programs:
        tokens = program * KEYS + tl.arange(0, KEYS)
        _insert_keys(kv, cache, slots, positions, angles, tokens, FORMAT, KEYS)
    else:
        head_tiles = (num_heads + HEADS - 1) // HEADS
        tile = program - key_programs
        token, first_head = tile // head_tiles, tile % head_tiles * HEADS
        _normalise_heads(q, positions, angles, token, first_head, EPS, FORMAT, HEADS)


HEADS = 4
"""Heads per program, all of one token. A thread then has 16 values."""

KEYS = 4
"""Keys per program, as in the kernel that only inserts."""

WARPS = 4


@triton.jit(do_not_specialize=SIZES)
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
    wait_for_previous_kernel()
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
    row = row_format(launch, main, k_cache)
    programs = num_tokens * ((num_heads + HEADS - 1) // HEADS) + (num_slots + KEYS - 1) // KEYS
    if num_tokens == 0:
        return out
    launch(qnorm_rope_kv_insert_kernel)[programs,](
        *strided(q), out, num_heads, *strided(kv),
        k_cache, k_cache.stride(0), k_cache.stride(1), k_cache.shape[0],
        *strided(slot_mapping), num_slots, *strided(positions), *angles(cos_sin_cache),
        EPS=float(eps), FORMAT=(*row[:5], 0, False, False) if plain else row,
        HEADS=HEADS, KEYS=KEYS, num_warps=WARPS,
    )  # fmt: skip
    return out
