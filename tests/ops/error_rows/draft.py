"""Rows of ``error_rows.TABLE`` for the verification of drafts, and a valid call."""

import torch

from tests.helpers import i64
from tests.ops.error_rows.cache import Entry
from tests.ops.error_rows.valid import COUNTS, NUMBERS, OWN, Valid

# two requests of one draft, of four tokens
OWN |= {
    "verify_draft": {
        "logits": Valid(
            torch.zeros(2, 2, 4),
            "[num_reqs, num_drafts + 1, vocab_size]",
            "torch.float32 or torch.bfloat16",
        ),
        "draft_ids": Valid(i64([[0], [1]]), "[num_reqs, num_drafts]"),
        "draft_probs": Valid(torch.ones(2, 1, 4) / 4, "[num_reqs, num_drafts, vocab_size]"),
        "uniforms": Valid(torch.zeros(2, 2), "[num_reqs, num_drafts + 1]"),
    }
}
NUMBERS |= {"temperature": 1.0}
COUNTS |= {
    "num_drafts": "the drafted tokens of a request",
    "vocab_size": "the tokens of the vocabulary",
}
GREEDY = "Leave it out, or pass a temperature above 0."
RANGE = "Pass 0 to decode greedily."

DRAFT_TABLE: dict[str, list[Entry]] = {
    "verify_draft": [
        (
            "no vocabulary",
            {"logits": torch.zeros(2, 2, 0)},
            ValueError,
            "logits must have a token in its vocabulary, got [2, 2, 0]. "
            "Pass the logits of at least one.",
        ),
        (
            "no row behind the drafts",
            {"logits": torch.zeros(2, 0, 4)},
            ValueError,
            "logits must have shape [num_reqs, num_drafts + 1, vocab_size], got [2, 0, 4]. "
            "Pass at least 1 entry, even for an empty batch.",
        ),
        (
            "a word for a temperature",
            {"temperature": "hot"},
            TypeError,
            "temperature must be a float, got str. "
            "Pass a Python float that is known on the host, never a tensor.",
        ),
        (
            "a negative temperature",
            {"temperature": -1.0},
            ValueError,
            f"temperature must be finite and at least 0, got -1.0. {RANGE}",
        ),
        (
            "no number for a temperature",
            {"temperature": float("nan")},
            ValueError,
            f"temperature must be finite and at least 0, got nan. {RANGE}",
        ),
        (
            "nothing to sample with",
            {"uniforms": None},
            ValueError,
            "uniforms must be a tensor with temperature = 1.0, got None. "
            "Pass torch.rand(num_reqs, num_drafts + 1), or temperature=0.0.",
        ),
        (
            "greedy with probabilities",
            {"temperature": 0.0},
            ValueError,
            f"draft_probs must be None with temperature = 0, got a tensor. {GREEDY}",
        ),
        (
            "greedy with random numbers",
            {"temperature": 0.0, "draft_probs": None},
            ValueError,
            f"uniforms must be None with temperature = 0, got a tensor. {GREEDY}",
        ),
    ]
}
