"""Dense MLA decode in Triton: one split of the keys of a token, or of a few of one request."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies kernels, not modules
    multiply_add,
    round_to,
    round_to_bf16,
)
from dsv4_ops.kernels.common.triton_compat import EMULATE
from dsv4_ops.kernels.sparse_mla.triton.decode_kernel import scale_of_partial
from dsv4_ops.kernels.sparse_mla.triton.mainloop import (
    apart,
    log2_sum,
    softmax_step,
    store_heads,
)

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _codes_to_float(codes):
    """float32 values of e4m3 codes."""
    if EMULATE:  # Triton's interpreter reads the NaN codes as 480
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        return tl.where((codes & 0x7F) == 0x7F, float("nan"), values)
    # by way of float16: the direct conversion to bf16 takes a slow unit, value by value
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)


@triton.jit
def _load_codes(row, dim, wanted, DTYPE: tl.constexpr):
    """Values of codes [keys, dims], without their scale."""
    codes = tl.load(row[:, None] + dim[None, :], mask=wanted, other=0)
    values = _codes_to_float(codes)
    return round_to(values, DTYPE)


@triton.jit
def _load_scaled_codes(row, exists, LORA: tl.constexpr):
    """bf16 latents [keys, LORA]; scales of 128 values each are behind the codes."""
    GROUP: tl.constexpr = 128
    dim = tl.arange(0, LORA)
    codes = tl.load(row[:, None] + dim[None, :], mask=exists[:, None], other=0)
    group = tl.arange(0, LORA // GROUP)
    start = (row + LORA).to(tl.pointer_type(tl.float32), bitcast=True)
    scale = tl.load(start[:, None] + group[None, :], mask=exists[:, None], other=0.0)
    values = _codes_to_float(codes)
    scaled = tl.reshape(values, (codes.shape[0], LORA // GROUP, GROUP)) * scale[:, :, None]
    return round_to_bf16(tl.reshape(scaled, (codes.shape[0], LORA)))


@triton.jit
def _load_rows(row, exists, SIZES: tl.constexpr, DTYPE: tl.constexpr):
    """Latents and RoPE dimensions of rows; zeros of rows that do not exist."""
    FORMAT: tl.constexpr = SIZES[0]
    LORA: tl.constexpr = SIZES[1]
    ROPE: tl.constexpr = SIZES[2]
    dim, rope_dim = tl.arange(0, LORA), tl.arange(0, SIZES[3])
    wanted = exists[:, None] & (rope_dim < ROPE)[None, :]
    if FORMAT == 0:
        latent = tl.load(row[:, None] + dim[None, :], mask=exists[:, None], other=0.0)
        rope = tl.load(row[:, None] + (LORA + rope_dim)[None, :], mask=wanted, other=0.0)
    elif FORMAT == 1:
        latent = _load_codes(row, dim, exists[:, None], DTYPE)
        rope = _load_codes(row, LORA + rope_dim, wanted, DTYPE)
    else:
        latent = _load_scaled_codes(row, exists, LORA)
        start = (row + (LORA + LORA // 32)).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        rope = tl.load(start[:, None] + rope_dim[None, :], mask=wanted, other=0.0)
    return latent, rope


@triton.jit
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
    TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One split of the keys of a token for ROWS of its heads, or of up to GROUP tokens of a request
    with all their heads, so that their keys are read once. The TILES of heads of a split run side
    by side, so that the L2 has its keys for all but one.

    A group begins every GROUP tokens from ``query_start_loc`` on, and behind a token of another
    request; the programs of its other tokens end at once. Rows of a token of one split are finished
    here; of the others the normalised sums go to ``partial`` as multiples of ``partial_scale``.
    FORMAT of rows: 0 values, 1 codes, 2 codes with scales, and RoPE values.
    """
    number, head_tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    if HAS_PLAN:
        tile = plan + number.to(tl.int64) * plan_stride
        token = tl.load(tile).to(tl.int64)
        split = tl.load(tile + plan_column_stride)
        splits = tl.load(tile + 2 * plan_column_stride)
        first = tl.load(tile + 3 * plan_column_stride)
        fits = (splits == 1) | ((first >= 0) & (first <= capacity - splits))
        real = (token >= 0) & (token < num_tokens) & (split >= 0) & (split < splits) & fits
        if not real:
            return
    else:
        token = (number // splits).to(tl.int64)
        split = number % splits
        first = token * splits
    request = tl.load(req_indices + token * req_stride).to(tl.int64)
    known = (request >= 0) & (request < num_reqs)
    count = 1
    if GROUP > 1:
        start = tl.load(query_start_loc + request * start_stride, mask=known, other=-1)
        inside = known & (start >= 0) & (start <= token)
        behind = tl.where(inside, (token - start) % GROUP, 0)  # tokens of the group before this
        before = tl.load(req_indices + (token - 1) * req_stride, mask=behind > 0, other=-1)
        if inside & (before == request):
            return
        lane = tl.arange(0, LANES)
        others = tl.load(
            req_indices + (token + lane) * req_stride,
            mask=inside & (lane < GROUP - behind) & (token + lane < num_tokens),
            other=-1,
        )
        unlike = tl.where((others == request) & inside, LANES, lane)
        count = tl.maximum(tl.min(unlike, 0), 1)

    row = head_tile * ROWS + tl.arange(0, ROWS)
    there = row < count * num_heads
    member, head = row * 0, row
    if GROUP > 1:
        member, head = row // num_heads, row % num_heads
    each = token + member
    lengths = tl.load(seq_lens + each * len_stride, mask=there & known, other=0)
    lengths = tl.minimum(tl.maximum(lengths, 0), max_blocks * BLOCK_SIZE)
    stop = tl.max(lengths, 0)
    least = tl.min(tl.where(there, lengths, stop), 0)
    tiles = ((stop + KEYS - 1) // KEYS).to(tl.int64)
    tile = (tiles * split // splits).to(tl.int32)
    last = (tiles * (split + 1) // splits).to(tl.int32)

    DTYPE: tl.constexpr = q.dtype.element_ty
    SIZES: tl.constexpr = (FORMAT, LORA, ROPE, ROPE_TILE)
    heads = q + each * q_stride + head.to(tl.int64) * q_head_stride
    dim = tl.arange(0, LORA).to(tl.int64)
    rope_dim = tl.arange(0, ROPE_TILE).to(tl.int64)
    latent_q = tl.load(heads[:, None] + dim[None, :] * q_dim_stride, mask=there[:, None], other=0.0)
    rope_q = tl.load(
        heads[:, None] + (LORA + rope_dim)[None, :] * q_dim_stride,
        mask=there[:, None] & (rope_dim < ROPE)[None, :],
        other=0.0,
    )
    scale = tl.full((), SOFTMAX_SCALE * _LOG2_E, tl.float32)
    value_scale = tl.full((), 1.0, tl.float32)
    if HAS_Q_SCALE:
        scale *= tl.load(q_scale)
    if HAS_KV_SCALE:
        value_scale = tl.load(kv_scale)
        scale *= value_scale
    sums = tl.zeros((ROWS, LORA), dtype=tl.float32)
    row_max = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((ROWS,), dtype=tl.float32)
    entries = block_table + tl.where(known, request, 0) * table_stride
    while tile < last:
        position = tile * KEYS + tl.arange(0, KEYS)
        column = (position // BLOCK_SIZE).to(tl.int64)
        page = tl.load(entries + column * column_stride, mask=position < stop, other=-1)
        exists = (page >= 0) & (page < num_blocks)
        page = tl.where(exists, page, 0).to(tl.int64)
        key = kv_cache + page * page_stride + (position % BLOCK_SIZE) * ROW
        latent, rope = _load_rows(key, exists, SIZES, DTYPE)
        lost = tl.zeros((KEYS,), dtype=tl.int32)
        if GROUP > 1:
            if (tile + 1) * KEYS > least:
                # P of tokens that do not see a row is 0, and its product with no number NaN: those
                # that see it have that from the logits
                is_number = tl.abs(latent.to(tl.float32)) < float("inf")
                lost = tl.max(tl.where(is_number, 0, 1), axis=1)
                latent = tl.where(is_number, latent, 0.0)
        logits = tl.zeros((ROWS, KEYS), dtype=tl.float32)
        if tile >= 0:  # always, and see ``apart``
            of_latent = apart(multiply_add(latent_q, tl.trans(latent), logits))
            of_rope = apart(multiply_add(rope_q, tl.trans(rope), logits))
            logits = of_latent + of_rope
        visible = exists[None, :] & (position[None, :] < lengths[:, None])
        if GROUP > 1:
            logits = tl.where((lost > 0)[None, :], float("nan"), logits)
        logits = tl.where(visible, logits * scale, float("-inf"))
        weights, factor, row_max, row_sum = softmax_step(logits, row_max, row_sum)
        rounded = round_to(weights, DTYPE)
        sums = multiply_add(rounded, latent, sums * factor[:, None])
        tile += 1

    log2_total = log2_sum(row_max, row_sum)
    inverse = value_scale / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if splits == 1:
        target = each * num_heads + head
        store_heads(out + target[:, None] * LORA, there, sums * inverse, 0)
        tl.store(lse + target, log2_total / _LOG2_E, mask=there)
    else:
        target = (first + member * splits + split).to(tl.int64) * num_heads + head
        amax = scale_of_partial(sums * inverse)
        inverse *= 1.0 / amax
        store_heads(partial + target[:, None] * LORA, there, sums * inverse, 0)
        tl.store(partial_lse + target, log2_total, mask=there)
        tl.store(partial_scale + target, tl.zeros_like(log2_total) + amax, mask=there)
