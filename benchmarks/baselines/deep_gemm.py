"""DeepGEMM as a baseline: logits of the lightning indexer. DeepGEMM's plan is not timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.baselines import vllm_metadata
from benchmarks.harness.work import Args
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.kernels.external.deep_gemm import settings_of


def load(folder: Path) -> Any:
    """Load DeepGEMM from the bundle; any failure raises."""
    return vllm_metadata.library(folder).load_deep_gemm()[0]


def arguments(
    q: Tensor, weights: Tensor, k_cache: Tensor, lens: Tensor, table: Tensor, *, block_size: int
) -> Args:
    """Convert queries, keys and lengths to DeepGEMM's form, with one query per request."""
    view = IndexerLayout(block_size).kernel_view(k_cache)
    return q[:, None], view, weights, lens[:, None].contiguous(), table


def logits_call(sets: Sequence[Args], block_size: int, library: Any) -> Callable[..., Tensor]:
    """Return a call for logits. All sets share lengths; logits past the lengths are undefined."""
    lens = sets[0][3]
    plan = library.get_paged_mqa_logits_metadata(lens, block_size, library.get_num_sms())
    function = library.fp8_fp4_paged_mqa_logits
    settings = settings_of(function)

    def call(q: Tensor, k_cache: Tensor, weights: Tensor, lens: Tensor, table: Tensor) -> Tensor:
        found: Tensor = function(
            q=(q, None), kv_cache=k_cache, weights=weights, context_lens=lens, block_table=table,
            schedule_meta=plan, max_context_len=table.shape[1] * block_size, **settings,
        )  # fmt: skip
        return found

    return call


def select_call(
    sets: Sequence[Args], block_size: int, topk: int, library: Any
) -> Callable[..., Tensor]:
    """Return a call that selects rows by ``torch.topk``, unsorted. All rows must exist."""
    logits = logits_call(sets, block_size, library)

    def call(*args: Tensor) -> Tensor:
        found = logits(*args)
        return found.topk(min(topk, found.shape[1]), sorted=False).indices

    return call
