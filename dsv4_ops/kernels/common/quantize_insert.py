"""Quantise rows and insert them into a cache of keys (``MainLayout``) or of indexer keys
(``IndexerLayout``)."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import QuantizedLayout
from dsv4_ops.kernels.arguments import row_format, strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import quantize  # by name: Inductor copies no modules
from dsv4_ops.kernels.common.paging import locate_slots
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

WARPS = 4


@triton.jit
def insert_codes(source, dim_stride, mask, page_start, row, slot_valid, FORMAT: tl.constexpr):
    """Load the bf16 rows at ``source`` that ``mask`` selects, quantise them, and store codes and
    scales in ``row`` of the pages at ``page_start``, but only where ``slot_valid``."""
    BLOCK_SIZE: tl.constexpr = FORMAT[0]
    HEAD_DIM: tl.constexpr = FORMAT[1]
    CODE_DIM: tl.constexpr = FORMAT[2]
    QUANT_BLOCK: tl.constexpr = FORMAT[3]
    DATA_BYTES: tl.constexpr = FORMAT[4]
    SCALE_BYTES: tl.constexpr = FORMAT[5]
    FLOAT_SCALES: tl.constexpr = FORMAT[6]
    CONVERTS: tl.constexpr = FORMAT[7]
    group = tl.arange(0, HEAD_DIM // QUANT_BLOCK)[None, :]
    coded = group < CODE_DIM // QUANT_BLOCK
    dim = group[:, :, None] * QUANT_BLOCK + tl.arange(0, QUANT_BLOCK)[None, None, :]
    values = tl.load(
        source[:, None, None] + dim.to(tl.int64) * dim_stride,
        mask=mask[:, None, None] & coded[:, :, None],
        other=0.0,
    )
    codes, scale = quantize(values.to(tl.float32), CONVERTS)
    data = page_start + row * DATA_BYTES
    code_mask = slot_valid[:, None, None] & coded[:, :, None]
    tl.store(data[:, None, None] + dim, codes, mask=code_mask)
    scales = (page_start + BLOCK_SIZE * DATA_BYTES + row * SCALE_BYTES)[:, None]
    if FLOAT_SCALES:
        floats = scales.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(floats + group, scale << 23, mask=slot_valid[:, None])
    else:
        padded = tl.where(coded, scale, 0).to(tl.uint8)
        tl.store(scales + group, padded, mask=slot_valid[:, None] & (group < SCALE_BYTES))


@triton.jit(do_not_specialize=SIZES)
def quantize_and_insert_kernel(
    k, row_stride, dim_stride,
    k_cache, page_stride,
    slot_mapping, slot_stride, num_tokens, num_blocks,
    FORMAT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    BLOCK_SIZE: tl.constexpr = FORMAT[0]
    HEAD_DIM: tl.constexpr = FORMAT[1]
    CODE_DIM: tl.constexpr = FORMAT[2]
    DATA_BYTES: tl.constexpr = FORMAT[4]
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    in_batch = token < num_tokens
    slot = tl.load(slot_mapping + token.to(tl.int64) * slot_stride, mask=in_batch, other=-1)
    page, row, slot_valid = locate_slots(slot, num_blocks, BLOCK_SIZE)
    source = k + token.to(tl.int64) * row_stride
    page_start = k_cache + page * page_stride
    if CODE_DIM < HEAD_DIM:
        # copy the RoPE values separately from the codes, in the layout of their load; load them
        # first, because a load after the stores would wait for the stores
        lane = tl.arange(0, HEAD_DIM - CODE_DIM)[None, :]
        words = source.to(tl.pointer_type(tl.int16), bitcast=True)
        rope = words[:, None] + (CODE_DIM + lane).to(tl.int64) * dim_stride
        rope_words = tl.load(rope, mask=in_batch[:, None], other=0)
    insert_codes(source, dim_stride, in_batch, page_start, row, slot_valid, FORMAT)
    if CODE_DIM < HEAD_DIM:
        target = page_start + row * DATA_BYTES + CODE_DIM
        target = target.to(tl.pointer_type(tl.int16), bitcast=True)
        tl.store(target[:, None] + lane, rope_words, mask=slot_valid[:, None])


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
    """Run ``op``, which inserts rows into a cache of layout ``kind``, with ``tokens`` tokens per
    program."""
    quantized = kind(block_size)
    Checks(op).page_start("k_cache", k_cache, quantized)
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0 or k_cache.shape[0] == 0:
        return
    launch(quantize_and_insert_kernel)[(num_tokens + tokens - 1) // tokens,](
        *strided(k), k_cache, k_cache.stride(0),
        *strided(slot_mapping), num_tokens, k_cache.shape[0],
        FORMAT=row_format(launch, quantized, k_cache), TOKENS=tokens, num_warps=WARPS,
    )  # fmt: skip
