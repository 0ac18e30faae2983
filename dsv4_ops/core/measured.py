"""Where a library was faster than our kernels on an H200: what ``impl="auto"`` goes by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

MEASURED_BY = "a script of the calls of python -m dsv4_ops.bench.choice, 2026-11-21"
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
        if not isinstance(q.shape[0], int) or not isinstance(columns, int):
            return None
        planned = plan is not None and plan.dim() == 1
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


_ANY = (0, 2**62)
_STORED = 2**23
"""Logits that DeepGEMM may store: 32 MiB."""

RULES = (
    Rule("sparse_mla_gathered", "flash_mla", None, False, 1, 128, _ANY, (74.0, 14.2)),
    Rule("indexer_logits", "deep_gemm", 64, False, 32, 2048, (2**20, _STORED), (51.1, 36.3)),
)
"""None of sparse MLA's decode: of 53 rows of ``bench sparse_mla`` of 2026-11-22, FlashMLA without
its adapter and its plan, it was faster in one, C128 of 64 ragged tokens without a plan of ours.
None of selections, where ours is faster. That of logits is older than our faster kernel of them."""


def _columns(op: str, values: Mapping[str, Any]) -> Any:
    if op == "sparse_mla_gathered":
        return values["indices"].shape[1]
    if op == "indexer_logits":
        return values["num_rows"]
    if op == "indexer_select":
        return values["block_table"].shape[1] * values["block_size"]
    columns = values["swa_indices"].shape[1]
    if op == "sparse_mla_decode_paged":
        return columns + values["extra_block_table"].shape[1] * values["extra_block_size"]
    extra = values["extra_indices"]
    return columns if extra is None else columns + extra.shape[1]
