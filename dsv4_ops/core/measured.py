"""Where a library was faster than our kernels on an H200: what ``impl="auto"`` goes by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

MEASURED_BY = "python -m dsv4_ops.bench.choice, 2026-11-22"
"""Where the rules come from: torch 2.11.0+cu130, the FlashMLA and DeepGEMM of vLLM 0.22.1, CUDA
graphs over rotating inputs whose L2 was not emptied."""


class Sizes(NamedTuple):
    """What the rules ask of a call.

    Args:
        tokens: Tokens of the batch.
        heads: Heads of the queries.
        columns: Keys that a token may have: the widths of its lists, or the rows of a request.
        planned: Whether a plan of the library was given.
        gathered: Rows that are copied for the library, of requests as long as their tables.
    """

    tokens: int
    heads: int
    columns: int
    planned: bool = False
    gathered: int = 0

    @classmethod
    def of(cls, op: str, values: Mapping[str, Any]) -> Sizes | None:
        """The sizes of a call; None if one is a symbol."""
        q, plan = values["q"], values.get("plan")
        columns, gathered = _columns(op, values), _gathered(op, values)
        if not all(isinstance(size, int) for size in (q.shape[0], columns, gathered)):
            return None
        planned = plan is not None and plan.dim() == 1
        return cls(q.shape[0], int(q.shape[1]), columns, planned, gathered)


class Rule(NamedTuple):
    """From so many tokens and columns on ``library`` is faster for calls of ``op``.

    Args:
        op: Name of the op.
        library: What is faster.
        heads: Heads of the queries; None for any that the library takes.
        planned: Whether that is with a plan of the library.
        tokens: Tokens, at least.
        columns: Columns, at least.
        work: Tokens times columns, at least and at most: what a library stores for each of them is
            memory that ours does not take.
        measured: Microseconds of ours and of the library at the least of these sizes.
        gathered: Rows gathered per token, at most: each takes the library as long, whatever is
            made of it.
    """

    op: str
    library: str
    heads: int | None
    planned: bool
    tokens: int
    columns: int
    work: tuple[int, int]
    measured: tuple[float, float]
    gathered: int = 0

    def covers(self, op: str, library: str, sizes: Sizes) -> bool:
        """Whether the rule is about such a call."""
        least, most = self.work
        return (
            (self.op, self.library, self.planned) == (op, library, sizes.planned)
            and self.heads in (None, sizes.heads)
            and sizes.tokens >= self.tokens
            and sizes.columns >= self.columns
            and least <= sizes.tokens * sizes.columns <= most
            and sizes.gathered <= self.gathered * sizes.tokens
        )


_ANY = (0, 2**62)
_STORED = 2**23
"""Logits that DeepGEMM may store: 32 MiB."""

_LISTED = (0, 2**27)
"""Entries of lists that a prefill may store: 512 MiB."""
_GATHERED = 32
"""Three times as many rows per token as of the prefills measured: 512 tokens behind 16384. A row
takes an H200 half a nanosecond, and 512 tokens are 20 microseconds faster."""

RULES = (
    Rule("sparse_mla_gathered", "flash_mla", None, False, 1, 128, _ANY, (74.0, 14.2)),
    Rule(
        "sparse_mla_prefill", "flash_mla", 64, False, 512, 640, _LISTED, (124.6, 105.8), _GATHERED
    ),
    Rule(
        "sparse_mla_prefill", "flash_mla", 128, False, 512, 640, _LISTED, (245.2, 189.8), _GATHERED
    ),
    Rule("indexer_logits", "deep_gemm", 64, False, 32, 2048, (2**20, _STORED), (36.7, 32.2)),
)
"""None of sparse MLA's decode: in ``bench sparse_mla`` of 2026-11-22 FlashMLA was slower wherever
both had a plan or both made it in the call; with a plan beside ours without one it was faster in a
row, C128 of 64 ragged tokens. None of selections, where ours is faster. Of
prefills those that select: without a selection, C128, none was measured. At 256 tokens FlashMLA was
faster too, but its copies and lists cost short contexts of few tokens more than it saves there."""


def workspace_rows(values: Mapping[str, Any]) -> Any:
    """Rows that a prefill with a library has room for: all that its block tables name."""
    window, compressed = _rows_named(values)
    return window + compressed


def _rows_named(values: Mapping[str, Any]) -> tuple[Any, Any]:
    """Rows of all requests that the block tables of a prefill name: the window's and compressed."""
    num_reqs, blocks = values["swa_block_table"].shape
    window, table = num_reqs * blocks * values["swa_block_size"], values["extra_block_table"]
    return window, 0 if table is None else table.numel() * values["extra_block_size"]


def _gathered(op: str, values: Mapping[str, Any]) -> Any:
    if op != "sparse_mla_prefill":
        return 0
    (window, compressed), num_reqs = _rows_named(values), values["swa_block_table"].shape[0]
    rows = values["q"].shape[0] + num_reqs * (values["window_size"] - 1)
    if not all(isinstance(size, int) for size in (window, compressed, rows)):
        return None
    return compressed + min(window, rows)


def _columns(op: str, values: Mapping[str, Any]) -> Any:
    if op == "sparse_mla_gathered":
        return values["indices"].shape[1]
    if op == "indexer_logits":
        return values["num_rows"]
    if op == "indexer_select":
        return values["block_table"].shape[1] * values["block_size"]
    if op == "sparse_mla_prefill":
        return _prefilled(values)
    columns = values["swa_indices"].shape[1]
    if op == "sparse_mla_decode_paged":
        return columns + values["extra_block_table"].shape[1] * values["extra_block_size"]
    extra = values["extra_indices"]
    return columns if extra is None else columns + extra.shape[1]


def _prefilled(values: Mapping[str, Any]) -> Any:
    """Without a selection none: of all rows of a table nothing was measured."""
    selected = values["topk_indices"]
    return 0 if selected is None else values["window_size"] + selected.shape[1]
