"""vLLM 0.22.1's sparse prefill over FP8 blocks: it dequantises a request's rows into a bf16
workspace, converts indices to rows of the workspace, and calls FlashMLA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases.attention_draws import PAGE, PAGES, WINDOW
from benchmarks.harness.work import Work
from dsv4_ops.core.layout import MainLayout


class Context(NamedTuple):
    """One prefill request of ``tokens`` new tokens: vLLM gathers up to four requests per chunk, so
    one request is one chunk.

    Args:
        tokens: New tokens.
        length: All tokens, including earlier ones.
        ratio: Tokens per compressed row.
    """

    tokens: int
    length: int
    ratio: int

    @property
    def compressed(self) -> int:
        """Number of gathered compressed rows: all rows of the request, selected or not."""
        return self.length // self.ratio

    @property
    def block_size(self) -> int:
        """Compressed rows per block."""
        return PAGES[self.ratio]

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
            "Its gather is the kernel in Triton, where on an NVIDIA GPU it takes another in the "
            "CuTe DSL"
        )


@dataclass(frozen=True, kw_only=True)
class PrefillWork(Work):
    """A ``Work`` with arguments of ``sparse_mla_prefill`` and its request."""

    context: Context
    scale: float


class WholePrefill:
    """vLLM's prefill of one input set.

    Args:
        flash_mla: FlashMLA.
        cache: vLLM's cache ops.
        work: The case.
        place: Index of the input set.
        workspace: bf16 [1, rows, 512], which all layers of a server share.
    """

    def __init__(
        self, flash_mla: Any, cache: Any, work: PrefillWork, place: int, workspace: Tensor
    ) -> None:
        self.flash_mla, self.cache, self.workspace = flash_mla, cache, workspace
        self.context, self.scale = work.context, work.scale
        self.q, self.swa, positions, _, swa_table, self.extra, table, selected, self.sink = (
            work.sets[place]
        )
        self.selected = self._every(positions) if selected is None else selected
        self.swa_table, self.table = swa_table.contiguous(), table.contiguous()
        device = self.q.device

        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.starts, self.seq_lens = ints(0, self.context.tokens), ints(self.context.length)
        self.gather_lens = ints(self.context.window)
        self.indices = self.lens = ints()

    def _every(self, positions: Tensor) -> Tensor:
        """Build the selection of a layer that attends to all rows, which a server builds once per
        step."""
        row = torch.arange(self.context.compressed, dtype=torch.int32, device=positions.device)
        visible = (positions + 1) // self.context.ratio
        return torch.where(row < visible[:, None], row, -1).to(torch.int32)

    @staticmethod
    def rows(context: Context) -> tuple[int, int]:
        """Return the workspace rows per request, and the row at which the window starts, in a
        server for which this request and this step are the longest."""
        start = -(-context.length // context.ratio)
        return start + WINDOW + context.tokens, start

    def gather(self) -> None:
        """Gather the compressed rows, then the window rows."""
        gather, size = self.cache.dequantize_and_gather_k_cache, self.context.block_size
        counts = self.seq_lens // self.context.ratio  # a server computes it in every layer
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

    def attend(self) -> Tensor:
        """Run FlashMLA over the workspace."""
        out: Tensor = self.flash_mla.sparse_prefill(
            self.q,
            self.workspace.view(-1, 1, MainLayout.head_dim),
            self.indices[:, None],
            scale=self.scale,
            attn_sink=self.sink,
            topk_length=self.lens,
        )[0]
        return out

    def whole(self) -> Tensor:
        """All of it."""
        self.gather()
        self.combine()
        return self.attend()


def whole_prefills(flash_mla: Any, cache: Any, work: PrefillWork) -> list[WholePrefill]:
    """Make the calls of every input set, over one workspace."""
    rows = WholePrefill.rows(work.context)[0]
    q = work.sets[0][0]
    workspace = torch.zeros(1, rows, MainLayout.head_dim, dtype=torch.bfloat16, device=q.device)
    return [
        WholePrefill(flash_mla, cache, work, place, workspace) for place in range(len(work.sets))
    ]
