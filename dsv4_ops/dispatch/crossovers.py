"""Where a library was faster than our kernels on an H200: what ``impl="auto"`` goes by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dsv4_ops.core.tiles import PROGRAMS, head_tiles, is_of_ours

MEASURED_BY = "python -m benchmarks.choice, 2026-11-22"
"""Where the rules come from: torch 2.11.0+cu130, the FlashMLA and DeepGEMM of vLLM 0.22.1, CUDA
graphs over rotating inputs whose L2 was not emptied."""


class Sizes(NamedTuple):
    """What the rules ask of a call.

    Args:
        tokens: Tokens of the batch.
        heads: Heads of the queries.
        columns: Keys that a token may have: the widths of its lists, or the rows of a request.
        planned: Whether a plan of the library was given.
    """

    tokens: int
    heads: int
    columns: int
    planned: bool = False

    @classmethod
    def of(cls, op: str, values: Mapping[str, Any]) -> Sizes | None:
        """The sizes of a call; None if one is a symbol."""
        q, plan = values["q"], values.get("plan")
        columns = _columns(op, values)
        if not all(isinstance(size, int) for size in (q.shape[0], columns)):
            return None
        planned = plan is not None and not is_of_ours(plan)
        return cls(q.shape[0], int(q.shape[1]), columns, planned)


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
    """

    op: str
    library: str
    heads: int | None
    planned: bool
    tokens: int
    columns: int
    work: tuple[int, int]
    measured: tuple[float, float]

    def covers(self, op: str, library: str, sizes: Sizes) -> bool:
        """Whether the rule is about such a call."""
        least, most = self.work
        return (
            (self.op, self.library, self.planned) == (op, library, sizes.planned)
            and self.heads in (None, sizes.heads)
            and sizes.tokens >= self.tokens
            and sizes.columns >= self.columns
            and least <= sizes.tokens * sizes.columns <= most
        )


_STORED = 2**23
"""Logits that DeepGEMM may store: 32 MiB."""

MOST_LISTED, MOST_GATHERED = 2**27, 2**20
"""Entries of lists and rows in bf16 that a prefill may store: 512 MiB and 1 GiB."""

_CALLS, _ROW, _ENTRY = 1_200_000, 50, 6
"""Hundredths of a nanosecond that a prefill on an H200 takes to copy rows before it attends to
them, for its launches and for each row, and that it saves for each key of a token and tile of
heads: each is dequantised once and not by every token that sees it. The last SMs' tokens take as
long as others before."""

NOTES = {
    "sparse_mla_prefill": (
        "on Hopper over a copy of its rows in bf16, where that is faster: "
        f"{_CALLS / 1e5:g} us and {_ROW / 100} ns a row, for {_ENTRY / 100} ns a key of a token "
        f"and 64 heads, all rows of a table counted; else with the keys of up to {PROGRAMS // 2} "
        "tokens of 64 heads in splits"
    ),
    "sparse_mla_gathered": "on Hopper; on other GPUs the reference",
}
"""What is to be said of our own kernels, by op."""

RULES = (Rule("indexer_logits", "deep_gemm", 64, False, 32, 2048, (2**20, _STORED), (36.7, 32.2)),)
"""None of sparse MLA: in ``bench sparse_mla`` of 2026-11-23 FlashMLA was slower than the way that
ours takes in every row but one, in which it was 0.4 % faster, with a plan of its own that its time
does not count, and over bf16 rows without the kernels that make lists safe for it. None of
selections, where ours is faster."""


def gathers(values: Mapping[str, Any]) -> Any:
    """Whether a prefill copies its rows to bf16 before it attends, on Hopper: where that takes
    less time than to dequantise them for every token, which tokens too few for all SMs do in
    splits, and its memory is no more than ``MOST_LISTED`` and ``MOST_GATHERED``. Of all rows of a
    table only values say how many there are: this goes by as many as it has room for, though a
    short request in a wide table takes less from the pages.

    Returns:
        1 or 0, or of symbolic sizes a symbol that is one of them.
    """
    tokens, columns, rows = values["q"].shape[0], prefilled(values), workspace_rows(values)
    tiles = tokens * head_tiles(int(values["q"].shape[1]))
    rounds = (tiles + PROGRAMS - 1) // PROGRAMS
    return (
        positive(_ENTRY * rounds * PROGRAMS * columns - _CALLS - _ROW * gathered_rows(values))
        * positive(2 * tiles - PROGRAMS)
        * positive(MOST_GATHERED + 1 - rows)
        * positive(MOST_LISTED + 1 - tokens * columns)
    )


def positive(number: Any) -> Any:
    """1 or 0; a comparison would fix what is a symbol."""
    return torch.sym_max(0, torch.sym_min(1, number))


def workspace_rows(values: Mapping[str, Any]) -> Any:
    """Rows that a prefill with a library has room for: all that its block tables name."""
    window, compressed = _rows_named(values)
    return window + compressed


def _rows_named(values: Mapping[str, Any]) -> tuple[Any, Any]:
    """Rows of all requests that the block tables of a prefill name: the window's and compressed."""
    num_reqs, blocks = values["swa_block_table"].shape
    window, table = num_reqs * blocks * values["swa_block_size"], values["extra_block_table"]
    return window, 0 if table is None else table.numel() * values["extra_block_size"]


def gathered_rows(values: Mapping[str, Any]) -> Any:
    """Rows that a prefill copies at most, of requests as long as their tables."""
    (window, compressed), num_reqs = _rows_named(values), values["swa_block_table"].shape[0]
    rows = values["q"].shape[0] + num_reqs * (values["window_size"] - 1)
    return compressed + torch.sym_min(window, rows)


def _columns(op: str, values: Mapping[str, Any]) -> Any:
    if op == "sparse_mla_gathered":
        return values["indices"].shape[1]
    if op == "indexer_logits":
        return values["num_rows"]
    if op == "indexer_select":
        return values["block_table"].shape[1] * values["block_size"]
    if op == "sparse_mla_prefill":
        return prefilled(values)
    columns = values["swa_indices"].shape[1]
    if op == "sparse_mla_decode_paged":
        return columns + values["extra_block_table"].shape[1] * values["extra_block_size"]
    extra = values["extra_indices"]
    return columns if extra is None else columns + extra.shape[1]


def prefilled(values: Mapping[str, Any]) -> Any:
    """Keys that a token of a prefill has at most."""
    selected, table = values["topk_indices"], values["extra_block_table"]
    columns = values["window_size"]
    if selected is not None:
        return columns + selected.shape[1]
    return columns if table is None else columns + table.shape[1] * values["extra_block_size"]
