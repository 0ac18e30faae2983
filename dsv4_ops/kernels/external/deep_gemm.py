"""DeepGEMM for the lightning indexer: DeepGEMM computes the logits of paged keys, and our kernel
selects rows by these logits.

DeepGEMM checks no values, so we replace absent pages by page 0 before the call, and the logits of
such pages by -inf after the call. If a call passes no ``schedule``, we compute one. DeepGEMM
compiles its kernels when they first run, and its functions are not torch ops, so no package can
call them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.dispatch import libraries
from dsv4_ops.kernels import opaque_op
from dsv4_ops.reference.common import valid_tokens, visible_rows
from dsv4_ops.reference.sanitize import fill_absent, list_pages

_LOGITS = (
    "(Tensor q, Tensor k_cache, Tensor weights, Tensor lens, Tensor pages, Tensor? schedule, "
    "int block_size, SymInt num_rows) -> Tensor"
)


def packaged() -> bool:
    """Return whether an AOTInductor package can call the library."""
    return False


def lowered() -> dict[Any, Any]:
    """Return an empty dict, because the library has no ops that could replace ours."""
    return {}


def num_sms() -> int:
    """Return the number of SMs that the library's kernels run on."""
    return int(libraries.load(libraries.DEEP_GEMM).get_num_sms())


def check_sms(op: str, name: str, schedule: Tensor) -> None:
    """Check that a schedule is for the number of SMs that the library uses."""
    num_rows = num_sms() + 1
    if schedule.shape[0] != num_rows:
        raise argument_error(
            op,
            name,
            must=f"have {num_rows} rows, for the SMs that DeepGEMM uses here",
            got=schedule.shape[0],
            do="Make it for providers.deep_gemm_num_sms()",
        )


def _logits(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    lens: Tensor,
    pages: Tensor,
    schedule: Tensor | None,
    block_size: int,
    num_rows: int,
) -> Tensor:
    """Compute logits. Logits of rows past a token's length are undefined."""
    num_tokens, columns = q.shape[0], min(pages.shape[1] * block_size, num_rows)
    if num_tokens == 0 or columns == 0 or k_cache.shape[0] == 0:
        return weights.new_empty((num_tokens, num_rows))
    library = libraries.load(libraries.DEEP_GEMM)
    lens = lens[:, None]
    if schedule is None:
        schedule = library.get_paged_mqa_logits_metadata(lens, block_size, library.get_num_sms())
    else:
        check_sms("indexer_logits", "schedule", schedule)
        schedule = schedule.contiguous()
    view = IndexerLayout(block_size).kernel_view(k_cache)
    rest = (weights, lens, pages, schedule, columns)
    if hasattr(library, "fp8_fp4_paged_mqa_logits"):
        function, queries = library.fp8_fp4_paged_mqa_logits, (q[:, None], None)
    else:
        function, queries = library.fp8_paged_mqa_logits, q[:, None]
    logits = function(queries, view, *rest, **settings_of(function))
    if columns == num_rows:
        return logits[:, :num_rows].contiguous()
    padded: Tensor = weights.new_empty((num_tokens, num_rows))
    padded[:, :columns] = logits[:, :columns]
    return padded


@functools.cache
def settings_of(function: Callable[..., Any]) -> dict[str, bool]:
    """Return settings that leave logits past a token's length undefined. DeepGEMM 2.8 always leaves
    them undefined. In earlier releases, the functions have a setting for this, but no signature
    that Python can inspect."""
    with contextlib.suppress(ValueError):
        if "clean_logits" not in inspect.signature(function).parameters:
            return {}
    return {"clean_logits": False}


def _logits_fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[0], rest[-1]), dtype=torch.float32)


paged_logits = opaque_op.define("_deep_gemm_logits", _LOGITS, _logits, _logits_fake)


def indexer_logits(
    launch: Any,
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    schedule: Tensor | None = None,
    *,
    block_size: int,
    num_rows: int,
    **settings: Any,
) -> Tensor:
    num_tokens, num_blocks = q.shape[0], k_cache.shape[0]
    if num_tokens == 0 or num_rows == 0:
        return weights.new_empty((num_tokens, num_rows))
    table, table_rows = (block_table, req_indices), block_table.shape[1] * block_size
    lens = lens.reshape(-1)  # one token per row: a row of several tokens could span requests
    arguments = (*table, lens, num_blocks, torch.sym_min(table_rows, num_rows))
    pages, page_lens = opaque_op.kernel_or_reference(list_pages, launch, q.device)(*arguments)
    rows = (weights.contiguous(), page_lens, pages, schedule)
    logits = paged_logits(q.contiguous(), k_cache, *rows, block_size, num_rows)
    fill = opaque_op.kernel_or_reference(fill_absent, launch, q.device)
    return fill(logits, *table, page_lens, num_blocks, block_size)


def indexer_select(
    launch: Any,
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    schedule: Tensor | None = None,
    *,
    block_size: int,
    compress_ratio: int,
    topk: int,
    slots: bool = False,
    **settings: Any,
) -> Tensor:
    positions, (num_reqs, max_blocks) = positions.reshape(-1), block_table.shape
    valid = valid_tokens(positions, req_indices, num_reqs)
    lens = torch.where(valid, visible_rows(positions, compress_ratio), 0)
    tensors = (q, weights, k_cache, lens, req_indices, block_table, schedule)
    sizes = {"block_size": block_size, "num_rows": max_blocks * block_size}
    logits = indexer_logits(launch, *tensors, **sizes)
    topk_rows: Tensor = torch.ops.dsv4_ops.indexer_topk(logits, lens, topk=topk)
    if slots:
        translate = torch.ops.dsv4_ops.global_topk_indices_and_lens
        topk_rows, _ = translate(topk_rows, req_indices, block_table, block_size=block_size)
    return topk_rows
