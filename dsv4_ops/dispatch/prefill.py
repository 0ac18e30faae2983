"""Whether a prefill on Hopper attends to a bfloat16 copy of its rows, from sizes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_ops.core.tiles import PROGRAMS, head_tiles

MOST_LISTED, MOST_GATHERED = 2**27, 2**20
"""Entries of lists and bfloat16 rows that a prefill may store: 512 MiB and 1 GiB."""

_CALLS, _ROW, _ENTRY = 1_200_000, 50, 6
"""In 0.01 ns on an H200: what a copy costs for its launches and for each row, and what it saves for
each key of a token and tile of heads, which is dequantized once instead of once per token."""

NOTE = (
    "on Hopper over a copy of its rows in bf16, where that is faster: "
    f"{_CALLS / 1e5:g} us and {_ROW / 100} ns a row, for {_ENTRY / 100} ns a key of a token "
    f"and 64 heads, all rows of a table counted; else with the keys of up to {PROGRAMS // 2} "
    "tokens of 64 heads in splits"
)
"""What ``explain`` says of prefill."""


def gathers(values: Mapping[str, Any]) -> Any:
    """Decide whether a prefill copies its rows before it attends to them.

    It does where the copy takes less time than it saves, where there are enough tokens to occupy
    all SMs without splits, and where it takes no more memory than ``MOST_LISTED`` and
    ``MOST_GATHERED``. Only values say how many rows of a table are in use: all of them count here,
    so a short request in a wide table may copy where reading its blocks would be faster.

    Returns:
        1 or 0; of symbolic sizes a symbol that is one of them.
    """
    tokens, columns, rows = values["q"].shape[0], prefilled(values), workspace_rows(values)
    tiles = tokens * head_tiles(int(values["q"].shape[1]))
    waves = (tiles + PROGRAMS - 1) // PROGRAMS  # the last SMs' tiles take as long as a full wave
    return (
        positive(_ENTRY * waves * PROGRAMS * columns - _CALLS - _ROW * gathered_rows(values))
        * positive(2 * tiles - PROGRAMS)
        * positive(MOST_GATHERED + 1 - rows)
        * positive(MOST_LISTED + 1 - tokens * columns)
    )


def positive(number: Any) -> Any:
    """``int(number > 0)`` without guarding a SymInt."""
    return torch.sym_max(0, torch.sym_min(1, number))


def workspace_rows(values: Mapping[str, Any]) -> Any:
    """Rows that the block tables of a prefill name: the capacity of a library's workspace."""
    window, compressed = _rows_named(values)
    return window + compressed


def gathered_rows(values: Mapping[str, Any]) -> Any:
    """Most rows that a prefill copies: of requests as long as their tables."""
    (window, compressed), num_reqs = _rows_named(values), values["swa_block_table"].shape[0]
    rows = values["q"].shape[0] + num_reqs * (values["window_size"] - 1)
    return compressed + torch.sym_min(window, rows)


def prefilled(values: Mapping[str, Any]) -> Any:
    """Most keys of a token of a prefill."""
    selected, table = values["topk_indices"], values["extra_block_table"]
    columns = values["window_size"]
    if selected is not None:
        return columns + selected.shape[1]
    return columns if table is None else columns + table.shape[1] * values["extra_block_size"]


def _rows_named(values: Mapping[str, Any]) -> tuple[Any, Any]:
    """Rows of all requests that the block tables name: of the window and compressed."""
    num_reqs, blocks = values["swa_block_table"].shape
    window, table = num_reqs * blocks * values["swa_block_size"], values["extra_block_table"]
    return window, 0 if table is None else table.numel() * values["extra_block_size"]
