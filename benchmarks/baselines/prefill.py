"""vLLM 0.22.1's sparse prefill over FP8 blocks: it dequantises a request's rows into a bf16
workspace, converts indices to rows of the workspace, and calls FlashMLA."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases.attention_calls import SCALE
from benchmarks.cases.attention_draws import PAGE, PAGES, WINDOW
from benchmarks.harness.work import Args, Work
from dsv4_ops.core.layout import MainLayout


class Context(NamedTuple):
    """One prefill request. It is one chunk, because vLLM gathers up to four requests per chunk."""

    tokens: int  # new tokens
    length: int  # all tokens, including earlier ones
    ratio: int  # tokens per compressed row

    @property
    def compressed(self) -> int:
        """Number of gathered compressed rows: all rows of the request, selected or not."""
        return self.length // self.ratio

    @property
    def window(self) -> int:
        """Number of gathered window rows."""
        return self.tokens + min(self.length - self.tokens, WINDOW - 1)

    @property
    def note(self) -> str:
        """Note on the baseline's times."""
        return (
            "baseline_us is FlashMLA alone, over bf16 rows gathered before; baseline_whole_us is "
            f"vLLM's gather of {self.compressed} C{self.ratio} and {self.window} window rows to "
            f"bf16, of one request of {self.length} tokens, its combined indices, and FlashMLA. "
            "The gather is vLLM's Triton kernel; on NVIDIA GPUs vLLM runs one in the CuTe DSL"
        )


class WholePrefill:
    """vLLM's prefill on one input set; ``workspace`` is bf16 [1, rows, 512]."""

    def __init__(
        self, flash_mla: Any, cache: Any, context: Context, args: Args, workspace: Tensor
    ) -> None:
        self.flash_mla, self.cache, self.workspace = flash_mla, cache, workspace
        self.context = context
        self.q, self.swa, positions, _, swa_table, self.extra, table, selected, self.sink = args
        if selected is None:  # a server lists all rows once per step, so the list is not timed
            row = torch.arange(self.context.compressed, dtype=torch.int32, device=self.q.device)
            visible = (positions[:, None] + 1) // self.context.ratio
            selected = torch.where(row < visible, row, -1)
        self.selected = selected
        self.swa_table, self.table = swa_table.contiguous(), table.contiguous()
        device = self.q.device
        ints = functools.partial(torch.tensor, dtype=torch.int32, device=device)
        self.starts, self.seq_lens = ints([0, self.context.tokens]), ints([self.context.length])
        self.gather_lens = ints([self.context.window])
        self.indices = self.lens = ints([])

    @staticmethod
    def rows(context: Context) -> tuple[int, int]:
        """Return the workspace rows per request and the first row of the window, for a server whose
        longest request and longest step have the sizes of ``context``."""
        start = -(-context.length // context.ratio)
        return start + WINDOW + context.tokens, start

    def gather(self) -> None:
        """Gather the compressed rows, then the window rows."""
        gather, size = self.cache.dequantize_and_gather_k_cache, PAGES[self.context.ratio]
        counts = self.seq_lens // self.context.ratio  # a server computes this in every layer
        start = self.rows(self.context)[1]
        compressed = MainLayout(size).kernel_view(self.extra)[:, :, 0]
        window = MainLayout(PAGE).kernel_view(self.swa)[:, :, 0]
        gather(
            self.workspace, compressed, seq_lens=counts, gather_lens=None, block_table=self.table,
            block_size=size, offset=0,
        )  # fmt: skip
        gather(
            self.workspace, window, seq_lens=self.seq_lens, gather_lens=self.gather_lens,
            block_table=self.swa_table, block_size=PAGE, offset=start,
        )  # fmt: skip

    def combine(self) -> tuple[Tensor, Tensor]:
        """Return the indices of the gathered rows that every token attends to."""
        self.indices, self.lens = self.cache.combine_topk_swa_indices(
            self.selected, self.starts, self.seq_lens, self.gather_lens, WINDOW,
            self.context.ratio, self.selected.shape[1], *self.rows(self.context),
        )  # fmt: skip
        return self.indices, self.lens

    def whole(self) -> Tensor:
        """Run the whole prefill, including FlashMLA over the workspace."""
        self.gather()
        self.combine()
        rows = self.workspace.view(-1, 1, MainLayout.head_dim)
        out: Tensor = self.flash_mla.sparse_prefill(
            self.q, rows, self.indices[:, None], scale=SCALE, attn_sink=self.sink,
            topk_length=self.lens,
        )[0]  # fmt: skip
        return out


def whole_prefills(flash_mla: Any, cache: Any, work: Work) -> list[WholePrefill]:
    """Make the prefill of every input set; all share a workspace."""
    rows = WholePrefill.rows(work.details)[0]
    device = work.sets[0][0].device
    workspace = torch.zeros(1, rows, MainLayout.head_dim, dtype=torch.bfloat16, device=device)
    return [WholePrefill(flash_mla, cache, work.details, args, workspace) for args in work.sets]
