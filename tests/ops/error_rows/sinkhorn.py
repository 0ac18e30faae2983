"""Rows of ``error_rows.TABLE`` for the mixing matrices, and a valid call."""

import torch

from tests.ops.error_rows.cache import Entry
from tests.ops.error_rows.rope import bf16, float_rows
from tests.ops.error_rows.valid import NUMBERS, OWN, Valid

SHAPE = "[num_tokens, 16]"
SMALLER = "Pass a smaller one: compiled code has every step of every entry written out."
OWN |= {
    "sinkhorn": {"logits": Valid(torch.zeros(5, 16), SHAPE)},
    "hyper_connection": {
        "streams": Valid(bf16(5, 2, 8), "[num_tokens, num_streams, hidden_size]"),
        "fn": Valid(torch.zeros(8, 16), "[8, 16]"),
        "base": Valid(torch.zeros(8), "[8]"),
        "scale": Valid(torch.ones(3), "[3]"),
        "norm_weight": Valid(torch.ones(8), "[hidden_size]"),
        "block_out": Valid(bf16(5, 8), "[num_tokens, hidden_size]"),
        "post": Valid(torch.ones(5, 2), "[num_tokens, 2]"),
        "mix": Valid(torch.ones(5, 2, 2), "[num_tokens, 2, 2]"),
    },
}
NUMBERS |= {"num_streams": 4, "iterations": 20, "eps": 1e-6, "norm_eps": 1e-6}

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
    ],
    "hyper_connection": [
        *float_rows("eps", 0),
        *float_rows("norm_eps", 0),
        (
            "65 iterations",
            {"iterations": 65},
            ValueError,
            f"iterations must be at most 64, got 65. {SMALLER}",
        ),
        (
            "9 streams",
            {"streams": bf16(5, 9, 8)},
            ValueError,
            f"num_streams must be at most 8, got 9. {SMALLER}",
        ),
        (
            "no stream",
            {"streams": bf16(5, 0, 8)},
            ValueError,
            "num_streams must be at least 1, got 0. Pass 1 or more.",
        ),
        *(
            (
                f"{name} alone",
                dict.fromkeys({"block_out", "post", "mix"} - {name}),
                ValueError,
                f"{name} must be None without {partner}, got a tensor. Pass both or neither.",
            )
            for name, partner in (
                ("block_out", "post"),
                ("post", "block_out"),
                ("mix", "block_out"),
            )
        ),
    ],
}
