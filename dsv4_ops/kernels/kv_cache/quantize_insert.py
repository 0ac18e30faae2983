"""The quantising insert of both FP8 layouts: one kernel, rows of whole blocks."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import QuantizedLayout
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.fp8 import quantize  # by name: Inductor copies kernels, not modules
from dsv4_ops.kernels.common.paging import place_slots
from dsv4_ops.kernels.launcher import Launcher

WARPS = 4


@triton.jit
def insert_codes(source, dim_stride, given, start, row, exists, FORMAT: tl.constexpr):
    """Codes and scales of the bf16 rows at ``source`` that are ``given``, into ``row`` of the
    blocks at ``start``, as far as they exist."""
    HEAD_DIM: tl.constexpr = FORMAT[1]
    CODE_DIM: tl.constexpr = FORMAT[2]
    QUANT_BLOCK: tl.constexpr = FORMAT[3]
    DATA_BYTES: tl.constexpr = FORMAT[4]
    SCALE_BYTES: tl.constexpr = FORMAT[5]
    group = tl.arange(0, HEAD_DIM // QUANT_BLOCK)[None, :]
    coded = group < CODE_DIM // QUANT_BLOCK
    dim = group[:, :, None] * QUANT_BLOCK + tl.arange(0, QUANT_BLOCK)[None, None, :]
    values = tl.load(
        source[:, None, None] + dim.to(tl.int64) * dim_stride,
        mask=given[:, None, None] & coded[:, :, None],
        other=0.0,
    )
    codes, scale = quantize(values.to(tl.float32))
    data = start + row * DATA_BYTES
    there = exists[:, None, None] & coded[:, :, None]
    tl.store(data[:, None, None] + dim, codes, mask=there)
    scales = (start + FORMAT[0] * DATA_BYTES + row * SCALE_BYTES)[:, None]
    if FORMAT[6]:
        floats = scales.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(floats + group, scale << 23, mask=exists[:, None])
    else:
        padded = tl.where(coded, scale, 0).to(tl.uint8)
        tl.store(scales + group, padded, mask=exists[:, None] & (group < SCALE_BYTES))


@triton.jit
def quantize_and_insert_kernel(
    k, row_stride, dim_stride,
    k_cache, page_stride,
    slot_mapping, slot_stride, num_tokens, num_blocks,
    FORMAT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    HEAD_DIM: tl.constexpr = FORMAT[1]
    CODE_DIM: tl.constexpr = FORMAT[2]
    DATA_BYTES: tl.constexpr = FORMAT[4]
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    given = token < num_tokens
    slot = tl.load(slot_mapping + token.to(tl.int64) * slot_stride, mask=given, other=-1)
    page, row, exists = place_slots(slot, num_blocks, FORMAT[0])
    source = k + token.to(tl.int64) * row_stride
    start = k_cache + page * page_stride
    if CODE_DIM < HEAD_DIM:
        # RoPE, apart: its words keep the layout that they are loaded in; first: not behind stores
        lane = tl.arange(0, HEAD_DIM - CODE_DIM)[None, :]
        words = source.to(tl.pointer_type(tl.int16), bitcast=True)
        rope = words[:, None] + (CODE_DIM + lane).to(tl.int64) * dim_stride
        rope_words = tl.load(rope, mask=given[:, None], other=0)
    insert_codes(source, dim_stride, given, start, row, exists, FORMAT)
    if CODE_DIM < HEAD_DIM:
        target = (start + row * DATA_BYTES + CODE_DIM).to(tl.pointer_type(tl.int16), bitcast=True)
        tl.store(target[:, None] + lane, rope_words, mask=exists[:, None])


def insert(
    op: str,
    kind: type[QuantizedLayout],
    tokens: int,
    launch: Launcher,
    k: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    block_size: int,
    layout: str,
) -> None:
    """The op of a ``kind`` of layout, by programs of so many ``tokens``."""
    quantized = kind(block_size)
    Checks(op).page_start("k_cache", k_cache, quantized)
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0 or k_cache.shape[0] == 0:
        return
    launch(quantize_and_insert_kernel)[(num_tokens + tokens - 1) // tokens,](
        *strided(k), k_cache, k_cache.stride(0),
        *strided(slot_mapping), num_tokens, k_cache.shape[0],
        FORMAT=quantized.format, TOKENS=tokens, num_warps=WARPS,
    )  # fmt: skip
