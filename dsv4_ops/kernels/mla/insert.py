"""Insert rows into dense MLA's cache: values, e4m3 codes, or codes with scales and RoPE values."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import FP8_MAX, MlaDsFp8Layout
from dsv4_ops.kernels.arguments import paged, strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import encode, round_to_bf16, widen
from dsv4_ops.kernels.common.paging import locate_slots, word_pointer
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.kernels.mla.decode import FORMATS

TOKENS, WARPS = 4, 4
"""Tokens and warps of a program."""

_FP8_MAX = tl.constexpr(FP8_MAX)
_NAN_BITS = tl.constexpr(0x7FC0)
_MIN_NORMAL = tl.constexpr(torch.finfo(torch.float32).tiny)
_UE8M0_AMAX = tl.constexpr(1e-4)
_TILE = tl.constexpr(MlaDsFp8Layout.quant_block)


@triton.jit
def _load_float32(tensor, token, mask, dim):
    """Load rows of tokens as float32. ``tensor`` is a tuple of a tensor and its strides."""
    start, stride, dim_stride = tensor
    rows = start + token[:, None] * stride + dim[None, :].to(tl.int64) * dim_stride
    return widen(tl.load(rows, mask=mask, other=0.0))


@triton.jit
def _scales(tiles, FINITE_MAX: tl.constexpr, UE8M0: tl.constexpr):
    """Return the scale of the values along the last dimension: their amax without NaN, divided by
    448. With UE8M0, round the scale up to a power of two."""
    magnitudes = tl.minimum(tl.abs(tl.where(tiles != tiles, 0.0, tiles)), FINITE_MAX)
    amax = tl.max(magnitudes, axis=-1)
    scale = tl.div_rn(amax, tl.full(amax.shape, _FP8_MAX, tl.float32))
    if UE8M0:
        bits = tl.maximum(scale, _UE8M0_AMAX).to(tl.int32, bitcast=True)
        return (((bits + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)
    else:
        return tl.maximum(scale, _MIN_NORMAL)


@triton.jit(do_not_specialize=SIZES)
def mla_insert_kernel(
    kv_c, latent_stride, latent_dim_stride,
    k_pe, rope_stride, rope_dim_stride,
    kv_cache, page_stride, num_blocks,
    slot_mapping, slot_stride,
    scale,
    num_tokens, block_size,
    FORMAT: tl.constexpr, LORA: tl.constexpr, ROPE: tl.constexpr, LORA_TILE: tl.constexpr,
    ROPE_TILE: tl.constexpr, ROW: tl.constexpr, WORD_BYTES: tl.constexpr, HAS_SCALE: tl.constexpr,
    UE8M0: tl.constexpr, FINITE_MAX: tl.constexpr, TOKENS: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Insert TOKENS rows. FORMAT is 0 for rows of values, 1 for rows of codes, and 2 for rows of
    codes, scales (one per 128 codes) and RoPE values."""
    wait_for_previous_kernel()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_stride, mask=token < num_tokens, other=-1)
    page, row, valid = locate_slots(slot, num_blocks, block_size)
    target = (kv_cache + page * page_stride + row * ROW)[:, None]
    dim, rope_dim = tl.arange(0, LORA_TILE), tl.arange(0, ROPE_TILE)
    latent_mask = valid[:, None] & (dim < LORA)[None, :]
    rope_mask = valid[:, None] & (rope_dim < ROPE)[None, :]
    latent, rope = (kv_c, latent_stride, latent_dim_stride), (k_pe, rope_stride, rope_dim_stride)
    if FORMAT == 0:
        words = target.to(word_pointer(WORD_BYTES), bitcast=True)
        source = kv_c.to(word_pointer(WORD_BYTES), bitcast=True) + token[:, None] * latent_stride
        source += dim[None, :].to(tl.int64) * latent_dim_stride
        tl.store(words + dim[None, :], tl.load(source, mask=latent_mask), mask=latent_mask)
        source = k_pe.to(word_pointer(WORD_BYTES), bitcast=True) + token[:, None] * rope_stride
        source += rope_dim[None, :].to(tl.int64) * rope_dim_stride
        words += LORA
        tl.store(words + rope_dim[None, :], tl.load(source, mask=rope_mask), mask=rope_mask)
    elif FORMAT == 1:
        latents = _load_float32(latent, token, latent_mask, dim)
        ropes = _load_float32(rope, token, rope_mask, rope_dim)
        if HAS_SCALE:
            divisor = tl.load(scale)
            latents = tl.div_rn(latents, tl.zeros_like(latents) + divisor)
            ropes = tl.div_rn(ropes, tl.zeros_like(ropes) + divisor)
        tl.store(target + dim[None, :], encode(latents, CONVERTS), mask=latent_mask)
        tl.store(target + (LORA + rope_dim)[None, :], encode(ropes, CONVERTS), mask=rope_mask)
    else:
        latents = _load_float32(latent, token, latent_mask, dim)
        tiles = tl.reshape(latents, (TOKENS, LORA // _TILE, _TILE))
        scales = _scales(tiles, FINITE_MAX, UE8M0)
        codes = encode(tl.div_rn(tiles, tl.zeros_like(tiles) + scales[:, :, None]), CONVERTS)
        tl.store(target + dim[None, :], tl.reshape(codes, (TOKENS, LORA)), mask=latent_mask)
        tail = (target + LORA).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(tail + tl.arange(0, LORA // _TILE)[None, :], scales, mask=valid[:, None])
        tail = (target + (LORA + LORA // 32)).to(tl.pointer_type(tl.int16), bitcast=True)
        if k_pe.dtype.element_ty == tl.bfloat16:
            source = k_pe.to(tl.pointer_type(tl.int16), bitcast=True) + token[:, None] * rope_stride
            source += rope_dim[None, :].to(tl.int64) * rope_dim_stride
            bits = tl.load(source, mask=rope_mask, other=0)
        else:
            ropes = _load_float32(rope, token, rope_mask, rope_dim)
            bits = round_to_bf16(ropes).to(tl.int16, bitcast=True)
            bits = tl.where(ropes != ropes, _NAN_BITS, bits).to(tl.int16)
        tl.store(tail + rope_dim[None, :], bits, mask=rope_mask)


def mla_insert_kv(
    launch: Launcher,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    block_size: int,
    layout: str,
    scale_format: str,
) -> None:
    num_tokens = slot_mapping.shape[0]
    rank, rope = int(kv_c.shape[1]), int(k_pe.shape[1])
    if layout == MlaDsFp8Layout.tag:
        Checks("mla_insert_kv").page_start("kv_cache", kv_cache, MlaDsFp8Layout(block_size))
    if num_tokens == 0 or kv_cache.numel() == 0:
        return
    launch(mla_insert_kernel)[((num_tokens + TOKENS - 1) // TOKENS,)](
        *strided(kv_c, k_pe), *paged(kv_cache), *strided(slot_mapping),
        slot_mapping if scale is None else scale, num_tokens, block_size,
        FORMAT=FORMATS[layout], LORA=rank, ROPE=rope, LORA_TILE=triton.next_power_of_2(rank),
        ROPE_TILE=triton.next_power_of_2(rope), ROW=int(kv_cache.shape[2]),
        WORD_BYTES=kv_c.dtype.itemsize, HAS_SCALE=scale is not None, UE8M0=scale_format == "ue8m0",
        FINITE_MAX=torch.finfo(kv_c.dtype).max, TOKENS=TOKENS,
        CONVERTS=launch.converts_codes(kv_c.device), num_warps=WARPS,
    )  # fmt: skip
