"""Where a library was faster than our kernels on an H200: what ``impl="auto"`` goes by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

MEASURED_BY = (
    "python -m dsv4_ops bench sparse_mla --anchor .anchor --cases decode,ragged,prefill,paged; "
    "python -m dsv4_ops bench indexer --anchor .anchor --cases select"
)
"""The commands that the rules come from; benchmarks/h200/*.jsonl holds their rows."""


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
    """``library`` is faster for calls of ``op`` with such heads (None: any) and plan, from so many
    tokens, of so many columns, on."""

    op: str
    library: str
    heads: int | None
    planned: bool
    tokens: int
    columns: int

    def covers(self, op: str, library: str, sizes: Sizes) -> bool:
        """Whether the rule is about such a call."""
        return (
            (self.op, self.library, self.planned) == (op, library, sizes.planned)
            and self.heads in (None, sizes.heads)
            and sizes.tokens >= self.tokens
            and sizes.columns >= self.columns
        )


RULES = (
    Rule("sparse_mla_decode", "flash_mla", 64, True, 128, 256),
    Rule("sparse_mla_decode", "flash_mla", 128, True, 64, 256),
)


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
