"""Rows of ``error_rows.TABLE`` for the mixing matrices, and a valid call."""

import torch

from tests.ops.error_rows.cache import Entry
from tests.ops.error_rows.rope import float_rows
from tests.ops.error_rows.valid import NUMBERS, OWN, Valid

SHAPE = "[num_tokens, 16]"
SMALLER = "Pass a smaller one: compiled code has every step of every entry written out."
OWN |= {"sinkhorn": {"logits": Valid(torch.zeros(5, 16), SHAPE)}}
NUMBERS |= {"num_streams": 4, "iterations": 20, "eps": 1e-6}

SINKHORN_TABLE: dict[str, list[Entry]] = {
    "sinkhorn": [
        *float_rows("eps", 0),
        (
            "65 iterations",
            {"iterations": 65},
            ValueError,
            f"iterations must be at most 64, got 65. {SMALLER}",
        ),
        (
            "9 streams",
            {"num_streams": 9},
            ValueError,
            f"num_streams must be at most 8, got 9. {SMALLER}",
        ),
        (
            "no square",
            {"logits": torch.zeros(5, 12)},
            ValueError,
            f"logits must have shape {SHAPE}, got [5, 12]. Pass exactly 16 entries in dimension 1.",
        ),
    ]
}
