"""The rows that C4 layers select, as tests compare them between one process and several ranks."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dsv4_ops.attention import layer, sharded

MOST = 128


class SelectedRows(ExitStack):
    """Notes what the C4 layer selected last, where one process selects or all ranks do.

    In a buffer, so that a compiled step notes it too, without a guard.
    """

    def __init__(self, topk: int) -> None:
        super().__init__()
        self.buffer = torch.full((MOST, topk), -1, dtype=torch.int32)

    def __enter__(self) -> SelectedRows:
        of_one, of_ranks, buffer = layer.select, sharded.cp_topk, self.buffer

        def note(found: Tensor) -> Tensor:
            buffer[: found.shape[0]].copy_(found)
            return found

        def select(*args: Any, slots: bool) -> Tensor:
            rows = note(of_one(*args, slots=False))
            return of_one(*args, slots=slots) if slots else rows

        def topk(*args: Any, **settings: Any) -> Tensor:
            return note(of_ranks(*args, **settings))

        self.enter_context(mock.patch.object(layer, "select", select))
        self.enter_context(mock.patch.object(sharded, "cp_topk", topk))
        return self

    def take(self, num_tokens: int) -> Tensor:
        """Rows of the first tokens, in order."""
        return self.buffer[:num_tokens].sort(-1).values.clone()
