"""DeepGEMM behind the lightning indexer: its logits of paged keys, and our selection among them.

DeepGEMM checks no value: pages that do not exist are replaced by page 0 before, and what they gave
by -inf after. Its schedule is made in every call. It compiles its kernels when they first run, and
its functions are no ops of torch: no package can call them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.core import libraries
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.kernels import foreign
from dsv4_ops.reference.common import valid_tokens, visible_rows
from dsv4_ops.reference.pages import locate

_LOGITS = (
    "(Tensor q, Tensor weights, Tensor k_cache, Tensor lens, Tensor req_indices, "
    "Tensor block_table, int block_size, SymInt num_rows) -> Tensor"
)


def packaged() -> bool:
    """Whether an AOTInductor package can call the library."""
    return False


def lowered() -> dict[Any, Any]:
    """The library's own op for each of ours: it has none."""
    return {}


def _logits(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    block_size: int,
    num_rows: int,
) -> Tensor:
    num_tokens, num_blocks = q.shape[0], k_cache.shape[0]
    columns = block_table.shape[1] * block_size
    if num_tokens == 0 or num_rows == 0 or columns == 0 or num_blocks == 0:
        return q.new_full((num_tokens, num_rows), -torch.inf, dtype=torch.float32)
    start = torch.arange(0, columns, block_size, device=q.device)
    counted = torch.where(valid_requests(req_indices, block_table), lens, 0)
    counted = counted.clamp(0, min(columns, num_rows))
    wanted = start < counted[:, None]
    pages, _ = locate(block_table, req_indices[:, None], start, wanted, block_size)
    exists = (pages >= 0) & (pages < num_blocks)
    table = torch.where(exists, pages, 0).to(torch.int32)
    found = _paged_logits(
        q.contiguous()[:, None],
        IndexerLayout(block_size).kernel_view(k_cache),
        weights.contiguous(),
        counted[:, None].to(torch.int32).contiguous(),
        table,
        block_size,
        columns,
    )
    row = torch.arange(columns, device=q.device)
    known = exists.repeat_interleave(block_size, 1) & (row < counted[:, None])
    logits = torch.where(known, found, -torch.inf)
    if num_rows == columns:
        return logits
    return pad(logits[:, :num_rows], (0, max(num_rows - columns, 0)), value=-torch.inf).contiguous()


def valid_requests(req_indices: Tensor, block_table: Tensor) -> Tensor:
    return (req_indices >= 0) & (req_indices < block_table.shape[0])


def _paged_logits(
    q: Tensor,
    view: Tensor,
    weights: Tensor,
    lens: Tensor,
    table: Tensor,
    block_size: int,
    columns: int,
) -> Tensor:
    library = libraries.load(libraries.DEEP_GEMM)
    schedule = library.get_paged_mqa_logits_metadata(lens, block_size, library.get_num_sms())
    last = (weights, lens, table, schedule, columns)
    if hasattr(library, "fp8_fp4_paged_mqa_logits"):
        found: Tensor = library.fp8_fp4_paged_mqa_logits((q, None), view, *last, clean_logits=False)
    else:
        found = library.fp8_paged_mqa_logits(q, view, *last, clean_logits=False)
    return found[:, :columns]


def _logits_fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[0], rest[-1]), dtype=torch.float32)


logits = foreign.define("_deep_gemm_logits", _LOGITS, _logits, _logits_fake)


def indexer_logits(
    launch: Any,
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_rows: int,
    **settings: Any,
) -> Tensor:
    tensors = (q, weights, k_cache, lens, req_indices, block_table)
    found: Tensor = logits(*tensors, block_size, num_rows)
    return found


def indexer_select(
    launch: Any,
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    compress_ratio: int,
    topk: int,
    **settings: Any,
) -> Tensor:
    num_reqs, max_blocks = block_table.shape
    valid = valid_tokens(positions, req_indices, num_reqs)
    lens = torch.where(valid, visible_rows(positions, compress_ratio), 0)
    tensors = (q, weights, k_cache, lens, req_indices, block_table)
    found = logits(*tensors, block_size, max_blocks * block_size)
    chosen: Tensor = torch.ops.dsv4_ops.indexer_topk(found, lens, topk=topk)
    return chosen
