"""References of dense MLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_ops.core.layout import MlaDsFp8Layout, MlaFp8Layout, PlainLayout
from dsv4_ops.core.types import MlaAttention
from dsv4_ops.reference.pages import locate, words
from dsv4_ops.reference.quantization import from_bytes

KEYS_AT_A_TIME = 128
"""Keys of every token that a decode holds at a time."""


class Decode(NamedTuple):
    """What of a call of ``mla_decode`` every part of its keys is computed with.

    Args:
        q: float32 queries.
        seq_lens: Keys of every token.
        req_indices: Its request.
        block_table: Pages of every request.
        kv_cache: The pages.
        scale: What q . row is multiplied by.
        kv_lora_rank: Leading values of a row that are the value.
        block_size: Rows per page.
        layout: Tag of the cache's layout.
        rounded: Dtype that P is rounded to.
    """

    q: Tensor
    seq_lens: Tensor
    req_indices: Tensor
    block_table: Tensor
    kv_cache: Tensor
    scale: Tensor
    kv_lora_rank: int
    block_size: int
    layout: str
    rounded: torch.dtype


class Running(NamedTuple):
    """Attention to the keys so far: row_max and row_sum of P, and P V."""

    row_max: Tensor
    row_sum: Tensor
    total: Tensor


def stored_rows(kv_cache: Tensor, pages: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """What is stored at (page, row), floats as integers, and which pages exist; 0 for others."""
    exists = (pages >= 0) & (pages < kv_cache.shape[0])
    stored = words(kv_cache)
    if isinstance(kv_cache.shape[0], int) and kv_cache.shape[0] == 0:
        return stored.new_zeros((*pages.shape, kv_cache.shape[2])), exists
    page = torch.where(exists, pages, 0)
    # whole rows are copied, and what does not exist selected away: vectors, not single values
    found = torch.ops.aten._unsafe_index.Tensor(stored, [page, rows])
    return torch.where(exists[..., None], found, 0), exists


def values_of(stored: Tensor, dtype: torch.dtype, layout: str) -> Tensor:
    """float32 values of rows from ``stored_rows`` of a cache of ``dtype``; codes of "mla_fp8"
    without their scale."""
    if layout == PlainLayout.tag:
        return stored.view(dtype).to(torch.float32)
    if layout == MlaFp8Layout.tag:
        return stored.view(torch.float8_e4m3fn).to(torch.float32)
    rank, rope = MlaDsFp8Layout.kv_lora_rank, MlaDsFp8Layout.rope_byte
    codes = stored[..., :rank].view(torch.float8_e4m3fn).to(torch.float32)
    scales = from_bytes(stored[..., rank:rope], 4).view(torch.float32)
    scaled = codes.unflatten(-1, (-1, MlaDsFp8Layout.quant_block)) * scales[..., None]
    # a compiler rounds to bf16 only where the bits are asked for
    latent = scaled.flatten(-2).to(torch.bfloat16).view(torch.int16).to(torch.int32)
    bits = torch.cat([latent, from_bytes(stored[..., rope:], 2)], -1)
    return (bits << 16).view(torch.float32)


def attend_to(call: Decode, running: Running, start: Tensor | int, num_keys: int) -> Running:
    """``running``, and the keys at positions ``start`` .. ``start + num_keys - 1``."""
    position = start + torch.arange(num_keys, device=call.q.device)
    wanted = position < call.seq_lens[:, None]
    pages, rows = locate(
        call.block_table, call.req_indices[:, None], position, wanted, call.block_size
    )
    stored, exists = stored_rows(call.kv_cache, pages, rows.expand(pages.shape))
    keys = values_of(stored, call.kv_cache.dtype, call.layout)
    logits = torch.matmul(call.q, keys.mT) * call.scale
    logits = torch.where(exists[:, None, :], logits, -torch.inf)
    row_max = torch.maximum(running.row_max, logits.amax(-1))
    origin = torch.where(row_max == -torch.inf, 0.0, row_max)
    p = torch.exp(logits - origin[..., None])
    factor = torch.exp(running.row_max - origin)
    values = keys[..., : call.kv_lora_rank]
    added = torch.matmul(p.to(call.rounded).to(torch.float32), values)
    return Running(
        row_max,
        running.row_sum * factor + p.sum(-1),
        running.total * factor[..., None] + added,
    )


def start_decode(
    q: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    scales: Sequence[Tensor | None],
    *,
    softmax_scale: float,
    block_size: int,
    kv_lora_rank: int,
    layout: str,
) -> tuple[Decode, Running]:
    """The call, and its state before any key."""
    scale = torch.full((1,), softmax_scale, dtype=torch.float32, device=q.device)
    for each in scales:
        scale = scale if each is None else scale * each
    rounded = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    call = Decode(
        q.to(torch.float32),
        seq_lens,
        req_indices,
        block_table,
        kv_cache,
        scale,
        kv_lora_rank,
        block_size,
        layout,
        rounded,
    )
    row_sum = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
    total = torch.zeros((*q.shape[:2], kv_lora_rank), dtype=torch.float32, device=q.device)
    return call, Running(torch.full_like(row_sum, -torch.inf), row_sum, total)


def finish_decode(call: Decode, running: Running, kv_scale: Tensor | None) -> MlaAttention:
    """Output and log-sum-exp behind the last key."""
    row_max, row_sum, total = running
    none = row_sum == 0.0
    out = total / row_sum[..., None]
    if kv_scale is not None:
        out = out * kv_scale
    lse = torch.where(none, -torch.inf, row_max + torch.log(row_sum))
    return MlaAttention(torch.where(none[..., None], 0.0, out).to(call.rounded), lse)


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor | None = None,
    plan: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    *,
    softmax_scale: float,
    block_size: int,
    kv_lora_rank: int,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
    impl: str = "auto",
) -> MlaAttention:
    """Sums in float32; of a half-precision query P is rounded to its dtype before it meets the
    values, as the tensor cores have it."""
    call, running = start_decode(
        q,
        kv_cache,
        seq_lens,
        req_indices,
        block_table,
        (q_scale, kv_scale),
        softmax_scale=softmax_scale,
        block_size=block_size,
        kv_lora_rank=kv_lora_rank,
        layout=layout,
    )
    num_rows = block_table.shape[1] * block_size
    for start in range(0, num_rows, KEYS_AT_A_TIME):
        running = attend_to(call, running, start, min(KEYS_AT_A_TIME, num_rows - start))
    return finish_decode(call, running, kv_scale)
