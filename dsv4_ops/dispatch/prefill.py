"""Decide from sizes whether a prefill on Hopper first dequantises its rows into a bfloat16 copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_ops.core.ints import positive
from dsv4_ops.core.tiles import PROGRAMS, head_tiles

MOST_LISTED, MOST_GATHERED = 2**27, 2**20
"""Maximum entries of a prefill's index lists (512 MiB), and maximum rows of its copy (1 GiB)."""

_CALLS, _ROW, _ENTRY = 1_200_000, 50, 6
"""Times on an H200, in units of 0.01 ns. A copy costs the first time for its launches, and the
second time for each row. A copy saves the third time for each key of a token and head tile, because
each row is dequantised once for all tokens."""

NOTE = (
    "on Hopper it runs over a bf16 copy of the rows, if that saves time: a copy costs "
    f"{_CALLS / 1e5:g} us and {_ROW / 100} ns per row of the block tables, and saves "
    f"{_ENTRY / 100} ns per key of a token and 64 heads; otherwise calls of up to "
    f"{PROGRAMS // 2} tokens of 64 heads split their keys"
)
"""The rule for prefill in ``explain``."""


def gathers(values: Mapping[str, Any]) -> Any:
    """Whether a prefill copies its rows before attention.

    A prefill copies its rows if the copy takes less time than it saves, if the tokens fill more
    than half of the SMs without splits, and if the sizes are within ``MOST_LISTED`` and
    ``MOST_GATHERED``. Sizes do not say how many rows of a block table are in use, so the rule
    assumes that all are: for a short request in a wide table, a copy may be slower than reading the
    blocks.

    Returns:
        1 or 0; for symbolic sizes, a symbol with one of these values.
    """
    tokens, columns, rows = values["q"].shape[0], prefilled(values), workspace_rows(values)
    tiles = tokens * head_tiles(int(values["q"].shape[1]))
    waves = (tiles + PROGRAMS - 1) // PROGRAMS  # a partly filled wave takes as long as a full one
    return (
        positive(_ENTRY * waves * PROGRAMS * columns - _CALLS - _ROW * gathered_rows(values))
        * positive(2 * tiles - PROGRAMS)
        * positive(MOST_GATHERED + 1 - rows)
        * positive(MOST_LISTED + 1 - tokens * columns)
    )


def workspace_rows(values: Mapping[str, Any]) -> Any:
    """Return the number of rows in a prefill's block tables, the capacity of a library's
    workspace."""
    window, compressed = _rows_named(values)
    return window + compressed


def gathered_rows(values: Mapping[str, Any]) -> Any:
    """Return the maximum number of rows that a prefill copies, if all tables are full."""
    (window, compressed), num_reqs = _rows_named(values), values["swa_block_table"].shape[0]
    rows = values["q"].shape[0] + num_reqs * (values["window_size"] - 1)
    return compressed + torch.sym_min(window, rows)


def prefilled(values: Mapping[str, Any]) -> Any:
    """Return the maximum number of keys of a prefill token."""
    selected, table = values["topk_indices"], values["extra_block_table"]
    columns = values["window_size"]
    if selected is not None:
        return columns + selected.shape[1]
    return columns if table is None else columns + table.shape[1] * values["extra_block_size"]


def _rows_named(values: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the number of window rows and of compressed rows in the block tables of all
    requests."""
    num_reqs, blocks = values["swa_block_table"].shape
    window, table = num_reqs * blocks * values["swa_block_size"], values["extra_block_table"]
    return window, 0 if table is None else table.numel() * values["extra_block_size"]
