"""Rows of the mixing matrices, and valid calls."""

import torch

from tests.ops.error_rows.rope import bf16
from tests.ops.error_rows.valid import NUMBERS, OWN, Valid
from tests.ops.error_rows.wording import Entry, alone, at_least, exactly, float_rows, wrong

SHAPE = "[num_tokens, 16]"
SMALLER = "Pass a smaller one: compiled code has every step of every entry written out"
OWN |= {
    "sinkhorn": {"logits": Valid(torch.zeros(5, 16), SHAPE)},
    "hyper_connection": {"streams": Valid(bf16(5, 2, 8), "[num_tokens, num_streams, hidden_size]"),
     "fn": Valid(torch.zeros(8, 16), "[8, 16]"), "base": Valid(torch.zeros(8), "[8]"),
     "scale": Valid(torch.ones(3), "[3]"), "norm_weight": Valid(torch.ones(8), "[hidden_size]"),
     "block_out": Valid(bf16(5, 8), "[num_tokens, hidden_size]"),
     "post": Valid(torch.ones(5, 2), "[num_tokens, 2]"),
     "mix": Valid(torch.ones(5, 2, 2), "[num_tokens, 2, 2]")},
}  # fmt: skip
NUMBERS |= {"num_streams": 4, "iterations": 20, "eps": 1e-6, "norm_eps": 1e-6}
MANY_ITERATIONS = wrong("iterations", "be at most 64", 65, SMALLER)
CONNECTED = {"block_out": "post", "post": "block_out", "mix": "block_out"}

TABLE: dict[str, list[Entry]] = {
    "sinkhorn": [
        *float_rows("eps", 0),
        MANY_ITERATIONS,
        wrong("num_streams", "be at most 8", 9, SMALLER),
        exactly("logits", SHAPE, torch.zeros(5, 12), 1),
    ],
    "hyper_connection": [
        *float_rows("eps", 0),
        *float_rows("norm_eps", 0),
        MANY_ITERATIONS,
        wrong("num_streams", "be at most 8", 9, SMALLER, streams=bf16(5, 9, 8)),
        at_least("num_streams", 1, 0, streams=bf16(5, 0, 8)),
        *[alone(name, other, *(CONNECTED.keys() - {name})) for name, other in CONNECTED.items()],
    ],
}  # fmt: skip
