"""The rows that an indexer selects, for comparisons between one process and several ranks."""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dsv4_ops.attention import layer, shared_selection

MOST = 128
dsa_layer = import_module("dsv4_ops.attention.dsa_layer")  # the package has a function of that name


class SelectedRows(ExitStack):
    """Records the selection of the last layer with an indexer, in one process or over ranks.

    The record is a buffer, so that a compiled step writes it too, without a guard.
    """

    def __init__(self, topk: int) -> None:
        super().__init__()
        self.buffer = torch.full((MOST, topk), -1, dtype=torch.int32)

    def __enter__(self) -> SelectedRows:
        of_ranks, buffer = shared_selection.cp_topk, self.buffer

        def note(found: Tensor) -> Tensor:
            buffer[: found.shape[0]].copy_(found)
            return found

        def selecting(of_one: Any) -> Any:
            def select(*args: Any, slots: bool, **settings: Any) -> Tensor:
                rows = note(of_one(*args, slots=False, **settings))
                return of_one(*args, slots=slots, **settings) if slots else rows

            return select

        def topk(*args: Any, **settings: Any) -> Tensor:
            return note(of_ranks(*args, **settings))

        for module, name in ((layer, "select"), (dsa_layer, "indexer_select")):
            select = selecting(getattr(module, name))
            self.enter_context(mock.patch.object(module, name, select))
        self.enter_context(mock.patch.object(shared_selection, "cp_topk", topk))
        return self

    def take(self, num_tokens: int) -> Tensor:
        """Return the selected rows of the first tokens, in order."""
        return self.buffer[:num_tokens].sort(-1).values.clone()
