"""Normalise and rotate queries, rotate and insert keys, in one kernel."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.kernels.common.fp8 import round_to_bf16, widen  # by name: Inductor copies kernels
from dsv4_ops.kernels.common.paging import place_slots
from dsv4_ops.kernels.common.rope import rotate_pairs
from dsv4_ops.kernels.kv_cache.quantize_insert import insert_codes
from dsv4_ops.kernels.launcher import EMULATE, Launch

_NAN_BITS = tl.constexpr(0x7FC0)


@triton.jit
def _rotated_tail(
    source,
    dim_stride,
    given,
    factor,
    token,
    positions,
    position_stride,
    cos_sin_cache,
    table_stride,
    column_stride,
    num_positions,
    ROWS: tl.constexpr,
    CODE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """float32 [ROWS, ROPE_DIM]: the end of the rows at ``source`` that are ``given``, times
    ``factor``, rotated by the positions of ``token``, of which there may be one for all rows."""
    lane = tl.arange(0, ROPE_DIM)[None, :]
    tail = source[:, None] + (CODE_DIM + lane).to(tl.int64) * dim_stride
    values = widen(tl.load(tail, mask=given[:, None], other=0.0), EMULATE) * factor[:, None]
    position = tl.load(positions + token.to(tl.int64) * position_stride)
    known = (position >= 0) & (position < num_positions)
    angle = cos_sin_cache + tl.where(known, position, 0) * table_stride
    column = tl.arange(0, ROPE_DIM // 2)[None, :].to(tl.int64) * column_stride
    known = known[:, None]
    cos = tl.load(angle[:, None] + column, mask=known, other=1.0)
    sin = tl.load(angle[:, None] + column + ROPE_DIM // 2 * column_stride, mask=known, other=0.0)
    even, odd = tl.split(tl.reshape(values, (ROWS, ROPE_DIM // 2, 2)))
    first, second = rotate_pairs(even, odd, cos, sin, EMULATE)
    turned = tl.join(tl.where(known, first, even), tl.where(known, second, odd))
    return tl.reshape(turned, (ROWS, ROPE_DIM))


@triton.jit
def _normalise_heads(
    q,
    token_stride,
    head_stride,
    dim_stride,
    out,
    num_heads,
    positions,
    position_stride,
    cos_sin_cache,
    table_stride,
    column_stride,
    num_positions,
    token,
    first_head,
    EPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    head = first_head + tl.arange(0, HEADS)
    given = head < num_heads
    source = q + token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    target = out + (token.to(tl.int64) * num_heads + head) * HEAD_DIM
    dim = tl.arange(0, HEAD_DIM)[None, :]
    address = source[:, None] + dim.to(tl.int64) * dim_stride
    values = widen(tl.load(address, mask=given[:, None], other=0.0), EMULATE)
    factor = tl.rsqrt(tl.sum(values * values, axis=1) / HEAD_DIM + EPS)
    rotated = _rotated_tail(  # loaded again, from the first cache: few values, in their own layout
        source,
        dim_stride,
        given,
        factor,
        token + tl.zeros((1,), tl.int32),
        positions,
        position_stride,
        cos_sin_cache,
        table_stride,
        column_stride,
        num_positions,
        HEADS,
        CODE_DIM,
        HEAD_DIM - CODE_DIM,
        EMULATE,
    )
    normed = round_to_bf16(values * factor[:, None], EMULATE)
    tl.store(target[:, None] + dim, normed, mask=given[:, None] & (dim < CODE_DIM))
    lane = tl.arange(0, HEAD_DIM - CODE_DIM)[None, :]
    tail = target[:, None] + CODE_DIM + lane
    tl.store(tail, round_to_bf16(rotated, EMULATE), mask=given[:, None])


@triton.jit
def _insert_keys(
    kv,
    row_stride,
    dim_stride,
    k_cache,
    page_stride,
    cache_row_stride,
    num_blocks,
    slot_mapping,
    slot_stride,
    num_slots,
    positions,
    position_stride,
    cos_sin_cache,
    table_stride,
    column_stride,
    num_positions,
    token,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODE_DIM: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    KEYS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    given = token < num_slots
    slot = tl.load(slot_mapping + token.to(tl.int64) * slot_stride, mask=given, other=-1)
    page, row, exists = place_slots(slot, num_blocks, BLOCK_SIZE)
    source = kv + token.to(tl.int64) * row_stride
    start = k_cache + page * page_stride
    if SCALE_BYTES == 0:  # plain: words, which keep the payload of a NaN
        lane = tl.arange(0, HEAD_DIM)[None, :]
        stored = start.to(tl.pointer_type(tl.int16), bitcast=True) + row * cache_row_stride
        nope = source.to(tl.pointer_type(tl.int16), bitcast=True)[:, None]
        coded = lane < CODE_DIM
        words = tl.load(nope + lane.to(tl.int64) * dim_stride, mask=given[:, None] & coded, other=0)
        tl.store(stored[:, None] + lane, words, mask=exists[:, None] & coded)
        target = stored + CODE_DIM
    else:
        insert_codes(
            source,
            dim_stride,
            given,
            start,
            row,
            exists,
            BLOCK_SIZE,
            HEAD_DIM,
            CODE_DIM,
            QUANT_BLOCK,
            DATA_BYTES,
            SCALE_BYTES,
            False,
            EMULATE,
        )
        rope_bytes = start + row * DATA_BYTES + CODE_DIM
        target = rope_bytes.to(tl.pointer_type(tl.int16), bitcast=True)
    lane = tl.arange(0, HEAD_DIM - CODE_DIM)[None, :]
    rotated = _rotated_tail(
        source,
        dim_stride,
        given,
        tl.full((KEYS,), 1.0, tl.float32),
        tl.where(given, token, 0),
        positions,
        position_stride,
        cos_sin_cache,
        table_stride,
        column_stride,
        num_positions,
        KEYS,
        CODE_DIM,
        HEAD_DIM - CODE_DIM,
        EMULATE,
    )
    bits = round_to_bf16(rotated, EMULATE).to(tl.int16, bitcast=True)
    bits = tl.where(rotated != rotated, _NAN_BITS, bits).to(tl.int16)
    tl.store(target[:, None] + lane, bits, mask=exists[:, None])


@triton.jit
def normalise_and_insert(
    program,
    q,
    token_stride,
    head_stride,
    q_dim_stride,
    out,
    num_heads,
    kv,
    row_stride,
    kv_dim_stride,
    k_cache,
    page_stride,
    cache_row_stride,
    num_blocks,
    slot_mapping,
    slot_stride,
    num_slots,
    positions,
    position_stride,
    cos_sin_cache,
    table_stride,
    column_stride,
    num_positions,
    EPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODE_DIM: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """The keys come first: their loads depend on each other."""
    key_programs = (num_slots + KEYS - 1) // KEYS
    if program < key_programs:
        _insert_keys(
            kv,
            row_stride,
            kv_dim_stride,
            k_cache,
            page_stride,
            cache_row_stride,
            num_blocks,
            slot_mapping,
            slot_stride,
            num_slots,
            positions,
            position_stride,
            cos_sin_cache,
            table_stride,
            column_stride,
            num_positions,
            program * KEYS + tl.arange(0, KEYS),
            BLOCK_SIZE,
            HEAD_DIM,
            CODE_DIM,
            QUANT_BLOCK,
            DATA_BYTES,
            SCALE_BYTES,
            KEYS,
            EMULATE,
        )
    else:
        parts = (num_heads + HEADS - 1) // HEADS
        part = program - key_programs
        _normalise_heads(
            q,
            token_stride,
            head_stride,
            q_dim_stride,
            out,
            num_heads,
            positions,
            position_stride,
            cos_sin_cache,
            table_stride,
            column_stride,
            num_positions,
            part // parts,
            part % parts * HEADS,
            EPS,
            HEAD_DIM,
            CODE_DIM,
            HEADS,
            EMULATE,
        )


HEADS = 4
"""Heads of a token that a program normalises: 16 values per thread."""

KEYS = 4
"""Keys per program, as in the insert."""

WARPS = 4


@triton.jit
def qnorm_rope_kv_insert_kernel(
    q,
    token_stride,
    head_stride,
    q_dim_stride,
    out,
    num_heads,
    kv,
    row_stride,
    kv_dim_stride,
    k_cache,
    page_stride,
    cache_row_stride,
    num_blocks,
    slot_mapping,
    slot_stride,
    num_slots,
    positions,
    position_stride,
    cos_sin_cache,
    table_stride,
    column_stride,
    num_positions,
    EPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODE_DIM: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    normalise_and_insert(
        tl.program_id(0),
        q,
        token_stride,
        head_stride,
        q_dim_stride,
        out,
        num_heads,
        kv,
        row_stride,
        kv_dim_stride,
        k_cache,
        page_stride,
        cache_row_stride,
        num_blocks,
        slot_mapping,
        slot_stride,
        num_slots,
        positions,
        position_stride,
        cos_sin_cache,
        table_stride,
        column_stride,
        num_positions,
        EPS,
        BLOCK_SIZE,
        HEAD_DIM,
        CODE_DIM,
        QUANT_BLOCK,
        DATA_BYTES,
        SCALE_BYTES,
        HEADS,
        KEYS,
        EMULATE,
    )


def qnorm_rope_kv_insert(
    launch: Launch,
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
        q,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        out,
        num_heads,
        kv,
        kv.stride(0),
        kv.stride(1),
        k_cache,
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.shape[0],
        slot_mapping,
        slot_mapping.stride(0),
        num_slots,
        positions,
        positions.stride(0),
        cos_sin_cache,
        cos_sin_cache.stride(0),
        cos_sin_cache.stride(1),
        cos_sin_cache.shape[0],
        EPS=float(eps),
        BLOCK_SIZE=block_size,
        HEAD_DIM=main.head_dim,
        CODE_DIM=main.code_dim,
        QUANT_BLOCK=main.quant_block,
        DATA_BYTES=main.data_bytes,
        SCALE_BYTES=0 if plain else main.scale_bytes,
        HEADS=HEADS,
        KEYS=KEYS,
        EMULATE=EMULATE,
        num_warps=WARPS,
    )
    return out
