"""FlashMLA as a baseline: calls on the inputs of our cases. FlashMLA's plan is not timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.baselines import vllm_metadata
from benchmarks.harness.work import Args
from dsv4_ops.core.layout import MainLayout


def load(folder: Path) -> Any:
    """Load FlashMLA from the bundle; any failure raises."""
    return vllm_metadata.library(folder).FlashMLA()


def decode_arguments(
    q: Tensor, swa_cache: Tensor, swa_indices: Tensor, swa_lens: Tensor, extra_cache: Tensor | None,
    extra_indices: Tensor | None, extra_lens: Tensor | None, attn_sink: Tensor, *,
    block_sizes: tuple[int, int], per_request: int = 1,
) -> Args:  # fmt: skip
    """Convert arguments of ``sparse_mla_decode``; tokens of a request must have equal lengths."""

    def by_request(values: Tensor) -> Tensor:
        return values.view(-1, per_request, *values.shape[1:])

    view = MainLayout(block_sizes[0]).kernel_view(swa_cache)
    swa = (view, by_request(swa_indices), swa_lens[::per_request].contiguous())
    if extra_cache is None or extra_indices is None or extra_lens is None:
        return (by_request(q), *swa, None, None, None, attn_sink)
    view = MainLayout(block_sizes[1]).kernel_view(extra_cache)
    extra = (view, by_request(extra_indices), extra_lens[::per_request].contiguous())
    return (by_request(q), *swa, *extra, attn_sink)


def decode_call(
    sets: Sequence[Args], scale: float, library: Any, *, planned: bool = True
) -> Callable[..., Any]:
    """Return a call that decodes an input set. The plan depends on shapes and lengths, which all
    sets share. If ``planned``, the plan is made once here, else in every call."""

    def attend(args: Args, meta: Any) -> Any:
        q, swa, indices, lens, extra, extra_indices, extra_lens, sink = args
        return library.sparse_decode(
            q, swa, indices, topk_length=lens, attn_sink=sink, meta=meta, extra_kv=extra,
            extra_indices=extra_indices, extra_topk_length=extra_lens, scale=scale,
        )  # fmt: skip

    plan = attend(sets[0], None)[2] if planned else None

    def call(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse, _ = attend(args, plan)
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    return call


def prefill_call(scale: float, library: Any) -> Callable[..., Any]:
    """Return a prefill over gathered rows, without the lse, on whose unit documents disagree."""

    def call(q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, sink: Tensor) -> Tensor:
        out: Tensor = library.sparse_prefill(
            q, kv, indices, scale=scale, attn_sink=sink, topk_length=lens
        )[0]
        return out

    return call
