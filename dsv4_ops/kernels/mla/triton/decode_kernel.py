"""MLA in Triton: a token, or a group of tokens of one request, attends to one split of its
keys."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.attention.mainloop import (
    log2_sum,
    scale_of_partial,
    softmax_step,
    store_heads,
    unfused,
)
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies no modules
    convert_once,
    decode,
    decode_to_bf16,
    multiply_add,
    round_to,
    round_to_bf16,
    widen,
)
from dsv4_ops.kernels.common.sizes import SIZES

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _codes_to_float(codes, CONVERTS: tl.constexpr):
    """Return the float32 values of e4m3 codes."""
    if CONVERTS:
        # through float16: a direct conversion to bf16 would use a slow unit, one value at a time
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        return decode(codes, CONVERTS)


@triton.jit
def _load_codes(row, dim, mask, DTYPE: tl.constexpr, CONVERTS: tl.constexpr):
    """Load codes [keys, dims] as values of DTYPE; do not multiply them by a scale."""
    codes = tl.load(row[:, None] + dim[None, :], mask=mask, other=0)
    if CONVERTS:
        return round_to(_codes_to_float(codes, CONVERTS), DTYPE)
    else:
        return convert_once(round_to(widen(decode_to_bf16(codes)), DTYPE), True)


@triton.jit
def _load_scaled_codes(row, kv_valid, LORA: tl.constexpr, CONVERTS: tl.constexpr):
    """Load latents as bf16 [keys, LORA]. After its codes, a row has one scale per 128 codes."""
    GROUP: tl.constexpr = 128
    dim = tl.arange(0, LORA)
    codes = tl.load(row[:, None] + dim[None, :], mask=kv_valid[:, None], other=0)
    group = tl.arange(0, LORA // GROUP)
    start = (row + LORA).to(tl.pointer_type(tl.float32), bitcast=True)
    scale = tl.load(start[:, None] + group[None, :], mask=kv_valid[:, None], other=0.0)
    values = _codes_to_float(codes, CONVERTS)
    scaled = tl.reshape(values, (codes.shape[0], LORA // GROUP, GROUP)) * scale[:, :, None]
    latent = round_to_bf16(tl.reshape(scaled, (codes.shape[0], LORA)))
    return convert_once(latent, not CONVERTS)


@triton.jit
def _load_rows(row, kv_valid, SIZES: tl.constexpr, DTYPE: tl.constexpr):
    """Load latents and RoPE columns of rows; rows that do not exist are zeros."""
    FORMAT: tl.constexpr = SIZES[0]
    LORA: tl.constexpr = SIZES[1]
    ROPE: tl.constexpr = SIZES[2]
    ROPE_TILE: tl.constexpr = SIZES[3]
    CONVERTS: tl.constexpr = SIZES[4]
    dim, rope_dim = tl.arange(0, LORA), tl.arange(0, ROPE_TILE)
    mask = kv_valid[:, None] & (rope_dim < ROPE)[None, :]
    if FORMAT == 0:
        latent = tl.load(row[:, None] + dim[None, :], mask=kv_valid[:, None], other=0.0)
        rope = tl.load(row[:, None] + (LORA + rope_dim)[None, :], mask=mask, other=0.0)
    elif FORMAT == 1:
        latent = _load_codes(row, dim, kv_valid[:, None], DTYPE, CONVERTS)
        rope = _load_codes(row, LORA + rope_dim, mask, DTYPE, CONVERTS)
    else:
        latent = _load_scaled_codes(row, kv_valid, LORA, CONVERTS)
        start = (row + (LORA + LORA // 32)).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        rope = tl.load(start[:, None] + rope_dim[None, :], mask=mask, other=0.0)
    return latent, rope


@triton.jit(do_not_specialize=SIZES)
def mla_decode_kernel(
    q, q_stride, q_head_stride, q_dim_stride,
    out, lse, partial, partial_lse, partial_scale,
    kv_cache, page_stride, num_blocks,
    seq_lens, len_stride,
    req_indices, req_stride,
    block_table, table_stride, column_stride, max_blocks, num_reqs,
    query_start_loc, start_stride,
    q_scale, kv_scale,
    plan, plan_stride, plan_column_stride,
    capacity, num_tokens, num_heads, splits,
    SOFTMAX_SCALE: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, LORA: tl.constexpr,
    ROPE: tl.constexpr, ROPE_TILE: tl.constexpr, ROW: tl.constexpr, HAS_PLAN: tl.constexpr,
    HAS_Q_SCALE: tl.constexpr, HAS_KV_SCALE: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SLOTS: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Compute the attention of a group of tokens over one split of the keys, for ROWS rows of
    queries.

    A group is one token, or up to GROUP tokens of a request, which read the keys together. The
    query rows of a group are the heads of its tokens. The TILES tiles of rows of a split run at the
    same time, so that all but one of them read the keys from the L2.

    A new group begins after every GROUP tokens, counted from ``query_start_loc``, and after a token
    of another request. The program of the group's first token computes the group; the programs of
    the other tokens return early. With one split, a program writes the result. With several splits,
    a program writes the normalised accumulator, divided by ``partial_scale``, to ``partial``.
    FORMAT is 0 for rows of values, 1 for rows of codes, and 2 for rows of codes, scales and RoPE
    values. With SLOTS, ``block_table`` lists the slots of each token instead of the blocks of a
    request.
    """
    wait_for_previous_kernel()
    program, head_tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    if HAS_PLAN:
        tile = plan + program.to(tl.int64) * plan_stride
        token = tl.load(tile).to(tl.int64)
        split = tl.load(tile + plan_column_stride)
        splits = tl.load(tile + 2 * plan_column_stride)
        first = tl.load(tile + 3 * plan_column_stride)
        partials_fit = (splits == 1) | ((first >= 0) & (first <= capacity - splits))
        valid = (token >= 0) & (token < num_tokens) & (split >= 0) & (split < splits) & partials_fit
        if not valid:
            return
    else:
        token = (program // splits).to(tl.int64)
        split = program % splits
        first = token * splits
    COLUMN_KEYS: tl.constexpr = 1 if SLOTS else BLOCK_SIZE
    request = token
    if not SLOTS:
        request = tl.load(req_indices + token * req_stride).to(tl.int64)
    request_valid = (request >= 0) & (request < num_reqs)
    group_tokens = 1
    if GROUP > 1:
        start = tl.load(query_start_loc + request * start_stride, mask=request_valid, other=-1)
        start_valid = request_valid & (start >= 0) & (start <= token)
        group_offset = tl.where(start_valid, (token - start) % GROUP, 0)
        previous_request = tl.load(
            req_indices + (token - 1) * req_stride, mask=group_offset > 0, other=-1
        )
        if start_valid & (previous_request == request):
            return
        lane = tl.arange(0, LANES)
        group_requests = tl.load(
            req_indices + (token + lane) * req_stride,
            mask=start_valid & (lane < GROUP - group_offset) & (token + lane < num_tokens),
            other=-1,
        )
        first_other = tl.where((group_requests == request) & start_valid, LANES, lane)
        group_tokens = tl.maximum(tl.min(first_other, 0), 1)

    row = head_tile * ROWS + tl.arange(0, ROWS)
    row_valid = row < group_tokens * num_heads
    member, head = row * 0, row
    if GROUP > 1:
        member, head = row // num_heads, row % num_heads
    row_token = token + member
    lengths = tl.load(seq_lens + row_token * len_stride, mask=row_valid & request_valid, other=0)
    lengths = tl.minimum(tl.maximum(lengths, 0), max_blocks * COLUMN_KEYS)
    stop = tl.max(lengths, 0)
    min_length = tl.min(tl.where(row_valid, lengths, stop), 0)
    tiles = ((stop + KEYS - 1) // KEYS).to(tl.int64)
    tile = (tiles * split // splits).to(tl.int32)
    stop_tile = (tiles * (split + 1) // splits).to(tl.int32)

    DTYPE: tl.constexpr = q.dtype.element_ty
    SIZES: tl.constexpr = (FORMAT, LORA, ROPE, ROPE_TILE, CONVERTS)
    q_rows = q + row_token * q_stride + head.to(tl.int64) * q_head_stride
    dim = tl.arange(0, LORA).to(tl.int64)
    rope_dim = tl.arange(0, ROPE_TILE).to(tl.int64)
    latent_q = tl.load(
        q_rows[:, None] + dim[None, :] * q_dim_stride, mask=row_valid[:, None], other=0.0
    )
    rope_q = tl.load(
        q_rows[:, None] + (LORA + rope_dim)[None, :] * q_dim_stride,
        mask=row_valid[:, None] & (rope_dim < ROPE)[None, :],
        other=0.0,
    )
    scale = tl.full((), SOFTMAX_SCALE * _LOG2_E, tl.float32)
    value_scale = tl.full((), 1.0, tl.float32)
    if HAS_Q_SCALE:
        scale *= tl.load(q_scale)
    if HAS_KV_SCALE:
        value_scale = tl.load(kv_scale)
        scale *= value_scale
    acc = tl.zeros((ROWS, LORA), dtype=tl.float32)
    row_max = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((ROWS,), dtype=tl.float32)
    entries = block_table + tl.where(request_valid, request, 0) * table_stride
    while tile < stop_tile:
        position = tile * KEYS + tl.arange(0, KEYS)
        column = (position // COLUMN_KEYS).to(tl.int64)
        page = tl.load(entries + column * column_stride, mask=position < stop, other=-1)
        page_row = position % BLOCK_SIZE
        kv_valid = page >= 0
        if SLOTS:
            page_row, page = page % BLOCK_SIZE, page // BLOCK_SIZE
        kv_valid &= page < num_blocks
        page = tl.where(kv_valid, page, 0).to(tl.int64)
        kv_rows = kv_cache + page * page_stride + page_row * ROW
        latent, rope = _load_rows(kv_rows, kv_valid, SIZES, DTYPE)
        bad_rows = tl.zeros((KEYS,), dtype=tl.int32)
        if GROUP > 1:
            if (tile + 1) * KEYS > min_length:
                # P is 0 for tokens that do not see a row, and 0 times NaN or infinity is NaN, so
                # clear such values; tokens that see the row get NaN through the logits
                is_finite = tl.abs(latent.to(tl.float32)) < float("inf")
                bad_rows = tl.max(tl.where(is_finite, 0, 1), axis=1)
                latent = tl.where(is_finite, latent, 0.0)
        logits = tl.zeros((ROWS, KEYS), dtype=tl.float32)
        if tile >= 0:  # always true, see ``attend`` of the sparse mainloop
            qk_latent = unfused(multiply_add(latent_q, tl.trans(latent), logits))
            qk_rope = unfused(multiply_add(rope_q, tl.trans(rope), logits))
            logits = qk_latent + qk_rope
        visible = kv_valid[None, :] & (position[None, :] < lengths[:, None])
        if GROUP > 1:
            logits = tl.where((bad_rows > 0)[None, :], float("nan"), logits)
        logits = tl.where(visible, logits * scale, float("-inf"))
        p, alpha, row_max, row_sum = softmax_step(logits, row_max, row_sum)
        p_rounded = round_to(p, DTYPE)
        acc = multiply_add(p_rounded, latent, acc * alpha[:, None])
        tile += 1

    lse_log2 = log2_sum(row_max, row_sum)
    inverse = value_scale / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if splits == 1:
        dst_row = row_token * num_heads + head
        store_heads(out + dst_row[:, None] * LORA, row_valid, acc * inverse, 0)
        tl.store(lse + dst_row, lse_log2 / _LOG2_E, mask=row_valid)
    else:
        dst_row = (first + member * splits + split).to(tl.int64) * num_heads + head
        amax = scale_of_partial(acc * inverse)
        inverse *= 1.0 / amax
        store_heads(partial + dst_row[:, None] * LORA, row_valid, acc * inverse, 0)
        tl.store(partial_lse + dst_row, lse_log2, mask=row_valid)
        tl.store(partial_scale + dst_row, tl.zeros_like(lse_log2) + amax, mask=row_valid)
